"""Runs one training: its start, its end, and the status that it leaves when it fails; and steps apart from a run's own, to
measure the pace or to compare a run's steps with what it recorded."""

import contextlib
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.checkpoint.folder import Reader, stored_name
from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.data.paths import refused
from mamba_fsdp.data.selection import one_for_all
from mamba_fsdp.errors import UserError, counted, first_line
from mamba_fsdp.interop.places import Origin
from mamba_fsdp.ops import cpp
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World, lost_rank, start_world
from mamba_fsdp.report.console import Console, Say
from mamba_fsdp.run.layout import committed, step_name, step_of
from mamba_fsdp.run.names import CHECKPOINTS, CIRCUMSTANCES, KERNELS, MODELS, SETTINGS, STEPS
from mamba_fsdp.run.records import add_event, entries, latest, read
from mamba_fsdp.settings import resolve
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.storage.patience import write_for_user
from mamba_fsdp.trainer import loop
from mamba_fsdp.trainer.first_use import repeats
from mamba_fsdp.trainer.metrics_logger import MetricsLogger
from mamba_fsdp.trainer.process import training_process
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.setup import TAKES_LESS, SetUp, TrainContext
from mamba_fsdp.trainer.starting_point import StartingPoint, find_start
from mamba_fsdp.trainer.step_stats import StepStats
from mamba_fsdp.trainer.stopping import OnRecord, StopRequest
from mamba_fsdp.trainer.watchdog import watchdog

UNTIMED_STEPS = 2  # the first, which make buffers and compile kernels
LEAST_STEPS = 5  # of measure_pace
TIMED_SECONDS = 6.0  # unless so many steps take longer
MOST_REPLAYED = 200  # steps, unless the user says how many
TOLERANCE = 0.02  # relative, of replayed losses and gradient norms if bits may differ
OTHER_BITS = "; not compared bit for bit, since it ran with"
quiet = Console(enabled=False).line
WriteModel = Callable[[Path, Path], object]  # (checkpoint, folder to write, which may exist)


class Trained(NamedTuple):
    """How a training ended, the same on all ranks. It can be used as a path."""

    folder: Path  # of the run
    stopped: str  # why it stopped before its last step; "" if it has all its steps
    last: dict[str, Any]  # the latest value of each key of metrics.jsonl, such as val_loss

    def __fspath__(self) -> str:
        return str(self.folder)


def run_training(
    settings: TrainConfig,
    write_model: WriteModel | None = None,
    on_record: OnRecord | None = None,
    planned: tuple[int, int] | None = None,
) -> Trained:
    """Trains as the settings say, from the newest checkpoint of the run folder or from the start.

    write_model: writes the finished model from the last checkpoint. on_record: see StopRequest. planned: the number of
    ranks, and of ranks on a node, if a dry run in a single process stands for them.
    """
    with training_process(settings.training.deterministic):
        return _run_training(settings, write_model, on_record, planned)


def _run_training(
    settings: TrainConfig,
    write_model: WriteModel | None,
    on_record: OnRecord | None,
    planned: tuple[int, int] | None,
) -> Trained:
    folder = RunFolder(settings.checkpoint.save_ckpt_path)
    world = start_world(timeout_minutes=settings.parallel.timeout_minutes)
    shape = world  # of all ranks
    if planned:
        shape = replace(world, size=planned[0], local_size=planned[1])
    cpp.tune_process(world.device.type)
    console = Console(enabled=world.rank == 0)
    state = TrainState()
    is_dry = settings.training.dry_run
    stop = StopRequest(folder.path, world.rank == 0 and not is_dry, on_record)
    try:
        with (
            contextlib.closing(world),
            watchdog(settings.parallel.timeout_minutes, world.rank),
        ):
            start = world.on_rank0(begin, settings, folder, shape, console.line)
            if not is_dry:
                console.line(f"run        {folder.path}")
            for note in start.notes:
                console.line(f"settings   {note}")
            with stop:
                set_up = SetUp(start, world, folder, console.line)
                if is_dry:
                    set_up.show(shape)
                    return Trained(folder.path, "dry run", {})
                context = set_up.context()
                state = context.state
                with contextlib.closing(context.checkpointer):
                    stopped = train(context, folder, stop, console)
                checkpoint = context.checkpointer.last
                del context  # model and optimizer, before the world is closed
                last = world.on_rank0(latest, folder.path)
        if checkpoint and not stopped and world.rank == 0:
            if not settings.checkpoint.publish:
                write_model = None
            finish(folder, checkpoint, write_model, console)
    except BaseException as raised:
        error = explained(raised, world.rank, stop.has_stepped)
        if isinstance(error, KeyboardInterrupt) and not stop.has_stepped:
            console.line("stopped    before the first step of this start: nothing was lost")
        folder.write_failure(state.step, error)
        if error is raised:
            raise
        raise error from raised
    finally:
        folder.lease.close()
    return Trained(folder.path, stopped, last)


def begin(settings: TrainConfig, folder: RunFolder, shape: World, say: Say) -> StartingPoint:
    """Acquires the run folder, except for a dry run, then returns what the run starts from. The order matters: the former
    holder of the folder may have left the run's first checkpoint. Rank 0 calls it. shape: the number of all ranks, and
    their device."""
    if not settings.training.dry_run:
        folder.acquire()
    return find_start(settings, folder.path, shape, say)


def explained(error: BaseException, rank: int, has_stepped: bool) -> BaseException:
    """Returns an Accident in place of the error of communicating with a rank that is gone, a UserError in place of
    PyTorch's out-of-memory error, and any other error as it is.

    Before the first step is done, too little memory means that the settings ask for too much. Later, memory may run
    out by accident, and a restart helps."""
    accident = lost_rank(error, rank)
    if accident:
        return accident
    is_out_of_memory = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError)
        and re.search("can't allocate memory|Storage size calculation overflowed", str(error))
    )
    if not is_out_of_memory or has_stepped:
        return error
    return UserError(f"rank {rank} has too little memory: {TAKES_LESS} ({first_line(error)[:200]})")


def train(context: TrainContext, folder: RunFolder, stop: StopRequest, console: Console) -> str:
    """Returns why the run stopped, or "" if it has all its steps. Runs the loop and records its start
    and its end in the run folder."""
    state = context.state
    world = context.world
    schedule = context.schedule
    if not state.first_started:
        state.first_started = context.settings.began
    validation_due = context.start.validation_due
    is_over = state.step >= schedule.total_steps
    if is_over and not validation_due:
        what = f"already has all its {counted(state.step, 'step')}"
        if state.step > schedule.total_steps:
            what = f"is already past {schedule.total_steps}: it has {counted(state.step, 'step')}"
        console.line(f"over       {folder.path} {what}; raise num_steps to train on")
        return ""
    shards = [] if is_over else context.parallel.shards(context.optimizer)
    world.on_all_ranks(prepare, context, folder, shards)
    with context.loader, MetricsLogger(context, folder, console, stop.hear) as logger:
        console.passing("the first step ...")
        reason = world.broadcast_object(loop.train(context, logger, stop, validation_due))
    if not reason:
        return ""
    world.on_rank0(folder.write_status, "stopped", state.step, reason)
    if stop.has_stepped:
        how = f"at step {state.step} ({reason}); the same command resumes from here"
    else:
        how = f"before the first step of this start ({reason}): nothing was lost"
    console.line(f"stopped    {how}")
    return reason


def prepare(context: TrainContext, folder: RunFolder, shards: Sequence[Shard]) -> None:
    """Makes room for saves of the shards. Writes the settings, the tokenizer and the start into the run folder, on rank
    0. All ranks call it."""
    context.checkpointer.make_room(shards)
    if context.world.rank == 0:
        write_for_user(folder.path / SETTINGS, resolve.as_yaml(context.settings))
        folder.copy_tokenizer(one_for_all(context.data.sources.values()))
        facts = {"ranks": context.world.size, "from": context.start.begins}
        if context.start.changed:
            facts["changed"] = context.start.changed
        step = context.state.step
        add_event(folder.path, "started", step, **facts)
        circumstances = context.circumstances()
        add_event(folder.path, "started", step, CIRCUMSTANCES, circumstances=circumstances)


def finish(
    folder: RunFolder, checkpoint: Path, write_model: WriteModel | None, console: Console
) -> None:
    """Writes the whole model as one file, then the status `finished`: whoever reads this status
    finds the model. Rank 0 calls it after the process group has ended: writing a large model may
    take longer than the other ranks would wait."""
    step = step_of(checkpoint.name) or 0
    if write_model:
        write_model(checkpoint, folder.path / MODELS / checkpoint.name)
    folder.write_status("finished", step)
    console.line(f"finished   {counted(step, 'step')}; everything is in {folder.path}")


def measure_pace(settings: TrainConfig) -> float:
    """Returns the tokens a second of training steps on this process's device, without validation and checkpoints.
    Nothing of the steps is kept. Raises UserError as training does."""
    deterministic = settings.training.deterministic
    seconds: list[float] = []
    with training_process(deterministic), tempfile.TemporaryDirectory() as place:
        world = start_world()
        cpp.tune_process(world.device.type)
        folder = RunFolder(Path(place, "run"))
        (folder.path / CHECKPOINTS).mkdir(parents=True)
        run = str(folder.path)
        of_random = settings.changed(save_ckpt_path=run, load_ckpt_path="", init_from="")
        start = find_start(of_random, folder.path, world, quiet)
        context = SetUp(start, world, folder, quiet).context()
        steps = loop.bare_steps(context)
        while len(seconds) < LEAST_STEPS or sum(seconds) < TIMED_SECONDS:
            began = time.perf_counter()
            next(steps)
            seconds.append(time.perf_counter() - began)
    # The mean, as a run shows it: it includes steps that other programs slow down.
    return context.schedule.tokens_per_step / statistics.mean(seconds[UNTIMED_STEPS:])


class DifferenceError(UserError):
    """The error if a run did not compute what is computed again."""

    exit_code = 3


class Span(NamedTuple):
    """Steps of a run that one start made."""

    run: Path
    first: int  # the step of the checkpoint that they follow
    kept: dict[int, Path]  # the checkpoint of each step
    recorded: dict[int, dict[str, Any]]  # {step: its entry in steps.jsonl}
    circumstances: dict[str, Any]  # of the start


def replay(run: Path, first: int, count: int) -> None:
    """Computes steps of a run again, compares them with what the run recorded, and prints that they repeat. All ranks call
    it. first, count: see find_span. Nothing is written into the run, and its lease stays with whoever has it.

    Raises DifferenceError, which names the first step or tensor that differs, and UserError as find_span does and if the
    data has changed or the checkpoint is broken."""
    with tempfile.TemporaryDirectory() as place, contextlib.closing(start_world()) as world:
        cpp.tune_process(world.device.type)
        folder = RunFolder(Path(place, "run"))  # in place of the run's
        span = world.on_rank0(find_span, run, first, count)
        start = world.on_rank0(begin_replay, span, world, folder.path)
        with training_process(start.settings.training.deterministic):
            compare(span, SetUp(start, world, folder, quiet).context())


def find_span(run: Path, first: int, count: int) -> Span:
    """Returns `count` steps after the checkpoint of step `first`, as far as they are recorded and the run was not started
    again in between.

    first: -1 means the newest checkpoint but one. count: 0 means up to the next checkpoint, at most MOST_REPLAYED. Raises
    UserError if there is no such checkpoint, or nothing is recorded after it.
    """
    kept = {step_of(path.name) or 0: path for path in committed(run / CHECKPOINTS)}
    if not kept:
        raise refused(run, "a run with a checkpoint")
    if first < 0:
        first = [*kept][-2:][0]
    starts = read(run / CIRCUMSTANCES)
    circumstances = [start["circumstances"] for start in starts if start["step"] <= first]
    ends = [start["step"] for start in starts if start["step"] > first]
    ends.append(first + (count or MOST_REPLAYED))
    if not count:
        ends += [step for step in kept if step > first]
    recorded = {}
    for entry, _ in entries(run / STEPS):
        if first < entry["step"] <= min(ends):
            recorded[entry["step"]] = entry
    if not (circumstances and recorded):
        raise UserError(
            f"{run} records no step after step {first}, and runs of older versions record none; give --from an earlier "
            "checkpoint (keep_checkpoints and keep_every keep more)"
        )
    return Span(run, first, kept, recorded, circumstances[-1])


def begin_replay(span: Span, world: World, scratch: Path) -> StartingPoint:
    """Returns the starting point of the replay. Rank 0 calls it. scratch: a folder to make. Raises UserError as find_start
    does."""
    scratch.mkdir()
    with contextlib.suppress(FileNotFoundError):  # a run on a CPU has none
        (scratch / KERNELS).write_bytes((span.run / KERNELS).read_bytes())
    then = span.circumstances
    settings = resolve.from_plain(then["settings"])
    settings = settings.changed(save_ckpt_path=str(span.run), eval_prompts="")
    if world.size != then["ranks"]:
        settings = settings.changed(
            sharding_strategy="auto",
            context_parallel=1,
            global_batch_size=then["global_batch"],
            batch_size=math.gcd(settings.training.batch_size, then["global_batch"] // world.size),
        )
    checkpoint = span.run / CHECKPOINTS / step_name(span.first)
    start = find_start(settings, scratch, world, quiet, checkpoint)
    # Named, so that none is taken in its place if it is broken.
    return replace(start, origin=Origin("load_ckpt_path", str(checkpoint), is_checkpoint=True))


def compare(span: Span, context: TrainContext) -> None:
    """Takes the steps, and prints that they repeat. Raises DifferenceError."""
    console = Console(enabled=context.world.rank == 0)
    since = reasons_to_differ(span.circumstances, context)
    tolerance = TOLERANCE if OTHER_BITS in since else 0
    checkpoints = 0
    last = max(span.recorded)
    for step, stats in zip(range(span.first + 1, last + 1), loop.bare_steps(context)):
        console.passing(f"step {step}/{last}")
        difference = different_number(span.recorded.get(step, {}), stats, tolerance)
        if step in span.kept and not tolerance and not difference:
            checkpoints += 1
            difference = different_tensor(context, span.kept[step])
        if difference:
            console.clear()
            raise DifferenceError(f"step {step} of {span.run} differs: {difference}{since}")
    how = f"within {TOLERANCE:.0%}" if tolerance else "bit for bit"
    compared = f"{counted(len(span.recorded), 'loss')}, {counted(checkpoints, 'checkpoint')}"
    console.line(f"steps {span.first} to {last} of {span.run} repeat {how} ({compared}){since}")


def reasons_to_differ(then: dict[str, Any], context: TrainContext) -> str:
    """Returns, in words, why steps may differ here though all is right; "" if nothing is known. then: the circumstances of
    their start. Other code alone need not change the bits."""
    now = context.circumstances()
    names = ("ranks", "ranks per node", "device", "kernels", "torch")
    others = [
        f"{name} {then[name]} (here {now[name]})" for name in names if then[name] != now[name]
    ]
    on_gpu = context.world.device.type == "cuda"
    if on_gpu and not repeats(context.settings, context.kernels.backends):
        others.append("kernels that repeat their bits only with deterministic=true")
    said = f"{OTHER_BITS} {', '.join(others)}" if others else ""
    return said if then["code"] == now["code"] else f"{said}; the code has changed since then"


def different_number(recorded: dict[str, Any], stats: StepStats, tolerance: float) -> str:
    """Returns in words how a step's loss or gradient norm differs from what is recorded; "" if they agree."""
    for name, now in (("loss", stats.loss), ("grad_norm", stats.gradient_norm)):
        then = recorded.get(name)  # null if it was not finite: then the step was skipped
        if then and not abs(now - then) <= tolerance * abs(then):
            return f"its {name} was {then}, and is {now} now"
    return ""


def different_tensor(context: TrainContext, checkpoint: Path) -> str:
    """Returns in words which tensors of model and optimiser differ from those in a checkpoint; "" if they agree."""
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
    return (
        f"{names[0]} is not what {checkpoint} holds, of {counted(len(names), 'tensor')}"
        if names
        else ""
    )
