"""Resolves the settings of a start with launch/plan.py, and reads its answer.

For the cluster's own Python, see host.py.
"""

import json
import os
import subprocess
from typing import Any, Dict, List, NamedTuple, Optional

from mamba_fsdp.launch.host import find_settings_python
from mamba_fsdp.launch.nodes import Batch

MODULE = ["-m", "mamba_fsdp.launch.plan"]
EXIT_MISSING_PACKAGES = 1  # exit code of launch/plan.py


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


class Answer(NamedTuple):
    """The answer of launch/plan.py: a plan, or None with the exit code after a help page, an error
    or Ctrl-C.

    launch/plan.py has then printed the page or the error itself.
    """

    plan: Optional[Plan]
    code: int


def read_plan(python: str, args: List[str]) -> Answer:
    """Resolves the settings in the arguments with this Python. A help page or an error goes to
    stdout and stderr.
    """
    reading, writing = os.pipe()
    process = subprocess.Popen([python, *MODULE, f"/dev/fd/{writing}", *args], pass_fds=[writing])
    os.close(writing)
    try:
        with open(reading) as answer:
            text = answer.read()
    finally:  # also after Ctrl-C, so that the process can print its message
        code = process.wait()
    return parse_answer(code, text)


def read_plan_on_host(args: List[str]) -> Optional[Answer]:
    """Resolves the settings with a Python of this host, so that no image has to be unpacked.

    Returns None if the host has no Python with the packages that this needs.
    """
    python = find_settings_python()
    if not python:
        return None
    answer = read_plan(python, args)
    return None if answer.code == EXIT_MISSING_PACKAGES else answer


def parse_answer(code: int, text: str) -> Answer:
    """Parses the output of launch/plan.py. A help page leaves the output empty, and the answer has
    no plan.
    """
    code = code if code >= 0 else 128 - code
    if code != 0 or not text.strip():
        return Answer(None, code)
    content = json.loads(text)
    content["batch"] = Batch(*content["batch"])
    return Answer(Plan(**content), 0)
