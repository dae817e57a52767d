"""Builds the command lines that run on the nodes.

For the cluster's own Python, see host.py.
"""

import os
from typing import List

from mamba_fsdp.launch.host import PROJECT
from mamba_fsdp.run.names import PROFILE

# An environment variable. If it is set, 1.train.sbatch sets up the network and then runs its arguments as a command.
NODE_VARIABLE = "MAMBA_TRAIN_NODE"


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
