"""What Slurm's container plugin Pyxis is asked for: the image, under which name it is unpacked, and what is
mounted. For the cluster's own Python, see host.py."""

import os
import socket
from typing import Iterable, Iterator, List, Set, Tuple

from mamba_fsdp.launch.host import PROJECT, Mistake, say

NAME = "mamba-train-"  # of our containers, before the start of the job that has unpacked them
# Pyxis and Enroot pass mounts on through a list, a shell and an fstab, each version with other escapes or none.
HARD_TO_MOUNT = " \t\n,:#$`\"'\\"
LONGEST_LIST = 100000  # of mounts; Linux takes no word of 131,072 bytes
# Over these folders, or below them, nothing is mounted: it would hide what the image has there.
OF_IMAGE = ("/", "/dev", "/opt", "/run", "/var")
OF_IMAGE_AND_BELOW = (
    "/bin",
    "/boot",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/opt/amazon",
    "/proc",
    "/root",
    "/sbin",
    "/sys",
    "/usr",
)


def container_options(image: str, start: str, folders: Iterable[str]) -> List[str]:
    """Returns srun's options for the container of a start of the job, in which the project and the
    folders are mounted. Raises Mistake if they can't be; [] without an image.

    A container with a name is unpacked once and stays for the job's other steps. The name is of one
    start of the job: what a start that was killed has left may be half unpacked. no_exec: each step has
    its own mounts. The home folder stays out: its .triton, .cache and .local belong to other versions
    and are shared by all nodes.
    """
    if not image:
        return []
    options = [
        "--container-image=" + image,
        f"--container-name={NAME}{start}:no_exec",
        "--container-mounts=" + list_of_mounts([PROJECT, *folders]),
        "--container-workdir=" + PROJECT,
        "--no-container-mount-home",
    ]
    # The image asks for NVIDIA's driver, and Enroot fails where that has no tools.
    if not os.environ.get("SLURM_GPUS_ON_NODE") and not os.path.exists("/proc/driver/nvidia"):
        os.environ["NVIDIA_VISIBLE_DEVICES"] = "void"
        options.append("--container-env=NVIDIA_VISIBLE_DEVICES")
    return options


def list_of_mounts(paths: Iterable[str]) -> str:
    """Returns the value of --container-mounts that makes the paths visible under their own names. Raises
    Mistake if one is missing or can't be mounted."""
    mounts: List[str] = []
    covered: Set[str] = set()
    for path in paths:
        if path.startswith(PROJECT + "/"):
            continue
        if not os.path.exists(path):
            raise Mistake(
                f"there is no {path} on {socket.gethostname()}, which a setting or MOUNTS names"
            )
        mount = nearest_mount(path)
        if not _is_covered(mount, covered):
            mounts.append(mount)
        covered.add(_plain(mount))
    listed = ",".join(f"{mount}:{mount}" for mount in mounts)
    if len(listed) >= LONGEST_LIST:
        raise Mistake(
            f"symbolic links lead to {len(mounts)} folders, such as {mount}: a container can't mount so many; name one that "
            "they lie in: MOUNTS=FOLDER"
        )
    return listed


def nearest_mount(path: str) -> str:
    """Returns the path, or the nearest folder above it that a mount can name. Raises Mistake if that is
    a folder of the image."""
    mount = path
    while any(letter in mount for letter in HARD_TO_MOUNT):
        mount = os.path.dirname(mount)
        if mount == "/":
            break
    if not os.path.isfile(mount) and is_of_image(mount):
        raise Mistake(
            f"{path}: the container would need {mount}, which is the image's own (no mount has a space or one of "
            ",:#$`\"'\\ in its name); move or rename it"
        )
    return mount


def _is_covered(mount: str, covered: Set[str]) -> bool:
    """Returns whether a mount shows this folder already: it has what lies in it, other file systems too,
    but not where links lead."""
    above = _plain(mount)
    while above != "/" and above not in covered and not os.path.islink(above):
        above = os.path.dirname(above)
    return above in covered


def _plain(folder: str) -> str:
    return folder.rstrip("/") or "/"


def is_of_image(folder: str) -> bool:
    """Returns whether the image has a folder of this name that nothing may hide."""
    plain = _plain(folder)
    return plain in OF_IMAGE or any(
        plain == own or plain.startswith(own + "/") for own in OF_IMAGE_AND_BELOW
    )


def folders_behind_links(paths: Iterable[str]) -> List[str]:
    """Returns the folders that the paths lie in, and where symbolic links in and below them lead, the
    links that are found there too, and so on. Warns of links that a container can't follow."""
    folders: List[str] = []
    astray: List[str] = []
    seen: Set[str] = set()
    targets = list(paths)
    while targets:
        places = []
        for path in _both_names(targets):
            if path in seen:
                continue
            seen.add(path)
            if can_mount(path):
                folders.append(_folder_of(path))
            elif not os.path.islink(path):
                continue
            places.append(path)
        targets = []
        for link, target in _links_below(places):
            if can_mount(target):
                targets.append(target)
            else:
                astray.append(f"{link} -> {target}")
    if astray:
        say(
            f"warning: the container can't follow {astray[0]}: this leads nowhere or into the image's own folders "
            f"(such links: {len(astray)})"
        )
    return folders


def can_mount(path: str) -> bool:
    """Returns whether the path is there and no folder of the image."""
    return os.path.exists(path) and not is_of_image(_folder_of(path))


def _folder_of(path: str) -> str:
    return path if os.path.isdir(path) else os.path.dirname(path)


def _both_names(paths: Iterable[str]) -> Iterator[str]:
    """Yields the paths under the names that links have for them, and then under their own."""
    paths = list(paths)
    for path in paths:
        yield os.path.abspath(path)
    for path in paths:
        yield os.path.realpath(path)


def _links_below(paths: Iterable[str]) -> Iterator[Tuple[str, str]]:
    """Yields (symbolic link, where it leads) for the paths that are links, and the links in the other paths."""
    for path in paths:
        if os.path.islink(path):
            yield _link(path)
            continue
        for folder, folders, files in os.walk(path):  # which follows no link
            for name in folders + files:
                inside = os.path.join(folder, name)
                if os.path.islink(inside):
                    yield _link(inside)


def _link(path: str) -> Tuple[str, str]:
    return path, os.path.join(os.path.dirname(path), os.readlink(path))
