"""What the programs of a job share on the host: lines for the user, mistakes, and which Python trains.

It runs on the cluster's own Python, which may be 3.6, with the standard library alone; so do job.py,
tokenize_job.py, node_guard.py and what they import.
"""

import os
import struct
import subprocess
from typing import List, Mapping, NamedTuple, Optional

PROJECT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
DEFAULT_IMAGE = "mamba-train.sqsh"
SUPERBLOCK_BYTES = 48  # of a squashfs: its first four say so, its last eight how long the image is


class Mistake(Exception):
    """A user's mistake: what is wrong and what to do. No restart fixes it."""

    exit_code = 2


class Variables(NamedTuple):
    """What people set in the environment of 1.train.sbatch, checked."""

    image: str
    mounts: List[str]  # whole paths of folders
    profile: str
    max_restarts: int
    spare_nodes: int
    min_nodes: int  # 0: the training needs all its nodes


class Environment(NamedTuple):
    """What trains: the project's .venv, or an image with a Python of its own."""

    python: str
    image: str  # "" without one

    def __str__(self) -> str:
        return self.image or os.path.join(PROJECT, ".venv")


def say(text: str = "") -> None:
    """Prints a line."""
    write(1, text + "\n")


def say_error(text: str) -> None:
    """Prints an error's line to stderr."""
    write(2, f"error: {text}\n")


def write(stream: int, text: str) -> None:
    """Writes to stdout (1) or stderr (2), even if its reader has gone: then it is lost, and no more."""
    try:
        os.write(stream, os.fsencode(text))
    except OSError:
        pass


def answer_of(*command: str) -> str:
    """Returns what a command prints; "" if there is no such command, or if it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
        )
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def set_up_python() -> None:
    """Sets the environment of every Python that this job starts: this project's code, and no other packages than those
    of its environment."""
    os.environ.pop("PYTHONHOME", None)
    os.environ["PYTHONPATH"] = PROJECT
    os.environ["PYTHONNOUSERSITE"] = "1"
    os.environ["PYTHONUNBUFFERED"] = "1"
    # Of Python 3.11 and newer: a file in the folder where one stands is no module of ours.
    os.environ["PYTHONSAFEPATH"] = "1"
    gpus = os.environ.get("GPUS_PER_NODE")
    if gpus:
        os.environ["PROCESSES_PER_NODE"] = gpus


def read_variables(environ: Mapping[str, str]) -> Variables:
    """Returns the variables that people set. Raises Mistake if one has a value that means nothing."""
    for name in ("PROCESSES_PER_NODE", "GPUS_PER_NODE"):
        value = environ.get(name) or "1"
        if not value.isdigit() or int(value) == 0:
            raise Mistake(f"{name}={value}: expected 1 or more")
    ranks = environ.get("PROCESSES_PER_NODE")
    gpus = environ.get("GPUS_PER_NODE")
    if ranks and gpus and ranks != gpus:
        raise Mistake(
            f"GPUS_PER_NODE={gpus} and PROCESSES_PER_NODE={ranks} mean the same; give one of them"
        )
    max_restarts = read_number(environ, "MAX_RESTARTS", 3)
    spare_nodes = read_number(environ, "SPARE_NODES", 0)
    min_nodes = read_number(environ, "MIN_NODES", 0)
    profile = environ.get("PROFILE", "")
    if profile not in ("", "torch", "nsys"):
        raise Mistake(f"PROFILE={profile}: choose torch or nsys")
    image = environ.get("IMAGE", "")
    mounts = read_mounts(environ)
    return Variables(image, mounts, profile, max_restarts, spare_nodes, min_nodes)


def read_number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Returns the number in a variable of the environment. Raises Mistake if it is none."""
    value = environ.get(name) or str(default)
    if not value.isdigit():
        raise Mistake(f"{name}={value}: expected a number")
    return int(value)


def read_mounts(environ: Mapping[str, str]) -> List[str]:
    """Returns the folders that MOUNTS=FOLDER,..., DATA_PATH=FOLDER and FSX_MOUNT=FOLDER:FOLDER,... name."""
    named = ",".join(environ.get(name, "") for name in ("MOUNTS", "DATA_PATH", "FSX_MOUNT"))
    folders = []
    for mount in named.replace("\n", ",").split(","):
        if not mount:
            continue
        if not mount.startswith("/"):
            raise Mistake(
                f"MOUNTS, DATA_PATH or FSX_MOUNT: {mount}: expected the whole path of a folder"
            )
        folder, _, inside = mount.partition(":")
        if inside not in ("", folder):
            raise Mistake(
                f"MOUNTS or FSX_MOUNT: {mount}: in the container each folder has its own name; write {folder}:{folder}"
            )
        folders.append(folder)
    return folders


def choose_venv() -> Environment:
    """Returns the project's own environment. Raises Mistake if there is none, or half of one."""
    venv = os.path.join(PROJECT, ".venv")
    python = os.path.join(venv, "bin", "python")
    if not os.access(python, os.X_OK):
        raise Mistake(f"there is no environment in {venv}; make it: ./0.create_env.sh")
    if not os.path.isfile(os.path.join(venv, ".complete")):
        raise Mistake(f"the environment {venv} is incomplete; make it again: ./0.create_env.sh")
    return Environment(python, "")


def choose_environment(named: str) -> Environment:
    """Returns the image that IMAGE names or that lies in the project, else .venv. Raises Mistake if
    there is neither, or the image can't be used."""
    image = os.path.join(PROJECT, named or DEFAULT_IMAGE)  # Pyxis asks a registry for a bare name
    if os.path.isfile(image):
        check_image(image)
        return Environment("python3", image)
    if named:
        raise Mistake(
            f"IMAGE={named}: there is no such file ({image}); build it (docs/image.md), or unset IMAGE to use "
            ".venv"
        )
    if os.path.lexists(os.path.join(PROJECT, ".venv")):
        return choose_venv()
    raise Mistake(
        f"there is neither an image ({image}) nor an environment ({PROJECT}/.venv); build an image (docs/image.md) "
        "or make the environment: ./0.create_env.sh"
    )


def check_image(image: str) -> None:
    """Raises Mistake if the file can't be read, is not a squashfs image, or is a part of one."""
    try:
        with open(image, "rb") as file:
            superblock = file.read(SUPERBLOCK_BYTES)
    except OSError:
        raise Mistake(
            f"the image {image} can't be read by user {os.getuid()}: chmod a+r it"
        ) from None
    if superblock[:4] != b"hsqs":
        raise Mistake(
            f"{image} is no squashfs image; make it with enroot import (docs/image.md), or copy it again"
        )
    is_short = len(superblock) < SUPERBLOCK_BYTES
    if is_short or os.stat(image).st_size < struct.unpack("<Q", superblock[40:])[0]:
        raise Mistake(f"the image {image} was cut short; copy it again")


def python_for_settings() -> Optional[str]:
    """Returns a Python of this host that can read settings, before an image is unpacked; None if there
    is none."""
    venv = os.path.join(PROJECT, ".venv")
    own = os.path.join(venv, "bin", "python")
    if os.access(own, os.X_OK) and os.path.isfile(os.path.join(venv, ".complete")):
        return own
    for python in (own, "python3"):
        can = "import sys, yaml; print(sys.version_info >= (3, 10))"
        if answer_of(python, "-c", can).strip() == "True":
            return python
    return None
