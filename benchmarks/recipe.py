"""Compares training recipes: `python -m benchmarks.recipe`.

Trains the same small models on the built-in corpus, with the same number of tokens and several seeds, by each recipe in
turn. Prints the validation loss with its spread over the seeds, the tokens at which a recipe reached the first
recipe's final loss, as a fraction of the run, and the time of a step relative to the first recipe's.

The losses are computed on the validation windows that the demo does not read, so that this study does not select the
demo's own figure. A full table takes hours. The same command resumes it. --only, --layers, --widths, --seeds and --steps
select a part of the table. Two parts can run at the same time if each uses one thread (OMP_NUM_THREADS=1). data/builtin
must exist: ./1.train.sbatch creates it.
"""

import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import command_line, table
from mamba_fsdp.data.store import StoreWriter, TokenStore
from mamba_fsdp.run.names import METRICS
from mamba_fsdp.run.records import read_entries
from mamba_fsdp.settings.resolve import resolve_settings

OUT = Path("runs/recipe")
VALIDATION = OUT / "validation"
LAYERS = {"mamba1": "mamba1", "mamba2": "mamba2", "hybrid": "3*mamba2,attention"}
ADAMW = "optimizer=adamw"
MUON = "optimizer=muon muon_coefficients=minimax muon_momentum=0.9"
RECIPES = {  # {name: settings}; the first one is the reference
    "AdamW 1e-2": f"{ADAMW} beta2=0.99 learning_rate=1e-2",
    "AdamW 3e-3, beta2 0.95": f"{ADAMW} beta2=0.95 learning_rate=3e-3",
    "AdamW 2.5e-3": f"{ADAMW} beta2=0.99 learning_rate=2.5e-3",
    "AdamW 5e-3": f"{ADAMW} beta2=0.99 learning_rate=5e-3",
    "AdamW 2e-2": f"{ADAMW} beta2=0.99 learning_rate=2e-2",
    "Muon 1e-2": f"{MUON} beta2=0.99 learning_rate=1e-2",
    "Muon 2e-2": f"{MUON} beta2=0.99 learning_rate=2e-2",
    "Muon 4e-2": f"{MUON} beta2=0.99 learning_rate=4e-2",
    "Muon 2e-2, beta2 0.95": f"{MUON} beta2=0.95 learning_rate=2e-2",
    "Muon 2e-2, momentum 0.95": f"{MUON} muon_momentum=0.95 beta2=0.99 learning_rate=2e-2",
    "Muon 2e-2, jordan": f"{MUON} muon_coefficients=jordan beta2=0.99 learning_rate=2e-2",
    "Muon 2e-2, linear to 0": f"{MUON} beta2=0.99 learning_rate=2e-2 schedule=linear min_learning_rate_ratio=0",
}


def make_validation() -> None:
    """Creates a store with the part of the validation data that the demo does not read, unless the store exists."""
    if VALIDATION.exists():
        return
    config = resolve_settings({}, "config/demo.yaml")
    training = config.training
    of_demo = training.eval_batches * training.batch_size * config.data.seq_length
    store = TokenStore(f"{config.data.dataset_path}/validation")
    rest = store.read(of_demo + 1, store.token_count - of_demo - 1).tokens
    unfinished = VALIDATION.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    writer = StoreWriter(unfinished, store.vocab_size, store.eos, store.tokenizer, whole=False)
    writer.append(rest)
    writer.finish()
    shutil.copytree(store.tokenizer_path, unfinished / "tokenizer")
    unfinished.rename(VALIDATION)


def train(name: str, model: Mapping[str, object], steps: int) -> list[dict[str, Any]]:
    """Trains a model, unless an earlier call has finished this training. Returns the entries of the run's metrics.jsonl."""
    settings = {"recipe": "published"}
    settings |= dict(setting.split("=") for setting in RECIPES[name].split())
    settings |= {setting: str(value) for setting, value in model.items()}
    folder = OUT / "-".join([*settings.values(), str(steps)]).replace("*", "x")
    common = {
        "validation_path": VALIDATION,
        "save_ckpt_path": folder,
        "num_steps": steps,
        "eval_interval": max(1, steps // 20),
        "keep_checkpoints": 1,
        "publish": "false",
    }
    options = [f"--{setting}={value}" for setting, value in {**settings, **common}.items()]
    entries = read_entries(folder / METRICS) if folder.exists() else []
    if not any("val_loss" in entry and entry["step"] == steps for entry in entries):
        command = [sys.executable, "training.py", *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        entries = read_entries(folder / METRICS)
    return entries


def losses(entries: list[dict[str, Any]]) -> dict[int, float]:
    """Returns {step: validation loss}."""
    return {entry["step"]: entry["val_loss"] for entry in entries if "val_loss" in entry}


def first_step_below(found: Mapping[int, float], wanted: float) -> float:
    """Returns the step at which the losses fall to `wanted`, interpolated between validations. Returns the last step if they
    never do. found: {step: loss}, in the order of steps."""
    before = 0
    for step, loss in found.items():
        if loss <= wanted and step:
            share = (found[before] - wanted) / (found[before] - loss)
            return before + share * (step - before)
        before = step
    return before


def step_seconds(entries: list[dict[str, Any]]) -> float:
    """Returns the median time per token, which is proportional to the time of a step."""
    speeds = [entry["tokens_per_second"] for entry in entries if "tokens_per_second" in entry]
    return 1 / statistics.median(speeds)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--widths", default="64,128,256")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", default="", help="names of recipes, separated by ;")
    args = parser.parse_args()
    if not Path("data/builtin").exists():
        parser.error("data/builtin does not exist; ./1.train.sbatch creates it")
    make_validation()
    reference, *others = RECIPES
    names = [reference, *(args.only.split(";") if args.only else others)]
    for layers in args.layers.split(","):
        for width in args.widths.split(","):
            found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
            for seed in args.seeds.split(","):
                model = {"layers": LAYERS[layers], "d_model": width, "seed": seed}
                for name in names:
                    found[name].append(train(name, model, args.steps))
            print(f"\n{layers}, d_model {width}\n")
            print(table(rows(found, args.steps)), flush=True)
    return 0


def rows(found: Mapping[str, list[list[dict[str, Any]]]], steps: int) -> list[dict[str, object]]:
    """Returns the rows of a table. found: {recipe: the metrics of each seed}; the first recipe is the reference."""
    reference = next(iter(found.values()))
    wanted = [losses(entries)[steps] for entries in reference]
    result = []
    for name, runs in found.items():
        final = [losses(entries)[steps] for entries in runs]
        shares = [
            first_step_below(losses(entries), loss) / steps for entries, loss in zip(runs, wanted)
        ]
        ratios = [step_seconds(a) / step_seconds(b) for a, b in zip(runs, reference)]
        result.append(
            {
                "recipe": name,
                "loss": f"{statistics.mean(final):.4f}",
                "spread": f"{max(final) - min(final):.4f}",
                "tokens": f"{statistics.mean(shares):.2f}",
                "step": f"{statistics.median(ratios):.2f}",
            }
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
