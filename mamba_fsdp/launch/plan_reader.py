"""Resolves the settings of a start with launch/plan.py, and reads the plan that it writes.

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

import json
import os
import subprocess
from typing import Any, Dict, List, NamedTuple, Optional

from mamba_fsdp.launch.host import find_settings_python
from mamba_fsdp.launch.nodes import Batch

MODULE = ["-m", "mamba_fsdp.launch.plan"]
EXIT_MISSING_PACKAGES = 1  # exit code of launch/plan.py if fire is not installed


class Plan(NamedTuple):
    """The resolved settings of a start. launch/plan.py documents the fields."""

    run_folder: str
    dry_run: bool
    missing_data: str
    settings: Dict[str, Any]
    paths: List[str]
    replay: List[str]
    batch: Batch

    def user_folder(self) -> str:
        """Returns the run folder that messages mention: for a replay, the run that is replayed."""
        return self.replay[0] if self.replay else self.run_folder

    def rank_command(self, training: str, settings: str) -> List[str]:
        """Returns the program of each rank with its arguments.

        training: the path of training.py. settings: the path of the file with the resolved
        settings.
        """
        if self.replay:
            return ["-m", "mamba_fsdp", "replay", *self.replay]
        return [training, "--resolved=" + settings]


def read_plan(python: str, args: List[str]) -> Plan:
    """Resolves the settings in the arguments with launch/plan.py, and returns the plan.

    python: the Python that runs launch/plan.py. Raises SystemExit with the exit code of
    launch/plan.py if it has printed a help page or an error instead of a plan, and after Ctrl-C.
    """
    reading, writing = os.pipe()
    process = subprocess.Popen([python, *MODULE, f"/dev/fd/{writing}", *args], pass_fds=[writing])
    os.close(writing)
    try:
        with open(reading) as answer:
            text = answer.read()
    finally:  # also after Ctrl-C, so that the process can print its message
        code = process.wait()
    if code != 0 or not text:
        raise SystemExit(code if code >= 0 else 128 - code)
    return parse_plan(text)


def read_plan_on_host(args: List[str]) -> Optional[Plan]:
    """Resolves the settings with a Python of this host, so that no image has to be unpacked.

    Returns None if the host has no Python with the packages that launch/plan.py needs. Raises SystemExit in
    the cases that `read_plan` documents.
    """
    python = find_settings_python()
    if not python:
        return None
    try:
        return read_plan(python, args)
    except SystemExit as error:
        if error.code == EXIT_MISSING_PACKAGES:
            return None
        raise


def parse_plan(text: str) -> Plan:
    """Parses the JSON object that launch/plan.py writes."""
    content = json.loads(text)
    content["batch"] = Batch(*content["batch"])
    return Plan(**content)
