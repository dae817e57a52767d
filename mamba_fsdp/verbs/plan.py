"""python -m mamba_fsdp plan [PRESET] [--config=FILE] [--SETTING=VALUE ...] --nodes=N --instance=NAME

Does this training fit, and how long does it take? By formulas: nothing is run, no GPU is needed.

  python -m mamba_fsdp plan mamba-2.8b --nodes=2 --instance=p5.48xlarge --tokens=300B
  python -m mamba_fsdp plan --config=bamba-9b --nodes=24 --instance=p4de.24xlarge
  python -m mamba_fsdp plan mamba-130m --memory=24 --peak=165 --bandwidth=1008

  --nodes=1           machines
  --instance=NAME     what they are: a line of mamba_fsdp/planning/devices.py, as p4d.24xlarge; without it the machine
                      at hand, whose speed is not known
  --devices=N         of a machine
  --memory=GB         of a device       --peak=TFLOPS      of a device, dense, in bf16
  --bandwidth=GB/s    of its memory     --nvlink=GB/s      of a device to the others of its machine, one way
  --network=Gbit/s    of a machine to the others, one way
  --tokens=N          length of the training, as in 300B; by default num_steps, where that is not given 1B
  --json              the same as JSON, in bytes and seconds

The settings are those of training.py. The last lines are these as given and the fastest that fits: of batch sizes (with
global_batch_size those that keep the step), shares of recomputing blocks. How exact this is:
docs/planning.md. Exit codes: 0 it fits, 1 it does not, 2 a mistake.
"""

import json as as_json
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from config.fields import Bounds, near_name, read
from config.presets import title
from config.resolve import resolve_settings
from mamba_fsdp.errors import UserError
from mamba_fsdp.planning.devices import INSTANCES, Instance
from mamba_fsdp.planning.estimate import Estimate, best, estimate, machine_at_hand
from mamba_fsdp.report.console import scaled

ABOVE_0 = Bounds(above=0)
USUAL_TOKENS = 10**9


def main(
    *preset: str,
    nodes: str = "1",
    instance: str = "",
    tokens: str = "",
    json: bool = False,
    **given: Any,
) -> int:
    count = read("--nodes", int, nodes, Bounds(at_least=1, at_most=100_000))
    machine = choose_machine(instance, given)
    config = given.pop("config", None)
    if preset:
        given = {"model_name": preset[0], **given}
    settings, explicit = resolve_settings(given, config, preset[1:])
    found = estimate(settings, count, machine)
    better = best(settings, count, machine)
    length = USUAL_TOKENS
    if tokens:
        length = read("--tokens", int, tokens, ABOVE_0)
    elif "num_steps" in explicit:
        length = settings.training.num_steps.tokens(found.tokens_per_step)
    figures: dict[str, Any] = {}
    if found.step:
        days = length / found.tokens_per_second / 86400
        figures = {"tokens": length, "days": days, "device_hours": 24 * days * found.devices}
    if json:
        best_found = asdict(better) if better else None
        print(as_json.dumps({**asdict(found), **figures, "best": best_found}, indent=1))
    else:
        print(f"model      {title(settings.model)}: {found.parameters:,} parameters")
        machines = f"{found.nodes} x {instance}" if instance else str(found.nodes)
        print(
            f"machines   {machines}: {found.devices} x {machine.device} of {machine.memory:.1f} GB"
        )
        for line in report_lines(found, figures, better, settings.data.seq_length):
            print(line)
    return 0 if found.fits else 1


def choose_machine(instance: str, given: dict[str, Any]) -> Instance:
    """Returns the machine that is meant; takes out of `given` what describes it. Raises UserError for an unknown one, or
    where its memory is not known."""
    hardware: dict[str, Any] = {}
    for field in fields(Instance)[1:]:
        if field.name in given:
            kind = int if field.name == "devices" else float
            hardware[field.name] = read(f"--{field.name}", kind, given.pop(field.name), ABOVE_0)
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
    return replace(Instance("device", 1, 0), **hardware)


def report_lines(
    found: Estimate, figures: dict[str, Any], better: Estimate | None, seq_length: int
) -> Iterator[str]:
    """Yields the report for a terminal of 80 columns."""
    verdict = "it fits" if found.fits else f"it does NOT fit; most are the {found.largest_part}"
    yield f"memory     {scaled(found.bytes, 'B')} a device: {verdict}"
    for part, size in found.memory.items():
        if size:
            yield f"           {part:<12}{scaled(size, 'B'):>11}"
    if found.step:
        yield from speed_lines(found, figures, seq_length)
    else:
        yield "step       --instance=NAME, or --memory, --peak and --bandwidth, tell its seconds"
    yield f"checkpoint {scaled(found.checkpoint_bytes, 'B')}"
    yield f"{'':<11}{'nodes':>5}{'batch_size':>12}{'recompute':>11}{'global':>8}{'memory':>11}{'tokens/s':>13}"
    yield table_line("as given", found)
    if better:
        yield table_line("best", better)
    else:
        yield "nothing that was tried fits; take more nodes, a smaller model or seq_length, or larger devices"


def speed_lines(found: Estimate, figures: dict[str, Any], seq_length: int) -> Iterator[str]:
    yield (
        f"step       {found.seconds_per_step:.3f} s of {found.global_batch_size:,} x {seq_length:,} = "
        f"{found.tokens_per_step:,} tokens"
    )
    for part, seconds in found.step.items():
        if seconds >= 5e-4:
            yield f"           {part:<12}{seconds:>9.3f} s"
    rate = found.tokens_per_second
    yield (
        f"speed      {rate:,.0f} tokens/s, {rate / found.devices:,.0f} a device, "
        f"{found.share_of_peak:.0%} of its peak"
    )
    yield (
        f"length     {figures['tokens']:,} tokens: {figures['days']:,.2f} days, "
        f"{figures['device_hours']:,.1f} device-hours"
    )


def table_line(name: str, found: Estimate) -> str:
    rate = f"{found.tokens_per_second:,.0f}" if found.step else "-"
    return (
        f"{name:<11}{found.nodes:>5}{found.batch_size:>12}{found.recompute:>11}"
        f"{found.global_batch_size:>8}{scaled(found.bytes, 'B'):>11}{rate:>13}"
    )
