"""What only whole runs of training.py show: equal bits in equal runs and behind a kill, cold and warm starts."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

from mamba_fsdp.report.records import read
from mamba_fsdp.run_layout import CHECKPOINTS, METRICS, STATUS, committed, rank_file

PROJECT = Path(__file__).resolve().parents[2]
USUAL = {
    "use_dummy_dataset": "true",
    "report_interval": 1,
    "eval_interval": 0,
    "publish": "false",
    "num_workers": 0,
}
ON_GPU = {"model_name": "mamba-130m", "seq_length": 1024, "batch_size": 8}
TINY = {
    "d_model": 16,
    "n_layer": 1,
    "vocab_size": 64,
    "d_state": 4,
    "seq_length": 16,
    "batch_size": 1,
}
MODELS = {"mamba1": {}, "mamba2": {"model_name": "mamba2-130m"}}


def command(folder, rehearse, given, launcher=()):
    settings = USUAL | (TINY if rehearse else ON_GPU) | given | {"save_ckpt_path": folder}
    return [
        sys.executable,
        *launcher,
        "training.py",
        *(f"--{name}={value}" for name, value in settings.items()),
    ]


def train(folder, rehearse, given, launcher=()):
    """Seconds; raises with the last line of what it said where it failed."""
    began = time.perf_counter()
    done = subprocess.run(
        command(folder, rehearse, given, launcher), cwd=PROJECT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        )
    return time.perf_counter() - began


def train_and_kill(folder, rehearse, given):
    """Ends the run by SIGKILL as soon as a checkpoint is committed."""
    process = subprocess.Popen(
        command(folder, rehearse, given),
        cwd=PROJECT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not committed(Path(folder) / CHECKPOINTS):
        time.sleep(0.005)
    killed = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return killed


def bits(folder):
    """(loss and gradient norm of each step, digest of the last checkpoint)."""
    steps = [
        (entry["step"], entry["loss"], entry["grad_norm"]) for entry in read(Path(folder) / METRICS)
    ]
    last = committed(Path(folder) / CHECKPOINTS)[-1]
    return steps, hashlib.sha256((last / rank_file(0)).read_bytes()).hexdigest()


def repeat(scratch, rehearse, keep):
    """Two equal runs and one that is killed and resumes, as the settings are and with deterministic=true."""
    rows = []
    models = {"mamba1": {}} if rehearse else MODELS
    for model, given in models.items():
        for extra in ({},) if rehearse else ({}, {"deterministic": "true"}):
            row = {"model": model, "deterministic": extra.get("deterministic", "false")}
            given = given | extra | {"num_steps": 12, "checkpoint_interval": 4}
            try:
                folders = [scratch / f"repeat{index}" for index in range(3)]
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)
                for folder in folders[:2]:
                    train(folder, rehearse, given)
                killed = train_and_kill(folders[2], rehearse, given)
                train(folders[2], rehearse, given)
                first, second, resumed = map(bits, folders)
                row |= {
                    "equal runs": same(first, second),
                    "killed, resumed": same(first, resumed),
                    "note": "" if killed else "was over before it was killed",
                }
            except Exception as failure:
                row["note"] = f"{type(failure).__name__}: {failure}"
            rows.append(row)
            keep(rows)


def same(first, second):
    if first == second:
        return "same bits"
    differing = next((a[0] for a, b in zip(first[0], second[0]) if a != b), "only weights")
    return f"differ from step {differing}"


def starts(scratch, rehearse, keep):
    """Two starts through the launcher: the first compiles, the second finds the kernels."""
    rows = []
    environment = dict(os.environ)
    for name in environment:
        if name.startswith("TRITON_CACHE"):
            del os.environ[name]
    triton = util.find_spec("triton")
    if triton and not Path(triton.origin).with_name("runtime").joinpath("rank0_cache.py").exists():
        # What Triton's own writer wrote is found in the folder where it was written, and nowhere else.
        os.environ |= {
            "TRITON_CACHE_MANAGER": "rank0_cache:Rank0CacheManager",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(PROJECT / "patches"), environment.get("PYTHONPATH")])
            ),
        }
    try:
        for model, given in ({"mamba1": {}} if rehearse else MODELS).items():
            for start in ("cold", "warm"):
                folder = scratch / f"start-{model}-{start}"
                shutil.rmtree(folder, ignore_errors=True)
                given = given | {"num_steps": 3}
                os.environ["TRITON_CACHE_DIR"] = str(scratch / f"kernels-{model}")
                launcher = [
                    "-m",
                    "mamba_fsdp.launch.node",
                    str(folder),
                    "--standalone",
                ]
                row = {"of": model, "start": start}
                try:
                    row["seconds in all"] = f"{train(folder, rehearse, given, launcher):.1f}"
                    parts = json.loads((folder / STATUS).read_text())["start"]
                    row |= {part: f"{seconds:.1f}" for part, seconds in parts.items()}
                except Exception as failure:
                    row["note"] = f"{type(failure).__name__}: {failure}"
                rows.append(row)
                keep(rows)
    finally:
        os.environ.clear()
        os.environ.update(environment)
