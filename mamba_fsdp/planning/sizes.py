"""Plans, for `plan --hours`, three sizes of a model that can be trained in a given time on given data, and the commands
that train them. docs/planning.md names the laws that decide."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.model.presets import PRESETS
from mamba_fsdp.planning.devices import Instance
from mamba_fsdp.planning.estimate import Estimate, best, estimate
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.settings.train_config import VALIDATION_SHARE, TrainConfig
from mamba_fsdp.storage.patience import exists
from mamba_fsdp.text import format_quantity

# The rules of `plan --hours`; docs/planning.md explains them.
TOKENS_PER_PARAMETER = 20  # compute-optimal: Hoffmann et al. 2022 (arXiv 2203.15556)
PASSES_AS_NEW = 4  # teach nearly as much as new data: Muennighoff et al. 2023 (arXiv 2305.16264)
WIDTH_STEP = 64
WIDTH_PER_LAYER = 32  # as in 4 layers of 128 (demo), 24 of 768 (mamba-130m), 48 of 1536
WITH_RECIPES = ("mamba-130m", "mamba-370m", "mamba-790m", "mamba-1.4b", "mamba-2.8b")
NAMES = ("smaller", "middle", "larger")
HEADER = "         layers x width parameters  tokens/s   tokens  passes tok/param   memory"
LAUNCHER = "1.train.sbatch"


@dataclass(frozen=True)
class Budget:
    """The time, machines and data that there are to train with."""

    hours: float
    nodes: int
    instance: str  # its name; "" for machines without one
    machine: Instance
    is_here: bool  # whether it is this machine: its steps can be timed
    data_tokens: int
    is_made: bool  # whether the data is there already

    @property
    def devices(self) -> int:
        return self.nodes * self.machine.devices

    @property
    def is_timed(self) -> bool:
        """Returns whether the machine's speed is unknown, so that steps are timed."""
        return not self.machine.tflops()


@dataclass(frozen=True)
class Size:
    """A size of the model and what the time allows for it, as `plan --hours --json` prints it."""

    settings: dict[str, str]  # to train it with
    command: str
    tokens: int  # in the time
    passes: float  # over the data
    tokens_per_parameter: float
    expected: Estimate


def plan_sizes(
    words: dict[str, str],
    config: str | None,
    budget: Budget,
    measure_pace: Callable[[TrainConfig], float],
) -> dict[str, Size]:
    """Returns three sizes of a model, by their NAMES, for the time there is. words, config: the settings besides the
    ones chosen here. measure_pace: trains for a moment on this machine, and returns the tokens a second. Raises
    UserError if there is no speed to know."""
    machine = budget.machine
    if budget.is_timed and not (budget.is_here and budget.devices == 1):
        raise UserError(
            "--hours can time one device of this machine; describe others by --instance=NAME, or by --memory, --peak and "
            "--bandwidth"
        )
    is_cpu = machine.device == "cpu"
    takes_recipe = not (is_cpu or config or "model_name" in words)
    console = Console()

    def size_of(width: int) -> Size:
        console.passing(f"a model {width} wide ...")
        chosen = {**words, "d_model": str(width), "n_layer": str(width // WIDTH_PER_LAYER)}
        if takes_recipe:
            narrower = [name for name in WITH_RECIPES if PRESETS[name]["d_model"] <= width]
            chosen["model_name"] = [WITH_RECIPES[0], *narrower][-1]
        settings = resolve_settings(chosen, config)
        expected = estimate(settings, budget.nodes, machine)
        if not is_cpu and "batch_size" not in settings.explicit:
            expected = best(settings, budget.nodes, machine) or expected
            chosen["batch_size"] = str(expected.batch_size)
            if expected.recompute != "0":
                chosen["fsdp_activation_checkpointing"] = "true"
                chosen["selective_checkpointing"] = expected.recompute
        if budget.is_timed and expected.fits:
            settings = resolve_settings(chosen, config)
            settings = settings.changed(use_dummy_dataset=not budget.is_made)
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

    return three_sizes(size_of)


def report_sizes(sizes: dict[str, Size], budget: Budget) -> Iterator[str]:
    """Yields the report of plan_sizes for a terminal of 80 columns."""
    machine = budget.machine
    how = "timed" if budget.is_timed else "calculated"
    yield f"data       {budget.data_tokens:,} tokens"
    yield f"machines   {budget.devices} x {machine.device} of {machine.memory:.1f} GB, {how}"
    yield f"time       {budget.hours:g} hours, a twentieth of them for validation\n\n{HEADER}"
    for name, size in sizes.items():
        yield size_line(name, size)
    yield advice(sizes["smaller"], sizes["middle"])
    for name, size in sizes.items():
        yield f"\n{name}:\n{size.command}"


def three_sizes(size_of: Callable[[int], Size]) -> dict[str, Size]:
    """Returns the sizes by their NAMES. size_of: a function of the width.

    Each size is a quarter wider than the one before, by steps of WIDTH_STEP. The middle one is the nearest to
    TOKENS_PER_PARAMETER, as a ratio, of those that fit; the larger one may not fit."""
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


def command(words: dict[str, str], config: str | None, budget: Budget) -> str:
    """Returns the command that trains with these settings."""
    start = ["mamba-fsdp", "train"]  # of an installed package
    if budget.instance or budget.nodes > 1:
        start = ["sbatch", f"--nodes={budget.nodes}", LAUNCHER]
    elif exists(LAUNCHER):
        start = [f"./{LAUNCHER}"]
    if config:
        start.append(f"--config={config}")
    return shlex.join([*start, *(f"--{name}={text}" for name, text in words.items())])


def size_line(name: str, size: Size) -> str:
    shape = f"{size.settings['n_layer']} x {size.settings['d_model']}"
    expected = size.expected
    warning = "" if expected.fits else " does NOT fit"
    return (
        f"{name:<8}{shape:>15}{format_quantity(expected.parameters, ''):>11}{format_quantity(expected.tokens_per_second, ''):>10}"
        f"{format_quantity(size.tokens, ''):>9}{size.passes:>8,.1f}{size.tokens_per_parameter:>10,.1f}"
        f"{format_quantity(expected.bytes, 'B'):>9}{warning}"
    )


def advice(smaller: Size, middle: Size) -> str:
    """Returns what the laws say about these sizes."""
    lines = f"\nCompute-optimal are about {TOKENS_PER_PARAMETER} tokens per parameter (tok/param)."
    if smaller.tokens_per_parameter < TOKENS_PER_PARAMETER:
        lines += "\nThe time is too short: even the smaller size has fewer."
    if middle.passes > PASSES_AS_NEW:
        enough = format_quantity(middle.tokens / PASSES_AS_NEW, "tokens")
        lines += (
            f"\nThe data is too small for this time: {PASSES_AS_NEW} passes teach nearly as much as new data,\n"
            f"those after the 16th little. The middle size wants {enough} or more."
        )
    return lines
