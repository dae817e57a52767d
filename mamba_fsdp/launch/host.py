"""Provides what the launcher's programs on the host share: messages, user errors, the choice of the
Python that trains, and the command lines for the nodes.

This module, job.py, tokenize_job.py, node_guard.py and their imports run on the cluster's own
Python. That Python can be as old as 3.6, so these modules use only the syntax and the standard
library of Python 3.6.
"""

import json
import os
import struct
import subprocess
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

from mamba_fsdp.run.names import PROFILE

PROJECT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
DEFAULT_IMAGE = "mamba-train.sqsh"
# The size of the first block of a squashfs image. The block begins with a magic number and ends with
# the size of the image, in 8 bytes.
SUPERBLOCK_BYTES = 48


# The name of an environment variable. If the variable is set, 1.train.sbatch sets up the network and then runs its
# arguments as a command.
NODE_VARIABLE = "MAMBA_TRAIN_NODE"


class LaunchError(Exception):
    """An error that the user has to fix. The message explains what is wrong and what to do."""

    exit_code = 2  # no restart fixes the error


class Variables(NamedTuple):
    """The validated environment variables of 1.train.sbatch."""

    image: str
    mounts: List[str]  # absolute paths of folders
    profile: str
    max_restarts: int
    spare_nodes: int
    min_nodes: int  # 0 if the training needs all its nodes


class Environment(NamedTuple):
    """The Python interpreter that trains: of the project's .venv, or of an image."""

    python: str
    image: str  # "" for .venv

    def __str__(self) -> str:
        return self.image or os.path.join(PROJECT, ".venv")


def print_line(text: str = "") -> None:
    """Prints a line to stdout."""
    write(1, text + "\n")


def print_error(text: str) -> None:
    """Prints an error message to stderr."""
    write(2, f"error: {text}\n")


def write(stream: int, text: str) -> None:
    """Writes to stdout (1) or stderr (2). Drops the text if the reader has closed the pipe."""
    try:
        os.write(stream, os.fsencode(text))
    except OSError:
        pass


def command_output(*command: str) -> str:
    """Runs a command and returns its stdout; "" if the command does not exist or fails."""
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


def read_json(path: str) -> Dict[str, Any]:
    """Returns the JSON object in a file; {} if the file does not exist or is damaged."""
    try:
        with open(path) as file:
            content = json.load(file)
    except (OSError, ValueError):
        content = None
    return content if isinstance(content, dict) else {}


def set_python_variables() -> None:
    """Sets the environment variables of all Python processes that this job starts.

    With these variables, a process imports only this project and the packages of its own
    environment.
    """
    os.environ.pop("PYTHONHOME", None)
    os.environ["PYTHONPATH"] = PROJECT
    os.environ["PYTHONNOUSERSITE"] = "1"
    os.environ["PYTHONUNBUFFERED"] = "1"
    # With this variable, Python 3.11 and newer do not import modules from the working directory.
    os.environ["PYTHONSAFEPATH"] = "1"
    gpus = os.environ.get("GPUS_PER_NODE")
    if gpus:
        os.environ["PROCESSES_PER_NODE"] = gpus


def read_variables(environ: Mapping[str, str]) -> Variables:
    """Reads and validates the environment variables that users set. Raises LaunchError for an
    invalid value.
    """
    for name in ("PROCESSES_PER_NODE", "GPUS_PER_NODE"):
        read_count(environ, name, default=1, minimum=1)
    ranks = environ.get("PROCESSES_PER_NODE")
    gpus = environ.get("GPUS_PER_NODE")
    if ranks and gpus and ranks != gpus:
        raise LaunchError(
            f"GPUS_PER_NODE={gpus} and PROCESSES_PER_NODE={ranks} contradict each other; set only one of them"
        )
    max_restarts = read_count(environ, "MAX_RESTARTS", 3)
    spare_nodes = read_count(environ, "SPARE_NODES", 0)
    min_nodes = read_count(environ, "MIN_NODES", 0)
    profile = environ.get("PROFILE", "")
    if profile not in ("", "torch", "nsys"):
        raise LaunchError(f"PROFILE={profile}: expected torch or nsys")
    image = environ.get("IMAGE", "")
    mounts = read_mounts(environ)
    return Variables(image, mounts, profile, max_restarts, spare_nodes, min_nodes)


def read_count(environ: Mapping[str, str], name: str, default: int, minimum: int = 0) -> int:
    """Returns the integer in an environment variable. Raises LaunchError for any other text, and for
    a number below the minimum.
    """
    value = environ.get(name) or str(default)
    if not value.isdigit() or int(value) < minimum:
        raise LaunchError(f"{name}={value}: expected an integer of at least {minimum}")
    return int(value)


def read_mounts(environ: Mapping[str, str]) -> List[str]:
    """Returns the folders listed in MOUNTS=FOLDER,..., DATA_PATH=FOLDER and
    FSX_MOUNT=FOLDER:FOLDER,...

    Raises LaunchError for a relative path, and for a folder that is mounted under another name.
    """
    folders = []
    for name in ("MOUNTS", "DATA_PATH", "FSX_MOUNT"):
        for mount in environ.get(name, "").replace("\n", ",").split(","):
            folder, _, inside = mount.partition(":")
            if mount and not mount.startswith("/"):
                raise LaunchError(
                    f"{name}={mount}: expected the absolute path of a folder, as in {name}={os.path.abspath(folder)}"
                )
            if inside not in ("", folder):
                raise LaunchError(
                    f"{name}={mount}: folders keep their paths in the container; write {name}={folder}"
                )
            if folder:
                folders.append(folder)
    return folders


def choose_venv() -> Environment:
    """Returns the environment in .venv. Raises LaunchError if it does not exist, is incomplete or
    belongs to a user who does not let others read it.
    """
    venv = os.path.join(PROJECT, ".venv")
    if os.path.isdir(venv) and not os.access(venv, os.R_OK | os.X_OK):
        raise LaunchError(
            f"the environment {venv} can't be read by this user; its owner can allow it: chmod -R a+rX {venv}"
        )
    python = os.path.join(venv, "bin", "python")
    if not os.access(python, os.X_OK):
        raise LaunchError(f"the environment {venv} does not exist; create it: ./0.create_env.sh")
    if not os.path.isfile(os.path.join(venv, ".complete")):
        raise LaunchError(
            f"the environment {venv} is incomplete; create it again: ./0.create_env.sh"
        )
    return Environment(python, "")


def choose_environment(named: str) -> Environment:
    """Returns the image in IMAGE, else the default image if it exists in the project, else .venv.

    Raises LaunchError if none of them exists, or if the image is unusable.
    """
    # The path is absolute, because Pyxis looks up other names in a registry.
    image = os.path.join(PROJECT, named or DEFAULT_IMAGE)
    if os.path.isfile(image):
        check_image(image)
        return Environment("python3", image)
    if named:
        raise LaunchError(
            f"IMAGE={named}: the file {image} does not exist; build the image (docs/image.md), or unset IMAGE to use "
            ".venv"
        )
    if os.path.lexists(os.path.join(PROJECT, ".venv")):
        return choose_venv()
    raise LaunchError(
        f"found neither an image ({image}) nor an environment ({PROJECT}/.venv); build an image (docs/image.md) "
        "or create the environment: ./0.create_env.sh"
    )


def check_image(image: str) -> None:
    """Raises LaunchError if the file can't be read, is not a squashfs image, or is truncated."""
    try:
        with open(image, "rb") as file:
            superblock = file.read(SUPERBLOCK_BYTES)
    except OSError:
        raise LaunchError(
            f"the image {image} can't be read by user {os.getuid()}; its owner can allow it: chmod a+r {image}"
        ) from None
    if superblock[:4] != b"hsqs":
        raise LaunchError(
            f"{image} is not a squashfs image; make it with enroot import (docs/image.md), or copy it again"
        )
    is_short = len(superblock) < SUPERBLOCK_BYTES
    if is_short or os.stat(image).st_size < struct.unpack("<Q", superblock[40:])[0]:
        raise LaunchError(f"the image {image} is truncated; copy it again")


def find_settings_python() -> Optional[str]:
    """Returns a Python of this host that can read the settings before an image is unpacked; None if
    there is none.
    """
    try:
        return choose_venv().python
    except LaunchError:  # .venv does not exist or is incomplete
        pass
    for python in (os.path.join(PROJECT, ".venv", "bin", "python"), "python3"):
        can = "import sys, yaml; print(sys.version_info >= (3, 10))"
        if command_output(python, "-c", can).strip() == "True":
            return python
    return None


def with_node_setup(command: List[str]) -> List[str]:
    """Returns the command line that sets up the node's network variables with 1.train.sbatch and
    then runs the command.
    """
    # Started with bash, because the file is not executable in a copy from a ZIP file or on a noexec mount.
    return ["env", NODE_VARIABLE + "=1", "bash", os.path.join(PROJECT, "1.train.sbatch"), *command]


def launcher_command(python: str, run_folder: str, profile: str, start: str) -> List[str]:
    """Returns the command line of a node's launcher, under nsys if PROFILE=nsys. start: a name for
    the profile's file.
    """
    launcher = [python, "-m", "mamba_fsdp.launch.node", run_folder]
    if profile != "nsys":
        return launcher
    folder = os.path.join(run_folder, PROFILE)
    os.makedirs(folder, exist_ok=True)
    output = f"--output={folder}/nsys_{start}_%h"
    return ["nsys", "profile", "--trace=cuda,nvtx", output, *launcher]
