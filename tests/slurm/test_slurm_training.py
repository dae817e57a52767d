"""Tests 1.train.sbatch on a real Slurm with the real programs: two nodes with one rank each, over gloo."""

import json
import os
import shutil
import subprocess

import numpy as np
import pytest

from mamba_fsdp.run.records import read_events, read_status
from tests.support import projects
from tests.support.corpora import write_store
from tests.support.processes import write_program
from tests.support.tiny import TINY, format_arguments

pytestmark = [pytest.mark.pinned, pytest.mark.slow]

SETTINGS = [
    *format_arguments(TINY | {"num_steps": 16, "checkpoint_interval": 12}),
    "--deterministic=true",
    "--sharding_strategy=fsdp",
    "--dataset_path=data/store",
]
HOLD = """

if os.environ.get("HELD") and not os.environ.get("SLURM_RESTART_COUNT"):
    looks = []
    look = StopRequest.check

    def look_or_wait(request):
        looks.append(request)
        if request.files and len(looks) > 5:
            while not any(file.exists() for file in request.files):
                time.sleep(0.05)
            request.next_poll = 0.0  # it checks now, not up to a second and hundreds of steps later
        return look(request)

    StopRequest.check = look_or_wait
"""
DEMO_STEPS = 5


@pytest.fixture
def new_project(tmp_path):
    """Makes a copy of the checkout with a .venv, like a new user's, but with a shorter demo.

    The demo takes only the first five of its thousand steps. The number of Python's library files suffices for three
    batches, so several threads use the tokenizer.
    """
    project = projects.make_project(tmp_path / "the project", training=None)
    projects.edit(project / "config/demo.yaml", "num_steps: 1000", f"num_steps: {DEMO_STEPS}")
    projects.shorten_corpus(project)
    projects.make_venv(project)
    return project


@pytest.fixture
def training_project(tmp_path):
    """Makes a copy of the checkout with its own training program, a .venv and a link to a small token store.

    With HELD=1 in its environment, the first start of a run waits after some steps until it is asked to stop.
    """
    project = projects.make_project(tmp_path / "the project", training=None)
    stopping = project / "mamba_fsdp/trainer/stopping.py"
    stopping.write_text(stopping.read_text() + HOLD)
    projects.shorten_lease_expiry(project)
    projects.make_venv(project)
    documents = np.random.default_rng(0).integers(1, 64, size=(300, 100))
    write_store(tmp_path / "store", documents, vocab_size=64, eos=0, tokenizer="none")
    (project / "data").mkdir()
    (project / "data/store").symlink_to(tmp_path / "store")
    return project


def log(project, job):
    return (project / f"logs/mamba-train_{job}.out").read_text()


def read_metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in read_metrics(run)]


def weights(run):
    return {path.name: path.read_bytes() for path in sorted(run.glob("pth/step_*/*.pth"))}


def test_a_bare_sbatch_makes_its_data_and_trains_on_it(cluster, new_project):
    """`sbatch 1.train.sbatch` without settings and data, the first command of a new user, makes the data and trains on
    it."""
    job = cluster.submit(new_project)
    state = cluster.wait_for_end(job)
    text = log(new_project, job)
    assert state == "COMPLETED" and "Traceback" not in text, text
    assert cluster.restarts(job) == 0
    assert "making data/builtin from the source files of Python's standard library" in text
    for name in ("train", "validation"):
        assert (new_project / "data/builtin" / name / "index.json").exists()
    run = new_project / "runs/demo"
    assert text.splitlines()[-1] == f"finished: {run}"
    status = read_status(run)
    assert (status["status"], status["step"]) == ("finished", DEMO_STEPS)
    assert list(run.glob(f"checkpoints/step_{DEMO_STEPS:08d}/COMMIT"))
    assert len(weights(run)) == 1


def test_a_run_that_usr1_interrupts_equals_an_uninterrupted_one(cluster, training_project):
    """A run that USR1 stops, and that Slurm starts again, has bitwise the same losses and weights as an uninterrupted
    one with as many ranks on this machine alone.

    `--signal=B:USR1@300` sends USR1 before the time limit, even if Slurm's controller is too busy to answer queries.
    """
    asked = training_project / "asked"
    squeue = shutil.which("squeue")
    write_program(
        training_project / "bin/squeue",
        f'#!/bin/sh\ncd "{training_project}"; echo >> asked; [ $(wc -l < asked) -gt 2 ] || exit 1\n'
        f'exec {squeue} "$@"\n',
    )
    unbroken = subprocess.Popen(
        ["./1.train.sbatch", *SETTINGS, "--save_ckpt_path=runs/unbroken"],
        cwd=training_project,
        env={**os.environ, "PROCESSES_PER_NODE": "2"},
    )
    words = [*SETTINGS, "--save_ckpt_path=runs/broken"]
    environment = {"HELD": "1", "PATH": f"{training_project}/bin:{os.environ['PATH']}"}
    broken = cluster.submit(training_project, *words, env=environment)
    run = training_project / "runs/broken"
    metrics = run / "metrics.jsonl"
    cluster.wait_until(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3,
        "training has done some steps",
    )
    cluster.run("scancel", "--batch", "--signal=USR1", broken)
    assert cluster.wait_for_end(broken) == "COMPLETED", log(training_project, broken)
    assert cluster.restarts(broken) == 1 and len(asked.read_text()) > 2
    assert unbroken.wait(400) == 0
    text = log(training_project, broken)
    stopped = int(text.split("stopped    at step ")[1].split()[0])
    assert 0 < stopped < 16 and f"step_{stopped:08d}" in text
    assert not (run / "STOP").exists()
    assert losses(run) == losses(training_project / "runs/unbroken")
    assert weights(run) == weights(training_project / "runs/unbroken") and len(weights(run)) == 1


# `pkill -f` would also kill the launcher, because its arguments contain the program's name.
KILL_RANK = "ps -ww -eo pid=,args= | awk '/ -u training[.]py / {print $1}' | xargs kill -KILL"


def test_a_lost_rank_starts_again_in_its_job_and_a_lost_first_node_costs_only_steps_since_the_last_checkpoint(
    cluster, training_project
):
    """Ranks are restarted within the job after a rank is killed. If the first node is lost, on which the job's script
    runs, Slurm queues the job again, and the training resumes from the newest checkpoint."""
    run = training_project / "runs/a"
    words = [*SETTINGS, f"--save_ckpt_path={run}", projects.MANY_STEPS, "--checkpoint_interval=5"]
    job = cluster.submit(training_project, *words)
    checkpoints = run / "checkpoints"
    cluster.wait_until(lambda: list(checkpoints.glob("*/COMMIT")), "a checkpoint is committed")
    subprocess.run(cluster.command("sh", "-c", KILL_RANK, on="node2"), check=True)

    def beginnings():
        return [event["step"] for event in read_events(run) if event["event"] == "started"]

    cluster.wait_until(lambda: beginnings()[1:], "the ranks have started again")
    first = beginnings()[1]
    cluster.wait_until(lambda: losses(run)[first:], "training is under way again")
    steps = [step for step, *_ in losses(run)]
    assert steps == list(range(1, len(steps) + 1)), "no gap, no step twice"
    assert cluster.state(job) == "RUNNING" and cluster.restarts(job) == 0
    lost = "after the loss of rank 1 on node2: It was killed by SIGKILL"
    assert lost in log(training_project, job)
    cluster.kill_node("node1")
    newest = max(path.parent.name for path in checkpoints.glob("*/COMMIT"))
    cluster.wait_until(lambda: cluster.state(job) == "PENDING", "the job is queued again")
    cluster.start_node("node1")
    cluster.wait_until(lambda: cluster.idle_nodes() == 6, "the node is back")
    cluster.release(job)
    cluster.wait_until(lambda: beginnings()[2:], "training resumes")
    assert beginnings()[2] >= int(newest[5:])
