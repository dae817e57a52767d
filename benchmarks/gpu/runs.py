"""What only whole runs of training.py show: equal bits in equal runs, and in one that is killed and resumes."""

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mamba_fsdp.report.records import read
from mamba_fsdp.run_layout import CHECKPOINTS, METRICS, committed, rank_file

PROJECT = Path(__file__).resolve().parents[2]
USUAL = {
    "use_dummy_dataset": "true",
    "report_interval": 1,
    "eval_interval": 0,
    "publish": "false",
    "num_workers": 0,
    "num_steps": 12,
    "checkpoint_interval": 4,
}
SIZE = {"seq_length": 1024, "batch_size": 8}
TINY = {"d_model": 16, "n_layer": 1, "vocab_size": 64, "d_state": 4, "seq_length": 16}


def start(folder: Path, settings: dict) -> subprocess.Popen:
    words = [f"--{name}={value}" for name, value in (USUAL | settings).items()]
    return subprocess.Popen(
        [sys.executable, "training.py", *words, f"--save_ckpt_path={folder}"], cwd=PROJECT
    )


def train(folder: Path, settings: dict) -> None:
    if start(folder, settings).wait():
        raise RuntimeError(f"training.py failed in {folder}")


def train_and_kill(folder: Path, settings: dict) -> None:
    """Ends the run by SIGKILL as soon as a checkpoint is committed."""
    process = start(folder, settings)
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
    for model in ("mamba-130m", "mamba2-130m"):
        settings = TINY if rehearse else SIZE | {"model_name": model}
        folders = [folder / f"{model}-{name}" for name in ("first", "second", "killed")]
        train(folders[0], settings)
        train(folders[1], settings)
        train_and_kill(folders[2], settings)
        train(folders[2], settings)
        first, second, resumed = map(bits, folders)
        yield {
            "model": model,
            "equal runs": "same bits" if first == second else "differ",
            "killed, resumed": "same bits" if first == resumed else "differ",
        }
