"""The commands of a node: how its launcher is started, and by way of which file. For the cluster's own Python, see
host.py."""

import os
from typing import List

from mamba_fsdp.launch.host import PROJECT
from mamba_fsdp.run.names import PROFILE

ON_NODE = "MAMBA_TRAIN_NODE"  # in the environment: 1.train.sbatch sets the network up and becomes the command


def on_node(command: List[str]) -> List[str]:
    """Returns what starts the command with the network settings of its node, inside its container if there is one."""
    # By bash: a copy from a ZIP file, or a file system mounted with noexec, makes no file executable.
    return ["env", ON_NODE + "=1", "bash", os.path.join(PROJECT, "1.train.sbatch"), *command]


def launcher_of(python: str, run_folder: str, profile: str, start: str) -> List[str]:
    """Returns the launcher of a node's ranks, under nsys if a profile is to be recorded."""
    launcher = [python, "-m", "mamba_fsdp.launch.node", run_folder]
    if profile != "nsys":
        return launcher
    folder = os.path.join(run_folder, PROFILE)
    os.makedirs(folder, exist_ok=True)
    output = f"--output={folder}/nsys_{start}_%h"
    return ["nsys", "profile", "--trace=cuda,nvtx", output, *launcher]
