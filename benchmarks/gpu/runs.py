"""What only whole runs of training.py show: equal bits in equal runs and in one that is killed and resumes, how long a start
takes, how long saves hold the steps up, and where a step's time goes."""

import gzip
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mamba_fsdp.report.records import read
from mamba_fsdp.run_layout import CHECKPOINTS, METRICS, PROFILE, committed, rank_file

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


def measure(folder: Path, rehearse: bool) -> Iterator[dict[str, object]]:
    """The first run finds no compiled kernels and no choice of backends, the second has both."""
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    for model in ("mamba-130m",) if rehearse else ("mamba-130m", "mamba2-130m"):
        settings = TINY if rehearse else SIZE | {"model_name": model}
        folders = [folder / model / name for name in ("first", "second", "killed")]
        cold = train(folders[0], settings)
        warm = train(folders[1], settings)
        train_and_kill(folders[2], settings)
        train(folders[2], settings)
        first, second, resumed = map(bits, folders)
        stalls = [entry["checkpoint_stall_seconds"] for entry in read(folders[0] / METRICS)]
        yield {
            "model": model,
            "equal runs": "same bits" if first == second else "differ",
            "killed, resumed": "same bits" if first == resumed else "differ",
            "first step, cold": f"{cold:.1f} s",
            "warm": f"{warm:.1f} s",
            "stalls by saves": f"{max(stalls):.3f} s",
        }


def trace(out: Path, folder: Path, rehearse: bool) -> Iterator[dict[str, object]]:
    """Leaves a Chrome trace of steps 5 to 7 of each model in `out`, packed; the log has torch's table."""
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
