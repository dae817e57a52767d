"""Tests 2.tokenize.sbatch on a real Slurm: the tasks of an array share one input."""

import json
import re

import pytest

from mamba_fsdp.importing.make_dataset import make_dataset
from mamba_fsdp.settings.dataset_config import DatasetConfig
from tests.support import projects
from tests.support.corpora import content, make_texts
from tests.support.processes import run_program

pytestmark = [pytest.mark.pinned, pytest.mark.slow]
OPTIONS = {"tokenizer": "train:300", "validation_fraction": 0.1}
PARTS = 3
# The project's get_dataset.py with small batches and short leases. After each batch it waits until the file `go` exists.
WAITING_PROGRAM = """
import time
from pathlib import Path

from mamba_fsdp import command_line
from mamba_fsdp.importing import make_dataset
from mamba_fsdp.run import lease
from mamba_fsdp.verbs import tokenize

write_batch = make_dataset._Part._write

def write_and_wait(*args):
    write_batch(*args)
    while not Path("go").exists():
        time.sleep(0.05)

make_dataset._Part._write = write_and_wait
make_dataset.BATCH_SIZE = 1 << 16
lease.RENEWAL_SECONDS = 0.2
lease.EXPIRY_SECONDS = 8.0
if __name__ == "__main__":
    command_line.run(tokenize.main, tokenize.page)
"""


@pytest.fixture
def tokenizing_project(tmp_path):
    """Makes a copy of the checkout with a .venv and a link to five files in another folder. WAITING_PROGRAM replaces
    get_dataset.py."""
    project = projects.make_project(tmp_path / "the project", training=None)
    projects.make_venv(project)
    (project / "get_dataset.py").write_text(WAITING_PROGRAM)
    (tmp_path / "texts").mkdir()
    (project / "in").symlink_to(tmp_path / "texts")
    for number in range(5):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in make_texts(400, number))
        (project / "in" / f"{number}.jsonl").write_text(lines)
    return project


def test_a_killed_and_a_requeued_task_of_an_array_leave_the_bytes_of_undisturbed_parts(
    cluster, tokenizing_project, tmp_path
):
    words = ["in", "out", *(f"--{name}={value}" for name, value in OPTIONS.items())]
    submit = ["sbatch", "--parsable", "--array=2-8:3", "2.tokenize.sbatch", *words]
    job = cluster.run(*submit, cwd=tokenizing_project).split()[-1]
    progress = tokenizing_project / "out/.progress"
    cluster.wait_until(
        lambda: len(list(progress.glob("[0-9]*.lease"))) == PARTS, "all tasks are at work"
    )
    tasks = [f"{job}_{number}" for number in (2, 5, 8)]
    # One of the tasks has the number of the whole array as its own job id.
    cluster.run("scancel", tasks[0])
    cluster.run("scancel", "--batch", "--signal=USR1", tasks[2])
    cluster.wait_until(lambda: cluster.state(tasks[0]) == "CANCELLED", "a task is cancelled")
    cluster.wait_until(lambda: cluster.restarts(tasks[2]) == 1, "a task is queued again")
    (tokenizing_project / "go").touch()
    assert cluster.wait_for_end(tasks[1]) == "COMPLETED"
    assert cluster.wait_for_end(tasks[2]) == "COMPLETED"
    assert [cluster.restarts(task) for task in tasks] == [0, 0, 1]
    logs = "".join(path.read_text() for path in (tokenizing_project / "logs").iterdir())
    assert set(re.findall(r"part (\d) is finished", logs)) == {"1", "2"}, logs
    assert "these parts have to finish: 0" in logs
    # The part that was cancelled is started by hand.
    program = [tokenizing_project / ".venv/bin/python", "get_dataset.py"]
    done = run_program(*program, *words, "--part=0/3", cwd=tokenizing_project)
    assert done.returncode == 0, done.stderr
    for part in range(PARTS):
        options = DatasetConfig(**OPTIONS, part=f"{part}/{PARTS}")
        make_dataset(str(tokenizing_project / "in"), tmp_path / "undisturbed", options)
    assert content(tokenizing_project / "out") == content(tmp_path / "undisturbed")
