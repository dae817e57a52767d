"""Measures how long a user waits for the help page, and for the first optimiser step: `python -m benchmarks.start`.

data/builtin must be there: ./1.train.sbatch makes it.
"""

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.measure import command_line, in_turn, spread, table
from mamba_fsdp.run.names import METRICS

PROGRAM = [sys.executable, "training.py"]
DEMO = "--config=config/demo.yaml --num_steps=1 --report_interval=1 --eval_interval=0".split()


def seconds_to_help() -> float:
    began = time.perf_counter()
    subprocess.run([*PROGRAM, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def seconds_to_first_step(command: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "run", METRICS)
        words = [*command, *DEMO, f"--save_ckpt_path={folder}/run"]
        began = time.perf_counter()
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        while not (metrics.exists() and metrics.read_text()):
            if process.poll():
                raise SystemExit(f"{command} failed")
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        process.wait()
    return seconds


def main() -> None:
    rounds = command_line(__doc__, rounds=5).parse_args().rounds
    waits = {
        "training.py --help": seconds_to_help,
        "training.py, to its first step": partial(seconds_to_first_step, PROGRAM),
        "1.train.sbatch, to its first step": partial(seconds_to_first_step, ["./1.train.sbatch"]),
    }
    rows = []
    for wait, seconds in in_turn(waits, rounds).items():
        rows.append({"seconds": wait} | spread(seconds))
    print(table(rows))


if __name__ == "__main__":
    main()
