"""Measures what a lost rank or node costs: `python -m benchmarks.recovery [ranks] [nodes]`, by default both.

Prints the seconds from the kill to the next applied step of a demo run of two ranks. ranks: on this
machine, under this launcher and under plain torchrun, in turn. nodes: if a node of a throw-away
Slurm is lost, as root, if Slurm is installed (nodes are switched on again at once, and the queue
is empty). data/builtin must be there: ./1.train.sbatch makes it.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mamba_fsdp.run.names import METRICS
from mamba_fsdp.run.records import read_events
from tests.support import cluster as slurm
from tests.support import projects

PROJECT = Path(__file__).resolve().parents[1]
KILLS = 3  # of each launcher
DEMO = [
    "--config=config/demo.yaml",
    "--num_steps=100000",
    "--report_interval=1",
    "--eval_interval=0",
    "--checkpoint_interval=5",
]
OURS = ["./1.train.sbatch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TORCHRUN += ["--max-restarts=99", "training.py"]


@contextlib.contextmanager
def launched(folder, launcher):
    environment = {
        **os.environ,
        "PROCESSES_PER_NODE": "2",
        "OMP_NUM_THREADS": "1",
        # Else ranks of plain torchrun look for the addresses of those before them, and fail.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    run = f"--save_ckpt_path={folder}/run"
    command = [*launcher, *DEMO, run]
    with open(f"{folder}/log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=PROJECT, env=environment)
    try:
        yield process
    finally:
        ranks = ranks_of(process.pid)
        for pid in [process.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks_of(pid):
    """Returns the ranks of torchrun, or of this launcher; the launcher's children are programs that start ranks."""
    below = children(pid)
    return [rank for child in below for rank in children(child)] or below


def wait_until(happened, what):
    end = time.monotonic() + 400
    while time.monotonic() < end:
        value = happened()
        if value:
            return value
        time.sleep(0.05)
    raise SystemExit(f"never came: {what}")


def events(run, kind):
    return [event for event in read_events(run) if event["event"] == kind]


def entries(run):
    return (run / METRICS).read_text().splitlines() if (run / METRICS).exists() else []


def until_next_step(run, kill):
    """Returns the seconds from `kill` to the first step of the next start; the run has saved in this one."""
    saved = len(events(run, "checkpoint"))
    starts = len(events(run, "started"))
    wait_until(lambda: len(events(run, "checkpoint")) > saved, "a checkpoint")
    began = time.monotonic()
    kill()
    before = set(entries(run))
    started = wait_until(lambda: events(run, "started")[starts:], "another start")[0]
    first = f'"step": {started["step"] + 1},'
    wait_until(
        lambda: any(first in line for line in set(entries(run)) - before), "the step after it"
    )
    return time.monotonic() - began


def lose_ranks():
    """Returns {launcher: seconds}."""
    seconds = {}
    for name in ("a rank, this launcher", "a rank, plain torchrun"):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            with launched(folder, OURS if "this" in name else TORCHRUN) as process:

                def kill(process=process):
                    os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)

                wait_until(lambda run=run: events(run, "started"), "a start")
                seconds[name] = [until_next_step(run, kill) for _ in range(KILLS)]
    return seconds


def lose_nodes():
    """Returns {what is lost: seconds}, of one job that loses a node at a time."""
    seconds = {}
    with tempfile.TemporaryDirectory() as root:
        project = projects.make_project(Path(root, "project"), training=None)
        projects.make_venv(project)
        (project / "data").symlink_to(PROJECT / "data")
        run = project / "runs/a"
        with slurm.Cluster(Path(root, "cluster"), shared=[project]) as cluster:
            words = [*DEMO, "--save_ckpt_path=runs/a"]
            job = cluster.submit(project, *words, env={"OMP_NUM_THREADS": "1"})
            wait_until(lambda: events(run, "started"), "a start")

            def lose(node):
                cluster.kill_node(node)
                cluster.wait_until(lambda: cluster.state(job) == "PENDING", "it is queued again")
                cluster.start_node(node)
                cluster.release(job)

            for name, node in (("a node", "node2"), ("the first node", "node1")):
                seconds[name] = [until_next_step(run, lambda node=node: lose(node))]
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lost", nargs="*", help="ranks, nodes")
    lost = parser.parse_args().lost or ["ranks", "nodes"]
    seconds = {}
    if "ranks" in lost:
        seconds |= lose_ranks()
    if "nodes" in lost:
        seconds |= lose_nodes()
    print(f"{'seconds from a kill to the next applied step':<48}{'median':>8}{'min':>8}{'max':>8}")
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:<48}{middle:>8.1f}{min(values):>8.1f}{max(values):>8.1f}")
    print(f"load at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
