"""The folder of one start of a run: RUN/starts/NAME. It bears the start's name, so that two starts of one run do not
take what is the other's. For the cluster's own Python, see host.py.

    settings.json   what the settings came to; nodes and ranks read it
    STOP            asks the ranks of this start to stop
    preflight/      what each node found, and verdict.json
    NODE.json       the first failure of a node
    outcome.json    how the training ended
"""

import contextlib
import glob
import json
import os
import shutil
from typing import Any, Dict, List

from mamba_fsdp.launch.decision import Outcome
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


def name_here() -> str:
    """Returns the name of this process's start without a job, here_BOOT_NAMESPACE_PID: the first two tell whether a
    process sees the other's id, as it does not on another machine or in another container."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().split("-")[0]
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return "here_{}_{}_{}".format(boot, namespace, os.getpid())


class StartFolder:
    """The folder of one start. path: its own. is_scratch: whether the run folder goes away with it."""

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
        """Makes the folder with the settings, for ranks that know a file STOP of before from a later one. Raises
        OSError."""
        os.environ[OLD_STOP_VARIABLE] = stop_file_id(self.run_folder)
        os.makedirs(self.path, exist_ok=True)
        with open(self.settings, "w") as file:
            file.write(json.dumps(settings) + "\n")

    def outcome(self) -> Outcome:
        """Returns what the launchers have left; an empty Outcome if they were killed."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            with open(os.path.join(self.path, OUTCOME)) as file:
                return Outcome(**json.load(file))
        return Outcome()

    def verdict(self) -> Dict[str, Any]:
        """Returns what preflight's judge has left: `unfit`, {node: reason}, and `ranks_per_node`."""
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(self.preflight, VERDICT)) as file:
                return json.load(file)
        return {"unfit": {}, "ranks_per_node": 1}

    def forget_failures(self) -> None:
        """Removes how the ranks ended, before they start again."""
        for name in os.listdir(self.path):
            if name.endswith(".json") and name != RESOLVED:
                os.unlink(os.path.join(self.path, name))

    def remove(self) -> None:
        """Removes the folder and those of killed starts; if none is left, the folder of all starts too."""
        for folder in [self.path, *self.killed_starts()]:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(self.starts)
        if self.is_scratch:
            shutil.rmtree(self.run_folder, ignore_errors=True)

    def killed_starts(self) -> List[str]:
        """Returns the folders that killed starts have left: earlier ones of this job or, without a job, those of this
        machine's processes that have ended."""
        job, _, _ = self.name.rpartition(".")
        if job:
            return glob.glob(os.path.join(glob.escape(self.starts), job + ".*"))
        machine, _, _ = self.name.rpartition("_")
        folders = glob.glob(os.path.join(glob.escape(self.starts), machine + "_*"))
        return [folder for folder in folders if not is_alive(folder.rpartition("_")[2])]


def is_alive(process: str) -> bool:
    return os.path.exists("/proc/" + process)
