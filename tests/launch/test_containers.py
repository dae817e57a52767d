"""Tests mamba_fsdp.launch.containers: which folders are mounted in a container, and which can't be."""

import os
import re
from pathlib import Path

import pytest

from mamba_fsdp.launch import containers
from mamba_fsdp.launch.containers import find_mount, is_protected
from mamba_fsdp.launch.host import LaunchError
from tests.support.pyxis import OLDEST_PYXIS, PYXIS_OPTIONS, mounted


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Returns a function options(*paths) that returns srun's options for a container in which the paths are mounted.
    The project is in tmp_path."""
    monkeypatch.setattr(containers, "PROJECT", f"{tmp_path}/the project")
    # The code under test sets this variable, and monkeypatch restores it after the test.
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    (tmp_path / "the project").mkdir()

    def find(*paths):
        paths = [str(path) for path in paths]
        folders = paths + containers.find_linked_folders(paths)
        return containers.container_options("/images/a.sqsh", "77.0", folders)

    return find


@pytest.fixture
def disk(tmp_path):
    """Makes a folder that no mount of the project contains."""
    folder = tmp_path.with_name(f"{tmp_path.name}-disk")
    folder.mkdir()
    return folder


def make_links(folder, links):
    for name, target in links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)


def test_the_project_is_mounted_once_and_nothing_without_an_image(options, tmp_path):
    assert mounted(options(f"{tmp_path}/the project/data")) == [str(tmp_path)]
    assert mounted(options(tmp_path, f"{tmp_path}/the project")) == [str(tmp_path)]
    assert containers.container_options("", "77.0", ["/nowhere"]) == []


@pytest.mark.parametrize("name", ["a b", "a,b", "a\\b"])
def test_the_parent_folder_is_mounted_if_a_mount_can_not_have_the_name(
    options, disk, tmp_path, name
):
    """A folder whose name contains a space, a comma or a backslash is mounted as part of its parent folder. Pyxis 0.24
    escapes spaces as \\040, but 0.20 does not, and a comma separates mounts."""
    (disk / name / "store").mkdir(parents=True)
    assert mounted(options(disk / name / "store")) == [str(tmp_path), str(disk)]


def test_links_to_too_many_folders_are_refused_unless_a_parent_is_mounted(
    options, disk, tmp_path, monkeypatch
):
    """Too many link targets are an error, unless one mount contains them all: Linux limits the length of a command-line
    argument, and all mounts are one argument."""
    monkeypatch.setattr(containers, "MAX_MOUNT_LIST_CHARS", 500)
    for number in range(10):
        (disk / f"at/{number}").mkdir(parents=True)
    make_links(tmp_path / "links", {f"{number}": disk / f"at/{number}" for number in range(10)})
    with pytest.raises(LaunchError, match="point to 11 folders, such as "):
        options(tmp_path / "links")
    assert mounted(options(f"{disk}/at/", tmp_path / "links")) == [str(tmp_path), f"{disk}/at/"]


def test_links_are_followed_to_their_end_but_not_into_folders_of_the_image(
    options, disk, tmp_path, capfd
):
    """The folders at the end of links are mounted, also for chains of links, a link to its own folder, and links in the
    target of a link. Links to files of the image and broken links cause a warning."""
    for name in ("real", "files", "hop", "end"):
        (disk / name).mkdir()
    (disk / "end/x.txt").touch()
    links = {
        "named": "real",
        "real/back": "../named",
        "real/a": f"{disk}/files",
        "files/b": "../hop/x.txt",
        "hop/x.txt": f"{disk}/end/x.txt",
        "real/python3": "/usr/bin/env",
        "real/gone": "nowhere/shard",
    }
    make_links(disk, links)
    found = mounted(options(disk / "named"))
    ends = {str(disk / name) for name in ("named", "real", "files", "hop", "end")}
    assert set(found) == {str(tmp_path), *ends}
    warning = capfd.readouterr().out
    assert warning.startswith("warning: the container can't follow ") and "links: 2" in warning
    with pytest.raises(LaunchError, match=re.escape(f"{disk}/real/gone does not exist on")):
        options(disk / "real/gone")
    assert f"{disk}/real/gone -> {disk}/real/nowhere/shard" in capfd.readouterr().out


@pytest.mark.parametrize(
    "path, folder",
    [("/my data", "/"), ("/opt/my data", "/opt"), ("/usr/bin/", "/usr/bin/"), ("/dev", "/dev")],
)
def test_a_folder_of_the_image_is_refused(path, folder):
    message = f"{path}: can't be mounted, since {folder} is a folder of the image"
    with pytest.raises(LaunchError, match=re.escape(message)):
        find_mount(path)


def test_files_and_folders_next_to_the_images_folders_can_be_mounted():
    """The image owns only the folder of AWS in /opt, so other folders in /opt can be mounted. A file can be mounted
    anywhere."""
    assert find_mount("/usr/bin/env") == "/usr/bin/env"
    assert is_protected("/opt/amazon/efa") and is_protected("/proc/self")
    assert not is_protected("/opt/mine") and not is_protected("/user/me")


def test_without_gpus_the_driver_of_nvidia_is_not_requested(options, monkeypatch):
    """On a node without GPUs and driver, a container does not request the NVIDIA driver. The image would request it,
    and Enroot would fail without NVIDIA's tools."""
    has_driver = Path("/proc/driver/nvidia").exists()
    assert ("--container-env=NVIDIA_VISIBLE_DEVICES" in options()) != has_driver
    assert has_driver or os.environ["NVIDIA_VISIBLE_DEVICES"] == "void"
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert "--container-env=NVIDIA_VISIBLE_DEVICES" not in options()


def test_no_option_is_newer_than_the_oldest_pyxis(project):
    assert max(PYXIS_OPTIONS.values()) <= OLDEST_PYXIS
    files = ("mamba_fsdp/launch/containers.py", "docs/image.md")
    text = "".join((project / name).read_text() for name in files)
    assert set(re.findall(r"--((?:no-)?container-[a-z-]+)", text)) <= PYXIS_OPTIONS.keys()
