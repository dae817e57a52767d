"""Builds srun's options for Pyxis, Slurm's container plugin: the image, the name of the unpacked
container, and the mounts.

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

import contextlib
import os
import socket
from typing import Iterable, Iterator, List, Set, Tuple

from mamba_fsdp.launch.host import PROJECT, LaunchError, print_line

CONTAINER_PREFIX = "mamba-train-"  # a container's name is this prefix followed by Job.start
# Pyxis and Enroot pass mounts through a list, a shell and an fstab file, and each version escapes these
# characters differently or not at all.
UNMOUNTABLE_CHARS = " \t\n,:#$`\"'\\"
MAX_MOUNT_LIST_CHARS = 100000  # Linux limits a command-line argument to 131,071 bytes
# Nothing is mounted over these folders, because that would hide files of the image. PROTECTED_PREFIXES
# also excludes everything below its folders.
PROTECTED_FOLDERS = ("/", "/dev", "/opt", "/run", "/var")
PROTECTED_PREFIXES = (
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
    """Returns srun's options for the container of one start of the job; [] without an image.

    The project and `folders` are mounted in the container. Raises LaunchError if that is
    impossible.

    The container has a name, so that Pyxis unpacks the image once and later steps of the job reuse
    it. The name contains the start of the job, because a start that was killed can leave a
    half-unpacked container. The flag no_exec gives each step its own mounts. The home folder is not
    mounted, because its .triton, .cache and .local contain files of other software versions and are
    shared by all nodes.
    """
    if not image:
        return []
    options = [
        "--container-image=" + image,
        f"--container-name={CONTAINER_PREFIX}{start}:no_exec",
        "--container-mounts=" + format_mounts([PROJECT, *folders]),
        "--container-workdir=" + PROJECT,
        "--no-container-mount-home",
    ]
    # The image requires the NVIDIA driver, and Enroot fails on a node without the driver's tools.
    if not os.environ.get("SLURM_GPUS_ON_NODE") and not os.path.exists("/proc/driver/nvidia"):
        os.environ["NVIDIA_VISIBLE_DEVICES"] = "void"
        options.append("--container-env=NVIDIA_VISIBLE_DEVICES")
    return options


def format_mounts(paths: Iterable[str]) -> str:
    """Returns the value of --container-mounts that makes the paths visible under their own names.

    Raises LaunchError if a path does not exist or can't be mounted.
    """
    mounts: List[str] = []
    covered: Set[str] = set()
    for path in paths:
        if path.startswith(PROJECT + "/"):
            continue
        if not os.path.exists(path):
            raise LaunchError(
                f"{path} does not exist on {socket.gethostname()}; correct the path in the settings or in MOUNTS"
            )
        mount = find_mount(path)
        if not _is_covered(mount, covered):
            mounts.append(mount)
        covered.add(_plain(mount))
    listed = ",".join(f"{mount}:{mount}" for mount in mounts)
    if len(listed) >= MAX_MOUNT_LIST_CHARS:
        raise LaunchError(
            f"symbolic links point to {len(mounts)} folders, such as {mount}, and a container can't mount so many; set "
            "MOUNTS=FOLDER to a folder that contains them all"
        )
    return listed


def find_mount(path: str) -> str:
    """Returns the path, or its nearest parent without characters that mounts can't contain.

    Raises LaunchError if the result is a protected folder of the image.
    """
    mount = path
    while any(letter in mount for letter in UNMOUNTABLE_CHARS):
        mount = os.path.dirname(mount)
        if mount == "/":
            break
    if not os.path.isfile(mount) and is_protected(mount):
        raise LaunchError(
            f"{path}: can't be mounted, since {mount} is a folder of the image (names with spaces or one of "
            ",:#$`\"'\\ are mounted through a parent folder); move or rename it"
        )
    return mount


def _is_covered(mount: str, covered: Set[str]) -> bool:
    """Returns whether an earlier mount already makes this folder visible.

    A mount includes the file systems mounted below it, but not the targets of symbolic links.
    """
    above = _plain(mount)
    while above != "/" and above not in covered and not os.path.islink(above):
        above = os.path.dirname(above)
    return above in covered


def _plain(folder: str) -> str:
    return folder.rstrip("/") or "/"


def is_protected(folder: str) -> bool:
    """Returns whether a mount over this folder would hide a folder that the image needs."""
    plain = _plain(folder)
    return plain in PROTECTED_FOLDERS or any(
        plain == prefix or plain.startswith(prefix + "/") for prefix in PROTECTED_PREFIXES
    )


def find_linked_folders(paths: Iterable[str]) -> List[str]:
    """Returns the folders of the paths, and the targets of symbolic links in and below them.

    Links that are found in the targets are followed in the same way. Prints a warning for links
    that can't be followed inside a container.
    """
    folders: List[str] = []
    broken: List[str] = []
    seen: Set[str] = set()
    targets = list(paths)
    while targets:
        places = []
        for path in [*map(os.path.abspath, targets), *map(os.path.realpath, targets)]:
            if path in seen:
                continue
            seen.add(path)
            if can_mount(path):
                folders.append(_containing_folder(path))
            elif not os.path.islink(path):
                continue
            places.append(path)
        targets = []
        for link, target in _find_links(places):
            if can_mount(target):
                targets.append(target)
            else:
                broken.append(f"{link} -> {target}")
    if broken:
        print_line(
            f"warning: the container can't follow the symbolic link {broken[0]}: the target does not exist or is a folder of "
            f"the image (such links: {len(broken)})"
        )
    return folders


def can_mount(path: str) -> bool:
    """Returns whether the path exists and is not in a protected folder of the image."""
    return os.path.exists(path) and not is_protected(_containing_folder(path))


def _containing_folder(path: str) -> str:
    return path if os.path.isdir(path) else os.path.dirname(path)


def _find_links(paths: Iterable[str]) -> Iterator[Tuple[str, str]]:
    """Yields (symbolic link, target) for the paths that are links, and for the links below the
    other paths.
    """
    remaining = list(paths)
    while remaining:
        path = remaining.pop()
        if os.path.islink(path):
            yield path, os.path.join(os.path.dirname(path), os.readlink(path))
        elif os.path.isdir(path):
            with contextlib.suppress(OSError), os.scandir(path) as entries:
                # An entry knows its type. A call for each file would be slow on a shared disk.
                remaining += [
                    entry.path for entry in entries if entry.is_symlink() or entry.is_dir()
                ]
