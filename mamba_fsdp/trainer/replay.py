"""Computes steps of a run again from one of its checkpoints, and compares what the run recorded: losses, gradient norms and
later checkpoints. Nothing is written into the run, and its lease stays with whoever has it."""

import contextlib
import math
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.checkpoint.folder import Reader, stored_name
from mamba_fsdp.data.paths import refused
from mamba_fsdp.errors import UserError, counted
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.interop.places import Origin
from mamba_fsdp.parallel.world import World, start_world
from mamba_fsdp.report.console import Console
from mamba_fsdp.run.layout import committed, step_name, step_of
from mamba_fsdp.run.names import CHECKPOINTS, CIRCUMSTANCES, KERNELS, STEPS
from mamba_fsdp.run.records import entries, read
from mamba_fsdp.settings.resolve import from_plain
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.storage.formats import code_digest
from mamba_fsdp.storage.patience import exists
from mamba_fsdp.trainer import loop
from mamba_fsdp.trainer.clock import Clock
from mamba_fsdp.trainer.first_use import repeats
from mamba_fsdp.trainer.process import training_process
from mamba_fsdp.trainer.run import explained
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.setup import SetUp, TrainContext
from mamba_fsdp.trainer.starting_point import StartingPoint, find_start
from mamba_fsdp.trainer.step_stats import StepStats
from mamba_fsdp.trainer.stopping import StopRequest
from mamba_fsdp.trainer.watchdog import watchdog

MOST_STEPS = 200  # unless the user says how many
TOLERANCE = 0.02  # relative, of losses and gradient norms, if bits may differ

say = Console(enabled=False).line


class DifferenceError(UserError):
    """The error if a run did not compute what is computed again."""

    exit_code = 3


@dataclass(frozen=True)
class Span:
    """Steps of a run that one start made, or several alike."""

    run: Path
    first: int  # the step of the checkpoint that they follow
    last: int
    kept: list[int]  # the steps of all checkpoints
    recorded: dict[int, dict[str, Any]]  # {step: its entry in steps.jsonl}
    circumstances: dict[str, Any]  # of their start

    def checkpoint(self, step: int) -> Path:
        return self.run / CHECKPOINTS / step_name(step)


def replay(run: Path, first: int, steps: int) -> None:
    """Says which steps of the run repeat. All ranks call it. first, steps: see find_span.

    Raises DifferenceError, which names the first step or the tensor that differs, and UserError as find_span does and if
    the data has changed or the checkpoint is broken."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.closing(start_world()) as world:
        span = world.on_rank0(find_span, run, first, steps)
        settings = settings_for(span, world.size)
        folder = RunFolder(Path(scratch, "run"))
        with (
            training_process(settings.training.deterministic),
            watchdog(settings.parallel.timeout_minutes, world.rank),
        ):
            try:
                start = world.on_rank0(begin, span, settings, world, folder.path)
                compare(span, SetUp(start, world, folder, say).context())
            except Exception as error:
                raise explained(error, world.rank, has_stepped=False) from None


def find_span(run: Path, first: int, steps: int) -> Span:
    """Returns the `steps` steps after the checkpoint of step `first`, as far as they are recorded and were made alike.

    first: -1 means the newest checkpoint but one. steps: 0 means up to the next checkpoint, at most MOST_STEPS. Raises
    UserError if there is no such checkpoint, or nothing is recorded after it.
    """
    kept = [step_of(path.name) or 0 for path in committed(run / CHECKPOINTS)]
    if not kept:
        raise refused(run, "a run with a checkpoint")
    if first < 0:
        first = kept[-2:][0]
    ends = [first + (steps or MOST_STEPS)]
    if not steps:
        ends += [step for step in kept if step > first]
    circumstances: dict[str, Any] = {}
    changes: list[int] = []  # the steps after which a start changed something
    for event in read(run / CIRCUMSTANCES):
        if event["step"] <= first:
            circumstances = event["circumstances"]
            changes = []
        elif event["circumstances"] != circumstances:
            changes.append(event["step"])
    if not circumstances:
        raise UserError(f"{run} was trained by a version that did not record what a replay needs")
    end = min(ends + changes)
    recorded = {
        entry["step"]: entry for entry, _ in entries(run / STEPS) if first < entry["step"] <= end
    }
    last = max(recorded, default=first)
    if last == first:
        raise UserError(f"{run} records no step after step {first}; choose another with --from")
    return Span(run, first, last, kept, recorded, circumstances)


def settings_for(span: Span, ranks: int) -> TrainConfig:
    """Returns the settings of the steps for so many ranks, with the global batch that they had."""
    settings = from_plain(span.circumstances["settings"])
    settings = settings.changed(save_ckpt_path=str(span.run), eval_prompts="")
    if ranks == span.circumstances["ranks"]:
        return settings
    global_batch = span.circumstances["global_batch"]
    if global_batch % ranks:
        raise UserError(f"start a number of ranks that divides {counted(global_batch, 'sample')}")
    return settings.changed(
        sharding_strategy="auto",
        context_parallel=1,
        global_batch_size=global_batch,
        batch_size=math.gcd(settings.training.batch_size, global_batch // ranks),
    )


def begin(span: Span, settings: TrainConfig, world: World, scratch: Path) -> StartingPoint:
    """Returns the starting point of the replay. Rank 0 calls it. scratch: a folder to make, in place of the run's. Raises
    UserError as find_start does."""
    scratch.mkdir()
    if exists(span.run / KERNELS):
        shutil.copyfile(span.run / KERNELS, scratch / KERNELS)
    checkpoint = span.checkpoint(span.first)
    start = find_start(settings, scratch, world, say, checkpoint)
    # Named, so that none is taken in its place if it is broken.
    return replace(start, origin=Origin("load_ckpt_path", str(checkpoint), is_checkpoint=True))


def compare(span: Span, context: TrainContext) -> None:
    """Takes the steps, and prints that they repeat. Raises DifferenceError."""
    world = context.world
    console = Console(enabled=world.rank == 0)
    causes = causes_of_other_bits(span, context)
    since = ""
    if causes:
        since = f"; not compared bit for bit, since it ran with {', '.join(causes)}"
    clock = Clock(span.first, world.size)
    stop = StopRequest(span.run, on_rank0=False)
    checkpoints = 0
    difference = ""
    with context.loader:
        for step, recorded in span.recorded.items():
            console.passing(f"step {step}/{span.last}")
            stats = loop.count_step(context, loop.take_step(context, clock, stop))
            difference = different_number(recorded, stats, TOLERANCE if causes else 0)
            if step in span.kept and not causes and not difference:
                checkpoints += 1
                difference = different_tensor(context, span.checkpoint(step))
            if difference:
                break
    console.clear()
    if difference:
        if span.circumstances["code"] != code_digest():
            since = f"; the code has changed since then{since}"
        raise DifferenceError(f"step {step} of {span.run} differs: {difference}{since}")
    how = f"within {TOLERANCE:.0%}" if causes else "bit for bit"
    compared = f"{counted(len(span.recorded), 'loss')}, {counted(checkpoints, 'checkpoint')}"
    console.line(
        f"steps {span.first} to {span.last} of {span.run} repeat {how} ({compared}){since}"
    )


def causes_of_other_bits(span: Span, context: TrainContext) -> list[str]:
    """Returns, in words, why the steps may have other bits here though all is right; [] if nothing is known to change
    them. Other code may or may not."""
    causes = [
        f"{name} {span.circumstances[name]} (here {here})"
        for name, here in context.circumstances().items()
        if name not in ("code", "settings") and span.circumstances[name] != here
    ]
    on_gpu = context.world.device.type == "cuda"
    if on_gpu and not repeats(context.settings, context.kernels.backends):
        causes.append("kernels that repeat their bits only with deterministic=true")
    return causes


def different_number(recorded: dict[str, Any], stats: StepStats, tolerance: float) -> str:
    """Returns in words how a step's loss or gradient norm differs from what is recorded; "" if they agree."""
    for name, now in (("loss", stats.loss), ("grad_norm", stats.gradient_norm)):
        then = recorded[name]  # None if it was not finite: then the step was skipped
        if then and not abs(now - then) <= tolerance * abs(then):
            return f"its {name} was {then}, and is {now} now"
    return ""


def different_tensor(context: TrainContext, checkpoint: Path) -> str:
    """Returns in words which tensors of model and optimiser differ from those in a checkpoint; "" if they agree."""
    reader = Reader(checkpoint, read_contents(checkpoint))

    def compare_shards() -> list[str]:
        differing = []
        for shard in context.parallel.shards(context.optimizer):
            name = stored_name(shard.name)
            kept = reader.read(name, shard.start, shard.start + len(shard.data))
            if not torch.equal(shard.data.cpu(), kept):
                differing.append(name)
            heart.beat()
        return differing

    world = context.world
    names = world.gather_unique(world.on_all_ranks(compare_shards))
    if not names:
        return ""
    return f"{names[0]} is not what {checkpoint} holds, one of {counted(len(names), 'tensor')}"
