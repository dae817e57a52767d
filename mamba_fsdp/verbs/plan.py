"""python -m mamba_fsdp plan [PRESET] [--config=FILE] [--SETTING=VALUE ...] --nodes=N --instance=NAME

Does this training fit, how long does it take, what does it cost? By formulas: nothing is run, no GPU is needed.

  python -m mamba_fsdp plan mamba-2.8b --nodes=2 --instance=p5.48xlarge --tokens=300B
  python -m mamba_fsdp plan --config=bamba-9b --nodes=24 --instance=p4de.24xlarge --price=40.97
  python -m mamba_fsdp plan mamba-130m --memory=24 --peak=165 --bandwidth=1008

  --nodes=1           machines
  --instance=NAME     what they are: a line of mamba_fsdp/planning/devices.py, as p4d.24xlarge; without it the machine
                      at hand
  --devices=N         of a machine
  --memory=GB         of a device       --peak=TFLOPS      of a device, dense, in bf16
  --bandwidth=GB/s    of its memory     --nvlink=GB/s      of a device to the others of its machine, one way
  --network=Gbit/s    of a machine to the others, one way
  --tokens=N          length of the training, as in 300B; by default num_steps, where that is not given 1B
  --price=P           of an hour of one machine
  --json              the same as JSON, in bytes and seconds

The settings are those of training.py. The last lines are these as given and the fastest that fits: of batch sizes (with
global_batch_size those that keep the step), shares of recomputing blocks, and where nothing fits more nodes. How exact
this is: docs/planning.md. Exit codes: 0 it fits, 1 it does not, 2 a mistake.
"""

import json as as_json
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Annotated, Any

from config.fields import Bounds, near_name, read
from config.presets import title
from config.resolve import resolve_settings
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.planning.devices import INSTANCES, Instance
from mamba_fsdp.planning.estimate import Estimate, best_on_more_nodes, estimate, machine_at_hand
from mamba_fsdp.report.console import scaled

ABOVE_0 = Bounds(above=0)
USUAL_TOKENS = 10**9


def main(
    *preset: str,
    nodes: Annotated[int, Bounds(at_least=1, at_most=100_000)] = 1,
    instance: str = "",
    price: Annotated[float, ABOVE_0] = 0.0,
    tokens: str = "",
    json: bool = False,
    **given: Any,
) -> int:
    hardware = read_hardware(given)
    config = given.pop("config", None)
    if preset:
        given = {"model_name": preset[0], **given}
    settings, explicit = resolve_settings(given, config, preset[1:])
    machine = choose_machine(instance, hardware)
    found = estimate(settings, nodes, machine)
    length = USUAL_TOKENS
    if tokens:
        length = read("--tokens", int, tokens, ABOVE_0)
    elif "num_steps" in explicit:
        length = settings.training.num_steps.tokens(found.tokens_per_step)
    figures = list_figures(found, length, price)
    better = best_on_more_nodes(settings, nodes, machine)
    if json:
        print(as_json.dumps({**figures, "best": better.row() if better else None}, indent=1))
        return 0 if found.fits else 1
    machines = f"{nodes} x {instance or 'this machine'}"
    if hardware and not instance:
        machines = f"{nodes} as given"
    for line in report_lines(found, figures, machines, better):
        print(line)
    return 0 if found.fits else 1


def read_hardware(given: dict[str, Any]) -> dict[str, float]:
    """Takes the fields of an Instance out of what is given, as numbers."""
    hardware = {}
    for field in fields(Instance)[1:]:
        if field.name in given:
            kind = int if field.name == "devices" else float
            hardware[field.name] = read(f"--{field.name}", kind, given.pop(field.name), ABOVE_0)
    return hardware


def choose_machine(instance: str, hardware: dict[str, Any]) -> Instance:
    """Returns the machine that is meant. Raises UserError for an unknown one, or where its memory is not known."""
    if instance and instance not in INSTANCES:
        hint = near_name(instance, INSTANCES, "one of " + ", ".join(INSTANCES))
        raise UserError(f"--instance={instance}: not known; {hint}")
    if instance:
        return replace(INSTANCES[instance], **hardware)
    if not hardware:
        return machine_at_hand()
    if "memory" not in hardware:
        raise UserError(
            f"--{next(iter(hardware))}: say of what: --instance=NAME, or --memory=GB of a device"
        )
    return replace(Instance("device", 1, 0, bandwidth=0, nvlink=32, network=10), **hardware)


def list_figures(found: Estimate, tokens: int, price: float) -> dict[str, Any]:
    """Returns what is told of an estimate as plain values, in bytes and seconds."""
    figures = {
        "parameters": parameter_count(found.settings.model),
        "devices": found.devices,
        "memory": found.memory,
        "step": found.seconds,
        **found.row(),
        "tokens_per_step": found.tokens_per_step,
        "checkpoint_bytes": found.checkpoint_bytes,
    }
    if found.seconds:
        figures["seconds_per_step"] = found.seconds_per_step
        figures["share_of_peak"] = found.share_of_peak
        figures["tokens"] = tokens
        figures["days"] = found.days(tokens)
        figures["device_hours"] = 24 * found.days(tokens) * found.devices
        if price:
            figures["price"] = price
            figures["cost"] = price * 24 * found.days(tokens) * found.nodes
    return figures


def report_lines(
    found: Estimate, figures: dict[str, Any], machines: str, better: Estimate | None
) -> Iterator[str]:
    """Yields the report for a terminal of 80 columns."""
    machine = found.machine
    yield f"model      {title(found.settings.model)}: {figures['parameters']:,} parameters"
    yield f"machines   {machines}: {found.devices} x {machine.device} of {machine.memory:.1f} GB"
    yield from memory_lines(found)
    if found.seconds:
        yield from speed_lines(found, figures)
    else:
        yield "step       --instance=NAME, or --memory, --peak and --bandwidth, tell its seconds"
    yield f"checkpoint {scaled(found.checkpoint_bytes, 'B')}"
    yield f"{'':<11}{'nodes':>5}{'batch_size':>12}{'recompute':>11}{'global':>8}{'memory':>11}{'tokens/s':>13}"
    yield table_line("as given", found)
    if better:
        yield table_line("best", better)
    else:
        yield "nothing that was tried fits; take a smaller model or seq_length, or larger devices"


def memory_lines(found: Estimate) -> Iterator[str]:
    verdict = "it fits" if found.fits else f"it does NOT fit; most are the {found.largest_part}"
    bound = "at least " if found.machine.device == "cpu" else ""
    yield f"memory     {bound}{scaled(found.total_bytes, 'B')} a device: {verdict}"
    for part, size in found.memory.items():
        if size:
            yield f"           {part:<12}{scaled(size, 'B'):>11}"


def speed_lines(found: Estimate, figures: dict[str, Any]) -> Iterator[str]:
    yield (
        f"step       {found.seconds_per_step:.3f} s of {figures['global_batch_size']:,} x "
        f"{found.settings.data.seq_length:,} = {found.tokens_per_step:,} tokens"
    )
    for part, seconds in found.seconds.items():
        if seconds >= 5e-4:
            yield f"           {part:<12}{seconds:>9.3f} s"
    yield (
        f"speed      {found.tokens_per_second:,.0f} tokens/s, "
        f"{found.tokens_per_second / found.devices:,.0f} a device, {found.share_of_peak:.0%} of its peak"
    )
    days = figures["days"]
    lasts = f"{days:,.1f} days" if days >= 1 else f"{days * 24:.1f} hours"
    yield f"length     {figures['tokens']:,} tokens: {lasts}, {figures['device_hours']:,.1f} device-hours"
    if "cost" in figures:
        yield f"cost       {figures['cost']:,.0f} at {figures['price']:g} per machine-hour"


def table_line(name: str, found: Estimate) -> str:
    row = found.row()
    rate = f"{row['tokens_per_second']:,}" if found.seconds else "-"
    return (
        f"{name:<11}{row['nodes']:>5}{row['batch_size']:>12}{row['recompute']:>11}"
        f"{row['global_batch_size']:>8}{scaled(row['bytes'], 'B'):>11}{rate:>13}"
    )
