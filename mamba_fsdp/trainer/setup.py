"""The set-up of a run: its data, model, optimiser, starting point, schedule and loader."""

from dataclasses import dataclass

import torch

from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.builtin import missing_builtin
from mamba_fsdp.data.loader import BatchShape, Loader, split_step
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.selection import (
    check_tokenizers_agree,
    one_for_all,
    training_sources,
    validation_sources,
)
from mamba_fsdp.data.source import DummySource, Source
from mamba_fsdp.data.tokenizer import TextTokenizer, import_with, load_words
from mamba_fsdp.errors import UserError, counted, with_unit
from mamba_fsdp.interop.places import Origin
from mamba_fsdp.interop.weights import Weights, find_weights
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.presets import title
from mamba_fsdp.model.spec import parameter_count, parameters
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.context import ContextGroup
from mamba_fsdp.parallel.model import ParallelModel
from mamba_fsdp.parallel.parallelize import choose_strategy, parallelize
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.estimate import machine_at_hand
from mamba_fsdp.planning.memory import Workload, expected_memory, state_memory
from mamba_fsdp.report.console import Say
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer import first_use
from mamba_fsdp.trainer.optimizer import LossScale, make_optimizer
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.run_schedule import RunSchedule, run_length, say_length, schedule_run
from mamba_fsdp.trainer.start import say_start, start

SAMPLE_LENGTH = 50  # tokens behind a prompt of eval_prompts
MOST_SAMPLED = 1 << 14  # tokens of a forward pass
MOST_PASSES = 100  # over the data without a warning
LARGEST_ERROR = 1.2  # expected memory over measured memory, at most: docs/planning.md
TAKES_LESS = (
    "lower batch_size or seq_length, set fsdp_activation_checkpointing=true, or add ranks; "
    "see `mamba-fsdp plan`"
)


@dataclass
class Data:
    """The data that a run reads."""

    sources: dict[str, Source]
    shares: dict[str, float]  # share of each source in the samples
    validation: list[Source]
    # Of the text that each validation predicts; the first one counts them.
    validation_bytes: float | None = None
    prompts: list[list[int]] | None = None  # the tokens of each line of eval_prompts


@dataclass
class TrainContext:
    """Everything that the training loop works on."""

    settings: TrainConfig
    world: World
    data: Data
    begins: str  # what the run starts from, in words
    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    state: TrainState
    loss_scale: LossScale
    schedule: RunSchedule
    loader: Loader
    checkpointer: Checkpointer


def set_up(
    settings: TrainConfig,
    world: World,
    folder: RunFolder,
    origin: Origin,
    weights: Weights | None,
    say: Say,
) -> TrainContext | None:
    """Returns what the loop needs, or None for a dry run. All ranks call it. weights: of `origin`, unless
    that is a checkpoint. Raises UserError where settings, data, model and checkpoint don't fit together."""
    batch_shape = split_step(settings, world.rank, world.size)
    # Only rank 0 looks at the files: thousands of files times a thousand ranks would keep a file
    # system busy.
    data = world.on_rank0(open_data, settings, origin, weights)
    backends = choose_backends(settings, world, folder, say)
    say_data(settings, data, origin, say)
    if settings.training.dry_run:
        tokens = one_for_all(data.sources.values()) if data.sources else None
        say_start(settings, tokens, world, origin, say)
        if tokens:
            plan_steps(settings, batch_shape, data, TrainState(), say)
        return None

    tokens_per_step = batch_shape.global_batch * settings.data.seq_length
    checkpointer = Checkpointer(
        folder.path,
        world,
        folder.lease,
        keep=settings.checkpoint.keep_checkpoints,
        keep_every=settings.checkpoint.keep_every.steps(tokens_per_step),
        asynchronous=settings.checkpoint.async_checkpoint,
        report=say,
    )
    parallel = build_model(settings, world, backends)
    dtype = DTYPES[settings.training.mixed_precision]
    optimizer = make_optimizer(parallel, parameters(settings.model), settings.optimizer, dtype)

    tokens = one_for_all(data.sources.values())
    state, begins = start(settings, tokens, parallel, optimizer, checkpointer, origin, weights, say)

    sampler, schedule = plan_steps(settings, batch_shape, data, state, say)
    if settings.training.eval_prompts and not schedule.eval_steps:
        raise UserError("eval_prompts: there is no data to validate on; name a validation_path")
    loader = Loader(
        data.sources,
        sampler,
        settings.data,
        batch_shape,
        vocab_size=settings.model.vocab_size,
        first_step=state.step,
        pin_memory=world.device.type == "cuda",
    )
    if state.step < schedule.total_steps:
        checkpointer.make_room(parallel.shards(optimizer))
    return TrainContext(
        settings=settings,
        world=world,
        data=data,
        begins=begins,
        parallel=parallel,
        optimizer=optimizer,
        state=state,
        loss_scale=LossScale(state, world.device, dynamic=dtype == torch.float16),
        schedule=schedule,
        loader=loader,
        checkpointer=checkpointer,
    )


def choose_backends(
    settings: TrainConfig, world: World, folder: RunFolder, say: Say
) -> dict[str, str]:
    """Returns the backend of each operator of the model. Prints the model, the kernels and the
    expected memory."""
    model = settings.model
    training = settings.training
    strategy = choose_strategy(settings.parallel, world).replace("none", "no sharding")
    say(
        f"model      {title(model)}: {parameter_count(model):,} parameters, {counted(model.n_layer, 'layer')}, "
        f"{training.mixed_precision}, {strategy} on {world.size} x {world.device.type}"
    )
    if world.device.type in first_use.DEVICES and not training.dry_run:
        choice, origin = first_use.choose(settings, world, folder.path)
        say(f"kernels    {choice}; {origin}")
    else:
        uses = settings.operator_uses()
        choice = resolve_backends(training.kernels, world.device.type, uses)
        say(f"kernels    {choice}")
    work = Workload(settings, world, choice.backends)
    if world.device.type == "cuda" or training.dry_run:
        memory = world.on_rank0(expected_memory, work)
    else:  # nothing is refused on a CPU, so the estimate is not worth its seconds
        memory = state_memory(work)
    rows = ", ".join(f"{name} {with_unit(size, 'B')}" for name, size in memory.items() if size)
    say(f"memory     at least {with_unit(sum(memory.values()), 'B')} a device: {rows}")
    check_memory(memory, world, say)
    return choice.backends


def check_memory(memory: dict[str, int], world: World, say: Say) -> None:
    """Prints a warning if the expected memory is more than a GPU has or, on CPUs, if the machine's ranks need much of its
    memory. Raises UserError if a GPU certainly can't hold it."""
    available = machine_at_hand().memory * 1e9
    needed = sum(memory.values())
    on_gpu = world.device.type == "cuda"
    if on_gpu and needed > LARGEST_ERROR * available:
        raise UserError(
            f"this needs at least {with_unit(needed, 'B')} of a GPU, which has {with_unit(available, 'B')}: {TAKES_LESS}"
        )
    if on_gpu and needed > available:
        say(f"warning    the GPU has only {with_unit(available, 'B')}: {TAKES_LESS}")
    on_machine = needed * world.local_size
    if not on_gpu and on_machine > 0.4 * available:
        say(
            f"warning    {with_unit(on_machine, 'B')} of the machine's {with_unit(available, 'B')}: {TAKES_LESS}"
        )


def open_data(settings: TrainConfig, origin: Origin, weights: Weights | None) -> Data:
    """Returns the data that the settings name; rank 0 calls it. Raises UserError for a store that is
    missing or doesn't fit the model."""
    vocab_size = settings.model.vocab_size
    if settings.data.use_dummy_dataset:
        dummy = DummySource(vocab_size)
        name = dummy.path.name
        return Data({name: dummy}, {name: 1.0}, [])
    if settings.training.dry_run and missing_builtin(settings.data):
        return Data({}, {}, [])
    sources, shares = training_sources(settings.data)
    validation = validation_sources(settings.data)
    stores = [*sources.values(), *validation]
    if not settings.data.allow_other_tokenizer:
        check_tokenizers_agree(stores)
    for store in stores:
        if store.vocab_size > vocab_size:
            remedy = f"set vocab_size={store.vocab_size}"
            if origin.setting:
                model = weights or find_weights(origin.path, settings.model)
                remedy = import_with(model.tokenizer_path)
            raise UserError(
                f"{store.path} has a vocabulary of {store.vocab_size}, the model only {vocab_size}; {remedy}"
            )
    data = Data(sources, shares, validation)
    if settings.training.eval_prompts:
        tokenizer = load_words(one_for_all(sources.values()).tokenizer_path)
        data.prompts = encode_prompts(settings.training.eval_prompts, tokenizer)
    return data


def encode_prompts(text: str, tokenizer: TextTokenizer) -> list[list[int]]:
    """Returns the tokens of each line of eval_prompts that is not empty. Raises UserError for more than one forward pass
    should read."""
    prompts = [*filter(None, map(tokenizer.encode, text.splitlines()))]
    longest = max(map(len, prompts), default=0)
    tokens = len(prompts) * (longest + SAMPLE_LENGTH)
    if tokens > MOST_SAMPLED:
        raise UserError(
            f"eval_prompts: {len(prompts):,} prompts of up to {longest:,} tokens, with {SAMPLE_LENGTH} behind each, are "
            f"{tokens:,} tokens; at most {MOST_SAMPLED:,} are written at a validation: give fewer or shorter ones"
        )
    return prompts


def say_data(settings: TrainConfig, data: Data, origin: Origin, say: Say) -> None:
    """Prints the data, with a warning if a model that starts at random has far more tokens than the data."""
    config = settings.data
    if config.use_dummy_dataset:
        say("data       made-up tokens, for benchmarks; no validation")
    elif not data.sources:
        say(f"data       {config.dataset_path}, which the run makes first")
    else:
        stores = data.sources.values()
        read = ", ".join(f"{store.path} ({store.token_count:,} tokens)" for store in stores)
        validated = ", ".join(str(store.path) for store in data.validation) or "none"
        say(f"data       {read}; validation: {validated}")
        known = max(store.vocab_size for store in stores)
        if not origin.setting and 2 * known < settings.model.vocab_size:
            say(
                f"warning    the model has {settings.model.vocab_size:,} tokens, the data only {known:,} of them: "
                f"set vocab_size={known}"
            )


def plan_steps(
    settings: TrainConfig, batch_shape: BatchShape, data: Data, state: TrainState, say: Say
) -> tuple[Sampler, RunSchedule]:
    """Returns the sampler from `state` on and the schedule of the run. Prints the number of steps."""
    sampler = Sampler(
        data.sources,
        data.shares,
        settings.data.seq_length,
        settings.training.seed,
        state=state.data or None,
    )
    length = run_length(settings, sampler)
    schedule = schedule_run(settings, batch_shape, state, length, len(data.validation), say)
    say_length(settings, schedule, say)
    passes = schedule.total_steps * batch_shape.global_batch / sampler.epoch_windows
    if passes > MOST_PASSES and not settings.training.num_epochs:
        say(
            f"warning    the run would read the data {passes:,.0f} times; set a lower num_steps, or num_epochs=10"
        )
    return sampler, schedule


def build_model(settings: TrainConfig, world: World, backends: dict[str, str]) -> ParallelModel:
    """Returns the parallelized model; its parameters have no values yet."""
    dtype = DTYPES[settings.training.mixed_precision]
    with torch.device("meta"):
        network = MambaLM(
            settings.model,
            backends=backends,
            compute_dtype=dtype,
            reset_at_documents=settings.data.reset_at_documents,
        )
    sharing = settings.parallel.context_parallel
    if sharing > 1:
        network.share_sequences(ContextGroup.of(world, sharing))
    return parallelize(network, settings.parallel, world=world, compute_dtype=dtype)
