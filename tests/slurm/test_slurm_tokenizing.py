"""2.tokenize.sbatch on a real Slurm: the tasks of an array share one input."""

import json
import re
import shutil

import pytest

from config.dataset_config import DatasetConfig
from mamba_fsdp.data import text, tokenize
from tests.support import projects
from tests.support.corpora import ROOT, content, make_texts

pytestmark = pytest.mark.slow
UNIT_BYTES = 1_500_000
OPTIONS = {"tokenizer": "train:300", "validation_fraction": 0.1, "workers": 1}


@pytest.fixture
def tokenizing_project(tmp_path):
    """The checkout with small units, a .venv, and a jsonl file of some twenty units. Each task stands in the middle of
    its first until there is a file `go`."""
    project = projects.make_project(tmp_path / "the project", training=None)
    projects.make_venv(project)
    shutil.copy(ROOT / "get_dataset.py", project)
    module = project / "mamba_fsdp/data/text.py"
    module.write_text(
        module.read_text().replace("\nUNIT_BYTES = 1 << 30", f"\nUNIT_BYTES = {UNIT_BYTES}")
    )
    units, writes = (
        project / "mamba_fsdp/data/units.py",
        "                self._write(tokens, counts)\n",
    )
    assert units.read_text().count(writes) == 1
    units.write_text(
        units.read_text().replace(
            writes,
            f"{writes}                while not Path('go').exists():\n"
            "                    time.sleep(0.05)\n",
        )
    )
    lines = "".join(json.dumps({"text": text}) + "\n" for text in make_texts(4000))
    (project / "x.jsonl").write_text(lines * 20)
    return project


def test_a_killed_and_a_requeued_task_of_an_array_leave_the_bytes_of_one_process(
    start_cluster, tokenizing_project, tmp_path, monkeypatch
):
    cluster = start_cluster(nodes=3)
    words = ["x.jsonl", "out", *(f"--{name}={value}" for name, value in OPTIONS.items())]
    job = (
        cluster.run(
            "sbatch",
            "--parsable",
            "--array=1-3",
            "2.tokenize.sbatch",
            *words,
            cwd=tokenizing_project,
        )
        .strip()
        .split("\n")[-1]
    )
    progress = tokenizing_project / "out/.progress"
    cluster.wait_until(
        lambda: len(list(progress.glob("[0-9]*.lease"))) == 3, "all tasks are at work"
    )
    tasks = sorted(cluster.run("squeue", "-h", "-o", "%i").split())
    assert tasks == [f"{job}_{number}" for number in (1, 2, 3)]
    cluster.run("scancel", tasks[0])
    cluster.run(
        "scancel", "--batch", "--signal=USR1", tasks[2]
    )  # which has the number of the whole array
    (tokenizing_project / "go").touch()
    assert (
        cluster.wait_for_end(tasks[1]) == "COMPLETED"
        and cluster.wait_for_end(tasks[2]) == "COMPLETED"
    )
    assert cluster.state(tasks[0]) == "CANCELLED"
    assert [cluster.restarts(task) for task in tasks] == [0, 0, 1]
    logs = [path.read_text() for path in sorted((tokenizing_project / "logs").iterdir())]
    assert sum("of all parts together" in log for log in logs) == 1, logs
    assert set(re.findall(r"part (\d) of 3: ", "".join(logs))) == {"0", "1", "2"}, logs
    monkeypatch.setattr(text, "UNIT_BYTES", UNIT_BYTES)
    source = text.open_source(str(tokenizing_project / "x.jsonl"), DatasetConfig(**OPTIONS))
    tokenize.make_dataset(source, tmp_path / "alone")
    assert content(tokenizing_project / "out") == content(tmp_path / "alone")
