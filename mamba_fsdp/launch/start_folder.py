"""Manages the folder of one start of a run: RUN/starts/NAME. Different starts of a run use
different names.

    settings.json   the resolved settings, read by nodes and ranks
    STOP            requests the ranks of this start to stop
    preflight/      the findings of each node, and verdict.json
    NODE.json       the first failure of a node
    outcome.json    how the training ended

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

import contextlib
import glob
import json
import os
import shutil
from typing import Any, Dict, List

from mamba_fsdp.launch.decision import TrainingOutcome
from mamba_fsdp.launch.host import read_json
from mamba_fsdp.run.names import (
    OLD_STOP_VARIABLE,
    OUTCOME,
    PREFLIGHT,
    RESOLVED,
    STARTS,
    STOP,
    VERDICT,
    stop_file_id,
)


def local_start_name() -> str:
    """Returns the name of this process's start outside of Slurm, here_BOOT_NAMESPACE_PID.

    BOOT and NAMESPACE identify the machine and the container, because a process id is valid only
    there.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().split("-")[0]
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return "here_{}_{}_{}".format(boot, namespace, os.getpid())


class StartFolder:
    """The folder of one start.

    is_scratch: whether the run folder is temporary, so that `remove` removes the run folder too.
    """

    def __init__(self, run_folder: str, name: str, is_scratch: bool = False) -> None:
        self.run_folder = run_folder
        self.is_scratch = is_scratch
        self.starts = os.path.join(run_folder, STARTS)
        self.name = name
        self.path = os.path.join(self.starts, name)
        self.settings = os.path.join(self.path, RESOLVED)
        self.stop = os.path.join(self.path, STOP)
        self.preflight = os.path.join(self.path, PREFLIGHT)

    def make(self, settings: Dict[str, Any]) -> None:
        """Makes the folder and writes the settings to it. Raises OSError.

        Also records in the environment whether the run has a file STOP and which one, so that the
        ranks can recognise a new file STOP.
        """
        os.environ[OLD_STOP_VARIABLE] = stop_file_id(self.run_folder)
        os.makedirs(self.path, exist_ok=True)
        with open(self.settings, "w") as file:
            file.write(json.dumps(settings) + "\n")

    def outcome(self) -> TrainingOutcome:
        """Reads outcome.json. Returns an empty TrainingOutcome if the launchers were killed before
        they could write it.
        """
        with contextlib.suppress(TypeError):
            return TrainingOutcome(**read_json(os.path.join(self.path, OUTCOME)))
        return TrainingOutcome()

    def verdict(self) -> Dict[str, Any]:
        """Reads preflight's verdict: `unfit`, {node: reason}, and `ranks_per_node`."""
        return {
            "unfit": {},
            "ranks_per_node": 1,
            **read_json(os.path.join(self.preflight, VERDICT)),
        }

    def remove_outcome(self) -> None:
        """Removes the failures and the outcome of the last attempt, so that the ranks can be restarted."""
        for name in os.listdir(self.path):
            if name.endswith(".json") and name != RESOLVED:
                os.unlink(os.path.join(self.path, name))

    def remove(self) -> None:
        """Removes this folder and the folders of killed starts, and then the folder `starts` if it
        is empty.
        """
        for folder in [self.path, *self.find_killed_starts()]:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(self.starts)
        if self.is_scratch:
            shutil.rmtree(self.run_folder, ignore_errors=True)

    def find_killed_starts(self) -> List[str]:
        """Returns the folders of starts that were killed.

        In a job, these are all folders of starts of this job, because earlier starts have ended.
        Outside of Slurm, these are the folders of starts by processes of this machine that have
        ended.
        """
        job, _, _ = self.name.rpartition(".")
        if job:
            return glob.glob(os.path.join(glob.escape(self.starts), job + ".*"))
        machine, _, _ = self.name.rpartition("_")
        folders = glob.glob(os.path.join(glob.escape(self.starts), machine + "_*"))
        return [
            folder for folder in folders if not os.path.exists("/proc/" + folder.rpartition("_")[2])
        ]
