"""How the threads of a step on the CPU wait for each other: `python -m benchmarks.threads [--rounds 3] [--busy 0]`.

training.py trains small models on made-up tokens, once for each way to wait, in turn, and the medians of its tokens/s
are compared with those of what mamba_fsdp sets by itself. --busy is the number of processes that compute meanwhile.
--checkout=FOLDER adds another commit's training.py, with what that sets.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from mamba_fsdp.report.records import read

PROJECT = Path(__file__).resolve().parents[1]
WAYS = {  # libgomp's names; mamba_fsdp sets nothing where one of them is set
    "as mamba_fsdp sets": {},
    "not at all (PASSIVE)": {"OMP_WAIT_POLICY": "PASSIVE"},
    "30,000 spins": {"GOMP_SPINCOUNT": "30000"},
    "100,000 spins": {"GOMP_SPINCOUNT": "100000"},
    "300,000 spins (libgomp's own)": {"GOMP_SPINCOUNT": "300000"},
    "spinning (ACTIVE)": {"OMP_WAIT_POLICY": "ACTIVE"},
}
MODELS = {
    "demo": "--config=demo",
    "4 layers of Mamba-2": "--layers=mamba2 --d_model=256 --n_layer=4 --seq_length=256 --batch_size=4",
}
STEPS, WARM_UP = 40, 10
BUSY = "x = 1.0\nwhile True: x *= 1.0000001"


def tokens_per_second(checkout: Path, model: str, way: dict[str, str]) -> float:
    """The median over the steps of a run of that checkout's training.py."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    }
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *model.split(),
            "--use_dummy_dataset=true",
            f"--num_steps={STEPS}",
            "--report_interval=1",
        ]
        words += [
            "--eval_interval=0",
            f"--checkpoint_interval={2 * STEPS}",
            f"--save_ckpt_path={folder}/run",
        ]
        subprocess.run(
            [sys.executable, "training.py", *words],
            cwd=checkout,
            env=environment | way,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        entries = read(Path(folder) / "run" / "metrics.jsonl")
    speeds = [entry["tokens_per_second"] for entry in entries if "tokens_per_second" in entry]
    return statistics.median(speeds[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--checkout", type=Path, action="append", default=[])
    arguments = parser.parse_args()
    variants = {name: (PROJECT, way) for name, way in WAYS.items()}
    for checkout in arguments.checkout:
        variants[str(checkout)] = (checkout, {})
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.busy} busy processes"
    )
    with ExitStack() as stack:
        for _ in range(arguments.busy):
            busy = subprocess.Popen([sys.executable, "-c", BUSY])
            stack.callback(busy.kill)
        for model, settings in MODELS.items():
            speeds = {name: [] for name in variants}
            for _ in range(arguments.rounds):
                for name, (checkout, way) in variants.items():
                    speeds[name].append(tokens_per_second(checkout, settings, way))
            print(f"\n{model:<32}{'tokens/s':>10}{'ratio':>8}")
            ours = next(iter(speeds.values()))
            for name, measured in speeds.items():
                ratio = statistics.median(mine / own for mine, own in zip(measured, ours))
                print(f"{name:<32}{statistics.median(measured):>10,.0f}{ratio:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
