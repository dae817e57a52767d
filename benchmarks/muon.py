"""Compares Muon with AdamW on the demo, at equal steps and at equal time: `python -m benchmarks.muon [--steps 1000]
[--seeds 3]`.

Each takes the best of the learning rates for the first seed. The time of a step is taken in turn; within AdamW's time
Muon has so many fewer steps, with a schedule of that length. Validation is on the demo's batches, in nats per token.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.measure import steps_in_turn, table, times_as_fast
from benchmarks.scan import our_step
from mamba_fsdp.run.names import METRICS
from mamba_fsdp.run.records import read
from mamba_fsdp.settings import resolve

DEMO = "config/demo.yaml"
OPTIMIZERS = ("adamw", "muon")
RATES = (3e-3, 6e-3, 1.2e-2)
FIRST_SEED = 2023
ROUNDS = 15


def cost_of_a_step(rounds: int) -> float:
    """Returns how many times as long as a step of AdamW one of Muon takes."""
    makers = {}
    for name in OPTIMIZERS:
        settings = resolve.resolve_settings({"optimizer": name}, DEMO)
        makers[name] = partial(our_step, settings)
    taken = steps_in_turn(makers, rounds)
    seconds = {name: [step.seconds for step in steps] for name, steps in taken.items()}
    return times_as_fast(seconds["adamw"], seconds["muon"])


def train(optimizer: str, rate: float, seed: int, steps: int) -> float:
    """Returns the validation loss at the end of a run."""
    given = {
        "config": DEMO,
        "optimizer": optimizer,
        "learning_rate": rate,
        "seed": seed,
        "num_steps": steps,
        "warmup_steps": -1,
        "eval_interval": steps,
        "checkpoint_interval": steps,
        "publish": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{name}={value}" for name, value in given.items()]
        command = [sys.executable, "training.py", *words, f"--save_ckpt_path={folder}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        entries = read(Path(folder, "run", METRICS))
    return [entry["val_loss"] for entry in entries if "val_loss" in entry][-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    cost = cost_of_a_step(ROUNDS)
    fewer = round(given.steps / cost)
    print(f"a step of muon takes {cost:.2f} times as long", flush=True)
    seeds = range(FIRST_SEED, FIRST_SEED + given.seeds)
    trials = []
    best = {}
    for name in OPTIMIZERS:
        losses = {rate: train(name, rate, FIRST_SEED, given.steps) for rate in RATES}
        best[name] = min(losses, key=losses.__getitem__)
        texts = {f"rate {rate:g}": f"{loss:.4f}" for rate, loss in losses.items()}
        trials.append({"optimizer": name} | texts)
    print(table(trials), flush=True)
    rows = []
    for name, steps in (("adamw", given.steps), ("muon", given.steps), ("muon", fewer)):
        losses = [train(name, best[name], seed, steps) for seed in seeds]
        row = {"optimizer": name, "steps": steps, "mean": f"{statistics.mean(losses):.4f}"}
        row["seeds"] = ", ".join(f"{loss:.4f}" for loss in losses)
        rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
