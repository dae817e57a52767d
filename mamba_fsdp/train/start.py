"""Where a run starts: the newest checkpoint in its folder, else what the settings name, else random
weights."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from config import resolve
from config.model_config import checked_model
from config.train_config import TrainConfig
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.folder import find_checkpoint, load
from mamba_fsdp.data.source import Source
from mamba_fsdp.data.tokenizer import check_tokenizer
from mamba_fsdp.model.init import initial_part
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.model import ParallelModel, Shard, fill_parts
from mamba_fsdp.run_layout import is_own
from mamba_fsdp.train.state import TrainState


class Weights(Protocol):
    """What init_from names."""

    def open(self, world: Any) -> "Weights": ...

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor: ...

    def tokenizer_identities(self) -> Iterable[str]: ...


def start(
    settings: TrainConfig,
    tokens: Source,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    checkpointer: Checkpointer,
    weights: Weights | None,
    say: Callable[[str], None],
) -> TrainState:
    """Fills the shards of model and optimiser and returns the train state that belongs to them.
    Raises UserError for a model that is known to have learnt other tokens than `tokens`."""
    config = settings.checkpoint
    origin = config.load_ckpt_path
    is_own_folder = is_own(origin, config.save_ckpt_path)
    shards = parallel.shards(optimizer)
    newest = checkpointer.to_resume(shards)
    if newest:
        state = load_checkpoint(newest, shards, settings, parallel, optimizer, "save_ckpt_path")
        learnt: Iterable[str] = [state.tokenizer]
        source: object = newest
        said = f"resumes    from {newest}, step {state.step}"
        first = config.init_from
        if not is_own_folder:
            first = first or origin
        if first:
            said += f"; {first} was for its first start"
    elif weights:
        source = config.init_from or origin
        learnt = weights.tokenizer_identities()
        state = TrainState()
        said = f"starting   from the weights in {source}"
    elif origin and not is_own_folder:
        source = find_checkpoint(origin, parallel.world, report=say, shards=shards)
        saved = load_checkpoint(source, shards, settings, parallel, optimizer, "load_ckpt_path")
        learnt = [saved.tokenizer]
        state = TrainState(optimizer_steps=saved.optimizer_steps)
        said = f"starting   from model and optimiser in {source}, the data from its start"
        if config.resuming_dataset:
            state.data = saved.data
            said = f"starting   from model and optimiser in {source}, the data's position"
    else:
        source = None
        learnt = []
        state = TrainState()
        said = ""
        if is_own_folder:
            said = f"starting   anew: load_ckpt_path {origin} is the run folder and holds no checkpoint yet"

    if not settings.data.allow_other_tokenizer:
        parallel.world.on_rank0(
            partial(check_tokenizer, tokens.path, tokens.tokenizer, source, learnt)
        )
    if weights and not newest:
        shards_of_model = parallel.shards()
        opened = weights.open(parallel.world)
        parallel.world.on_all_ranks(partial(fill_parts, shards_of_model, opened.slice))
    elif source is None:
        fill_at_random(settings, parallel)
    if said:
        say(said)
    state.tokenizer = tokens.tokenizer
    return state


def fill_at_random(settings: TrainConfig, parallel: ParallelModel) -> None:
    """Every element is a function of the seed, its tensor's name and its place: the same on any
    world."""
    spec = parameters(settings.model)
    seed = settings.training.seed

    def initial(name: str, start: int, stop: int) -> torch.Tensor:
        return initial_part(name, spec[name], seed, start, stop)

    parallel.world.run_local(partial(fill_parts, parallel.shards(), initial))


def load_checkpoint(
    checkpoint: Path,
    shards: Sequence[Shard],
    settings: TrainConfig,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    named_by: str,
) -> TrainState:
    """Loads the shards of model and optimiser, with which it was verified; returns the state that
    was saved with them. named_by: the setting that led here. Raises UserError where it holds
    another model or a newer version's."""

    def check(saved: dict, folder: Path) -> None:
        remedy = f"; give these settings again, or another {named_by}"
        model = checked_model(folder, saved["settings"]["model"])
        resolve.check_same_model(settings, model, str(folder), remedy)

    saved = load(checkpoint, shards, parallel.world, check=check)
    state = TrainState.from_saved(saved, checkpoint)
    parallel.set_optimizer_steps(optimizer, state.optimizer_steps)
    return state
