"""Finds the commands in README.md and docs/*.md for the tests in this folder, and lists the ones that they can't run.

Blocks that are fenced as sh or python, or indented by four spaces, contain commands. A fence without a language shows
the output of a program or the content of a folder. A line in such a fence that begins with "$ " is a command. The
following lines are its output.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support import forked
from tests.support.projects import PROJECT

PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (PROJECT / "docs").glob("*.md"))]
# test_readme.py runs the commands of these pages, in this order, in a fresh clone. test_cluster_pages.py runs the commands of
# the cluster pages on a simulated cluster, and test_pages.py runs the commands of all other pages.
IN_A_CLONE = ["README.md", "docs/models.md"]
ON_A_CLUSTER = ["docs/cluster.md", "docs/image.md"]


@dataclass(frozen=True)
class Command:
    text: str
    language: str  # "sh" or "python"
    output: str = ""  # the output on the page, if there is one


PARALLELCLUSTER = "it sets up the head node of a real ParallelCluster"
EXAMPLES = "/opt/parallelcluster/examples"
# {page: {prefix of a command: why no test in this folder runs it, and the test that covers it}}
NOT_RUN = {
    "README.md": {
        "docker build": "CI has no Docker: tests/container/test_image.py",
        "enroot import": "it reads the image from Docker",
        "sbatch 1.train.sbatch": "it needs Slurm and GPUs: tests/slurm/test_slurm_training.py",
    },
    "docs/cluster.md": {"tail -f": "it does not end: tests/slurm/test_slurm_launcher.py"},
    "docs/evaluating.md": {
        ".venv/bin/python -m pip install": "pip installs from the network",
        ".venv/bin/python -m mamba_fsdp evaluate runs/demo --tasks=lambada_openai,hellaswag": "its tasks come from the "
        "network: tests/inference/test_tasks.py",
        ".venv/bin/lm_eval": "its tasks come from the network",
    },
    "docs/models.md": {
        "hf download": "it comes from the network",
        ".venv/bin/python get_dataset.py mytexts data/mine-nemotron": "it needs that tokenizer",
        "sbatch 1.train.sbatch --config=nemotron-3-nano-4b": "it needs GPUs: tests/trainer/test_starting_point.py",
        ".venv/bin/mamba-fsdp export runs/nemotron": "it needs that run: tests/trainer/test_starting_point.py",
    },
    "docs/kernels.md": {
        "CUDA_ARCHITECTURES=9.0": "it compiles for minutes: tests/container/test_build_kernels.py",
        "python3 -m pip install -q --no-index": "it needs a GPU: tests/gpu/test_all.py",
        "pip download": "pip downloads from the network",
    },
    "docs/tuning.md": {
        ".venv/bin/python -m pip install": "pip installs from the network",
        ".venv/bin/python -m benchmarks.recipe": "it trains for hours",
    },
    "docs/image.md": {
        "docker build": "CI has no Docker: tests/container/test_image.py",
        "export ENROOT_SQUASH_OPTIONS='-comp zstd": "it is for the next command",
        "rm -f mamba-train.sqsh && enroot import": "it reads the image from Docker",
        "salloc": "it opens a shell, in which the next commands are typed",
        "mkdir -p /opt/slurm/etc/plugstack.conf.d": PARALLELCLUSTER,
        f"cp {EXAMPLES}/spank/plugstack.conf": PARALLELCLUSTER,
        f"cp {EXAMPLES}/pyxis/pyxis.conf": PARALLELCLUSTER,
        "scontrol reconfigure": PARALLELCLUSTER,
    },
}


def text_of(page: str) -> str:
    return (PROJECT / page).read_text()


def blocks(page: str) -> list[list[Command]]:
    """Returns the commands of each block of a page, without blocks that contain none."""
    text = text_of(page)
    fences = re.findall(r"^ *(?:```|~~~)", text, flags=re.M)
    starts_of_blocks = (
        r"^```(?P<language>.*)\n(?P<fenced>(?s:.*?))^```\n|(?P<indented>(?:^ {4}.*\n)+)"
    )
    found = []
    for match in re.finditer(starts_of_blocks, text, flags=re.M):
        if match["indented"]:
            block = [Command(each, "sh") for each in split(match["indented"])]
        else:
            del fences[:2]
            block = commands_of_fence(match["language"], match["fenced"])
        if block:
            found.append(block)
    assert not fences, f"{page}: a fence is not closed, or does not begin its line with ```"
    return found


def commands_of_fence(language: str, text: str) -> list[Command]:
    if language == "sh":
        return [Command(each, "sh") for each in split(text)]
    if language == "python":
        return [Command(text, "python")]
    assert language == "", f"no test runs a block of {language}"
    examples = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, flags=re.M)
    return [Command(command, "sh", output) for command, output in examples]


def split(text: str) -> Iterator[str]:
    """Splits a text into commands. Each command consists of as few lines as a shell accepts."""
    command = ""
    for line in text.replace("\\\n", "").splitlines():
        command += line.strip() + "\n"
        if not is_whole(command):
            continue
        if shlex.split(command, comments=True):
            yield command.strip()
        command = ""
    assert command == "", f"a shell does not take this: {command}"


def is_whole(command: str) -> bool:
    return subprocess.run(["bash", "-n", "-c", command], stderr=subprocess.DEVNULL).returncode == 0


def not_run(page: str, command: Command) -> list[str]:
    """Returns the keys of NOT_RUN for the page that match the command."""
    words = f"{command.text} "
    return [start for start in NOT_RUN.get(page, {}) if words.startswith(f"{start} ")]


def blocks_to_run(page: str) -> list[list[Command]]:
    """Returns `blocks` without the commands in NOT_RUN."""
    found = []
    for block in blocks(page):
        to_run = [command for command in block if not not_run(page, command)]
        if to_run:
            found.append(to_run)
    return found


def commands_to_run(page: str) -> list[Command]:
    return [command for block in blocks_to_run(page) for command in block]


class Shell:
    """Runs commands in a folder. It supports only the features of a shell that the pages need."""

    def __init__(self, folder):
        self.folder = folder
        self.variables = {}

    def run(self, text):
        """Runs a command, and returns its output. Raises AssertionError if it fails."""
        assignment = re.fullmatch(r'(\w+)="(.*)"', text)
        if assignment:
            name, value = assignment.groups()
            self.variables[name] = value
            return ""
        for name, value in self.variables.items():
            text = text.replace(f"${name}", value)
        program, *words = shlex.split(text, comments=True)
        if not program.startswith(".venv/bin/"):
            done = subprocess.run(text, shell=True, cwd=self.folder, capture_output=True, text=True)
            assert done.returncode == 0 and "Traceback" not in done.stderr, (
                f"{text}\n{done.stdout}\n{done.stderr}"
            )
            return done.stdout
        file = None
        if words[-2:-1] == [">"]:
            file = self.folder / words[-1]
            words = words[:-2]
        output = self.fork(program, words)
        if file:
            file.write_text(output)
            json.loads(output)
        return output

    def fork(self, program, words):
        if program == ".venv/bin/torchrun":
            ranks, *words = words
            count = int(ranks.removeprefix("--nproc_per_node="))
            assert words[:2] == ["-m", "mamba_fsdp"]
            return forked.run_ranks(count, words[2:], words[:2], self.folder)
        command = shlex.join([program, *words])
        return forked.run(command, self.folder, merged=False)
