"""From the settings to what the loop works on: data, model, optimiser, starting point, length, loader."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from config import resolve
from config.fields import Duration
from config.model_config import checked_model
from config.presets import title, usual_length
from config.train_config import TrainConfig
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.folder import find_checkpoint, load
from mamba_fsdp.checkpoint.retention import until_the_end
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.builtin import missing_builtin
from mamba_fsdp.data.loader import BatchLayout, Loader, split_step
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.selection import (
    check_tokenizers_agree,
    one_for_all,
    training_sources,
    validation_sources,
)
from mamba_fsdp.data.source import DummySource, Source
from mamba_fsdp.data.tokenizer import check_tokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.init import initial_part
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import flops_per_token, operator_uses, parameter_count, parameters
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.model import ParallelModel, Shard, fill_parts
from mamba_fsdp.parallel.parallelize import choose_strategy, parallelize
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.memory import expected_memory
from mamba_fsdp.report.console import scaled
from mamba_fsdp.run_layout import CHECKPOINTS, committed, is_own
from mamba_fsdp.train.optimizer import LossScale, make_optimizer
from mamba_fsdp.train.run_folder import RunFolder
from mamba_fsdp.train.sampling import read_prompts
from mamba_fsdp.train.schedule import Schedule, schedule_of
from mamba_fsdp.train.state import TrainState

Say = Callable[[str], None]  # prints a line, on rank 0
VALIDATION_SHARE = 0.05  # of the training between two validations that one costs, unless eval_batches says otherwise


class Weights(Protocol):
    def open(self, world: World, shards: Sequence[Shard]) -> "Weights": ...

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor: ...

    def tokenizer_identities(self) -> Iterable[str]: ...


@dataclass(frozen=True)
class RunSchedule:
    """The run in steps: how a step is split, how many there are, what is due after which."""

    split: BatchLayout
    tokens_per_step: int
    total_steps: int
    eval_steps: int  # 0: never
    eval_batches: int  # global batches of each store; 0: all
    checkpoint_steps: int
    schedule: Schedule

    def is_due(self, interval: int, step: int) -> bool:
        """Whether what is done every `interval` steps (0: never), and after the last, is done after `step`."""
        return interval > 0 and (step % interval == 0 or step == self.total_steps)


@dataclass
class TrainContext:
    """What the loop works on."""

    settings: TrainConfig
    world: World
    sources: dict[str, Source]
    validation: list[Source]
    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    state: TrainState
    loss_scale: LossScale
    plan: RunSchedule
    loader: Loader
    checkpointer: Checkpointer
    prompts: dict[str, list[int]]  # to be continued at each validation: {text: tokens}


def set_up(
    settings: TrainConfig, world: World, folder: RunFolder, weights: Weights | None, say: Say
) -> TrainContext | None:
    """Called by all ranks. weights: of init_from. None for a dry run. Raises UserError where things don't fit."""
    checkpoint, done = settings.checkpoint, folder.startup.done
    split = split_step(settings.training, world.rank, world.size)
    backends = choose_backends(settings, world, say)
    # Rank 0 looks at all files for all: thousands of files times a thousand ranks keep a file system busy.
    sources, shares, validation = world.on_rank0(lambda: open_data(settings, say))
    prompts = world.on_rank0(
        lambda: read_prompts(settings, one_for_all(sources.values())) if sources else {}
    )
    done("data")
    if settings.training.dry_run:
        for newest in committed(folder.path / CHECKPOINTS)[-1:]:
            say(f"resumes    from {newest.name}, if it is whole")
        if sources:
            length = run_length(
                settings, Sampler(sources, shares, settings.data.seq_length, settings.training.seed)
            )
            say_length(
                settings,
                plan_steps(settings, split, TrainState(), length, len(validation), say),
                say,
            )
        return None
    checkpointer = Checkpointer(
        folder.path,
        world,
        keep=checkpoint.keep_checkpoints,
        keep_every=checkpoint.keep_every.steps(split.global_batch * settings.data.seq_length),
        asynchronous=checkpoint.async_checkpoint,
        report=say,
        check_ours=folder.lease.check,
    )
    parallel = build_model(settings, world, backends)
    optimizer = make_optimizer(
        parallel.parameters(), parameters(settings.model), settings.optimizer, world.device
    )
    done("model")
    state = start(
        settings, one_for_all(sources.values()), parallel, optimizer, checkpointer, weights, say
    )
    until_the_end.close()  # what was read from another run has been read
    done("checkpoint")
    order = Sampler(
        sources,
        shares,
        settings.data.seq_length,
        settings.training.seed,
        state=state.data or None,
    )
    plan = plan_steps(settings, split, state, run_length(settings, order), len(validation), say)
    loader = Loader(
        sources,
        order,
        settings.data,
        split,
        vocab_size=settings.model.vocab_size,
        first_step=state.step,
        pin_memory=world.device.type == "cuda",
    )
    say_length(settings, plan, say)
    if state.step < plan.total_steps:
        checkpointer.check_room(parallel.shards(optimizer))
    scale = LossScale(state, world.device, dynamic=settings.training.mixed_precision == "fp16")
    return TrainContext(
        settings,
        world,
        sources,
        validation,
        parallel,
        optimizer,
        state,
        scale,
        plan,
        loader,
        checkpointer,
        prompts,
    )


def run_length(settings: TrainConfig, order: Sampler) -> Duration:
    """num_steps, or num_epochs in tokens. Raises UserError for epochs of data without end."""
    training = settings.training
    if not training.num_epochs:
        return training.num_steps
    if settings.data.use_dummy_dataset:
        raise UserError("num_epochs: made-up tokens have no end; give num_steps")
    return Duration(
        math.ceil(training.num_epochs * order.epoch_windows) * settings.data.seq_length, "tok"
    )


def say_length(settings: TrainConfig, plan: RunSchedule, say: Say) -> None:
    flops = flops_per_token(settings.model, settings.data.seq_length) * plan.tokens_per_step
    usual = usual_length(settings.model.model_name)
    if settings.data.seq_length < usual != usual_length("demo"):
        say(
            f"samples    {settings.data.seq_length} tokens each; {settings.model.model_name} comes with "
            f"seq_length={usual}"
        )
    say(
        f"steps      {plan.total_steps:,} of {plan.split.global_batch} x {settings.data.seq_length} = "
        f"{plan.tokens_per_step:,} tokens; {scaled(flops, 'FLOP')} each, "
        f"{scaled(flops * plan.total_steps, 'FLOP')} in all"
    )


def open_data(
    settings: TrainConfig, say: Say
) -> tuple[dict[str, Source], dict[str, float], list[Source]]:
    """(training sources, their shares, validation sources). Raises UserError where one is missing or doesn't fit."""
    if settings.data.use_dummy_dataset:
        dummy = DummySource(settings.model.vocab_size)
        say("data       made-up tokens, for benchmarks; no validation")
        return {dummy.path.name: dummy}, {dummy.path.name: 1.0}, []
    if settings.training.dry_run and missing_builtin(settings.data):
        say(f"data       {settings.data.dataset_path}, which a run makes first")
        return {}, {}, []
    sources, shares = training_sources(settings.data)
    validation = validation_sources(settings.data)
    if not settings.data.allow_other_tokenizer:
        check_tokenizers_agree([*sources.values(), *validation])
    for store in [*sources.values(), *validation]:
        if store.vocab_size > settings.model.vocab_size:
            raise UserError(
                f"{store.path} has a vocabulary of {store.vocab_size}, the model only "
                f"{settings.model.vocab_size}; set vocab_size={store.vocab_size}"
            )
    read = ", ".join(f"{store.path} ({store.token_count:,} tokens)" for store in sources.values())
    say(
        f"data       {read}; validation: {', '.join(str(store.path) for store in validation) or 'none'}"
    )
    tokens, rows = max(store.vocab_size for store in sources.values()), settings.model.vocab_size
    if 0 < tokens < rows and all(store.vocab_size for store in sources.values()):
        say(
            f"vocabulary {tokens:,} tokens in the data, {rows:,} in the model, of which {rows - tokens:,} are never "
            f"trained; a new model can do without them: vocab_size={tokens}"
        )
    return sources, shares, validation


def choose_backends(settings: TrainConfig, world: World, say: Say) -> dict[str, str]:
    """The backend of each operator of the model; says what is to be trained, how, and in how much memory."""
    model, training, parallel = settings.model, settings.training, settings.parallel
    dtype = DTYPES[training.mixed_precision]
    uses = operator_uses(model, dtype, settings.data.reset_at_documents, training.deterministic)
    choice = resolve_backends(training.kernels, world.device.type, uses)
    memory = expected_memory(settings, world, choice.backends)
    parts = ", ".join(f"{name} {scaled(size, 'B')}" for name, size in memory.items() if size)
    device = (
        f" of {scaled(torch.cuda.mem_get_info()[1], 'B')}" if world.device.type == "cuda" else ""
    )
    say(
        f"model      {title(model)}: {parameter_count(model):,} parameters, {model.n_layer} layers, "
        f"{training.mixed_precision}, {choose_strategy(parallel, world).replace('none', 'no sharding')} on "
        f"{world.size} x {world.device.type}"
    )
    say(f"kernels    {choice}")
    say(f"memory     at least {scaled(sum(memory.values()), 'B')}{device} a device: {parts}")
    return choice.backends


def build_model(settings: TrainConfig, world: World, backends: dict[str, str]) -> ParallelModel:
    """The model, parallelized but not yet filled."""
    dtype = DTYPES[settings.training.mixed_precision]
    with torch.device("meta" if settings.parallel.low_cpu_fsdp else "cpu"):
        network = MambaLM(
            settings.model,
            backends=backends,
            compute_dtype=dtype,
            reset_at_documents=settings.data.reset_at_documents,
        )
    return parallelize(network, settings.parallel, world=world, compute_dtype=dtype)


def start(
    settings: TrainConfig,
    tokens: Source,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    checkpointer: Checkpointer,
    weights: Weights | None,
    say: Say,
) -> TrainState:
    """Fills the shards from the newest checkpoint, else from what the settings name, else at random. Raises UserError
    for a model that is known to have learnt other tokens than `tokens`."""
    world, checkpoint, state = parallel.world, settings.checkpoint, TrainState()
    origin, own = (
        checkpoint.load_ckpt_path,
        is_own(checkpoint.load_ckpt_path, checkpoint.save_ckpt_path),
    )

    def check_same_tokenizer(source: object, identities: Iterable[str]) -> None:
        if not settings.data.allow_other_tokenizer:
            world.on_rank0(
                lambda: check_tokenizer(tokens.path, tokens.tokenizer, source, identities)
            )

    shards = parallel.shards(optimizer)
    newest = checkpointer.to_resume(shards)
    if newest:
        state = load_checkpoint(newest, shards, settings, parallel, optimizer, "save_ckpt_path")
        check_same_tokenizer(newest, [state.tokenizer])
        began = checkpoint.init_from or ("" if own else origin)
        say(
            f"resumes    from {newest}, step {state.step}"
            + (f"; {began} was for its first start" if began else "")
        )
    elif weights:
        source = checkpoint.init_from or checkpoint.load_ckpt_path
        check_same_tokenizer(source, weights.tokenizer_identities())
        opened = weights.open(world, model := parallel.shards())
        world.on_all_ranks(lambda: fill_parts(model, opened.slice))
        say(f"starting   from the weights in {source}")
    elif origin and not own:
        found = find_checkpoint(origin, world, report=say, shards=shards)
        saved = load_checkpoint(found, shards, settings, parallel, optimizer, "load_ckpt_path")
        check_same_tokenizer(found, [saved.tokenizer])
        data = saved.data if checkpoint.resuming_dataset else {}
        state = TrainState(optimizer_steps=saved.optimizer_steps, data=data)
        position = (
            "the data's position" if checkpoint.resuming_dataset else "the data from its start"
        )
        say(f"starting   from model and optimiser in {found}, {position}")
    else:
        if own:
            say(
                f"starting   anew: load_ckpt_path {origin} is the run folder and holds no checkpoint yet"
            )
        spec, seed = parameters(settings.model), settings.training.seed
        world.run_local(
            lambda: fill_parts(
                parallel.shards(),
                lambda name, first, stop: initial_part(name, spec[name], seed, first, stop),
            )
        )
    state.tokenizer = tokens.tokenizer
    return state


def load_checkpoint(
    checkpoint: Path,
    shards: Sequence[Shard],
    settings: TrainConfig,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    named_by: str,
) -> TrainState:
    """Loads the shards of model and optimiser, with which it was verified; returns the state that was saved with them.
    named_by: the setting that led here. Raises UserError where it holds another model or a newer version's."""
    remedy = f"; give these settings again, or another {named_by}"
    saved = load(
        checkpoint,
        shards,
        parallel.world,
        check=lambda saved, folder: resolve.check_same_model(
            settings, checked_model(folder, saved["settings"]["model"]), str(folder), remedy
        ),
    )
    state = TrainState.from_saved(saved, checkpoint)
    parallel.set_optimizer_steps(optimizer, state.optimizer_steps)
    return state


def plan_steps(
    settings: TrainConfig,
    split: BatchLayout,
    state: TrainState,
    length: Duration,
    stores: int,
    say: Say,
) -> RunSchedule:
    """The settings' durations in steps; a `length` in tokens counts those seen so far. stores: it validates on."""
    training, checkpoint = settings.training, settings.checkpoint
    tokens_per_step = split.global_batch * settings.data.seq_length
    if not state.first_tokens_per_step:  # older checkpoints don't say it
        state.first_tokens_per_step = state.tokens // state.step if state.step else tokens_per_step
    if state.samples != state.step * split.global_batch:
        say(
            f"batch      {split.global_batch} samples a step from here on, {state.samples / state.step:g} before; "
            "global_batch_size keeps it the same on any number of ranks"
        )
    total = length.count
    if length.unit == "tok":
        total = state.step + -(-max(0, total - state.tokens) // tokens_per_step)
    eval_steps, eval_batches = (
        training.eval_interval.steps(tokens_per_step) if stores else 0,
        training.eval_batches,
    )
    if eval_batches < 0:  # a step costs three forward passes
        eval_batches = math.ceil(VALIDATION_SHARE * 3 * eval_steps / max(1, stores))
    return RunSchedule(
        split,
        tokens_per_step,
        total,
        eval_steps=eval_steps,
        eval_batches=eval_batches,
        schedule=schedule_of(settings, state, length, tokens_per_step, say),
        checkpoint_steps=checkpoint.checkpoint_interval.steps(tokens_per_step),
    )
