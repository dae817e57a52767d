"""Implements `plan --hours`: proposes three sizes of a model that can be trained in a given time on given data, with
the commands that train them. docs/planning.md explains the scaling laws behind the choice."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.model.presets import PRESETS
from mamba_fsdp.planning.devices import Instance
from mamba_fsdp.planning.estimate import Estimate, best_estimate, estimate
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.settings.train_config import VALIDATION_SHARE, TrainConfig
from mamba_fsdp.storage.retry import exists
from mamba_fsdp.text import format_quantity

# The rules of `plan --hours`; docs/planning.md explains them.
TOKENS_PER_PARAMETER = 20  # compute-optimal: Hoffmann et al. 2022 (arXiv 2203.15556)
# Up to this number of passes, repeated data is nearly as good as new data: Muennighoff et al. 2023 (arXiv
# 2305.16264).
MAX_USEFUL_PASSES = 4
WIDTH_STEP = 64
WIDTH_PER_LAYER = 32  # examples: 4 layers of width 128, 24 of 768, 48 of 1536
RECIPE_PRESETS = ("mamba-130m", "mamba-370m", "mamba-790m", "mamba-1.4b", "mamba-2.8b")
NAMES = ("smaller", "middle", "larger")
HEADER = "         layers x width parameters  tokens/s   tokens  passes tok/param   memory"
LAUNCHER = "1.train.sbatch"


@dataclass(frozen=True)
class Budget:
    """The time, the machines and the data that are available for training."""

    hours: float
    nodes: int
    instance: str  # name of the cloud machine; "" for other machines
    machine: Instance
    is_local: bool  # whether `machine` is this machine, so that steps can be timed
    data_tokens: int
    data_exists: bool  # whether the token store exists already

    @property
    def devices(self) -> int:
        return self.nodes * self.machine.devices

    @property
    def is_timed(self) -> bool:
        """Returns whether steps must be timed, because the speed of the machine is unknown."""
        return not self.machine.tflops()


@dataclass(frozen=True)
class Size:
    """A size of the model, and how much it can be trained in the given time. `plan --hours --json` prints these
    fields."""

    settings: dict[str, str]  # settings of the training run
    command: str
    tokens: int  # tokens that the run trains on in the given time
    passes: float  # epochs over the data
    tokens_per_parameter: float
    expected: Estimate


def plan_sizes(
    arguments: dict[str, str],
    config: str | None,
    budget: Budget,
    measure_pace: Callable[[TrainConfig], float],
) -> dict[str, Size]:
    """Returns three sizes of a model for the budget, by their NAMES.

    arguments, config: the command line and the file with all other settings. measure_pace: trains for a short time on
    this machine, and returns the tokens per second. Raises UserError if the speed of the machine is unknown and can't
    be measured."""
    machine = budget.machine
    if budget.is_timed and not (budget.is_local and budget.devices == 1):
        raise UserError(
            "--hours can time one device of this machine; describe other machines with --instance=NAME, or with --memory, "
            "--peak and --bandwidth"
        )
    is_cpu = machine.device == "cpu"
    uses_recipe = not (is_cpu or config or "model_name" in arguments)
    console = Console()

    def size_of(width: int) -> Size:
        console.show_progress(f"a model {width} wide ...")
        chosen = {**arguments, "d_model": str(width), "n_layer": str(width // WIDTH_PER_LAYER)}
        if uses_recipe:
            narrower = [name for name in RECIPE_PRESETS if PRESETS[name]["d_model"] <= width]
            chosen["model_name"] = [RECIPE_PRESETS[0], *narrower][-1]
        settings = resolve_settings(chosen, config)
        expected = estimate(settings, budget.nodes, machine)
        if not is_cpu and "batch_size" not in settings.explicit:
            expected = best_estimate(settings, budget.nodes, machine) or expected
            chosen["batch_size"] = str(expected.batch_size)
            if expected.recompute != "0":
                chosen["fsdp_activation_checkpointing"] = "true"
                chosen["selective_checkpointing"] = expected.recompute
        if budget.is_timed and expected.fits:
            settings = resolve_settings(chosen, config)
            settings = settings.with_values(use_dummy_dataset=not budget.data_exists)
            expected = replace(expected, tokens_per_second=measure_pace(settings))
        seconds = 3600 * budget.hours / (1 + VALIDATION_SHARE)
        tokens = int(seconds * expected.tokens_per_second)
        chosen["num_steps"] = format_quantity(tokens, "tok").replace(" ", "")
        chosen["save_ckpt_path"] = f"runs/{Path(settings.data.dataset_path).name}-{width}"
        return Size(
            settings=chosen,
            command=command(chosen, config, budget),
            tokens=tokens,
            passes=tokens / budget.data_tokens,
            tokens_per_parameter=tokens / expected.parameters,
            expected=expected,
        )

    return choose_sizes(size_of)


def report_sizes(sizes: dict[str, Size], budget: Budget) -> Iterator[str]:
    """Yields the report about the sizes, for a terminal with 80 columns."""
    machine = budget.machine
    how = "timed" if budget.is_timed else "calculated"
    yield f"data       {budget.data_tokens:,} tokens"
    yield f"machines   {budget.devices} x {machine.device} of {machine.memory:.1f} GB, {how}"
    yield f"time       {budget.hours:g} hours, a twentieth of them for validation\n\n{HEADER}"
    for name, size in sizes.items():
        yield format_size(name, size)
    yield format_advice(sizes["smaller"], sizes["middle"])
    for name, size in sizes.items():
        yield f"\n{name}:\n{size.command}"


def choose_sizes(size_of: Callable[[int], Size]) -> dict[str, Size]:
    """Chooses three sizes, and returns them by their NAMES. size_of: returns the Size of a model with a given width.

    Each size is about a quarter wider than the previous one, in multiples of WIDTH_STEP. Of the sizes that fit, the
    middle one has the number of tokens per parameter that is nearest to TOKENS_PER_PARAMETER, as a ratio. The larger
    size might not fit."""
    sizes: list[Size] = []
    width = WIDTH_STEP
    while len(sizes) < len(NAMES) or (
        sizes[-1].expected.fits
        and sizes[-2].tokens_per_parameter * sizes[-1].tokens_per_parameter
        > TOKENS_PER_PARAMETER**2
    ):
        sizes.append(size_of(width))
        width += WIDTH_STEP * max(1, width // (4 * WIDTH_STEP))
    return dict(zip(NAMES, sizes[-len(NAMES) :]))


def command(arguments: dict[str, str], config: str | None, budget: Budget) -> str:
    """Returns the shell command that trains with these settings."""
    start = ["mamba-fsdp", "train"]  # the command of an installed package
    if budget.instance or budget.nodes > 1:
        start = ["sbatch", f"--nodes={budget.nodes}", LAUNCHER]
    elif exists(LAUNCHER):
        start = [f"./{LAUNCHER}"]
    if config:
        start.append(f"--config={config}")
    return shlex.join([*start, *(f"--{name}={text}" for name, text in arguments.items())])


def format_size(name: str, size: Size) -> str:
    shape = f"{size.settings['n_layer']} x {size.settings['d_model']}"
    expected = size.expected
    warning = "" if expected.fits else " does NOT fit"
    return (
        f"{name:<8}{shape:>15}{format_quantity(expected.parameters, ''):>11}{format_quantity(expected.tokens_per_second, ''):>10}"
        f"{format_quantity(size.tokens, ''):>9}{size.passes:>8,.1f}{size.tokens_per_parameter:>10,.1f}"
        f"{format_quantity(expected.bytes, 'B'):>9}{warning}"
    )


def format_advice(smaller: Size, middle: Size) -> str:
    """Returns advice about the sizes, according to the scaling laws."""
    lines = f"\nAbout {TOKENS_PER_PARAMETER} tokens per parameter (tok/param) are compute-optimal."
    if smaller.tokens_per_parameter < TOKENS_PER_PARAMETER:
        lines += "\nThe time is too short: even the smaller size gets fewer."
    if middle.passes > MAX_USEFUL_PASSES:
        enough = format_quantity(middle.tokens / MAX_USEFUL_PASSES, "tokens")
        lines += (
            f"\nThe data is too small for this time: {MAX_USEFUL_PASSES} passes teach nearly as much as new data,\n"
            f"passes after the 16th very little. The middle size needs {enough} or more."
        )
    return lines
