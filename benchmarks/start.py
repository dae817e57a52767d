"""Measures how long a user waits for the help page, and for the first optimiser step: `python -m benchmarks.start`."""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mamba_fsdp.run.names import METRICS

RUNS = 5


def seconds_to_help():
    began = time.perf_counter()
    subprocess.run([sys.executable, "training.py", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def seconds_to_first_step(launcher):
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / METRICS
        began = time.perf_counter()
        settings = [
            "--config=config/demo.yaml",
            f"--save_ckpt_path={folder}/run",
            "--num_steps=1",
            "--report_interval=1",
            "--eval_interval=0",
        ]
        process = subprocess.Popen([*launcher, *settings], stdout=subprocess.DEVNULL)
        while not (metrics.exists() and metrics.read_text()):
            if process.poll():
                raise SystemExit("the run failed; is data/builtin there? ./1.train.sbatch makes it")
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        process.wait()
    return seconds


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes no words but --help
    program, launcher = [sys.executable, "training.py"], ["./1.train.sbatch"]
    rows = [
        ("python training.py --help", seconds_to_help, "under 1"),
        (
            "python training.py, to the first step",
            lambda: seconds_to_first_step(program),
            "under 15",
        ),
        (
            "./1.train.sbatch, to the first step",
            lambda: seconds_to_first_step(launcher),
            "under 15",
        ),
    ]
    print(f"{'seconds':<42}{'median':>8}{'min':>8}{'max':>8}   wanted")
    for name, measure, wanted in rows:
        values = [measure() for _ in range(RUNS)]
        print(
            f"{name:<42}{statistics.median(values):>8.2f}{min(values):>8.2f}{max(values):>8.2f}   {wanted}"
        )


if __name__ == "__main__":
    main()
