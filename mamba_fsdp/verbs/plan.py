"""python -m mamba_fsdp plan [PRESET] [--config=FILE] [--NAME=VALUE ...]
python -m mamba_fsdp plan [DATA] --hours=N [--NAME=VALUE ...]

Does this training fit, and how long does it take? Memory is measured on
tensors without content, time is calculated: no GPU is needed. The names are
the options below and the settings of training.py, which --help=all lists too.

  python -m mamba_fsdp plan mamba-2.8b --nodes=2 --instance=p5.48xlarge
  python -m mamba_fsdp plan mamba_9.8b --nodes=24 --instance=p4de.24xlarge
  python -m mamba_fsdp plan mamba-130m --memory=24 --peak=165 --bandwidth=1008

The last lines show the settings as given and the fastest ones that fit, over
batch sizes (a given global_batch_size stays) and shares of recomputing blocks.
docs/planning.md says how exact this is. Exit codes: 0 it fits, 1 it does not,
2 a mistake.

What can I train in the time I have? With --hours, three sizes and the commands
that train them. DATA is what training reads: a token store, or a folder with
train/ and validation/. Without --instance the steps of this machine are timed,
for about a minute. A preset is then --model_name=NAME.

  python -m mamba_fsdp plan data/mine --hours=8
  python -m mamba_fsdp plan --hours=8 --tokens=2e9 --instance=p5.48xlarge
"""

import json as as_json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamba_fsdp.data.selection import training_sources
from mamba_fsdp.data.store import is_store, split_in
from mamba_fsdp.errors import UserError, near_name, with_unit
from mamba_fsdp.planning.devices import INSTANCES, Instance
from mamba_fsdp.report.console import Console
from mamba_fsdp.settings.fields import setting
from mamba_fsdp.settings.presets import PRESETS, recipe, title
from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.settings.train_config import TrainConfig

if TYPE_CHECKING:
    from mamba_fsdp.planning.estimate import Estimate

USUAL_TOKENS = 10**9
MOST_HOURS = 366 * 24

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


@dataclass
class PlanConfig:
    """The options besides the settings of the training. 0: as the instance has it."""

    nodes: int = setting(1, at_least=1, at_most=100_000, elsewhere="nnodes num_nodes node")
    """Number of machines."""
    instance: str = setting("", elsewhere="instance_type machine")
    """Kind of machine: a name in mamba_fsdp/planning/devices.py, as p4d.24xlarge. Without it: this
    machine, whose speed is unknown."""
    devices: int = setting(0, at_least=0, elsewhere="gpus gpus_per_node num_gpus")
    """Number of devices of a machine."""
    memory: float = setting(0.0, at_least=0, at_most=1_000_000)
    """Memory of a device in GB."""
    bandwidth: float = setting(0.0, at_least=0)
    """Bandwidth of a device's memory in GB/s."""
    peak: float = setting(0.0, at_least=0)
    """Peak of a device in TFLOP/s, dense, in bf16."""
    nvlink: float = setting(0.0, at_least=0)
    """Rate from a device to the others of its machine in GB/s, one way."""
    network: float = setting(0.0, at_least=0)
    """Rate from a machine to the others in Gbit/s, one way."""
    tokens: int = setting(0, at_least=0, at_most=10**14)
    """Length of the training in tokens, as in 300B. 0: num_steps, else the length of the recipe, else 1B.
    With --hours: the tokens of data that is not made yet."""
    hours: float = setting(0.0, above=0, at_most=MOST_HOURS)
    """Time for a training: say what can be trained in it."""
    json: bool = setting(False)
    """Print the figures as JSON, in bytes and seconds."""


def main(*name: str, options: PlanConfig, **settings_by_name: Any) -> int:
    machine = choose_machine(options)
    if name:
        of_name = "dataset_path" if options.hours else "model_name"
        settings_by_name = {of_name: name[0], **settings_by_name}
    config = settings_by_name.pop("config", None)
    if name and not options.hours and is_store(split_in(Path(name[0]))):
        raise UserError(f"{name[0]} is data; to see what to train on it, add the time: --hours=8")
    settings = resolve_settings(settings_by_name, config, name[1:])
    if options.hours:
        words, data_tokens = find_data(settings_by_name, settings, options.tokens)
        plan_sizes(words, config, data_tokens, options, machine)
        return 0
    # These import torch; mistakes in the words are reported earlier.
    from mamba_fsdp.planning.estimate import best, estimate, machine_at_hand

    machine = machine or machine_at_hand()
    expected = estimate(settings, options.nodes, machine)
    best_fitting = best(settings, options.nodes, machine)
    length = options.tokens or USUAL_TOKENS
    named = settings.explicit | recipe(settings.model.model_name).keys()
    if not options.tokens and "num_steps" in named:
        length = settings.training.num_steps.tokens(expected.tokens_per_step)
    figures: dict[str, Any] = {}
    if expected.step:
        days = length / expected.tokens_per_second / 86400
        figures = {"tokens": length, "days": days, "device_hours": 24 * days * expected.devices}
    if options.json:
        best_fields = asdict(best_fitting) if best_fitting else None
        print(as_json.dumps({**asdict(expected), **figures, "best": best_fields}, indent=1))
    else:
        for note in settings.notes:
            print(f"settings   {note}")
        print(f"model      {title(settings.model)}: {expected.parameters:,} parameters")
        machines = f"{expected.nodes} x {options.instance}".removesuffix(" x ")
        print(
            f"machines   {machines}: {expected.devices} x {machine.device} of {machine.memory:.1f} GB"
        )
        for line in report_lines(expected, figures, best_fitting, settings.data.seq_length):
            print(line)
    return 0 if expected.fits else 1


def find_data(
    words: dict[str, str], settings: TrainConfig, tokens: int
) -> tuple[dict[str, str], int]:
    """Returns the words with the settings that the data gives, and its tokens. tokens: of data that is not made yet; 0:
    the data is there. Raises UserError if it is not, or if a word gives what --hours chooses."""
    for name in CHOSEN_BY_HOURS & words.keys():
        raise UserError(f"{name}: with --hours, plan chooses it; leave it out")
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


def choose_machine(options: PlanConfig) -> Instance | None:
    """Returns the machine that the options describe, or None for this machine. Raises UserError for an unknown
    instance, or if the memory is unknown."""
    instance = options.instance
    named = {field.name: getattr(options, field.name) for field in fields(Instance)[1:]}
    hardware: dict[str, Any] = {name: number for name, number in named.items() if number}
    if instance and instance not in INSTANCES:
        hint = near_name(instance, INSTANCES, "one of " + ", ".join(INSTANCES))
        raise UserError(f"--instance={instance}: not known; {hint}")
    if instance:
        return replace(INSTANCES[instance], **hardware)
    if not hardware:
        return None
    if "memory" not in hardware:
        raise UserError(
            f"--{next(iter(hardware))}: it describes a machine that is not named: add --instance=NAME, or --memory=GB of a device"
        )
    return replace(Instance("device", 1, 0), **hardware)


def report_lines(
    expected: "Estimate", figures: dict[str, Any], best_fitting: "Estimate | None", seq_length: int
) -> Iterator[str]:
    """Yields the report for a terminal of 80 columns."""
    verdict = "it fits"
    if not expected.fits:
        largest = max(expected.memory, key=expected.memory.__getitem__)
        verdict = f"it does NOT fit; the largest part: {largest}"
    yield f"memory     {with_unit(expected.bytes, 'B')} a device: {verdict}"
    for part, size in expected.memory.items():
        if size:
            yield f"           {part:<12}{with_unit(size, 'B'):>11}"
    if expected.step:
        yield from speed_lines(expected, figures, seq_length)
    else:
        yield "step       needs --instance=NAME, or --memory, --peak and --bandwidth"
    yield f"checkpoint {with_unit(expected.checkpoint_bytes, 'B')}"
    yield f"{'':<11}{'nodes':>5}{'batch_size':>12}{'recompute':>11}{'global':>8}{'memory':>11}{'tokens/s':>13}"
    yield table_line("as given", expected)
    if best_fitting:
        yield table_line("best", best_fitting)
    else:
        yield "nothing that was tried fits; take more nodes, a smaller model or seq_length, or larger devices"


def speed_lines(expected: "Estimate", figures: dict[str, Any], seq_length: int) -> Iterator[str]:
    yield (
        f"step       {expected.seconds_per_step:.3f} s of {expected.global_batch_size:,} x {seq_length:,} = "
        f"{expected.tokens_per_step:,} tokens"
    )
    for part, seconds in expected.step.items():
        if seconds >= 5e-4:
            yield f"           {part:<12}{seconds:>9.3f} s"
    rate = expected.tokens_per_second
    yield (
        f"speed      {rate:,.0f} tokens/s, {rate / expected.devices:,.0f} a device, "
        f"{expected.share_of_peak:.0%} of its peak"
    )
    yield (
        f"length     {figures['tokens']:,} tokens: {figures['days']:,.2f} days, "
        f"{figures['device_hours']:,.1f} device-hours"
    )


def table_line(name: str, expected: "Estimate") -> str:
    rate = f"{expected.tokens_per_second:,.0f}" if expected.step else "-"
    return (
        f"{name:<11}{expected.nodes:>5}{expected.batch_size:>12}{expected.recompute:>11}"
        f"{expected.global_batch_size:>8}{with_unit(expected.bytes, 'B'):>11}{rate:>13}"
    )


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
    options: PlanConfig,
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
            console.passing(f"timing steps of a model {width} wide ...")
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
        console.line(as_json.dumps(figures, indent=1))
        return
    how = "timed" if is_timed else "calculated"
    console.line(
        f"data       {data_tokens:,} tokens\n"
        f"machines   {devices} x {machine.device} of {machine.memory:.1f} GB, {how}\n"
        f"time       {options.hours:g} hours, a twentieth of which validation takes\n\n{HEADER}"
    )
    for name, size in by_name.items():
        console.line(size_line(name, size))
    console.line(advice(by_name["middle"]))
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


def command(words: dict[str, str], config: str | None, options: PlanConfig) -> str:
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
        f"{name:<8}{shape:>15}{with_unit(expected.parameters, ''):>11}{expected.tokens_per_second:>10,.0f}"
        f"{with_unit(size.tokens, ''):>9}{size.passes:>8,.1f}{size.tokens_per_parameter:>10,.1f}"
        f"{with_unit(expected.bytes, 'B'):>9}{warning}"
    )


def advice(middle: Size) -> str:
    """Returns what the laws say of the middle size."""
    lines = f"\nCompute-optimal are about {TOKENS_PER_PARAMETER} tokens per parameter (tok/param)."
    if middle.passes > PASSES_AS_NEW:
        enough = with_unit(middle.tokens / PASSES_AS_NEW, "tokens")
        lines += (
            f"\nThe data is too small for this time: {PASSES_AS_NEW} passes teach nearly as much as new data,\n"
            f"those after the 16th little. The middle size wants {enough} or more."
        )
    return lines
