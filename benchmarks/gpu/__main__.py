"""Measures this project on a GPU, in calls of at most nine minutes.

    python -m benchmarks.gpu --call A           then B, then C
    python -m benchmarks.gpu --only candidates,ncu
                            [--out FOLDER] [--rehearse]

Call A consists of these parts: warm compiles and tunes all kernels. mamba2-1.3b and mamba-1.4b compare the training step of this
project with the models of mamba_ssm and transformers, and take 150 steps on a warm GPU.
Call B: tests runs tests/gpu. run makes two cold starts that must select the same kernels, a warm start, and a start after a
kill, compares the bits of these runs, and measures the delay by saves. sanitizer runs our kernels in small layers under
compute-sanitizer.
Call C: candidates compares launch configurations and backends with Triton's ptxas, candidates-cuda with CUDA's. ncu profiles
our kernels in a layer of each model. traces takes 200 steps of training.py with the kernels that it selects.

Each part runs in a separate process with its own time limit, and writes NAME.log in FOLDER (default: $OUT, else gpu-results).
The table of each part is added to the summary of the call. --rehearse uses tiny sizes, and the CPU if there is no GPU. Later
calls on the same machine use the kernels that earlier calls have compiled. If the machine has no git, add the commit to the
summary by hand.
docs/kernels.md contains the commands for a machine that is available for half an hour.
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

LIMITS = {  # in seconds; Triton compiles the four kernels of a scan in 20 s for each dtype
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
ON_DEVICE = {  # {part: function of (device, whether to use small sizes)}; for a preset, it is models.measure
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


TOOLS = {  # {part: the tool under which it runs, with its options}
    "sanitizer": ["compute-sanitizer", "--tool=memcheck", "--error-exitcode=9"],
    "ncu": [
        "ncu",
        "--set=full",
        "--print-details=all",  # includes the reasons for stalls of warps
        "--clock-control=none",  # do not lock the clocks of a GPU that belongs to others
        f"--kernel-name=regex:^({'|'.join(kernels())})$",
        "--launch-count=60",
    ],
}
TUNED = dict.fromkeys(("warm", *models.PRESETS), {warm.KEEP_CHOICES: "1"})
ENVIRONMENT = TUNED | {
    # Allocates each tensor separately, so that the sanitizer finds a write beyond its end.
    "sanitizer": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "candidates-cuda": {"TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas"},
}


def provenance() -> str:
    """Returns the device, versions and commit, as required in benchmarks/RESULTS.md."""
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
    """Runs a part. Writes the table after each row, so that the rows are kept if the time limit stops the part."""
    rows = []
    for row in rows_of(name, out, rehearse):
        rows.append(row)
        (out / f"{name}.md").write_text(table(rows) + "\n")


def run_part(name: str, out: Path, rehearse: bool) -> str:
    """Runs a part in a separate process. Returns DONE, or the reason for its failure."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--out", str(out)]
    if name == "tests":
        # tests/conftest.py is left out because it needs more packages. With xdist, kernels are compiled in parallel.
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
        # The first command compiles the kernels, because compiling under the tool takes long.
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
        with contextlib.suppress(
            ProcessLookupError
        ):  # also kills the processes that the part has started
            os.killpg(process.pid, signal.SIGKILL)


def take_table(name: str, out: Path) -> str:
    """Returns the table of a part, and removes its file, because some machines return only a few files."""
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
    args = parser.parse_args()
    names = CALLS.get(args.call) or [name for name in args.only.split(",") if name]
    if args.part:
        measure_part(args.part, args.out, args.rehearse)
        return 0
    if not names or not LIMITS.keys() >= set(names):
        parser.error(f"--call, or --only with some of {','.join(LIMITS)}")
    if not args.rehearse and not torch.version.cuda:
        parser.error("it needs a CUDA device; --rehearse tries all of it without one")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    summary = out / f"summary{args.call or ''}.md"
    summary.write_text(provenance())
    outcomes = set()
    for name in names:
        outcome = run_part(name, out, args.rehearse)
        outcomes.add(outcome)
        print(f"{name:<16}{outcome}", flush=True)
        with open(summary, "a") as file:
            file.write(f"\n## {name}: {outcome}\n\n{take_table(name, out)}")
    return 0 if outcomes == {DONE} else 1


if __name__ == "__main__":
    sys.exit(main())
