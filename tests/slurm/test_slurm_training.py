"""1.train.sbatch on a real Slurm with the real training program: two nodes, one rank each, over gloo."""

import json
import os
import subprocess

import numpy as np
import pytest

from mamba_fsdp.data.store import StoreWriter
from mamba_fsdp.report.records import read_events
from tests.support import projects

pytestmark = pytest.mark.slow

SETTINGS = [
    "--d_model=32",
    "--n_layer=2",
    "--vocab_size=64",
    "--d_state=4",
    "--seq_length=64",
    "--batch_size=2",
    "--num_steps=16",
    "--report_interval=1",
    "--checkpoint_interval=12",
    "--eval_interval=0",
    "--mixed_precision=fp32",
    "--deterministic=true",
    "--sharding_strategy=fsdp",
    "--kernels=reference",
    "--dataset_path=data/store",
]
HOLD = """

if os.environ.get("HELD") and not os.environ.get("SLURM_RESTART_COUNT"):
    looks, look = [], StopRequest.look

    def look_or_wait(request):
        looks.append(request)
        while len(looks) > 5 and request.file and not request.file.exists():
            time.sleep(0.05)
        return look(request)
    StopRequest.look = look_or_wait
"""


@pytest.fixture
def training_project(tmp_path):
    """The checkout with its own training program, a .venv and a small token store. With HELD=1 in its environment a run
    waits in its first start, after some steps, until it is asked to stop."""
    project = projects.make_project(tmp_path / "the project", training=None)
    stopping = project / "mamba_fsdp/train/stopping.py"
    stopping.write_text(stopping.read_text() + HOLD)
    projects.make_venv(project)
    random = np.random.default_rng(0)
    writer = StoreWriter(project / "data/store", vocab_size=64, eos=0, tokenizer="none")
    for _ in range(300):
        writer.append([*random.integers(1, 64, size=100).tolist(), writer.eos])
    writer.finish()
    return project


def log(project, job):
    return (project / f"logs/mamba-train_{job}.out").read_text()


def losses(run):
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in entries]


def weights(run):
    return {path.name: path.read_bytes() for path in sorted(run.glob("pth/step_*/*.pth"))}


def test_interrupted_by_usr1_the_run_is_bitwise_the_unbroken_one(start_cluster, training_project):
    """That one has as many ranks, on this machine alone."""
    cluster = start_cluster()
    unbroken = subprocess.Popen(
        ["./1.train.sbatch", *SETTINGS, "--save_ckpt_path=runs/unbroken"],
        cwd=training_project,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PROCESSES_PER_NODE": "2"},
    )
    words = [*SETTINGS, "--save_ckpt_path=runs/broken"]
    environment = {"OMP_NUM_THREADS": "1", "HELD": "1"}
    broken = cluster.submit(training_project, *words, env=environment)
    run = training_project / "runs/broken"
    metrics = run / "metrics.jsonl"
    cluster.wait_until(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3,
        "training has done some steps",
    )
    cluster.run("scancel", "--batch", "--signal=USR1", broken)
    assert cluster.wait_for_end(broken) == "COMPLETED", log(training_project, broken)
    assert cluster.restarts(broken) == 1
    assert unbroken.wait(400) == 0
    text = log(training_project, broken)
    stopped = int(text.split("stopped    at step ")[1].split()[0])
    assert 0 < stopped < 16 and f"step_{stopped:08d}" in text
    assert losses(run) == losses(training_project / "runs/unbroken")
    assert weights(run) == weights(training_project / "runs/unbroken") and len(weights(run)) == 1


def kill_rank(cluster, node):
    kill = "ps -ww -eo pid=,args= | awk '/ -u training[.]py / {print $1}' | xargs kill -KILL"
    subprocess.run(cluster.command("sh", "-c", kill, on=node), check=True)


def test_a_lost_rank_starts_again_in_its_job_and_a_node_killed_in_mid_run_costs_only_steps_since_the_last_checkpoint(
    start_cluster, training_project
):
    cluster = start_cluster()
    job = cluster.submit(
        training_project,
        *SETTINGS,
        "--save_ckpt_path=runs/a",
        "--num_steps=100000",
        "--checkpoint_interval=5",
        env={"OMP_NUM_THREADS": "1"},
    )
    run = training_project / "runs/a"
    cluster.wait_until(
        lambda: list(run.glob("checkpoints/step_*/COMMIT")), "a checkpoint is committed"
    )
    kill_rank(cluster, "node2")
    cluster.wait_until(
        lambda: [event for event in read_events(run) if event["event"] == "started"][1:],
        "the ranks have started again",
    )
    first = [event["step"] for event in read_events(run) if event["event"] == "started"][1]
    cluster.wait_until(lambda: losses(run)[first:], "training is under way again")
    steps = [step for step, *_ in losses(run)]
    assert steps == list(range(1, len(steps) + 1)), "no gap, no step twice"
    assert cluster.state(job) == "RUNNING" and cluster.restarts(job) == 0
    assert "after the loss of rank 1 on node2: It was ended by SIGKILL" in log(
        training_project, job
    )
    cluster.kill_node("node2")
    newest = max(path.parent.name for path in run.glob("checkpoints/step_*/COMMIT"))
    cluster.wait_until(lambda: cluster.state(job) == "PENDING", "Slurm has noticed")
    cluster.wait_until(
        lambda: "error: Slurm has lost node2\n" in log(training_project, job),
        "the script names the node",
    )
    cluster.start_node("node2")
    cluster.wait_until(lambda: cluster.idle_nodes() == 2, "the node is back")
    cluster.release(job)

    def resumed():
        lines = log(training_project, job).splitlines()
        return [line for line in lines if "resumes    from" in line][1:]

    (again,) = cluster.wait_until(resumed, "training resumes")
    assert again.split("step_")[1][:8] >= newest[5:]
