"""Repeats steps of a run and compares the results with the records of the run, to find silent hardware faults."""

import contextlib
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.checkpoint.folder import Reader, stored_name
from mamba_fsdp.checkpoint.restore import verify
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.kinds import unexpected_path_error
from mamba_fsdp.interop.places import Origin
from mamba_fsdp.ops import cpp
from mamba_fsdp.parallel.world import World, start_world
from mamba_fsdp.reporting.console import Console, discard_line
from mamba_fsdp.run.layout import checkpoints_by_step, step_name
from mamba_fsdp.run.names import CHECKPOINTS, EVENTS, KERNELS, STEPS
from mamba_fsdp.run.records import flatten_numbers, iterate_entries, read_starts
from mamba_fsdp.settings import resolve
from mamba_fsdp.storage.retry import copy_file, exists
from mamba_fsdp.storage.typed_json import FileName, at_least, from_json
from mamba_fsdp.text import format_count
from mamba_fsdp.trainer import loop
from mamba_fsdp.trainer.kernel_selection import is_reproducible
from mamba_fsdp.trainer.process import training_process
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.setup import RunSetup, TrainContext
from mamba_fsdp.trainer.starting_point import StartingPoint, find_starting_point
from mamba_fsdp.trainer.step_stats import StepStats

MAX_REPLAYED = 200  # the largest number of steps to repeat, if the user does not give a number
COMPARED_METRICS = {"loss", "grad_norm"}
# Relative difference allowed for losses and gradient norms if their bits can differ.
TOLERANCE = 0.02


class DifferenceError(UserError):
    """The error if a repeated step gives a different result."""

    exit_code = 3


@dataclass
class StartEvent:
    """The event of the start that made the recorded steps."""

    HAS_OTHER_FIELDS = True
    settings: FileName
    device: str
    kernels: str
    torch: str
    code: str
    ranks: int = at_least(1)
    ranks_per_node: int = at_least(1)
    global_batch: int = at_least(1)


class StepRange(NamedTuple):
    """A range of steps that one start of a run made."""

    run: Path
    first: int  # the step of the checkpoint that the range starts from
    kept: dict[int, Path]  # {step: path} of the run's checkpoints
    last: int  # the last step of the range
    recorded: dict[int, dict[str, Any]]  # {step: {metric: recorded value}}
    start: StartEvent


def replay(run: Path, first: int, count: int) -> None:
    """Repeats steps of a run, and compares the results with the records of the run. All ranks call it.

    Prints a line if they agree. The run folder is not changed, and its lease is not needed. first, count: see
    find_step_range.

    Raises DifferenceError with the first step or tensor that differs. Raises UserError if no steps can be repeated, if
    the data has changed, or if the checkpoint is damaged.
    """
    with tempfile.TemporaryDirectory() as place, contextlib.closing(start_world()) as world:
        cpp.tune_process(world.device.type)
        # Use a temporary run folder, so that the folder of the repeated run is not changed.
        folder = RunFolder(Path(place, "run"))
        span = world.on_rank0(find_step_range, run, first, count)
        start = world.on_rank0(prepare_replay, span, world, folder)
        with (
            contextlib.closing(folder.lease),
            training_process(start.settings.training.deterministic),
        ):
            compare(span, RunSetup(start, world, folder, discard_line).make_context())


def find_step_range(run: Path, first: int, count: int) -> StepRange:
    """Finds the steps to repeat: `count` steps after the checkpoint of step `first`, or fewer.

    The range is shorter if the run recorded fewer steps, or if the run was restarted within it: it then ends at the
    step of the restart. first: -1 means the second newest checkpoint. count: 0 means up to the next checkpoint, and at
    most MAX_REPLAYED steps.

    Raises UserError if the run has no checkpoint, if no step after `first` is recorded, or if the event of the start that
    took these steps is missing or damaged. `prepare_replay` raises UserError if there is no checkpoint of step `first`.
    """
    kept = checkpoints_by_step(run)
    if not kept:
        raise unexpected_path_error(run, "a run with a checkpoint")
    if first < 0:
        first = [*kept][-2:][0]
    starts = read_starts(run)
    restarts = [start["step"] for start in starts if start["step"] > first]
    checkpoints = [step for step in kept if step > first]
    end = min([first + (count or MAX_REPLAYED), *restarts, *([] if count else checkpoints)])
    recorded = read_recorded_steps(run, first, end)
    # A restart or a checkpoint proves that the run made the steps before it, even if they are not recorded.
    made = [step for step in [*recorded, *restarts, *checkpoints] if step <= end]
    before = [start for start in starts if start["step"] <= first]
    if not recorded or not before or "code" not in before[-1]:
        raise UserError(
            f"{run} has no record of a step after step {first} (runs of older versions have none at all); give an earlier "
            "checkpoint with --from (with keep_checkpoints and keep_every, a run keeps more of them)"
        )
    try:
        start = from_json(StartEvent, before[-1])
    except ValueError as error:
        raise UserError(
            f"{run / EVENTS}: the event of the start at step {before[-1]['step']} is damaged: {error}; choose another checkpoint with --from"
        ) from None
    return StepRange(run, first, kept, max(made), recorded, start)


def read_recorded_steps(run: Path, first: int, last: int) -> dict[int, dict[str, Any]]:
    """Returns {step: {metric: value}} for the steps after `first`, up to `last`, whose loss and gradient norm are recorded."""
    recorded = {}
    for entry, _ in iterate_entries(run / STEPS):
        numbers = flatten_numbers(entry)
        if first < entry["step"] <= last and COMPARED_METRICS <= numbers.keys():
            recorded[entry["step"]] = numbers
    return recorded


def prepare_replay(span: StepRange, world: World, scratch: RunFolder) -> StartingPoint:
    """Prepares the temporary run folder, and returns the starting point of the replay. Only rank 0 calls it.

    scratch: the temporary run folder; its path must not exist yet. Raises UserError if settings, data and checkpoint
    do not fit together.
    """
    scratch.path.mkdir()
    scratch.lease.acquire(discard_line, "")
    if exists(span.run / KERNELS):  # a run on a CPU does not write this file
        copy_file(span.run / KERNELS, scratch.path / KERNELS)
    then = span.start
    settings = resolve.read_settings_copy(span.run / then.settings)
    settings = settings.with_values(save_ckpt_path=str(span.run), eval_prompts="")
    if world.size != then.ranks:
        settings = settings.with_values(
            sharding_strategy="auto",
            context_parallel=1,
            global_batch_size=then.global_batch,
            batch_size=math.gcd(settings.training.batch_size, then.global_batch // world.size),
        )
    checkpoint = span.run / CHECKPOINTS / step_name(span.first)
    start = find_starting_point(settings, scratch.path, world, discard_line, checkpoint)
    # Start from exactly this checkpoint: if it is damaged, an older one must not be used instead.
    return replace(start, origin=Origin("load_ckpt_path", str(checkpoint), is_checkpoint=True))


def compare(span: StepRange, context: TrainContext) -> None:
    """Repeats the steps, and compares the results with the records. Prints a line if they agree. All ranks call it.

    Raises DifferenceError at the first difference. Raises UserError if the data has changed, or if a checkpoint to
    compare with is damaged.
    """
    console = Console(enabled=context.world.rank == 0)
    changes = list_changes(span.start, context)
    tolerance = TOLERANCE if changes else 0
    since = ""
    if changes:
        since = f"; not compared bit for bit, since it ran with {', '.join(changes)}"
    if span.start.code != context.environment_fingerprint()["code"]:
        since += "; the code has changed since then"  # changed code often gives the same bits
    checkpoints = 0
    last = span.last
    for step, stats in zip(range(span.first + 1, last + 1), loop.iterate_steps(context)):
        console.show_progress(f"step {step}/{last}")
        difference = ""
        if step in span.recorded:
            difference = compare_numbers(span.recorded[step], stats, tolerance)
        if step in span.kept and not tolerance and not difference:
            checkpoints += 1
            difference = compare_tensors(context, span.kept[step])
        if difference:
            console.clear()
            context.world.on_all_ranks(check_data, context)
            raise DifferenceError(f"step {step} of {span.run} differs: {difference}{since}")
    how = f"within {TOLERANCE:.0%}" if tolerance else "bit for bit"
    compared = (
        f"{format_count(len(span.recorded), 'loss')}, {format_count(checkpoints, 'checkpoint')}"
    )
    missing = last - span.first - len(span.recorded)
    if missing:
        compared += f"; {format_count(missing, 'step')} without a loss or a norm in {STEPS}"
    console.print_line(
        f"steps {span.first} to {last} of {span.run} repeat {how} ({compared}){since}"
    )


def check_data(context: TrainContext) -> None:
    """Raises UserError if the data files have changed since they were written.

    In this case, the hardware is not to blame for a difference.
    """
    for source in context.data.sources.values():
        if isinstance(source, TokenStore):
            source.verify(only_used=True)


def list_changes(start: StartEvent, context: TrainContext) -> list[str]:
    """Describes each difference between the run and this replay that changes the bits of a step, apart from the code."""
    then = vars(start)
    now = context.environment_fingerprint()
    names = ("ranks", "ranks_per_node", "device", "kernels", "torch")
    changes = [
        f"{name.replace('_', ' ')} {then[name]} (here {now[name]})"
        for name in names
        if then[name] != now[name]
    ]
    on_gpu = context.world.device.type == "cuda"
    if on_gpu and not is_reproducible(context.settings, context.kernels.backends):
        changes.append("kernels that repeat their bits only with deterministic=true")
    return changes


def compare_numbers(recorded: dict[str, Any], stats: StepStats, tolerance: float) -> str:
    """Returns how loss or gradient norm of a step differ from the recorded values, or "" if they agree.

    tolerance: the relative difference that is allowed.
    """
    for name, now in (("loss", stats.loss), ("grad_norm", stats.gradient_norm)):
        then = recorded[name]
        if then is None:  # the recorded value was not finite, and the step was skipped
            is_equal = not math.isfinite(now)
        else:
            is_equal = abs(now - then) <= tolerance * abs(then)
        if not is_equal:
            return f"its {name} was {then}, and is {now} now"
    return ""


def compare_tensors(context: TrainContext, checkpoint: Path) -> str:
    """Returns how the tensors of model and optimizer differ from a checkpoint, or "" if they agree.

    All ranks call it. Raises UserError if the checkpoint is damaged.
    """
    problems = verify(checkpoint, context.world)
    if problems:
        raise UserError(
            f"checkpoint {checkpoint} is broken: {'; '.join(problems)}; choose another one with --from"
        )
    reader = Reader(checkpoint, read_contents(checkpoint))

    def differing() -> list[str]:
        names = []
        for shard in context.parallel.shards(context.optimizer):
            name = stored_name(shard.name)
            kept = reader.read(name, shard.start, shard.start + len(shard.data))
            if not torch.equal(shard.data.cpu(), kept):
                names.append(name)
        return names

    names = context.world.gather_unique(context.world.on_all_ranks(differing))
    if not names:
        return ""
    return f"{names[0]} differs from {checkpoint} ({format_count(len(names), 'tensor')} in all)"
