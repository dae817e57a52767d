"""`plan --hours`: three sizes of a model that can be trained in a given time on given data, and the commands that train
them. docs/planning.md names the laws behind them."""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mamba_fsdp.data.selection import training_sources
from mamba_fsdp.errors import UserError, with_unit
from mamba_fsdp.planning.devices import Instance
from mamba_fsdp.report.console import Console, as_json
from mamba_fsdp.settings.presets import PRESETS, preset
from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.settings.train_config import TrainConfig

if TYPE_CHECKING:
    from mamba_fsdp.planning.estimate import Estimate
    from mamba_fsdp.verbs.plan import PlanConfig

# What `plan --hours` goes by; docs/planning.md explains it.
TOKENS_PER_PARAMETER = 20  # compute-optimal: Hoffmann et al. 2022 (arXiv 2203.15556)
PASSES_AS_NEW = 4  # teach nearly as much as new data: Muennighoff et al. 2023 (arXiv 2305.16264)
WIDTH_STEP = 64
WIDTH_PER_LAYER = 32  # as in 4 layers of 128 (demo), 24 of 768 (mamba-130m), 48 of 1536
WITH_RECIPES = ("mamba-130m", "mamba-370m", "mamba-790m", "mamba-1.4b", "mamba-2.8b")
NAMES = ("smaller", "middle", "larger")
HEADER = "         layers x width parameters  tokens/s   tokens  passes tok/param   memory"
LAUNCHER = "1.train.sbatch"
CHOSEN_BY_HOURS = {"d_model", "n_layer", "num_steps", "num_epochs", "save_ckpt_path"}


def find_data(
    words: dict[str, str], settings: TrainConfig, tokens: int
) -> tuple[dict[str, str], int]:
    """Returns the words with the settings that the data gives, and its tokens. tokens: of data that is not made yet; 0:
    the data is there. Raises UserError if it is not, or if a word gives what --hours chooses."""
    for name in CHOSEN_BY_HOURS & words.keys():
        raise UserError(f"{name}: with --hours, plan chooses it; leave it out")
    model_name = settings.model.model_name
    if "d_intermediate" in preset(model_name):
        raise UserError(
            f"--hours varies d_model and n_layer, but {model_name} has widths of its own, as d_intermediate; leave it out, "
            "and name its --layers if you want its mixture"
        )
    is_made = "dataset_path" in settings.explicit
    if is_made == (tokens > 0):
        raise UserError(
            "--hours: name the data, as in plan data/mine --hours=8, or if it is not made yet, say how much there is: "
            "plan --hours=8 --tokens=2e9"
        )
    if tokens:
        return {"dataset_path": "data/mine", **words}, tokens
    sources, _ = training_sources(settings.data)
    vocab_size = max(source.vocab_size for source in sources.values())
    data_tokens = sum(source.token_count for source in sources.values())
    return {"vocab_size": str(vocab_size), **words}, data_tokens


@dataclass(frozen=True)
class Size:
    """A size of the model and what the time allows for it, as `plan --hours --json` prints it."""

    settings: dict[str, str]  # that train it
    command: str
    tokens: int  # in the time
    passes: float  # over the data
    tokens_per_parameter: float
    expected: "Estimate"


def plan_sizes(
    words: dict[str, str],
    config: str | None,
    data_tokens: int,
    options: "PlanConfig",
    described: Instance | None,
) -> None:
    """Prints three sizes of a model for the time there is. words, config: the settings besides those chosen here.
    described: the machine, None for this one, whose steps are timed. Raises UserError if there is no speed to know."""
    from mamba_fsdp.planning.estimate import best, estimate, machine_at_hand
    from mamba_fsdp.trainer.run import measure_pace
    from mamba_fsdp.trainer.run_schedule import VALIDATION_SHARE

    machine = described or machine_at_hand()
    is_cpu = machine.device == "cpu"
    is_timed = not machine.tflops()
    devices = options.nodes * machine.devices
    if is_timed and (described or devices > 1):
        raise UserError(
            "--hours can time one device of this machine; describe others by --instance=NAME, or by --memory, --peak and "
            "--bandwidth"
        )
    takes_recipe = not (is_cpu or config or "model_name" in words)
    console = Console()

    def size_of(width: int) -> Size:
        console.passing(f"a model {width} wide ...")
        chosen = {**words, "d_model": str(width), "n_layer": str(width // WIDTH_PER_LAYER)}
        if takes_recipe:
            narrower = [name for name in WITH_RECIPES if PRESETS[name]["d_model"] <= width]
            chosen["model_name"] = [WITH_RECIPES[0], *narrower][-1]
        settings = resolve_settings(chosen, config)
        expected = estimate(settings, options.nodes, machine)
        if not is_cpu and "batch_size" not in settings.explicit:
            expected = best(settings, options.nodes, machine) or expected
            chosen["batch_size"] = str(expected.batch_size)
            if expected.recompute != "0":
                chosen["fsdp_activation_checkpointing"] = "true"
                chosen["selective_checkpointing"] = expected.recompute
        if is_timed and expected.fits:
            settings = resolve_settings(chosen, config)
            settings.data.use_dummy_dataset = options.tokens > 0
            expected = replace(expected, tokens_per_second=measure_pace(settings))
        seconds = 3600 * options.hours / (1 + VALIDATION_SHARE)
        tokens = int(seconds * expected.tokens_per_second)
        chosen["num_steps"] = with_unit(tokens, "tok").replace(" ", "")
        chosen["save_ckpt_path"] = f"runs/{Path(settings.data.dataset_path).name}-{width}"
        return Size(
            settings=chosen,
            command=command(chosen, config, options),
            tokens=tokens,
            passes=tokens / data_tokens,
            tokens_per_parameter=tokens / expected.parameters,
            expected=expected,
        )

    by_name = three_sizes(size_of)
    if options.json:
        figures = {name: asdict(size) for name, size in by_name.items()}
        console.line(as_json(figures))
        return
    how = "timed" if is_timed else "calculated"
    console.line(
        f"data       {data_tokens:,} tokens\n"
        f"machines   {devices} x {machine.device} of {machine.memory:.1f} GB, {how}\n"
        f"time       {options.hours:g} hours, a twentieth of which validation takes\n\n{HEADER}"
    )
    for name, size in by_name.items():
        console.line(size_line(name, size))
    console.line(advice(by_name["smaller"], by_name["middle"]))
    for name, size in by_name.items():
        console.line(f"\n{name}:\n{size.command}")


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


def command(words: dict[str, str], config: str | None, options: "PlanConfig") -> str:
    """Returns the command that trains with these settings."""
    start = ["mamba-fsdp", "train"]  # of an installed package
    if options.instance or options.nodes > 1:
        start = ["sbatch", f"--nodes={options.nodes}", LAUNCHER]
    elif Path(LAUNCHER).exists():
        start = [f"./{LAUNCHER}"]
    if config:
        start.append(f"--config={config}")
    return shlex.join([*start, *(f"--{name}={text}" for name, text in words.items())])


def size_line(name: str, size: Size) -> str:
    shape = f"{size.settings['n_layer']} x {size.settings['d_model']}"
    expected = size.expected
    warning = "" if expected.fits else " does NOT fit"
    return (
        f"{name:<8}{shape:>15}{with_unit(expected.parameters, ''):>11}{with_unit(expected.tokens_per_second, ''):>10}"
        f"{with_unit(size.tokens, ''):>9}{size.passes:>8,.1f}{size.tokens_per_parameter:>10,.1f}"
        f"{with_unit(expected.bytes, 'B'):>9}{warning}"
    )


def advice(smaller: Size, middle: Size) -> str:
    """Returns what the laws say of these sizes."""
    lines = f"\nCompute-optimal are about {TOKENS_PER_PARAMETER} tokens per parameter (tok/param)."
    if smaller.tokens_per_parameter < TOKENS_PER_PARAMETER:
        lines += "\nThe time is too short: even the smaller size has fewer."
    if middle.passes > PASSES_AS_NEW:
        enough = with_unit(middle.tokens / PASSES_AS_NEW, "tokens")
        lines += (
            f"\nThe data is too small for this time: {PASSES_AS_NEW} passes teach nearly as much as new data,\n"
            f"those after the 16th little. The middle size wants {enough} or more."
        )
    return lines
