"""Runs one training from start to end, and records its status."""

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.data.selection import representative_source
from mamba_fsdp.errors import UserError, out_of_memory_message
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.ops import cpp
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World, peer_lost_error, start_world
from mamba_fsdp.reporting.console import Console, PrintLine, discard_line
from mamba_fsdp.run.layout import PUBLISHING_BYTES_PER_PARAMETER, step_of
from mamba_fsdp.run.names import CHECKPOINTS, MODEL_FOLDERS
from mamba_fsdp.run.records import command_seconds, latest_values
from mamba_fsdp.settings import resolve
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.storage.retry import exists, make_folder, storage_error, sync_folder
from mamba_fsdp.text import format_count
from mamba_fsdp.trainer import loop
from mamba_fsdp.trainer.metrics_logger import MetricsLogger
from mamba_fsdp.trainer.process import training_process
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.setup import RunSetup, TrainContext
from mamba_fsdp.trainer.starting_point import StartingPoint, find_starting_point
from mamba_fsdp.trainer.stopping import OnRecord, StopRequest
from mamba_fsdp.trainer.watchdog import watchdog

# measure_tokens_per_second takes at least this many steps, and continues for at least this many seconds.
MIN_TIMED_STEPS = 5
MIN_TIMED_SECONDS = 6.0
# The first steps are not timed, because they allocate buffers and compile kernels.
UNTIMED_STEPS = 2
WriteModel = Callable[[Path, Path], object]  # its arguments: (checkpoint, new folder to write)


class TrainResult(NamedTuple):
    """The result of a training, the same on all ranks. It can be used as the path of the run folder."""

    folder: Path  # the run folder
    stopped: str  # the reason to stop early; "" if the run has all its steps
    last: dict[str, Any]  # the latest value of each key in metrics.jsonl, such as val_loss

    def __fspath__(self) -> str:
        return str(self.folder)


def run_training(
    settings: TrainConfig,
    write_model: WriteModel | None = None,
    on_record: OnRecord | None = None,
    planned: tuple[int, int] | None = None,
) -> TrainResult:
    """Trains with the given settings, from the newest checkpoint of the run folder if there is one. All ranks call it.

    write_model: writes the finished model of a checkpoint to a new folder. on_record: see StopRequest. planned: (number
    of ranks, ranks per node) that a dry run plans for, if it does not plan for its own single process.

    Raises UserError if the run can't start, or if it has to end before its last step.
    """
    with training_process(settings.training.deterministic):
        trained = _run_training(settings, write_model, on_record, planned)
    # Release GPU memory to this process's later work and to other processes.
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
    return trained


def _run_training(
    settings: TrainConfig,
    write_model: WriteModel | None,
    on_record: OnRecord | None,
    planned: tuple[int, int] | None,
) -> TrainResult:
    folder = RunFolder(settings.checkpoint.save_ckpt_path)
    world = start_world(timeout_minutes=settings.parallel.timeout_minutes)
    shape = world  # the ranks to plan for
    if planned:
        shape = replace(world, size=planned[0], local_size=planned[1])
    cpp.tune_process(world.device.type)
    console = Console(enabled=world.rank == 0)
    state = TrainState()
    is_dry = settings.training.dry_run
    stop = StopRequest(folder.path, world.rank == 0 and not is_dry, on_record, folder.lease.remove)
    try:
        with (
            contextlib.closing(world),
            watchdog(settings.parallel.timeout_minutes, world.rank),
        ):
            start = world.on_rank0(
                acquire_and_find_start, settings, folder, shape, console.print_line
            )
            console.print_line(f"run        {folder.path}")
            optimizer = start.settings.optimizer
            console.print_line(
                f"training   {optimizer.optimizer}, learning rate {optimizer.learning_rate:g} "
                f"({start.settings.lr_schedule.schedule}), recipe {optimizer.recipe}, "
                f"seed {start.settings.training.seed}"
            )
            for note in start.notes:
                console.print_line(f"settings   {note}")
            with stop:
                setup = RunSetup(start, world, folder, console.print_line)
                if is_dry:
                    setup.print_plan(shape)
                    over = completion_message(setup.start)
                    if over:
                        console.print_line(over)
                    return TrainResult(folder.path, "dry run", {})
                context = setup.make_context()
                state = context.state
                with contextlib.closing(context.checkpointer):
                    stopped = run_loop(context, folder, stop, console)
                checkpoint = context.checkpointer.last
                needed = PUBLISHING_BYTES_PER_PARAMETER * parameter_count(context.settings.model)
                make_room = partial(
                    context.checkpointer.retention.free_space, needed, "the model's files"
                )
                del context  # free model and optimizer before the process group ends
                last = world.on_rank0(latest_values, folder.path)
        if checkpoint and not stopped and world.rank == 0:
            if not settings.checkpoint.publish:
                write_model = None
            publish_model(folder, checkpoint, write_model, make_room, console)
    except BaseException as raised:
        error = translate_error(raised, world.rank, stop.has_stepped)
        if isinstance(error, KeyboardInterrupt) and not stop.has_stepped:
            console.print_line("stopped    before the first step of this start: nothing was lost")
        folder.write_failure(state.step, error)
        if error is raised:
            raise
        raise error from raised
    finally:
        folder.lease.close()
    return TrainResult(folder.path, stopped, last)


def acquire_and_find_start(
    settings: TrainConfig, folder: RunFolder, shape: World, print_line: PrintLine
) -> StartingPoint:
    """Acquires the run folder, except in a dry run, and then finds the starting point. Only rank 0 calls it.

    The order matters, because the former owner of the folder can have written a checkpoint just before. shape: the
    number of ranks and their device.

    Raises UserError if another process uses the folder, or if settings, data and checkpoint do not fit together.
    """
    if not settings.training.dry_run:
        folder.acquire()
    return find_starting_point(settings, folder.path, shape, print_line)


def translate_error(error: BaseException, rank: int, has_stepped: bool) -> BaseException:
    """Translates an error into one that determines whether the launcher restarts the ranks.

    If the connection to another rank was lost, returns a TransientError. If memory ran out before the first step, the
    settings need too much memory, and a UserError is returned. If memory runs out later, a restart can help: such an
    error, and any other error, is returned unchanged.

    rank: the number of this rank. has_stepped: whether the first step has been completed.
    """
    accident = peer_lost_error(error, rank)
    if accident:
        return accident
    message = out_of_memory_message(error, f"rank {rank}")
    if not message or has_stepped:
        return error
    return UserError(message)


def run_loop(context: TrainContext, folder: RunFolder, stop: StopRequest, console: Console) -> str:
    """Runs the training loop, and records its start and its end in the run folder.

    Returns the reason to stop early, or "" if the run has all its steps.
    """
    state = context.state
    world = context.world
    if not state.first_started:
        state.first_started = context.settings.began
    validation_due = context.start.validation_due
    is_over = completion_message(context.start)
    if is_over and not validation_due:
        console.print_line(is_over)
        return ""
    shards = [] if is_over else context.parallel.shards(context.optimizer)
    world.on_all_ranks(record_start, context, folder, shards)
    with context.loader, MetricsLogger(context, folder, console, stop.handle_record) as logger:
        console.show_progress("the first step ...")
        reason = world.broadcast_object(loop.train(context, logger, stop, validation_due))
    if not reason:
        return ""
    world.on_rank0(folder.write_status, "stopped", state.step, reason)
    if stop.has_stepped:
        how = f"at step {state.step} ({reason}); the same command resumes from here"
    else:
        how = f"before the first step of this start ({reason}): nothing was lost"
    console.print_line(f"stopped    {how}")
    return reason


def completion_message(start: StartingPoint) -> str:
    """Returns the log line for a run that already has all its steps; "" for any other run."""
    step = start.state.step
    if not start.schedule or step < start.schedule.total_steps:
        return ""
    what = f"already has all its {format_count(step, 'step')}"
    if step > start.schedule.total_steps:
        what = f"has {format_count(step, 'step')} already, more than num_steps={start.schedule.total_steps}"
    folder = start.settings.checkpoint.save_ckpt_path
    return f"complete   {folder} {what}; raise num_steps to train on"


def record_start(context: TrainContext, folder: RunFolder, shards: Sequence[Shard]) -> None:
    """Reserves memory and disk space for saves. On rank 0, also records the start in the run folder.

    All ranks call it. Rank 0 writes the settings, the tokenizer, and an event about the start. shards: the tensors that
    will be saved. Raises UserError if there is too little space.
    """
    context.checkpointer.reserve_space(shards)
    if context.world.rank == 0:
        settings = context.settings
        folder.copy_tokenizer(representative_source(context.data.sources.values()))
        folder.earlier_seconds = min(
            command_seconds(folder.path, settings.began),
            settings.began - context.state.first_started,  # this difference is 0 at the first start
        )
        folder.read_node_losses()
        shares = context.data.shares
        total = sum(shares.values())
        facts: dict[str, object] = {
            "from": context.start.origin_description,
            **context.environment_fingerprint(),
            "settings": folder.write_settings(resolve.as_yaml(settings)),
            "weights": {name: round(share / total, 4) for name, share in shares.items()},
            "peak_learning_rate": settings.optimizer.learning_rate,
            "seconds_to_start": round(time.time() - settings.began, 1),
            "seconds_of_earlier_commands": round(folder.earlier_seconds, 1),
        }
        if context.start.changed:
            facts["changed"] = context.start.changed
        if context.data.validation:
            facts["validation"] = context.data.validation_identities()
        folder.add_event("started", context.state.step, **facts)


def publish_model(
    folder: RunFolder,
    checkpoint: Path,
    write_model: WriteModel | None,
    make_room: Callable[[], None],
    console: Console,
) -> None:
    """Publishes the model of the last checkpoint, then writes the status `finished`. Only rank 0 calls it.

    The status is written last, so that a program that reads this status finds the model. Call it after the process
    group has ended, because writing a large model can take longer than the timeout of the other ranks.

    write_model: see `run_training`; None if the model is not to be published. make_room: makes room for it on the disk.
    Raises UserError if the disk fails.
    """
    step = step_of(checkpoint.name) or 0
    model = folder.path / MODEL_FOLDERS / checkpoint.name
    if write_model and not exists(model):
        make_room()
        unfinished = folder.lease.staging / MODEL_FOLDERS
        try:
            with folder.lease.guard():
                write_model(checkpoint, unfinished)
                make_folder(model.parent)
                folder.lease.move(unfinished, model)
                sync_folder(model.parent)
        except OSError as error:
            raise storage_error(error, f"can't write {model}: {error.strerror or error}") from None
    folder.write_status("finished", step)
    console.print_line(f"finished   {format_count(step, 'step')}; everything is in {folder.path}")


def measure_tokens_per_second(settings: TrainConfig) -> float:
    """Measures the tokens per second of training steps on this process's device, without validation and checkpoints.

    The measurement trains a randomly initialized model in a temporary folder. Raises UserError if a training with these
    settings can't start.
    """
    seconds: list[float] = []
    with (
        training_process(settings.training.deterministic),
        tempfile.TemporaryDirectory() as place,
    ):
        world = start_world()
        cpp.tune_process(world.device.type)
        folder = RunFolder(Path(place, "run"))
        make_folder(folder.path / CHECKPOINTS, parents=True)
        folder.lease.acquire(discard_line, "")
        random_start = settings.with_values(
            save_ckpt_path=str(folder.path), load_ckpt_path="", init_from=""
        )
        start = find_starting_point(random_start, folder.path, world, discard_line)
        context = RunSetup(start, world, folder, discard_line).make_context()
        steps = loop.iterate_steps(context)
        while len(seconds) < MIN_TIMED_STEPS or sum(seconds) < MIN_TIMED_SECONDS:
            began = time.perf_counter()
            next(steps)
            seconds.append(time.perf_counter() - began)
        folder.lease.close()
    # Use the mean, as in the reports of a run. The mean includes steps that other programs slowed down.
    return context.schedule.tokens_per_step / statistics.mean(seconds[UNTIMED_STEPS:])
