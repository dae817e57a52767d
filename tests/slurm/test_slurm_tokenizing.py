"""2.tokenize.sbatch on a real Slurm: the tasks of an array share one input."""

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


@pytest.fixture
def tokenizing_project(tmp_path):
    """The checkout with a .venv and a link to five files in another folder.

    Each task waits after its first batch until the file `go` exists.
    """
    project = projects.make_project(tmp_path / "the project", training=None)
    projects.make_venv(project)
    tokenize = project / "mamba_fsdp/importing/make_dataset.py"
    writes = "                self._write(batch, ids, tokenizer)\n"
    waits = "                while not Path('go').exists():\n                    time.sleep(0.05)\n"
    projects.edit(tokenize, writes, writes + waits)
    projects.edit(tokenize, "BATCH_SIZE = (1 << 20)", "BATCH_SIZE = (1 << 16)")
    projects.shorten_the_silence(project)
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
    cluster.run("scancel", tasks[0])
    cluster.run(
        "scancel", "--batch", "--signal=USR1", tasks[2]
    )  # one task has the number of the whole array
    cluster.wait_until(lambda: cluster.state(tasks[0]) == "CANCELLED", "a task is cancelled")
    cluster.wait_until(lambda: cluster.restarts(tasks[2]) == 1, "a task is queued again")
    (tokenizing_project / "go").touch()
    assert cluster.wait_for_end(tasks[1]) == "COMPLETED"
    assert cluster.wait_for_end(tasks[2]) == "COMPLETED"
    assert [cluster.restarts(task) for task in tasks] == [0, 0, 1]
    logs = "".join(path.read_text() for path in (tokenizing_project / "logs").iterdir())
    assert set(re.findall(r"part (\d) is finished", logs)) == {"1", "2"}, logs
    assert "these have to finish: 0" in logs
    # The part that was cancelled is started by hand.
    program = [tokenizing_project / ".venv/bin/python", "get_dataset.py"]
    done = run_program(*program, *words, "--part=0/3", cwd=tokenizing_project)
    assert done.returncode == 0, done.stderr
    for part in range(PARTS):
        options = DatasetConfig(**OPTIONS, part=f"{part}/{PARTS}")
        make_dataset(str(tokenizing_project / "in"), tmp_path / "undisturbed", options)
    assert content(tokenizing_project / "out") == content(tmp_path / "undisturbed")
