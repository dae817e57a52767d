"""What a start tells of its parts, and that no rank but the first looks around in shared folders."""

import json
import os
import subprocess
import sys
import time

import pytest

from mamba_fsdp.train.startup import Startup
from tests.support.tiny import TINY

AUDIT = """
import os, sys
def hook(event, given):
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir") and os.environ["SHARED"] in str(given[0]):
        if "RANK" in os.environ:
            with open(os.environ["AUDIT"] + os.environ["RANK"], "a") as log:
                log.write(f"{event} {given[0]}\\n")
sys.addaudithook(hook)
"""


def test_what_came_before_a_rank_is_told_by_its_environment(monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setenv("START_PARTS", f"queue=120+nodes=7.5+since={now - 5:.3f}")
    monkeypatch.setenv("RANKS_BEGAN", str(now - 2))
    rank = Startup()
    rank.done("imports")
    assert (
        list(rank.parts) == ["queue", "nodes", "launch", "imports"] and rank.parts["queue"] == 120
    )
    assert (rank.parts["launch"], rank.parts["imports"]) == (
        pytest.approx(3, abs=0.01),
        pytest.approx(2, abs=0.01),
    )


def test_what_the_first_step_takes_longer_than_the_second_is_compiling(monkeypatch):
    monkeypatch.setenv("RANKS_BEGAN", "100")
    now = iter([1000.0, 105.0, 115.0, 120.0, 122.0, 300.0])
    monkeypatch.setattr(time, "time", lambda: next(now))
    startup = Startup()
    startup.done("validation")
    assert not startup.stepped()
    startup.done("validation")
    assert startup.stepped()
    startup.done("validation")
    assert startup.parts == {"validation": 5.0, "compile": 8.0, "first step": 2.0}
    assert (
        startup.line()
        == "start      first step after 15.0 s: validation 5.0, compile 8.0, first step 2.0"
    )


def test_the_parts_stand_in_the_log_and_the_status(train, tmp_path):
    said = train(tmp_path / "run", num_steps=3)
    start = json.loads((tmp_path / "run/status.json").read_text())["start"]
    assert list(start) == [
        "imports",
        "process group",
        "data",
        "model",
        "checkpoint",
        "loader",
        "validation",
        "compile",
        "first step",
    ]
    assert sum(line.startswith("start      first step after ") for line in said.splitlines()) == 1


@pytest.mark.slow
def test_only_the_first_rank_looks_into_shared_folders(tmp_path, project):
    """What grows with the ranks is what they write of a checkpoint, and read of it when they resume."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(AUDIT)
    shared = tmp_path / "shared"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'site'}:{project}",
        "AUDIT": str(tmp_path / "rank"),
        "SHARED": str(shared),
        "PROCESSES_PER_NODE": "2",
        "OMP_NUM_THREADS": "1",
    }
    settings = TINY | {
        "eval_interval": 0,
        "use_dummy_dataset": "true",
        "publish": "false",
        "checkpoint_interval": 9,
        "num_steps": 2,
        "save_ckpt_path": shared / "run",
    }
    del settings["eval_batches"]
    command = [
        sys.executable,
        "-m",
        "mamba_fsdp.launch.node",
        shared / "run",
        "--standalone",
        "training.py",
        *(f"--{name}={value}" for name, value in settings.items()),
    ]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    touched = {rank: (tmp_path / f"rank{rank}").read_text().splitlines() for rank in (0, 1)}
    assert len(touched[0]) > 10 and touched[1]
    assert all("/checkpoints/.step_" in line for line in touched[1]), touched[1]
