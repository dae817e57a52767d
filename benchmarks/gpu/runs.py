"""Measures what only whole runs of training.py show: equal bits in equal runs and in one that is killed and resumes,
how long a start takes, how long saves hold up the steps, and where a step's time goes."""

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mamba_fsdp.run.layout import committed, rank_file
from mamba_fsdp.run.names import CHECKPOINTS, KERNELS, METRICS, PROFILE
from mamba_fsdp.run.records import read

PROJECT = Path(__file__).resolve().parents[2]
USUAL = {
    "use_dummy_dataset": "true",
    "report_interval": 1,
    "eval_interval": 0,
    "publish": "false",
    "num_workers": 0,
    "num_steps": 12,
    "checkpoint_interval": 4,
    "deterministic": "true",  # the libraries' kernels add with atomics
}
SIZE = {"seq_length": 1024, "batch_size": 8, "global_batch_size": 0}
TINY = {"d_model": 16, "n_layer": 1, "vocab_size": 64, "d_state": 4, "seq_length": 16}


def start(words: list[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "training.py", *words], cwd=PROJECT)


def words_of(folder: Path, settings: dict) -> list[str]:
    given = USUAL | settings | {"save_ckpt_path": folder}
    return [f"--{name}={value}" for name, value in given.items()]


def train(folder: Path, settings: dict) -> float:
    """Returns the seconds until the first step was reported."""
    began = time.perf_counter()
    process = start(words_of(folder, settings))
    seconds = 0.0
    while process.poll() is None:
        if not seconds and (folder / METRICS).exists() and (folder / METRICS).stat().st_size:
            seconds = time.perf_counter() - began
        time.sleep(0.005)
    if process.returncode:
        raise RuntimeError(f"training.py failed in {folder}")
    return seconds


def train_and_kill(folder: Path, settings: dict) -> None:
    """Ends the run by SIGKILL as soon as a checkpoint is committed."""
    process = start(words_of(folder, settings))
    while process.poll() is None and not committed(folder / CHECKPOINTS):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def bits(folder: Path) -> tuple[list, str]:
    """Returns (loss and gradient norm of each step, digest of the last checkpoint)."""
    steps = [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in read(folder / METRICS)]
    last = committed(folder / CHECKPOINTS)[-1]
    return steps, hashlib.sha256((last / rank_file(0)).read_bytes()).hexdigest()


def chosen(folder: Path) -> dict[str, str]:
    """Returns the backends that a run has chosen on a GPU; {} on a CPU, on which nothing is tried."""
    try:
        return json.loads((folder / KERNELS).read_text())["backends"]
    except FileNotFoundError:
        return {}


def measure(folder: Path, rehearse: bool) -> Iterator[dict[str, object]]:
    """Yields a row per model and kind of start. The most valuable rows come first in both models, since time may run
    out before the end."""
    models = ("mamba2-130m",) if rehearse else ("mamba2-130m", "mamba-130m")
    for compare in (compare_cold_starts, compare_warm_start, compare_killed_run):
        for model in models:
            settings = TINY if rehearse else SIZE | {"model_name": model}
            yield {"model": model} | compare(folder / model, settings)


def compare_cold_starts(folder: Path, settings: dict) -> dict[str, object]:
    """Compares two runs that find no compiled kernels and no choice of backends: each has caches of its own."""
    runs = []
    seconds = []
    for name in ("first", "second"):
        os.environ["TRITON_CACHE_DIR"] = str(folder / name / "triton")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / name / "inductor")
        runs.append(folder / name / "run")
        seconds.append(train(runs[-1], settings))
    first, second = map(chosen, runs)
    stalls = [entry["checkpoint_stall_seconds"] for run in runs for entry in read(run / METRICS)]
    return {
        "start": "cold, twice",
        "first step": ", ".join(f"{taken:.1f} s" for taken in seconds),
        "choice": "the same" if first == second else f"differs: {first}, {second}",
        "bits": "the same" if bits(runs[0]) == bits(runs[1]) else "differ",
        "longest stall by a save": f"{max(stalls):.3f} s",
    }


def compare_warm_start(folder: Path, settings: dict) -> dict[str, object]:
    """Compares a run that uses the caches and the choice that the second run of `compare_cold_starts` left."""
    return compare_with_second(folder, "warm", settings)


def compare_killed_run(folder: Path, settings: dict) -> dict[str, object]:
    train_and_kill(folder / "second/killed, resumed", settings)
    return compare_with_second(folder, "killed, resumed", settings)


def compare_with_second(folder: Path, start: str, settings: dict) -> dict[str, object]:
    """Trains in a folder next to that of the second cold run and compares the two."""
    for name, cache in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        os.environ[name] = str(folder / "second" / cache)
    cold = folder / "second/run"
    run = folder / "second" / start
    seconds = train(run, settings)
    return {
        "start": start,
        "first step": f"{seconds:.1f} s",
        "choice": "the same" if chosen(run) == chosen(cold) else "differs",
        "bits": "the same" if bits(run) == bits(cold) else "differ",
    }


def trace(out: Path, folder: Path, rehearse: bool) -> Iterator[dict[str, object]]:
    """Writes a Chrome trace of steps 5 to 7 of each model to `out`, packed; the log has torch's table."""
    for model in ("mamba-1.4b", "mamba2-1.3b"):
        settings = TINY if rehearse else SIZE | {"seq_length": 2048, "model_name": model}
        settings = settings | {"use_profiler": "true", "num_steps": 8, "checkpoint_interval": 1000}
        settings["deterministic"] = "false"
        train(folder / model, settings)
        trace = out / f"{model}.json.gz"
        with open(folder / model / PROFILE / "rank_0.json", "rb") as plain:
            with gzip.open(trace, "wb") as packed:
                shutil.copyfileobj(plain, packed)
        yield {"model": model, "trace": trace.name}
        if rehearse:
            return
