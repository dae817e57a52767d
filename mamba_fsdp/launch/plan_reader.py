"""How a job learns what its settings mean: it starts launch/plan.py, which answers with one JSON object. For the
cluster's own Python, see host.py."""

import json
import os
import subprocess
from typing import Any, Dict, List, NamedTuple, Optional

from mamba_fsdp.launch.host import python_for_settings
from mamba_fsdp.launch.nodes import Batch

MODULE = ["-m", "mamba_fsdp.launch.plan"]
NEEDS_MORE = 1  # the exit code if the words need packages that this Python lacks


class Plan(NamedTuple):
    """What the settings of a start came to; launch/plan.py explains each."""

    run_folder: str
    dry_run: bool
    missing_data: str
    settings: Dict[str, Any]
    paths: List[str]
    replay: List[str]
    batch: Batch

    def shown_folder(self) -> str:
        """Returns the run folder that a user knows: that of a replay is scratch."""
        return self.replay[0] if self.replay else self.run_folder

    def program(self, training: str, settings: str) -> List[str]:
        """Returns what each rank runs. training: the path of training.py. settings: of the file that has them."""
        if self.replay:
            return ["-m", "mamba_fsdp", "replay", *self.replay]
        return [training, "--resolved=" + settings]


class Answer(NamedTuple):
    """What launch/plan.py answers: a plan, or the exit code of a help page, a mistake or Ctrl-C, which it has said."""

    plan: Optional[Plan]
    code: int


def read_plan(python: str, words: List[str]) -> Answer:
    """Returns what the settings in `words` mean, as this Python finds out. stdout is the user's: of a help page."""
    reading, writing = os.pipe()
    process = subprocess.Popen([python, *MODULE, f"/dev/fd/{writing}", *words], pass_fds=[writing])
    os.close(writing)
    try:
        with open(reading) as answer:
            text = answer.read()
    finally:  # after Ctrl-C too, of which the process has the last word
        code = process.wait()
    return parse_answer(code, text)


def read_plan_on_host(words: List[str]) -> Optional[Answer]:
    """Returns what the settings mean if a Python of this host can say: then no image has to be unpacked for it."""
    python = python_for_settings()
    if not python:
        return None
    answer = read_plan(python, words)
    return None if answer.code == NEEDS_MORE else answer


def parse_answer(code: int, text: str) -> Answer:
    """Returns the answer in what launch/plan.py has written; there is no plan in "", after a help page."""
    code = code if code >= 0 else 128 - code
    if code != 0 or not text.strip():
        return Answer(None, code)
    content = json.loads(text)
    content["batch"] = Batch(*content["batch"])
    return Answer(Plan(**content), 0)
