"""One run: its start, its end, and what it leaves when it fails."""

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from config import resolve
from config.train_config import TrainConfig
from mamba_fsdp.durable import write_atomically
from mamba_fsdp.ops import native
from mamba_fsdp.parallel.world import start_world
from mamba_fsdp.run_layout import MODELS, SETTINGS, step_of
from mamba_fsdp.train import loop, memory
from mamba_fsdp.train.recorder import Recorder
from mamba_fsdp.train.run_folder import RunFolder
from mamba_fsdp.train.setup import Parts, Say, Weights, set_up
from mamba_fsdp.train.state import TrainState
from mamba_fsdp.train.stopping import StopRequest
from mamba_fsdp.train.watchdog import Watchdog

WriteModel = Callable[[Path, Path], object]  # (checkpoint, new folder)


def run_training(settings: TrainConfig, weights: Weights | None = None, write_model: WriteModel | None = None) -> int:
    """Trains as the settings say, from the newest checkpoint of the run folder or from the start. Returns exit code 0.

    weights: those of init_from. write_model: writes the finished model from the last checkpoint.
    """
    native.tune_process()
    if settings.training.deterministic:
        # Without it torch refuses every matrix product on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.training.deterministic)
    folder, state = RunFolder(settings.checkpoint.save_ckpt_path), TrainState()
    world = start_world(timeout_minutes=settings.parallel.timeout_minutes)
    say = partial(print, flush=True) if world.rank == 0 else lambda text: None
    try:
        with contextlib.closing(world), Watchdog(settings.parallel.timeout_minutes, world.rank):
            world.on_rank0(folder.take)
            parts = set_up(settings, world, folder, weights, say)
            state = parts.state
            last = train(parts, folder, say)
            del parts  # model and optimizer, before the world is closed
        if last and world.rank == 0:
            finish(folder, last, write_model)
    except BaseException as error:
        folder.say_failed(state.step, error)
        raise
    finally:
        folder.lease.give_back()
    return 0


def train(parts: Parts, folder: RunFolder, say: Say) -> Path | None:
    """The loop with its surroundings. Returns the last checkpoint of a run that has all its steps, else None."""
    state, plan, world = parts.state, parts.plan, parts.world
    if state.step >= plan.total_steps:
        say(f"over       {folder.path} has all its {state.step} steps; raise num_steps to train on")
        return parts.checkpointer.newest()
    if world.rank == 0:
        write_atomically(folder.path / SETTINGS, resolve.as_yaml(parts.settings))
        folder.keep_tokenizer(next(iter(parts.sources.values())).path)
        folder.say("running", state.step)
    first_step = state.step
    with (memory.explained(world.rank, while_=lambda: state.step == first_step), parts.loader,
          StopRequest(folder.path, world.rank == 0) as stop,
          Recorder(parts.settings, world, folder, plan, first_step) as recorder):
        reason = loop.train(parts, recorder, stop)
    if not reason:
        return parts.checkpointer.newest()
    if world.rank == 0:
        folder.say("stopped", state.step, reason)
    say(f"stopped    at step {state.step} ({reason}); the same command resumes from here")
    return None


def finish(folder: RunFolder, checkpoint: Path, write_model: WriteModel | None) -> None:
    """Writes the whole model as one file, then the status `finished`: whoever reads that finds the model.

    Rank 0 does this after the process group has ended: a large model may take longer than other ranks would wait.
    """
    step, written = step_of(checkpoint.name) or 0, folder.path / MODELS / checkpoint.name
    if write_model and not written.exists():
        write_model(checkpoint, written)
    folder.say("finished", step)
    print(f"finished   {step} steps; everything lies in {folder.path}", flush=True)
