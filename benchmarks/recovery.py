"""Measures the time lost with a rank or a node, compared with plain torchrun: `python -m benchmarks.recovery`.

Prints the seconds from the loss to the next step of a demo run with two ranks. The launcher of this project and plain torchrun
take turns. A rank is lost by SIGKILL on this machine. A node is lost by cutting its power in a Slurm cluster of three virtual
nodes on this machine, one of which is a spare. The second part needs root and the daemons of Slurm. data/builtin must exist;
./1.train.sbatch creates it.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import command_line, in_turn, table
from mamba_fsdp.run.names import METRICS
from mamba_fsdp.run.records import read_events
from tests.support.cluster import Cluster, missing

PROJECT = Path(__file__).resolve().parents[1]
MAX_SECONDS = 400  # the longest time to wait for an event
DEMO = [
    "--config=config/demo.yaml",
    "--num_steps=100000",
    "--report_interval=1",
    "--eval_interval=0",
    "--checkpoint_interval=5",
]
OURS = "1.train.sbatch"
TORCHRUN = "plain torchrun"
RUN_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=99"]
LAUNCHERS = {
    OURS: ["./1.train.sbatch"],
    TORCHRUN: [*RUN_TORCHRUN, "--standalone", "--nproc-per-node=2", "training.py"],
}
# Without the second variable, ranks that plain torchrun restarts would read the addresses of the earlier ranks, and fail.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RANK_ENVIRONMENT = ENVIRONMENT | {"PROCESSES_PER_NODE": "2"}
NODE_ENVIRONMENT = ENVIRONMENT | {"SPARE_NODES": "1", "GLOO_SOCKET_IFNAME": "eth0"}
# Plain torchrun has no spare nodes. It trains on three nodes, and after the loss on two.
ELASTIC = "--nnodes=2:3 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=node1:29500 --rdzv-id=1".split()
STEP_OF_ALL_NODES = (
    "srun --no-kill --kill-on-bad-exit=0 --nodes=3 --ntasks=3 --cpu-bind=none".split()
)


@contextlib.contextmanager
def launched(folder: Path, launcher: list[str]) -> Iterator[subprocess.Popen]:
    command = [*launcher, *DEMO, f"--save_ckpt_path={folder}/run"]
    environment = os.environ | RANK_ENVIRONMENT
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=PROJECT, env=environment)
    try:
        yield process
    finally:
        for pid in [process.pid, *ranks_of(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks_of(pid: int) -> list[int]:
    """Returns the process ids of the ranks. They are children of torchrun, or grandchildren of this project's launcher."""
    below = children(pid)
    return [rank for child in below for rank in children(child)] or below


def wait_until(happened: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + MAX_SECONDS
    while time.monotonic() < end:
        value = happened()
        if value:
            return value
        time.sleep(0.05)
    raise SystemExit(f"waited {MAX_SECONDS} s for {what}")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == kind]


def seconds_to_next_step(run: Path, lose: Callable[[], None]) -> float:
    """Waits for a checkpoint, and calls `lose()`. Returns the seconds from this call until the run, which is started again,
    has reported its first step."""
    metrics = run / METRICS
    wait_until(lambda: events(run, "checkpoint"), "a checkpoint")
    began = time.monotonic()
    lose()
    before = set(metrics.read_text().splitlines())
    started = wait_until(lambda: events(run, "started")[1:], "another start")[0]
    first = f'"step": {started["step"] + 1},'

    def reported() -> bool:
        lines = set(metrics.read_text().splitlines()) - before
        return any(first in line for line in lines)

    wait_until(reported, "the step after it")
    return time.monotonic() - began


def lose_a_rank(launcher: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder, launched(Path(folder), launcher) as process:
        run = Path(folder, "run")
        return seconds_to_next_step(run, lambda: os.kill(ranks_of(process.pid)[-1], signal.SIGKILL))


def lose_a_node(cluster: Cluster, launcher: str) -> float:
    """Returns the seconds to the next step after the power of the second node is cut. Slurm does not notice the loss in this
    time."""
    with tempfile.TemporaryDirectory(dir=cluster.folder, ignore_cleanup_errors=True) as folder:
        run = f"{folder}/run"
        arguments = [*DEMO, f"--save_ckpt_path={run}"]
        script = [PROJECT / "1.train.sbatch", *arguments]
        if launcher == TORCHRUN:
            command = [*STEP_OF_ALL_NODES, *RUN_TORCHRUN, *ELASTIC, "training.py", *arguments]
            script = ["--wrap=" + " ".join(command)]
        options = ["--nodes=3", "--exclusive", "--no-kill", f"--output={folder}/log"]
        cluster.run("sbatch", *options, *script, cwd=PROJECT, env=NODE_ENVIRONMENT)
        try:
            return seconds_to_next_step(Path(run), lambda: cluster.cut_power("node2"))
        finally:
            cluster.reset()


def show(title: str, works: dict[str, Callable[[], float]], rounds: int) -> None:
    rows = []
    for name, seconds in in_turn(works, rounds).items():
        rows.append(
            {
                f"seconds to the next step after the loss of a {title}": name,
                "median": f"{statistics.median(seconds):.1f}",
                "min": f"{min(seconds):.1f}",
                "max": f"{max(seconds):.1f}",
            }
        )
    print(table(rows), flush=True)


def main() -> None:
    rounds = command_line(__doc__, rounds=3).parse_args().rounds
    show(
        "rank", {name: partial(lose_a_rank, command) for name, command in LAUNCHERS.items()}, rounds
    )
    reason = missing()
    if reason:
        print(f"\nthe loss of a node was not measured: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder:
        with Cluster(Path(folder, "slurm"), gpus=[0, 0, 0]) as cluster:
            print()
            works = {name: partial(lose_a_node, cluster, name) for name in LAUNCHERS}
            show("node", works, rounds)


if __name__ == "__main__":
    main()
