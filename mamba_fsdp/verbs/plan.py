"""python -m mamba_fsdp plan [PRESET] [--config=FILE] [--NAME=VALUE ...]
python -m mamba_fsdp plan [DATA] --hours=N [--NAME=VALUE ...]

Does this training fit into memory, and how long does it take? Memory is
measured with meta tensors and time is calculated, so no GPU is needed.
NAME is one of the options below or a setting of training.py; --help=all lists
both.

  python -m mamba_fsdp plan mamba-2.8b --nodes=2 --instance=p5.48xlarge
  python -m mamba_fsdp plan mamba_9.8b --nodes=24 --instance=p4de.24xlarge
  python -m mamba_fsdp plan mamba-130m --memory=24 --peak=165 --bandwidth=1008

The last lines compare the given settings with the fastest ones that fit. For
these, plan tries other batch sizes, within a given global_batch_size, and other
values of selective_checkpointing. docs/planning.md describes the accuracy. Exit
codes: 0 it fits, 1 it does not fit, 2 an error in the arguments.

How often should I save? With --hours_between_failures=5000, the mean time
between failures of one node, plan also prints the expected number of failures,
the best checkpoint interval, and the fraction of time that remains for training
steps, with and without spare nodes.

What can I train in a given time? With --hours, plan prints three model sizes
and the commands that train them. DATA is the training data: a token store, or a
folder with train/ and validation/. Without --instance, plan measures the speed
of this machine for about a minute. Use --model_name=NAME for a preset.

  python -m mamba_fsdp plan data/mine --hours=8
  python -m mamba_fsdp plan --hours=8 --tokens=2e9 --instance=p5.48xlarge
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mamba_fsdp.data.selection import training_sources
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import condition, setting
from mamba_fsdp.importing.kinds import classify_path, unexpected_path_error
from mamba_fsdp.model.presets import SPELLINGS, model_title, normalize_name, preset
from mamba_fsdp.planning.devices import INSTANCES, Instance
from mamba_fsdp.planning.failures import Costs, find_intervals
from mamba_fsdp.reporting.console import Console, format_json
from mamba_fsdp.run.names import METRICS, SETTINGS
from mamba_fsdp.run.records import read_entries, read_events
from mamba_fsdp.settings.recipes import recipe
from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.storage.retry import exists
from mamba_fsdp.text import format_quantity, suggest_name

if TYPE_CHECKING:
    from mamba_fsdp.planning.estimate import Estimate

DEFAULT_TOKENS = 10**9
MAX_HOURS = 366 * 24
CHOSEN_SETTINGS = {"d_model", "n_layer", "num_steps", "num_epochs", "save_ckpt_path"}


@condition("a training to plan (without --hours)")
def single_training(options: "PlanConfig") -> bool:
    return not options.hours


@condition("--hours_between_failures")
def expects_failures(options: "PlanConfig") -> bool:
    return options.hours_between_failures > 0


@dataclass
class PlanConfig:
    """The options of the command, in addition to the settings of the training. If an option that describes the machine is 0,
    the value of --instance is used."""

    nodes: int = setting(1, at_least=1, at_most=100_000, elsewhere="nnodes num_nodes node")
    """Number of machines (nodes)."""
    instance: str = setting("", elsewhere="instance_type machine")
    """Type of machine: a name in mamba_fsdp/planning/devices.py, for example p4d.24xlarge. Empty: this machine, with
    unknown speed."""
    devices: int = setting(0, at_least=0, elsewhere="gpus gpus_per_node num_gpus")
    """Number of devices per machine."""
    memory: float = setting(0.0, at_least=0, at_most=1_000_000)
    """Memory of a device in GB."""
    bandwidth: float = setting(0.0, at_least=0)
    """Memory bandwidth of a device in GB/s."""
    peak: float = setting(0.0, at_least=0)
    """Peak performance of a device in TFLOP/s, for dense bf16."""
    nvlink: float = setting(0.0, at_least=0)
    """Bandwidth from a device to the other devices of its machine in GB/s, in one direction."""
    network: float = setting(0.0, at_least=0)
    """Bandwidth from a machine to the other machines in Gbit/s, in one direction."""
    tokens: int = setting(0, at_least=0, at_most=10**14)
    """Length of the training in tokens, for example 300B. 0: num_steps if it is given, otherwise the length in the recipe,
    otherwise 1B. With --hours, it is the number of tokens of a dataset that does not exist yet."""
    hours: float = setting(0.0, above=0, at_most=MAX_HOURS, elsewhere="hour time")
    """Hours available for training. Prints which models can be trained in this time."""
    hours_between_failures: float = setting(0.0, above=0, at_most=1e9, needs=single_training)
    """Mean hours between failures of one node. Prints how often to save, and the time lost to failures."""
    measured: str = setting("", is_path=True, needs=expects_failures)
    """Run folder from which to take the measured times of saves and recoveries."""
    save_seconds: float = setting(Costs.save, above=0, needs=expects_failures)
    """Seconds that training waits for a save, unless a run is given with --measured."""
    queue_seconds: float = setting(Costs.queue, at_least=0, needs=expects_failures)
    """Seconds that a job without spare nodes waits after a failure until Slurm starts it again."""
    json: bool = setting(False)
    """Print the results as JSON, in bytes and seconds."""


def main(*name: str, options: PlanConfig, **settings_by_name: Any) -> int:
    machine = choose_machine(options)
    if name:
        settings_by_name = {read_name(name[0], options): name[0], **settings_by_name}
    config = settings_by_name.pop("config", None)
    settings = resolve_settings(settings_by_name, config, name[1:])
    if not options.hours:
        return show_training(settings, options, machine)
    args, data_tokens = find_data(settings_by_name, settings, options.tokens)
    show_sizes(args, config, data_tokens, options, machine)
    return 0


def read_name(name: str, options: PlanConfig) -> str:
    """Returns the name of the setting whose value is the first argument `name`: dataset_path with --hours, otherwise
    model_name. Raises UserError if `name` is data instead of a model, or a model instead of data."""
    if not options.hours:
        if exists(name):
            raise UserError(_not_a_model_message(name))
        return "model_name"
    if normalize_name(name) in SPELLINGS and not exists(name):
        raise UserError(
            f"{name} is a model; with --hours, give the data, as in plan data/mine --model_name={name}"
        )
    return "dataset_path"


def show_training(settings: TrainConfig, options: PlanConfig, machine: Instance | None) -> int:
    """Prints the estimates of one training. Returns the exit code: 0 if the training fits into memory, otherwise 1."""
    # Importing torch takes seconds; mistakes in the arguments are reported before.
    from mamba_fsdp.planning.estimate import best_estimate, estimate, local_machine

    machine = machine or local_machine()
    expected = estimate(settings, options.nodes, machine)
    best_fitting = best_estimate(settings, options.nodes, machine)
    length = options.tokens or DEFAULT_TOKENS
    named = settings.explicit | recipe(settings.model.model_name).keys()
    if not options.tokens and "num_steps" in named:
        length = settings.training.num_steps.tokens(expected.tokens_per_step)
    figures: dict[str, Any] = {}
    if expected.step:
        days = length / expected.tokens_per_second / 86400
        figures = {"tokens": length, "days": days, "device_hours": 24 * days * expected.devices}
    figures |= expect_failures(expected, settings, options)
    if options.json:
        best_fields = asdict(best_fitting) if best_fitting else None
        print(format_json({**asdict(expected), **figures, "best": best_fields}))
    else:
        for note in settings.notes:
            print(f"settings   {note}")
        print(f"model      {model_title(settings.model)}: {expected.parameters:,} parameters")
        machines = f"{expected.nodes} x {options.instance}".removesuffix(" x ")
        print(
            f"machines   {machines}: {expected.devices} x {machine.device} of {machine.memory:.1f} GB"
        )
        for line in report_lines(expected, figures, best_fitting, settings.data.seq_length):
            print(line)
    return 0 if expected.fits else 1


def _not_a_model_message(path: str) -> str:
    """Returns the error message for a path that was given instead of a model's name."""
    place = classify_path(path)
    if place.kind in ("store", "stores"):
        return f"{path} is data; to plan models for it, add a time, as in --hours=8"
    if place.kind == "run":
        return f"{path} is a run; to plan it again, give its settings: --config={path}/{SETTINGS}"
    return str(unexpected_path_error(path, "a preset's name"))


def find_data(
    args: dict[str, str], settings: TrainConfig, tokens: int
) -> tuple[dict[str, str], int]:
    """Finds the training data for --hours.

    args: {name: text} of the settings on the command line. tokens: the number of tokens of data that does not exist yet,
    or 0 if it exists. Returns (`args` with the settings that follow from the data, number of tokens of the data).

    Raises UserError if `args` contains a setting that --hours chooses, if the model's preset has other fixed widths, and
    unless exactly one of the data and `tokens` is given."""
    for name in CHOSEN_SETTINGS & args.keys():
        raise UserError(f"{name}: plan chooses it with --hours; leave it out")
    model_name = settings.model.model_name
    if "d_intermediate" in preset(model_name):
        raise UserError(
            f"--hours varies d_model and n_layer, but {model_name} has other fixed widths, such as d_intermediate; leave it "
            "out, and give --layers if you want its sequence of layers"
        )
    data_exists = "dataset_path" in settings.explicit
    if data_exists == (tokens > 0):
        raise UserError(
            "--hours: give the data, as in plan data/mine --hours=8, or its number of tokens if it does not exist yet, as in "
            "plan --hours=8 --tokens=2e9"
        )
    if tokens:
        return {"dataset_path": "data/mine", **args}, tokens
    sources, _ = training_sources(settings.data)
    vocab_size = max(source.vocab_size for source in sources.values())
    data_tokens = sum(source.token_count for source in sources.values())
    return {"vocab_size": str(vocab_size), **args}, data_tokens


def show_sizes(
    args: dict[str, str],
    config: str | None,
    data_tokens: int,
    options: PlanConfig,
    described: Instance | None,
) -> None:
    """Prints three model sizes that can be trained in the available time.

    args: {name: text} of the settings. config: the settings file. data_tokens: the number of tokens of the data. described:
    the machine that the options describe, or None for this machine."""
    from mamba_fsdp.planning.estimate import local_machine
    from mamba_fsdp.planning.sizes import Budget, plan_sizes, report_sizes
    from mamba_fsdp.trainer.run import measure_tokens_per_second

    budget = Budget(
        hours=options.hours,
        nodes=options.nodes,
        instance=options.instance,
        machine=described or local_machine(),
        is_local=described is None,
        data_tokens=data_tokens,
        data_exists=not options.tokens,
    )
    sizes = plan_sizes(args, config, budget, measure_tokens_per_second)
    console = Console()
    if options.json:
        console.print_line(format_json({name: asdict(size) for name, size in sizes.items()}))
        return
    for line in report_sizes(sizes, budget):
        console.print_line(line)


def choose_machine(options: PlanConfig) -> Instance | None:
    """Returns the machine that the options describe, or None for this machine. Raises UserError for an unknown instance,
    and if the options describe other hardware without its memory."""
    instance = options.instance
    named = {field.name: getattr(options, field.name) for field in fields(Instance)[1:]}
    hardware: dict[str, Any] = {name: number for name, number in named.items() if number}
    if instance and instance not in INSTANCES:
        hint = suggest_name(instance, INSTANCES, "one of " + ", ".join(INSTANCES))
        raise UserError(f"--instance={instance}: there is no such instance type; {hint}")
    if instance:
        return replace(INSTANCES[instance], **hardware)
    if not hardware:
        return None
    if "memory" not in hardware:
        raise UserError(
            f"--{next(iter(hardware))}: the type of machine is missing; add --instance=NAME, or --memory=GB of a device"
        )
    return replace(Instance("device", 1, 0), **hardware)


def report_lines(
    expected: "Estimate", figures: dict[str, Any], best_fitting: "Estimate | None", seq_length: int
) -> Iterator[str]:
    """Yields the lines of the report, of at most 80 columns."""
    verdict = "it fits"
    if not expected.fits:
        largest = max(expected.memory, key=expected.memory.__getitem__)
        verdict = f"it does NOT fit; the largest part: {largest}"
    yield f"memory     {format_quantity(expected.bytes, 'B')} a device: {verdict}"
    for part, size in expected.memory.items():
        if size:
            yield f"           {part:<12}{format_quantity(size, 'B'):>11}"
    if expected.step:
        yield from speed_lines(expected, figures, seq_length)
    else:
        yield "step       needs --instance=NAME, or --memory, --peak and --bandwidth"
    yield f"checkpoint {format_quantity(expected.checkpoint_bytes, 'B')}"
    yield f"{'':<11}{'nodes':>5}{'batch_size':>12}{'recompute':>11}{'global':>8}{'memory':>11}{'tokens/s':>13}"
    yield table_line("as given", expected)
    if best_fitting:
        yield table_line("best", best_fitting)
    else:
        yield "none of the tried settings fit; use more nodes, a smaller model or seq_length, or larger devices"
    if "intervals" in figures:
        yield from failure_lines(figures)


def speed_lines(expected: "Estimate", figures: dict[str, Any], seq_length: int) -> Iterator[str]:
    yield (
        f"step       {expected.seconds_per_step:.3f} s of {expected.global_batch_size:,} x {seq_length:,} = "
        f"{expected.tokens_per_step:,} tokens"
    )
    for part, seconds in expected.step.items():
        if seconds >= 5e-4:
            yield f"           {part:<12}{seconds:>9.3f} s"
    if expected.step["launch"]:
        yield "           limited by the host, which launches kernels: a larger batch_size helps"
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
        f"{expected.global_batch_size:>8}{format_quantity(expected.bytes, 'B'):>11}{rate:>13}"
    )


def expect_failures(
    expected: "Estimate", settings: TrainConfig, options: PlanConfig
) -> dict[str, Any]:
    """Calculates the expected failures and the checkpoint intervals for --hours_between_failures.

    Returns {} without this option. Raises UserError if the time of a step is unknown, or if the run given with --measured
    has recorded no save after which the training continued."""
    if not options.hours_between_failures:
        return {}
    if not expected.step:
        raise UserError(
            "--hours_between_failures: the time of a step is unknown; add --instance=NAME, or --memory, --peak and --bandwidth"
        )
    measured = {}
    if options.measured:
        measured = measured_seconds(Path(options.measured))
    assumed = Costs(options.save_seconds, queue=options.queue_seconds)
    costs = replace(assumed, **measured)
    between = 3600 * options.hours_between_failures / expected.nodes
    given_steps = settings.checkpoint.checkpoint_interval.steps(expected.tokens_per_step)
    intervals = find_intervals(costs, between, expected.seconds_per_step, given_steps)
    return {
        "failures_per_day": 86400 / between,
        "cost_seconds": asdict(costs),
        "measured": measured,
        "intervals": [asdict(interval) for interval in intervals],
    }


def measured_seconds(run: Path) -> dict[str, float]:
    """Returns the fields of Costs that a run has measured. Raises UserError if the run has recorded no save after which the
    training continued."""
    events = read_events(run)
    # Only events of saves have "seconds". Leave out the last save of a start, and a save from which a later start resumed,
    # because the metrics do not contain the time that training waited for these saves. They are recognised by their steps,
    # which have other events too.
    ends = {event["step"] for event in events if "seconds" not in event}
    writes = [
        event["seconds"] for event in events if "seconds" in event and event["step"] not in ends
    ]
    if not writes:
        raise UserError(
            f"--measured={run}: the run's events.jsonl records no save after which the training continued; give another run"
        )
    stalled = sum(entry.get("checkpoint_stall_seconds", 0) for entry in read_entries(run / METRICS))
    measured = {"save": stalled / len(writes), "write": median(writes)}
    recoveries = [
        event["seconds_to_next_step"] for event in events if "seconds_to_next_step" in event
    ]
    if recoveries:
        measured["recovery"] = median(recoveries)
    return measured


def failure_lines(figures: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of the report on failures, of at most 80 columns."""
    per_day = figures["failures_per_day"]
    yield f"failures   {per_day:,.3g} a day, {per_day * figures['days']:,.3g} in all"
    for name, seconds in figures["cost_seconds"].items():
        source = "measured" if name in figures["measured"] else "assumed"
        yield f"           {name:<12}{seconds:>9.3f} s  {source}"
    yield "interval     seconds   goodput  without spares"
    for interval in figures["intervals"]:
        yield (
            f"{interval['name']:<11}{interval['seconds']:>9,.1f}{interval['goodput']:>10.2%}"
            f"{interval['goodput_without_spares']:>16.2%}  --checkpoint_interval={interval['steps']}"
        )
