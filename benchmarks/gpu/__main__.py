"""Measures what a lent GPU can show, in calls of at most ten minutes.

    benchmarks/gpu_setup.sh SDISTS TARGET       builds mamba_ssm and causal-conv1d if pip can't; then PYTHONPATH=TARGET
    python -m benchmarks.gpu --call 1           of 5, in order of worth
    python -m benchmarks.gpu --only values,run
                            [--out FOLDER] [--rehearse]

values: each backend of each operator compared with float64, its bits twice, the time of whole layers.
sanitizer: the same on small sizes under compute-sanitizer. ncu: our kernels in layers of models under ncu. run: two cold
starts that must choose the same, a warm one, equal bits of equal runs and after a kill, stalls by saves. traces: of
training steps. steps: training steps with and without our norms and use_torch_compile. Other names are presets: their
training step compared with mamba_ssm's and transformers' model. Each part runs in a process of its own with its own
time limit, and leaves NAME.log in FOLDER (default: $OUT, else gpu-results); its table goes into the call's summary.
--rehearse: tiny, and on the CPU if there is no GPU.

Calls that follow each other on one machine share what Triton compiled. If the machine has no git, add the commit.
"""

import argparse
import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.gpu import models, runs, values
from benchmarks.measure import command_line, table

LIMITS = {  # seconds at most; a scan's four kernels take Triton twenty of them, for each dtype
    "values": 300,
    "mamba-1.4b": 270,
    "mamba2-1.3b": 270,
    "run": 300,
    "sanitizer": 240,
    "ncu": 120,
    "traces": 120,
    "mamba2-2.7b": 150,
    "steps": 540,
}
CALLS = {
    "1": ("values",),
    "2": ("mamba-1.4b", "mamba2-1.3b"),
    "3": ("run", "sanitizer"),
    "4": ("ncu", "traces", "mamba2-2.7b"),
    "5": ("steps",),
}
ON_DEVICE = {  # called with the device and whether all is small; all others are presets
    "values": values.measure,
    "sanitizer": values.measure,
    "ncu": values.run_triton,
    "steps": models.measure_steps,
}
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
        "--clock-control=none",  # the clocks of a lent GPU are not ours to lock
        f"--kernel-name=regex:^({'|'.join(kernels())})$",
        "--launch-count=30",
    ],
}
# Each tensor in memory of its own, so that the checker finds a write after its end.
ENVIRONMENT = {"sanitizer": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}


def provenance() -> str:
    """Returns machine, versions and commit, as benchmarks/RESULTS.md wants them."""
    device = f"CPU {platform.machine()}"
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
    if name in ("run", "traces"):
        with tempfile.TemporaryDirectory() as folder:
            if name == "run":
                yield from runs.measure(Path(folder), rehearse)
            else:
                yield from runs.trace(out, Path(folder), rehearse)
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
    if rehearse:
        command.append("--rehearse")
    elif name in TOOLS:
        tool = TOOLS[name][0]
        found = shutil.which(tool, path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
        if not found:
            return f"there is no {tool}"
        command = [found, *TOOLS[name][1:], *command]
    with open(out / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=PROJECT,
            env=os.environ | ENVIRONMENT.get(name, {}),
        )
    try:
        code = process.wait(LIMITS[name])
        return f"ended with {code}, see {name}.log" if code else "done"
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
    return 0 if outcomes == {"done"} else 1


if __name__ == "__main__":
    sys.exit(main())
