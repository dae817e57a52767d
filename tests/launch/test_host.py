"""Tests mamba_fsdp.launch.host: the checks of variables, the choice of the image or .venv, and of a Python for the
settings."""

import os
import re
import subprocess

import pytest

from mamba_fsdp.launch import host
from mamba_fsdp.launch.host import LaunchError
from tests.support.pyxis import SQUASHFS

REFUSED = {
    "PROCESSES_PER_NODE=all": "PROCESSES_PER_NODE=all: expected an integer of at least 1",
    "GPUS_PER_NODE=0": "GPUS_PER_NODE=0: expected an integer of at least 1",
    "GPUS_PER_NODE=4 PROCESSES_PER_NODE=2": "contradict each other; set only one",
    "MAX_RESTARTS=-1": "MAX_RESTARTS=-1: expected an integer of at least 0",
    "PROFILE=yes": "PROFILE=yes: expected torch or nsys",
    "FSX_MOUNT=/mnt/lustre:/fsx": "write FSX_MOUNT=/mnt/lustre",
    "DATA_PATH=/data:/x": "DATA_PATH=/data:/x: folders keep their paths in the container; write DATA_PATH=/data",
    "MOUNTS=my": "MOUNTS=my: expected the absolute path of a folder, as in MOUNTS=/",
}


def variables(text):
    return host.read_variables(dict(word.split("=") for word in text.split()))


@pytest.mark.parametrize("given", REFUSED)
def test_a_variable_that_means_nothing_is_refused(given):
    with pytest.raises(LaunchError, match=re.escape(REFUSED[given])):
        variables(given)


def test_variables_are_read_by_their_own_names_and_by_those_of_aws():
    assert variables("") == ("", [], "", 3, 0, 0)
    given = "IMAGE=a.sqsh PROFILE=nsys MAX_RESTARTS=0 GPUS_PER_NODE=1 PROCESSES_PER_NODE=1"
    assert variables(given) == ("a.sqsh", [], "nsys", 0, 0, 0)
    mounts = {"MOUNTS": "/a,\n/b", "DATA_PATH": "/c", "FSX_MOUNT": "/d:/d"}
    assert host.read_mounts(mounts) == ["/a", "/b", "/c", "/d"]


@pytest.mark.parametrize("given, ranks", [({}, None), ({"GPUS_PER_NODE": "4"}, "4")])
def test_a_jobs_python_sees_this_project_and_no_other_packages(monkeypatch, given, ranks):
    monkeypatch.setattr(os, "environ", {"PYTHONHOME": "/nonsense", **given})
    host.set_python_variables()
    assert os.environ["PYTHONPATH"] == host.PROJECT and os.environ["PYTHONNOUSERSITE"] == "1"
    assert "PYTHONHOME" not in os.environ and os.environ.get("PROCESSES_PER_NODE") == ranks


@pytest.fixture
def here(launcher_project, monkeypatch):
    """Makes a project that the functions of host.py regard as their own."""
    monkeypatch.setattr(host, "PROJECT", str(launcher_project))
    return launcher_project


ENVIRONMENTS = {  # {command that changes a project with a .venv: path of the image or .venv, or a message}
    "true": "/.venv",
    "cp whole.sqsh mamba-train.sqsh": "/mamba-train.sqsh",
    "export IMAGE=whole.sqsh": "/whole.sqsh",
    "export IMAGE=old.sqsh": "IMAGE=old.sqsh: the file ",
    "echo PK > zip.sqsh; export IMAGE=zip.sqsh": "zip.sqsh is not a squashfs image",
    "export IMAGE=short.sqsh": "short.sqsh is truncated; copy it again",
    "head -c 47 whole.sqsh > head.sqsh; export IMAGE=head.sqsh": "head.sqsh is truncated",
    "rm -r .venv": "found neither an image",
    "rm .venv/.complete": "is incomplete; create it again: ./0.create_env.sh",
    "rm .venv/bin/python": "does not exist; create it: ./0.create_env.sh",
}


@pytest.mark.parametrize("done", ENVIRONMENTS)
def test_the_image_or_the_environment_that_trains(here, done):
    (here / "whole.sqsh").write_bytes(SQUASHFS)
    (here / "short.sqsh").write_bytes(SQUASHFS[:-1])
    shell = f'{done}; echo "${{IMAGE:-}}"'
    image = subprocess.check_output(shell, shell=True, cwd=here, text=True).strip()
    expected = ENVIRONMENTS[done]
    if not expected.startswith("/"):
        with pytest.raises(LaunchError, match=re.escape(expected)):
            host.choose_environment(image)
        return
    chosen = host.choose_environment(image)
    assert str(chosen) == f"{here}{expected}"
    assert chosen.python == ("python3" if chosen.image else f"{here}/.venv/bin/python")


def test_an_environment_without_its_python_reads_no_settings(here):
    python = here / ".venv/bin/python"
    assert host.find_settings_python() == str(python)
    python.unlink()
    assert host.find_settings_python() != str(python)


def test_an_environment_that_only_its_owner_can_read_is_not_called_missing(here, monkeypatch):
    """If the user can't read the .venv, the error suggests chmod. Root can read everything, so the result of os.access
    is replaced."""
    venv = str(here / ".venv")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(venv))
    with pytest.raises(LaunchError, match=re.escape(f"chmod -R a+rX {venv}")):
        host.choose_venv()
