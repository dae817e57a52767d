"""One run: its start, its end, and what it leaves when it fails."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from config import resolve
from config.train_config import CheckpointConfig, TrainConfig
from mamba_fsdp.data.selection import one_for_all
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.ops import cpp
from mamba_fsdp.parallel.compat import use_deterministic_algorithms
from mamba_fsdp.parallel.world import World, start_world
from mamba_fsdp.planning.estimate import what_would_fit
from mamba_fsdp.report.console import Console, output_that_may_go
from mamba_fsdp.report.records import add_event, was_validated
from mamba_fsdp.run_layout import MODELS, PROFILE, SETTINGS, is_own, step_name, step_of
from mamba_fsdp.storage import write_atomically
from mamba_fsdp.train import loop
from mamba_fsdp.train.metrics_logger import MetricsLogger
from mamba_fsdp.train.run_folder import RunFolder
from mamba_fsdp.train.setup import TrainContext, Weights, set_up
from mamba_fsdp.train.state import TrainState
from mamba_fsdp.train.stopping import StopRequest
from mamba_fsdp.train.watchdog import watchdog

WriteModel = Callable[
    ..., object
]  # (checkpoint, folder, new or not, verified=whether the checkpoint is whole)


@output_that_may_go()
def run_training(
    settings: TrainConfig, weights: Weights | None = None, write_model: WriteModel | None = None
) -> int:
    """Trains as the settings say, from the newest checkpoint of the run folder or from the start. Returns exit code 0.

    weights: those of init_from. write_model: writes the finished model from the last checkpoint.
    """
    use_deterministic_algorithms(settings.training.deterministic)
    folder, state, first_step = RunFolder(settings.checkpoint.save_ckpt_path), TrainState(), 0
    folder.startup.done("imports")
    world = start_world(timeout_minutes=settings.parallel.timeout_minutes)
    folder.startup.done("process group")
    cpp.tune_process(world.device.type)
    display = Console(enabled=world.rank == 0)
    try:
        with (
            contextlib.closing(world),
            watchdog(settings.parallel.timeout_minutes, world.rank),
            out_of_memory_explained(settings, world, folder.path, lambda: state.step == first_step),
        ):
            for note in settings.notes:
                display.line(f"settings   {note}")
            if not settings.training.dry_run:
                world.on_rank0(folder.take)
            parts = set_up(settings, world, folder, weights, display.line)
            if not parts:
                return 0
            state, first_step = parts.state, parts.state.step
            last = train(parts, folder, display)
            del parts  # model and optimizer, before the world is closed
        if last and world.rank == 0:
            finish(folder, last, write_model if settings.checkpoint.publish else None, display)
    except BaseException as error:
        folder.say_failed(state.step, error)
        raise
    finally:
        folder.lease.give_back()
    return 0


def train(parts: TrainContext, folder: RunFolder, display: Console) -> Path | None:
    """The loop with its surroundings. Returns the last checkpoint of a run that has all its steps, else None."""
    state, plan, world = parts.state, parts.plan, parts.world
    state.first_started = state.first_started or folder.startup.began
    validation_due = plan.is_due(plan.eval_steps, state.step) and not (
        state.step and world.on_rank0(lambda: was_validated(folder.path, state.step))
    )
    if state.step >= plan.total_steps and not validation_due:
        display.line(
            f"over       {folder.path} has all its {state.step} steps; raise num_steps to train on"
        )
        return parts.checkpointer.newest()
    if world.rank == 0:
        write_atomically(folder.path / SETTINGS, resolve.as_yaml(parts.settings))
        folder.keep_tokenizer(one_for_all(parts.sources.values()))
        folder.say("running", state.step)
        begins = begins_from(parts.settings.checkpoint, parts.checkpointer.newest_step)
        add_event(folder.path, "started", state.step, ranks=world.size, **{"from": begins})
    with parts.loader, StopRequest(folder.path, world.rank == 0) as stop:
        with MetricsLogger(
            parts.settings, world, folder, plan, parts.loader, state.step, display
        ) as recorder:
            folder.startup.done("loader")
            recorder.stall_seconds = parts.checkpointer.stall_seconds
            reason = loop.train(parts, recorder, stop, validation_due)
    if not reason:
        return parts.checkpointer.newest()
    if world.rank == 0:
        folder.say("stopped", state.step, reason)
    display.line(f"stopped    at step {state.step} ({reason}); the same command resumes from here")
    return None


def begins_from(settings: CheckpointConfig, newest: int) -> str:
    """In words, for events.jsonl. newest: the step that it resumes from, -1 for none."""
    loaded = (
        "" if is_own(settings.load_ckpt_path, settings.save_ckpt_path) else settings.load_ckpt_path
    )
    return (
        f"checkpoint {step_name(newest)}"
        if newest >= 0
        else f"init_from {settings.init_from}"
        if settings.init_from
        else f"load_ckpt_path {loaded}"
        if loaded
        else "the start"
    )


@contextlib.contextmanager
def out_of_memory_explained(
    settings: TrainConfig, world: World, folder: Path, while_: Callable[[], bool]
) -> Iterator[None]:
    """Raises UserError instead of PyTorch's error where memory runs out while `while_()` holds: at the start, settings
    ask for too much. Later it may be an accident that a restart mends, and stays PyTorch's error. Of a GPU a snapshot
    stays in profile/memory_rank_R.pickle, for docs.pytorch.org/memory_viz."""
    try:
        yield
    except RuntimeError as error:
        on_gpu = isinstance(error, torch.cuda.OutOfMemoryError)
        if on_gpu and folder.is_dir():
            with contextlib.suppress(OSError, RuntimeError):
                (folder / PROFILE).mkdir(exist_ok=True)
                torch.cuda.memory._dump_snapshot(
                    str(folder / PROFILE / f"memory_rank_{world.rank}.pickle")
                )
        if not (while_() and (on_gpu or "can't allocate memory" in str(error))):
            raise
        first = "leave out accumulate_unsharded, " if settings.parallel.accumulate_unsharded else ""
        raise UserError(
            f"rank {world.rank} has too little memory: {first}lower batch_size or seq_length "
            "(global_batch_size keeps the batch), set fsdp_activation_checkpointing=true, or shard over "
            f"more ranks; {what_would_fit(settings, world)} ({first_line(error)[:200]})"
        ) from error


def finish(
    folder: RunFolder, checkpoint: Path, write_model: WriteModel | None, display: Console
) -> None:
    """Writes the whole model as one file, then the status `finished`: whoever reads that finds the model. On rank 0,
    when the process group has ended: a large model may take longer than the other ranks would wait."""
    step, written = step_of(checkpoint.name) or 0, folder.path / MODELS / checkpoint.name
    if write_model:
        write_model(
            checkpoint, written, verified=True
        )  # by this run, when it committed it or at its start
    folder.say("finished", step)
    display.line(f"finished   {step} steps; everything lies in {folder.path}")
