"""Measures whole runs of training.py: whether equal runs and a killed, resumed run have equal bits, the time of a start, the
delay of steps by saves, and traces of steps."""

import gzip
import hashlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import PRESETS
from benchmarks.gpu.sensors import Sensors
from mamba_fsdp.ops.backends import BackendChoice
from mamba_fsdp.run.layout import list_committed, rank_file
from mamba_fsdp.run.names import CHECKPOINTS, KERNELS, METRICS, PROFILE
from mamba_fsdp.run.records import read_entries
from mamba_fsdp.trainer.kernel_selection import KernelRecord

PROJECT = Path(__file__).resolve().parents[2]
USUAL = {
    "use_dummy_dataset": "true",
    "report_interval": 1,
    "eval_interval": 0,
    "publish": "false",
    "num_workers": 0,
    "num_steps": 12,
    "checkpoint_interval": 4,
    "deterministic": "true",  # rejects kernels of other libraries, which use atomic additions
}
SIZE = {"seq_length": 1024, "batch_size": 8, "global_batch_size": 0}
REPORTS = 4  # reports of a traced run; the first one contains the steps in which the GPU warms up
TINY = {"d_model": 16, "n_layer": 1, "vocab_size": 64, "d_state": 4, "seq_length": 16}


def start(arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "training.py", *arguments], cwd=PROJECT)


def arguments_for(folder: Path, settings: dict) -> list[str]:
    given = USUAL | settings | {"save_ckpt_path": folder}
    return [f"--{name}={value}" for name, value in given.items()]


def train(folder: Path, settings: dict) -> float:
    """Trains in a process, and returns the seconds until the first step was reported."""
    metrics = folder / METRICS
    before = size_of(metrics)
    began = time.perf_counter()
    process = start(arguments_for(folder, settings))
    seconds = 0.0
    while process.poll() is None:
        if not seconds and size_of(metrics) > before:
            seconds = time.perf_counter() - began
        time.sleep(0.005)
    if process.returncode:
        raise RuntimeError(f"training.py failed in {folder}")
    return seconds


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def train_and_kill(folder: Path, settings: dict, reached: Callable[[], Any]) -> None:
    """Trains in a process, and kills it with SIGKILL as soon as `reached()` is true."""
    process = start(arguments_for(folder, settings))
    while process.poll() is None and not reached():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def bits(folder: Path) -> tuple[list, str]:
    """Returns ((step, loss, gradient norm) of each step, digest of the last checkpoint)."""
    steps = [
        (entry["step"], entry["loss"], entry["grad_norm"])
        for entry in read_entries(folder / METRICS)
    ]
    last = list_committed(folder / CHECKPOINTS)[-1]
    return steps, hashlib.sha256((last / rank_file(0)).read_bytes()).hexdigest()


def choice_of(folder: Path) -> BackendChoice:
    """Returns the backends that a run has selected on a GPU. On a CPU the choice is empty, because nothing is selected."""
    return KernelRecord.read(folder / KERNELS).choice


def use_caches(folder: Path) -> None:
    """Makes the runs that are started later keep the caches of the compilers in this folder."""
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")


def measure(folder: Path, rehearse: bool) -> Iterator[dict[str, object]]:
    """Yields a row for each kind of start and each model. The most important kind of start comes first, because the time limit
    can stop the measurement."""
    models = ("mamba2-130m",) if rehearse else ("mamba2-130m", "mamba-130m")
    for compare in (compare_cold_starts, compare_warm_start, compare_killed_run):
        for model in models:
            settings = TINY if rehearse else SIZE | {"model_name": model}
            yield {"model": model} | compare(folder / model, settings)


def compare_cold_starts(folder: Path, settings: dict) -> dict[str, object]:
    """Compares two runs with separate, empty caches: they have to compile the kernels and to select the backends."""
    seconds = []
    stalls = []
    for name in ("first", "second"):
        use_caches(folder / name)
        run = folder / name / "run"
        seconds.append(train(run, settings))
        stalls += [entry["checkpoint_stall_seconds"] for entry in read_entries(run / METRICS)]
    row = compared(folder, "first/run") | {"start": "cold, twice"}
    row["first step"] = ", ".join(f"{taken:.1f} s" for taken in seconds)
    return row | {"longest stall by a save": f"{max(stalls):.3f} s"}


def compare_warm_start(folder: Path, settings: dict) -> dict[str, object]:
    """Compares a run with the caches and the selected backends of the second run of `compare_cold_starts`."""
    use_caches(folder / "second")
    seconds = train(folder / "second/warm", settings)
    return compared(folder, "second/warm") | {"start": "warm", "first step": f"{seconds:.1f} s"}


def compare_killed_run(folder: Path, settings: dict) -> dict[str, object]:
    """Compares a run that is killed after its first checkpoint and resumed."""
    use_caches(folder / "second")
    run = folder / "second/killed"
    train_and_kill(run, settings, lambda: list_committed(run / CHECKPOINTS))
    seconds = train(run, settings)
    row = compared(folder, "second/killed") | {"start": "killed, resumed"}
    return row | {"first step": f"{seconds:.1f} s"}


def compared(folder: Path, name: str) -> dict[str, object]:
    """Compares a run with the second run of `compare_cold_starts`."""
    run = folder / name
    cold = folder / "second/run"
    same_choice = choice_of(run) == choice_of(cold)
    same_bits = bits(run) == bits(cold)
    return {
        "start": "",
        "first step": "",
        "choice": "the same" if same_choice else f"differs: {choice_of(run)}; {choice_of(cold)}",
        "bits": "the same" if same_bits else "differ",
    }


def trace(out: Path, folder: Path, rehearse: bool) -> Iterator[dict[str, object]]:
    """Writes a compressed Chrome trace of steps 5 to 7 of each model to `out`; torch prints its table to the log. Yields the
    rate of steps 51 to 200, in which the GPU is warm."""
    for model in PRESETS:
        run = folder / model
        metrics = run / METRICS
        settings = TINY if rehearse else SIZE | {"seq_length": 2048, "model_name": model}
        settings |= {"use_profiler": "true", "deterministic": "false", "num_steps": 1000}
        settings |= {"report_interval": 2 if rehearse else 50, "checkpoint_interval": 1000}
        with Sensors() as sensors:
            train_and_kill(run, settings, lambda path=metrics: len(read_entries(path)) == REPORTS)
        warm = read_entries(metrics)[1:REPORTS]
        rate = statistics.harmonic_mean(entry["tokens_per_second"] for entry in warm)
        seconds = (warm[-1]["tokens"] - read_entries(metrics)[0]["tokens"]) / rate
        row = {"model": model, "tokens/s": f"{rate:,.0f}", "sensors": sensors.medians(seconds)}
        row["MFU"] = f"{warm[-1].get('mfu', 0.0):.1%}"
        trace = out / f"{model}.json.gz"
        with open(run / PROFILE / "rank_0.json", "rb") as plain:
            with gzip.open(trace, "wb") as packed:
                shutil.copyfileobj(plain, packed)
        yield row | {"kernels": str(choice_of(run)), "trace": trace.name}
