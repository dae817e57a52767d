"""What a lost rank or node costs: `python -m benchmarks.recovery [ranks] [nodes] [goodput] [MINUTES]`, by default all.

ranks: seconds from a kill to the next applied step, of a demo run of two ranks on this machine under this launcher and
under plain torchrun, in turn. nodes: the same when a node of a throw-away Slurm is lost: with a spare one, without, and
the first, where the script runs; as root, where Slurm is installed (nodes are switched on again at once, and the queue
is empty). goodput: of a demo run of MINUTES (default 5) with a kill a minute. All of it takes about ten minutes on two
idle cores. data/builtin must be there: ./1.train.sbatch makes it.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mamba_fsdp.report.records import read, read_events
from mamba_fsdp.run_layout import METRICS

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "tests/slurm"), str(PROJECT / "tests/launcher")]
ROUNDS, KILLS = 2, 2  # of each launcher: starts in turn, and kills in each
DEMO = [
    "--config=config/demo.yaml",
    "--num_steps=100000",
    "--report_interval=1",
    "--eval_interval=0",
    "--checkpoint_interval=5",
]
MEETING = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


@contextlib.contextmanager
def launched(folder, *, ours):
    words = (
        ["-m", "mamba_fsdp.launch.node", f"{folder}/run/failures/1.0", *MEETING]
        if ours
        else ["-m", "torch.distributed.run", *MEETING, "--nproc-per-node=2", "--max-restarts=99"]
    )
    command = [sys.executable, *words, "training.py", *DEMO, f"--save_ckpt_path={folder}/run"]
    with open(f"{folder}/log", "w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=PROJECT,
            env={
                **os.environ,
                "PROCESSES_PER_NODE": "2",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(PROJECT),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
        )  # else ranks may look for those before them, and wait
    try:
        yield process
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def descendants(pid):
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *descendants(child)]
    return found


def kill_a_rank(process):
    os.kill([pid for pid in descendants(process.pid) if os.getsid(pid) == pid][-1], signal.SIGKILL)


def wait_until(happened, what):
    end = time.monotonic() + 400
    while not (value := happened()):
        if time.monotonic() > end:
            raise SystemExit(f"never came: {what}")
        time.sleep(0.05)
    return value


def events(run, kind):
    return [event for event in read_events(run) if event["event"] == kind]


def entries(run):
    return (run / METRICS).read_text().splitlines() if (run / METRICS).exists() else []


def until_next_step(run, kill):
    """Seconds from `kill` to the first step of the start after it, once the run has a checkpoint of this start."""
    saved, starts = len(events(run, "checkpoint")), len(events(run, "started"))
    wait_until(lambda: len(events(run, "checkpoint")) > saved, "a checkpoint")
    began = time.monotonic()
    kill()
    before = set(entries(run))
    first = wait_until(lambda: events(run, "started")[starts:], "another start")[0]["step"] + 1
    wait_until(
        lambda: any(f'"step": {first},' in line for line in set(entries(run)) - before),
        f"step {first}",
    )
    return time.monotonic() - began


def in_turn():
    """{launcher: seconds}."""
    seconds = {"a rank, this launcher": [], "a rank, plain torchrun": []}
    for _ in range(ROUNDS):
        for name, values in seconds.items():
            with (
                tempfile.TemporaryDirectory() as folder,
                launched(folder, ours="this" in name) as process,
            ):
                run = Path(folder, "run")
                wait_until(lambda run=run: events(run, "started"), "a start")
                for _ in range(KILLS):
                    values.append(
                        until_next_step(run, lambda process=process: kill_a_rank(process))
                    )
    return seconds


def in_slurm():
    """{what is lost: seconds}, of one job that loses a node at a time."""
    from tests.support import cluster as slurm
    from tests.support import projects

    seconds = {}
    with tempfile.TemporaryDirectory() as root:
        project = projects.make_project(Path(root, "project"), training=None)
        projects.make_venv(project)
        (project / "data").symlink_to(PROJECT / "data")
        with slurm.Cluster(Path(root, "cluster"), nodes=3, shared=[project]) as cluster:
            job = cluster.submit(
                project,
                *DEMO,
                "--spares=1",
                "--save_ckpt_path=runs/a",
                options=["--nodes=3"],
                env={"OMP_NUM_THREADS": "1"},
            )

            def lose(node, *back):
                cluster.kill_node(node)
                if back:
                    cluster.wait_until(
                        lambda: cluster.state(job) == "PENDING", "the job is queued again"
                    )
                    for name in back:
                        cluster.start_node(name)
                    cluster.release(job)

            run = project / "runs/a"
            wait_until(lambda: events(run, "started"), "a start")
            for name, *nodes in (
                ("a node, with a spare one", "node2"),
                ("a node, without: queued again", "node3", "node2", "node3"),
                ("the first node: queued again", "node1", "node1"),
            ):
                seconds[name] = [until_next_step(run, lambda nodes=nodes: lose(*nodes))]
    return seconds


def goodput(minutes):
    with tempfile.TemporaryDirectory() as root, launched(root, ours=True) as process:
        run = Path(root, "run")
        wait_until(lambda: events(run, "checkpoint"), "a checkpoint")
        for _ in range(minutes):
            time.sleep(60)
            kill_a_rank(process)
        time.sleep(60)
        return read(run / METRICS)[-1]["goodput"], [
            event["seconds"] for event in events(run, "recovered")
        ]


def main(words):
    minutes = next((int(word) for word in words if word.isdigit()), 5)
    parts = {word for word in words if not word.isdigit()} or {"ranks", "nodes", "goodput"}
    seconds = (in_turn() if "ranks" in parts else {}) | (in_slurm() if "nodes" in parts else {})
    if seconds:
        print(
            f"{'seconds from a kill to the next applied step':<48}{'median':>8}{'min':>8}{'max':>8}"
        )
    for name, values in seconds.items():
        print(
            f"{name:<48}{statistics.median(values):>8.1f}{min(values):>8.1f}{max(values):>8.1f}",
            flush=True,
        )
    if "ranks" in parts:
        ours, plain, *_ = (statistics.median(values) for values in seconds.values())
        print(f"a rank: {ours / plain:.2f} of the seconds of plain torchrun", flush=True)
    if "goodput" in parts:
        share, lost = goodput(minutes)
        print(
            f"goodput {share:.1%} with a kill a minute ({minutes}); the next step came {lost} s after each"
        )
    print("load at the end: {:.1f} on {} cores".format(os.getloadavg()[0], os.cpu_count()))


if __name__ == "__main__":
    main(sys.argv[1:])
