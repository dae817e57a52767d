"""What there is to do on a lent GPU, in calls of at most ten minutes.

    benchmarks/gpu_setup.sh SDISTS TARGET       builds mamba_ssm and causal-conv1d, where pip can't; then PYTHONPATH=TARGET
    python -m benchmarks.gpu --call 1           of 4, in order of worth
    python -m benchmarks.gpu --only values,run
                            [--out FOLDER] [--rehearse]

tests: tests/gpu. values: each backend of each operator beside float64, its bits twice, the time of whole layers.
sanitizer: the same on small sizes under compute-sanitizer. ncu: our kernels in layers of models under ncu. run: equal bits of equal
runs and behind a kill, cold and warm starts, stalls by saves. traces: of training steps. Others are presets: their training
step beside mamba_ssm's and transformers' model. Each part runs in a process of its own with its own time limit, and writes
NAME.md and NAME.log into FOLDER (default: $OUT, else gpu-results); summary.md has all. --rehearse: tiny, on the CPU.
"""

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import torch

LIMITS = {  # seconds at most
    "tests": 120,
    "values": 240,
    "sanitizer": 200,
    "mamba-1.4b": 240,
    "mamba2-1.3b": 240,
    "run": 300,
    "traces": 150,
    "ncu": 120,
    "mamba-130m": 150,
    "mamba2-2.7b": 240,
}
CALLS = {
    "1": ("tests", "values", "sanitizer"),
    "2": ("mamba-1.4b", "mamba2-1.3b"),
    "3": ("run", "traces", "ncu"),
    "4": ("mamba-130m", "mamba2-2.7b"),
}
TOOLS = {  # what these parts run under
    "sanitizer": ["compute-sanitizer", "--tool=memcheck", "--error-exitcode=9"],
    "ncu": [
        "ncu",
        "--set=full",
        "--kernel-name=regex:^(walk|local|forward|backward|sweep|gradients|finish)$",
        "--launch-count=20",
    ],
}


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """Returns Markdown; its columns are those of the first row."""
    rows = list(rows)
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    for row in rows:
        lines.append([str(row.get(name, "")).replace("|", "/") for name in rows[0]])
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def provenance(rehearse: bool) -> str:
    """Machine, versions and commit, as benchmarks/RESULTS.md wants them."""
    device = f"CPU {platform.machine()}" if rehearse else torch.cuda.get_device_name()
    versions = []
    for package in ("torch", "triton", "mamba-ssm", "causal-conv1d", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    described = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True)
    commit = described.stdout.strip() or "not a git checkout"
    return f"{device}; {', '.join(versions)}; commit {commit}\n"


def rows_of(name: str, out: Path, rehearse: bool) -> Iterator[dict[str, object]]:
    device = torch.device("cpu") if rehearse else torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder:
        if name in ("values", "sanitizer"):
            from benchmarks.gpu import values

            yield from values.measure(device, small=rehearse or name == "sanitizer")
        elif name == "ncu":
            from benchmarks.gpu import values

            yield from values.run_triton(device, rehearse)
        elif name == "run":
            from benchmarks.gpu import runs

            yield from runs.measure(Path(folder), rehearse)
        elif name == "traces":
            from benchmarks.gpu import runs

            yield from runs.trace(out, Path(folder), rehearse)
        else:
            from benchmarks.gpu import models

            yield from models.measure(name, device, rehearse)


def measure_part(name: str, out: Path, rehearse: bool) -> None:
    """Writes the table anew with each row, so that what there is stays where the time is over."""
    rows = []
    for row in rows_of(name, out, rehearse):
        rows.append(row)
        (out / f"{name}.md").write_text(table(rows))


def run_part(name: str, out: Path, rehearse: bool) -> str:
    """Runs a part in a process of its own; returns what came of it."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--out", str(out)]
    if name == "tests":
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/gpu",
            "--ignore=tests/gpu/test_all.py",
        ]
    elif rehearse:
        command.append("--rehearse")
    else:
        command = TOOLS.get(name, []) + command
    with open(out / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        code = process.wait(LIMITS[name])
        return f"ended with {code}, see {name}.log" if code else "done"
    except subprocess.TimeoutExpired:
        return f"stopped after {LIMITS[name]} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what the part had started ends with it
            os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        parser.error("it needs a CUDA device; --rehearse tries all of it on the CPU")
    asked.out.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for name in names:
        outcomes[name] = run_part(name, asked.out, asked.rehearse)
        print(f"{name:<16}{outcomes[name]}", flush=True)
    tables = []
    for name in names:
        path = asked.out / f"{name}.md"
        if path.exists():
            tables.append(f"## {name}\n\n{path.read_text()}")
    (asked.out / f"summary{asked.call or ''}.md").write_text(
        "\n".join([provenance(asked.rehearse), *tables])
    )
    return 0 if set(outcomes.values()) == {"done"} else 1


if __name__ == "__main__":
    sys.exit(main())
