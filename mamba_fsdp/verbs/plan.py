"""python -m mamba_fsdp plan [PRESET] [--config=FILE] [--SETTING=VALUE ...] --nodes=N --instance=NAME

Does this training fit, how long does it take, what does it cost? By formulas: nothing is run, no GPU is needed.

  python -m mamba_fsdp plan mamba-2.8b --nodes=2 --instance=p5.48xlarge --tokens=300B
  python -m mamba_fsdp plan --config=bamba-9b --nodes=24 --instance=p4de.24xlarge --price=40.97
  python -m mamba_fsdp plan mamba-130m --memory=24 --peak=165 --bandwidth=1008

  --nodes=1           machines
  --instance=NAME     what they are: a line of config/devices.py, as p4d.24xlarge; without it the machine at hand
  --devices=N         of a machine
  --memory=GB         of a device       --peak=TFLOPS      of a device, dense, in bf16
  --bandwidth=GB/s    of its memory     --nvlink=GB/s      of a device to the others of its machine, one way
  --network=Gbit/s    of a machine to the others, one way
  --tokens=N          length of the training, as in 300B; by default num_steps, where that is not given 1B
  --price=P           of an hour of one machine
  --storage=5         GB/s that all devices together write to the shared storage
  --json              the same as JSON, in bytes and seconds

The settings are those of training.py. The last lines are these as given and the fastest that fits: of batch sizes (with
global_batch_size those that keep the step), shares of recomputing blocks, and where nothing fits more nodes. How exact
this is: docs/planning.md. Exit codes: 0 it fits, 1 it does not, 2 a mistake.
"""

import json as as_json
from collections.abc import Iterator
from typing import Annotated, Any

from config.devices import INSTANCES, Instance
from config.fields import Bounds, near_name, read
from config.presets import title
from config.resolve import resolve_settings
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.spec import flops_per_token, parameter_count
from mamba_fsdp.report.console import duration, scaled
from mamba_fsdp.train.estimate import Estimate, at_hand, best, estimate
from mamba_fsdp.verbs.preflight import BYTES_PER_PARAMETER

TO_HOST = 20e9  # bytes/s of a device's memory to the host's, over PCIe 4.0 x16
ABOVE_0 = Bounds(above=0)


def main(
    *preset: str,
    nodes: Annotated[int, Bounds(at_least=1, at_most=100_000)] = 1,
    instance: str = "",
    price: Annotated[float, ABOVE_0] = 0.0,
    tokens: str = "",
    storage: Annotated[float, ABOVE_0] = 5.0,
    json: bool = False,
    **given: Any,
) -> int:
    hardware = {
        name: read(f"--{name}", int if name == "devices" else float, given.pop(name), ABOVE_0)
        for name in Instance._fields[1:]
        if name in given
    }
    config = given.pop("config", None)
    chosen = {"model_name": preset[0], **given} if preset else given
    settings, explicit = resolve_settings(chosen, config, preset[1:])
    if instance and instance not in INSTANCES:
        hint = near_name(instance, INSTANCES, "one of " + ", ".join(INSTANCES))
        raise UserError(f"--instance={instance}: not known; {hint}")
    if hardware and not instance and "memory" not in hardware:
        raise UserError(
            f"--{next(iter(hardware))}: say of what: --instance=NAME, or --memory=GB of a device"
        )
    known = (
        INSTANCES[instance]
        if instance
        else Instance("device", 1, 0, 0, 32, 10)
        if hardware
        else at_hand()
    )
    machine = known._replace(**hardware)
    plan = estimate(settings, nodes, machine)
    length = (
        settings.training.num_steps.tokens(plan.tokens_per_step)
        if "num_steps" in explicit
        else 10**9
    )
    found = figures(plan, read("--tokens", int, tokens, ABOVE_0) if tokens else length, storage)
    if price and plan.parts:
        found |= {"price": price, "cost": price * found["device_hours"] / machine.devices}
    enough = next(
        filter(None, (best(settings, nodes * 2**power, machine) for power in range(8))), None
    )
    if json:
        print(as_json.dumps(found | {"best": enough and enough.row()}, indent=1))
    else:
        of = "as given" if hardware and not instance else f"x {instance or 'this machine'}"
        print("\n".join(lines(plan, found, f"{nodes} {of}", enough)))
    return 0 if plan.fits else 1


def figures(plan: Estimate, tokens: int, storage: float) -> dict[str, Any]:
    """What is told of a plan, as plain values in bytes and seconds."""
    count = parameter_count(plan.settings.model)
    size = BYTES_PER_PARAMETER * count
    found = {
        "parameters": count,
        "devices": plan.devices,
        "memory": plan.memory,
        "step": plan.parts,
        **plan.row(),
        "tokens_per_step": plan.tokens_per_step,
        "checkpoint_bytes": size,
        "storage": storage,
        "stall_seconds": size / plan.devices / TO_HOST,
        "write_seconds": size / storage / 1e9,
    }
    if not plan.parts:
        return found
    hours = tokens / plan.rate / 3600
    flops = (
        plan.rate
        * flops_per_token(plan.settings.model, plan.settings.data.seq_length)
        / plan.devices
    )
    return found | {
        "seconds_per_step": plan.seconds,
        "share_of_peak": flops / plan.instance.tflops() / 1e12,
        "tokens": tokens,
        "days": hours / 24,
        "device_hours": hours * plan.devices,
    }


def lines(
    plan: Estimate, found: dict[str, Any], machines: str, enough: Estimate | None
) -> Iterator[str]:
    """The report for a terminal of 80 columns. enough: the best that fits."""
    length = plan.settings.data.seq_length
    verdict = "it fits" if plan.fits else f"it does NOT fit; most are the {plan.largest}"
    yield f"model      {title(plan.settings.model)}: {found['parameters']:,} parameters"
    yield f"machines   {machines}: {plan.devices} x {plan.instance.device} of {plan.instance.memory:.1f} GB"
    yield f"memory     {'at least ' * (plan.instance.device == 'cpu')}{scaled(plan.total, 'B')} a device: {verdict}"
    yield from (
        f"           {part:<12}{scaled(size, 'B'):>11}"
        for part, size in plan.memory.items()
        if size
    )
    if plan.parts:
        yield (
            f"step       {plan.seconds:.3f} s of {found['global_batch_size']:,} x {length:,} = "
            f"{plan.tokens_per_step:,} tokens"
        )
        yield from (
            f"           {part:<12}{each:>9.3f} s"
            for part, each in plan.parts.items()
            if each >= 5e-4
        )
        yield (
            f"speed      {plan.rate:,.0f} tokens/s, {plan.rate / plan.devices:,.0f} a device, "
            f"{found['share_of_peak']:.0%} of its peak"
        )
        days = found["days"]
        lasts = f"{days:,.1f} days" if days >= 1 else f"{days * 24:.1f} hours"
        yield f"length     {found['tokens']:,} tokens: {lasts}, {found['device_hours']:,.1f} device-hours"
    else:
        yield "step       --instance=NAME, or --memory, --peak and --bandwidth, tell its seconds"
    if "cost" in found:
        yield f"cost       {found['cost']:,.0f} at {found['price']:g} per machine-hour"
    yield (
        f"checkpoint {scaled(found['checkpoint_bytes'], 'B')}: {found['stall_seconds']:.2f} s of standing still, "
        f"{duration(found['write_seconds'])} to write at {found['storage']:g} GB/s"
    )
    yield f"{'':<11}{'nodes':>5}{'batch_size':>12}{'recompute':>11}{'global':>8}{'memory':>11}{'tokens/s':>13}"
    for name, each in {"as given": plan, **({"best": enough} if enough else {})}.items():
        row = each.row()
        yield (
            f"{name:<11}{row['nodes']:>5}{row['batch_size']:>12}{row['recompute']:>11}"
            f"{row['global_batch_size']:>8}{scaled(each.total, 'B'):>11}"
            f"{format(row['tokens_per_second'], ',') if each.parts else '-':>13}"
        )
    if not enough:
        yield "nothing that was tried fits; take a smaller model or seq_length, or larger devices"
