"""Where a run starts: from the newest checkpoint in its folder, else from the weights or checkpoint that the settings
name, else from random weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.checkpoint.restore import Check, find_checkpoint, load
from mamba_fsdp.checkpoint.saved_run import SavedRun, TrainState
from mamba_fsdp.data.source import Source
from mamba_fsdp.data.tokenizer import check_tokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.places import Origin
from mamba_fsdp.interop.weights import Weights, find_weights
from mamba_fsdp.model.config import checked_model
from mamba_fsdp.model.init import initial_part
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.model import ParallelModel, fill_parts
from mamba_fsdp.parallel.world import World
from mamba_fsdp.report.console import Say
from mamba_fsdp.settings import resolve
from mamba_fsdp.settings.train_config import TrainConfig


def starting_weights(settings: TrainConfig, origin: Origin) -> Weights | None:
    """Returns the weights of `origin`, not yet open, or None if it is a checkpoint or means random weights.

    With init_from, the model in the settings takes the shape of these weights or of the run's own checkpoint. Raises
    UserError if the weights are of another model than the settings ask for.
    """
    source = f"{origin.setting} {origin.path}"
    if settings.checkpoint.init_from:
        names_a_model = settings.explicit & vars(settings.model).keys()
        weights = find_weights(origin.path, settings.model if names_a_model else None)
        resolve.adopt_model(settings, weights.config, source)
        settings.check_model()
        return None if origin.is_checkpoint else weights
    if origin.is_checkpoint or not origin.setting:
        return None
    weights = find_weights(origin.path, settings.model)
    resolve.check_same_model(settings, weights.config, source)
    return weights


def start(
    settings: TrainConfig,
    tokens: Source,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    checkpointer: Checkpointer,
    origin: Origin,
    weights: Weights | None,
    say: Say,
) -> tuple[TrainState, str]:
    """Returns the train state of the start and, in words, what the run starts from. Fills the shards of model and
    optimiser. Raises UserError if the model is known to have been trained with another tokenizer than that of
    `tokens`."""
    config = settings.checkpoint
    shards = parallel.shards(optimizer)
    check = check_of_model(settings, origin)
    state = TrainState()
    source: object = None
    learnt: Iterable[str] = []
    begins = "the start"
    if origin.is_own:
        resumed = checkpointer.resume(shards, check)
        assert resumed
        state = SavedRun.from_state(resumed.state, resumed.path).progress
        source = resumed.path
        learnt = [state.tokenizer]
        begins = f"checkpoint {resumed.path.name}"
    elif origin.is_checkpoint:
        whole = find_checkpoint(origin.path, parallel.world, say, shards=shards)
        restored = load(whole, shards, parallel.world, check)
        saved = SavedRun.from_state(restored.state, restored.path).progress
        source = restored.path
        learnt = [saved.tokenizer]
        state.optimizer_steps = saved.optimizer_steps
        begins = f"model and optimiser in {source}, the data from its start"
        if config.resuming_dataset:
            state.data = saved.data
            begins = f"model and optimiser in {source}, the data's position"
    elif weights:
        source = origin.path
        learnt = weights.tokenizer_identities()
        begins = f"the weights in {source}"
    parallel.set_optimizer_steps(optimizer, state.optimizer_steps)

    if not settings.data.allow_other_tokenizer:
        parallel.world.on_rank0(check_tokenizer, tokens.path, tokens.tokenizer, source, learnt)
    if weights:
        opened = weights.open(parallel.world)
        parallel.world.on_all_ranks(fill_parts, parallel.shards(), opened.slice)
    elif source is None:
        fill_at_random(settings, parallel)

    first = config.init_from or config.load_ckpt_path
    if origin.is_own:
        other = ""
        if first and not config.loads_own_folder():
            other = f"; {first} applied to its first start only"
        say(f"resumes    from {source}, step {state.step}{other}")
    elif source is not None:
        say(f"starting   from {begins}")
    elif first:
        say(
            f"starting   anew: load_ckpt_path {first} is the run folder and holds no checkpoint yet"
        )
    state.tokenizer = tokens.tokenizer
    return state, begins


def say_start(
    settings: TrainConfig, tokens: Source | None, world: World, origin: Origin, say: Say
) -> None:
    """Prints the checkpoint that `start` would start from. Raises UserError if the checkpoint is of another model or
    another tokenizer. tokens: None if the run makes its data first."""
    if not origin.is_checkpoint:
        return
    checkpoint = find_checkpoint(origin.path, world, say).path
    verb = "resumes" if origin.is_own else "starting"
    say(f"{verb:<10} from {checkpoint}")

    def compare() -> None:
        state = read_contents(checkpoint).state
        check_of_model(settings, origin)(state, checkpoint)
        if tokens and not settings.data.allow_other_tokenizer:
            learnt = SavedRun.from_state(state, checkpoint).progress.tokenizer
            check_tokenizer(tokens.path, tokens.tokenizer, checkpoint, [learnt])

    world.on_rank0(compare)


def fill_at_random(settings: TrainConfig, parallel: ParallelModel) -> None:
    """Fills the model with random weights. A weight depends only on the seed, its tensor's name and its index, not on
    the number of ranks."""
    spec = parameters(settings.model)
    seed = settings.training.seed

    def initial(name: str, start: int, stop: int) -> torch.Tensor:
        return initial_part(name, spec[name], seed, start, stop)

    parallel.world.run_local(fill_parts, parallel.shards(), initial)


def check_of_model(settings: TrainConfig, origin: Origin) -> Check:
    """Returns a function that raises UserError if a checkpoint of `origin` holds another model than that of the
    settings, or the state of another optimiser."""

    def check(state: dict[str, Any], checkpoint: Path) -> None:
        saved = SavedRun.from_state(state, checkpoint)
        remedy = f"; give these settings again, or another {origin.setting}"
        model = checked_model(checkpoint, saved.model)
        resolve.check_same_model(settings, model, str(checkpoint), remedy)
        if saved.optimizer != settings.optimizer.optimizer:
            raise UserError(
                f"{checkpoint} holds the state of optimizer={saved.optimizer}; give this optimizer again, or begin another run "
                f"with its weights: init_from={checkpoint}"
            )

    return check
