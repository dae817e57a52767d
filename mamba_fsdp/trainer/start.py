"""Where a run starts: the newest checkpoint in its folder, else what the settings name, else random
weights."""

from collections.abc import Iterable
from pathlib import Path

import torch

from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.contents import read_state
from mamba_fsdp.checkpoint.restore import Check, find_checkpoint, load, newest_whole
from mamba_fsdp.data.source import Source
from mamba_fsdp.data.tokenizer import check_tokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.weights import Weights
from mamba_fsdp.model.init import initial_part
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.model import ParallelModel, fill_parts
from mamba_fsdp.parallel.world import World
from mamba_fsdp.report.console import Say
from mamba_fsdp.run_layout import CHECKPOINTS, is_own
from mamba_fsdp.settings import resolve
from mamba_fsdp.settings.model_config import checked_model
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.state import TrainState


def start(
    settings: TrainConfig,
    tokens: Source,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    checkpointer: Checkpointer,
    weights: Weights | None,
    say: Say,
) -> tuple[TrainState, str]:
    """Fills the shards of model and optimiser. Returns the train state that belongs to them, and
    what the run starts from, in words. Raises UserError for a model that is known to have learnt
    other tokens than `tokens`."""
    config = settings.checkpoint
    origin = config.load_ckpt_path
    is_own_folder = is_own(origin, config.save_ckpt_path)
    shards = parallel.shards(optimizer)
    resumed = checkpointer.resume(shards, check_of_model(settings, "save_ckpt_path"))
    state = TrainState()
    source: object = None
    learnt: Iterable[str] = []
    begins = "the start"
    if resumed:
        state = TrainState.from_saved(resumed.state, resumed.path)
        source = resumed.path
        learnt = [state.tokenizer]
        begins = f"checkpoint {resumed.path.name}"
    elif weights:
        source = config.init_from or origin
        learnt = weights.tokenizer_identities()
        begins = f"the weights in {source}"
    elif origin and not is_own_folder:
        check = check_of_model(settings, "load_ckpt_path")
        found = find_checkpoint(origin, parallel.world, say, shards=shards)
        restored = load(found, shards, parallel.world, check)
        saved = TrainState.from_saved(restored.state, restored.path)
        source = restored.path
        learnt = [saved.tokenizer]
        state.optimizer_steps = saved.optimizer_steps
        begins = f"model and optimiser in {source}, the data from its start"
        if config.resuming_dataset:
            state.data = saved.data
            begins = f"model and optimiser in {source}, the data's position"
    parallel.set_optimizer_steps(optimizer, state.optimizer_steps)

    if not settings.data.allow_other_tokenizer:
        parallel.world.on_rank0(check_tokenizer, tokens.path, tokens.tokenizer, source, learnt)
    if weights and not resumed:
        opened = weights.open(parallel.world)
        parallel.world.on_all_ranks(fill_parts, parallel.shards(), opened.slice)
    elif source is None:
        fill_at_random(settings, parallel)

    if resumed:
        first = config.init_from or origin
        other = f"; {first} applied to its first start only" if first and not is_own_folder else ""
        say(f"resumes    from {source}, step {state.step}{other}")
    elif source is not None:
        say(f"starting   from {begins}")
    elif is_own_folder:
        say(
            f"starting   anew: load_ckpt_path {origin} is the run folder and holds no checkpoint yet"
        )
    state.tokenizer = tokens.tokenizer
    return state, begins


def say_start(
    settings: TrainConfig,
    tokens: Source | None,
    world: World,
    weights: Weights | None,
    say: Say,
) -> None:
    """Says from which checkpoint `start` would start. Raises UserError where it is another model's, or has learnt
    other tokens. tokens: None where they are not made yet."""
    origin = settings.checkpoint.load_ckpt_path
    run = settings.checkpoint.save_ckpt_path
    check = check_of_model(settings, "save_ckpt_path")
    choice = newest_whole(Path(run, CHECKPOINTS), world, say)
    if choice:
        source = choice.path
        say(f"resumes    from {source}")
    elif origin and not weights and not is_own(origin, run):
        check = check_of_model(settings, "load_ckpt_path")
        source = find_checkpoint(origin, world, say).path
        say(f"starting   from {source}")
    else:
        return

    def compare() -> None:
        saved = read_state(source).state
        check(saved, source)
        if tokens and not settings.data.allow_other_tokenizer:
            learnt = TrainState.from_saved(saved, source).tokenizer
            check_tokenizer(tokens.path, tokens.tokenizer, source, [learnt])

    world.on_rank0(compare)


def fill_at_random(settings: TrainConfig, parallel: ParallelModel) -> None:
    """Every element is a function of the seed, its tensor's name and its place: the same on any
    world."""
    spec = parameters(settings.model)
    seed = settings.training.seed

    def initial(name: str, start: int, stop: int) -> torch.Tensor:
        return initial_part(name, spec[name], seed, start, stop)

    parallel.world.run_local(fill_parts, parallel.shards(), initial)


def check_of_model(settings: TrainConfig, named_by: str) -> Check:
    """What raises UserError where a checkpoint holds another model than the settings', or another
    optimiser's state. named_by: the setting that leads to the checkpoint."""

    def check(saved: dict, checkpoint: Path) -> None:
        remedy = f"; give these settings again, or another {named_by}"
        model = checked_model(checkpoint, saved["settings"]["model"])
        resolve.check_same_model(settings, model, str(checkpoint), remedy)
        there = saved["settings"].get("optimizer", {}).get("optimizer", "adamw")
        if there != settings.optimizer.optimizer:
            raise UserError(
                f"{checkpoint} holds the state of optimizer={there}; give that again, or begin another run "
                f"with its weights: init_from={checkpoint}"
            )

    return check
