"""Measures what a lost rank costs compared with plain torchrun: `python -m benchmarks.recovery`.

Prints the seconds from a kill to the next applied step of a demo run of two ranks on this machine, under this launcher
and under plain torchrun, in turn. data/builtin must be there: ./1.train.sbatch makes it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import command_line, in_turn, spread, table
from mamba_fsdp.run.names import METRICS
from mamba_fsdp.run.records import read_events

PROJECT = Path(__file__).resolve().parents[1]
LONGEST = 400  # seconds to wait for anything
DEMO = [
    "--config=config/demo.yaml",
    "--num_steps=100000",
    "--report_interval=1",
    "--eval_interval=0",
    "--checkpoint_interval=5",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCHERS = {
    "1.train.sbatch": ["./1.train.sbatch"],
    "plain torchrun": [*TORCHRUN, "--max-restarts=99", "training.py"],
}
ENVIRONMENT = {
    "PROCESSES_PER_NODE": "2",
    "OMP_NUM_THREADS": "1",
    # Else ranks of plain torchrun look for the addresses of those before them, and fail.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@contextlib.contextmanager
def launched(folder: Path, launcher: list[str]) -> Iterator[subprocess.Popen]:
    command = [*launcher, *DEMO, f"--save_ckpt_path={folder}/run"]
    environment = os.environ | ENVIRONMENT
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
    """Returns the ranks of torchrun, or of this launcher; the launcher's children are programs that start ranks."""
    below = children(pid)
    return [rank for child in below for rank in children(child)] or below


def wait_until(happened: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        value = happened()
        if value:
            return value
        time.sleep(0.05)
    raise SystemExit(f"never came: {what}")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == kind]


def lose_a_rank(launcher: list[str]) -> float:
    """Returns the seconds from the kill of a rank, after a checkpoint, to the first step of the next start."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "run"
        metrics = run / METRICS
        with launched(folder, launcher) as process:
            wait_until(lambda: events(run, "checkpoint"), "a checkpoint")
            began = time.monotonic()
            os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
            before = set(metrics.read_text().splitlines())
            started = wait_until(lambda: events(run, "started")[1:], "another start")[0]
            first = f'"step": {started["step"] + 1},'

            def reported() -> bool:
                lines = set(metrics.read_text().splitlines()) - before
                return any(first in line for line in lines)

            wait_until(reported, "the step after it")
            return time.monotonic() - began


def main() -> None:
    rounds = command_line(__doc__, rounds=3).parse_args().rounds
    works = {name: partial(lose_a_rank, launcher) for name, launcher in LAUNCHERS.items()}
    rows = []
    for name, seconds in in_turn(works, rounds).items():
        rows.append({"seconds to the next step": name} | spread(seconds))
    print(table(rows))


if __name__ == "__main__":
    main()
