"""Measures what a lent GPU can show, in calls of at most nine minutes.

    python -m benchmarks.gpu --call A           then B, then C
    python -m benchmarks.gpu --only candidates,ncu
                            [--out FOLDER] [--rehearse]

A: warm compiles and tunes everything beforehand. mamba2-1.3b and mamba-1.4b: their training step compared with mamba_ssm's
and transformers' model, and 150 steps on a card that is warm.
B: tests/gpu. run: two cold starts that must choose the same kernels, a warm one, equal bits of equal runs and after a
kill, stalls by saves. sanitizer: our kernels in small layers under compute-sanitizer.
C: candidates: launch configurations and backends compared, with Triton's ptxas and then with CUDA's. ncu: our kernels in
a layer of each model. traces: 200 steps of training.py, with the kernels that it chooses.

Each part runs in a process of its own with its own time limit, and leaves NAME.log in FOLDER (default: $OUT, else
gpu-results); its table goes into the call's summary. --rehearse: tiny, and on the CPU if there is no GPU. Calls that
follow each other on one machine share what Triton compiled. If the machine has no git, add the commit.
docs/kernels.md has the commands for a machine that is lent for half an hour.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.gpu import candidates, models, runs, warm
from benchmarks.measure import command_line, table

LIMITS = {  # seconds at most; a scan's four kernels take Triton twenty of them, for each dtype
    "warm": 150,
    "mamba2-1.3b": 180,
    "mamba-1.4b": 180,
    "tests": 160,
    "run": 240,
    "sanitizer": 100,
    "candidates": 100,
    "candidates-cuda": 80,
    "ncu": 60,
    "traces": 270,
}
CALLS = {
    "A": ("warm", "mamba2-1.3b", "mamba-1.4b"),
    "B": ("tests", "run", "sanitizer"),
    "C": ("candidates", "candidates-cuda", "ncu", "traces"),
}
ON_DEVICE = {  # called with the device and whether all is small; all others are presets
    "warm": warm.measure,
    "candidates": candidates.measure,
    "candidates-cuda": candidates.measure,
    "sanitizer": candidates.run_kernels,
    "ncu": candidates.run_kernels,
}
DONE = "done"
PROJECT = Path(__file__).resolve().parents[2]


def kernels() -> list[str]:
    """Returns the names of our Triton kernels, as the operators import them."""
    names = []
    for operator in PROJECT.glob("mamba_fsdp/ops/*/triton.py"):
        for imported in re.findall(r"\.triton_kernels import (.*)", operator.read_text()):
            names += imported.split(", ")
    return sorted(set(names))


TOOLS = {  # what these parts run under
    "sanitizer": ["compute-sanitizer", "--tool=memcheck", "--error-exitcode=9"],
    "ncu": [
        "ncu",
        "--set=full",
        "--print-details=all",  # the reasons for which warps stall too
        "--clock-control=none",  # the clocks of a lent GPU are not ours to lock
        f"--kernel-name=regex:^({'|'.join(kernels())})$",
        "--launch-count=60",
    ],
}
TUNED = dict.fromkeys(("warm", *models.PRESETS), {warm.KEEP_CHOICES: "1"})
ENVIRONMENT = TUNED | {
    # Each tensor in memory of its own, so that the checker finds a write after its end.
    "sanitizer": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "candidates-cuda": {"TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas"},
}


def provenance() -> str:
    """Returns machine, versions and commit, as benchmarks/RESULTS.md wants them."""
    device = "CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    versions = []
    for package in ("torch", "triton", "mamba-ssm", "causal-conv1d", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    commit = ""
    with contextlib.suppress(FileNotFoundError):
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
        )
        commit = described.stdout.strip()
    return f"{device}; {', '.join(versions)}; commit {commit or 'not known here'}\n"


def rows_of(name: str, out: Path, rehearse: bool) -> Iterator[dict[str, object]]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    in_folder = {"run": runs.measure, "traces": partial(runs.trace, out)}
    if name in in_folder:
        with tempfile.TemporaryDirectory() as folder:
            yield from in_folder[name](Path(folder), rehearse)
        return
    measure = ON_DEVICE.get(name, partial(models.measure, name))
    yield from measure(device, rehearse or name == "sanitizer")


def measure_part(name: str, out: Path, rehearse: bool) -> None:
    """Writes the whole table again with each row, so that the rows so far stay if time runs out."""
    rows = []
    for row in rows_of(name, out, rehearse):
        rows.append(row)
        (out / f"{name}.md").write_text(table(rows) + "\n")


def run_part(name: str, out: Path, rehearse: bool) -> str:
    """Runs a part in a process of its own; returns what came of it."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--out", str(out)]
    if name == "tests":
        # Without tests/conftest.py, which wants more packages than they do. Each of xdist's workers compiles kernels.
        command = [sys.executable, "-m", "pytest", "-v", "-n", "auto", "--noconftest", "tests/gpu"]
        command.append("--ignore=tests/gpu/test_all.py")
    elif rehearse:
        command.append("--rehearse")
    commands = [command]
    if name in TOOLS and not rehearse:
        tool = TOOLS[name][0]
        found = shutil.which(tool, path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
        if not found:
            return f"there is no {tool}"
        # The first command compiles the kernels, which would take long under the tool.
        commands.append([found, *TOOLS[name][1:], *command])
    end = time.monotonic() + LIMITS[name]
    outcome = DONE
    for command in commands:
        if outcome == DONE:
            outcome = run_command(command, name, out, end - time.monotonic())
    return outcome


def run_command(command: list[str], name: str, out: Path, seconds: float) -> str:
    with open(out / f"{name}.log", "ab") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=PROJECT,
            env=os.environ | ENVIRONMENT.get(name, {}),
        )
    try:
        code = process.wait(seconds)
        return f"ended with {code}, see {name}.log" if code else DONE
    except subprocess.TimeoutExpired:
        return f"stopped after {LIMITS[name]} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what the part had started ends with it
            os.killpg(process.pid, signal.SIGKILL)


def take_table(name: str, out: Path) -> str:
    """Returns a part's table, and removes its file: some places take only a few files."""
    path = out / f"{name}.md"
    if not path.exists():
        return ""
    text = path.read_text()
    path.unlink()
    return text


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--call", choices=CALLS)
    parser.add_argument("--only", default="")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu-results"))
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    names = CALLS.get(asked.call) or [name for name in asked.only.split(",") if name]
    if asked.part:
        measure_part(asked.part, asked.out, asked.rehearse)
        return 0
    if not names or not LIMITS.keys() >= set(names):
        parser.error(f"--call, or --only with some of {','.join(LIMITS)}")
    if not asked.rehearse and not torch.version.cuda:
        parser.error("it needs a CUDA device; --rehearse tries all of it without one")
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    summary = out / f"summary{asked.call or ''}.md"
    summary.write_text(provenance())
    outcomes = set()
    for name in names:
        outcome = run_part(name, out, asked.rehearse)
        outcomes.add(outcome)
        print(f"{name:<16}{outcome}", flush=True)
        with open(summary, "a") as file:
            file.write(f"\n## {name}: {outcome}\n\n{take_table(name, out)}")
    return 0 if outcomes == {DONE} else 1


if __name__ == "__main__":
    sys.exit(main())
