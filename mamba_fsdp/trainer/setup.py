"""The set-up of a run from its starting point: its model, optimiser and loader."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.restore import find_checkpoint, load
from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.loader import Loader, split_step
from mamba_fsdp.errors import UserError, counted, with_unit
from mamba_fsdp.model.init import initial_part
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.presets import title
from mamba_fsdp.model.spec import parameter_count, parameters
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.context import ContextGroup
from mamba_fsdp.parallel.model import ParallelModel, fill_parts
from mamba_fsdp.parallel.parallelize import choose_strategy, parallelize
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.estimate import machine_at_hand
from mamba_fsdp.planning.memory import Workload, expected_memory, state_memory
from mamba_fsdp.report.console import Say
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer import first_use
from mamba_fsdp.trainer.optimizer import LossScale, make_optimizer
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.run_schedule import RunSchedule
from mamba_fsdp.trainer.starting_point import Data, StartingPoint, find_start

LARGEST_ERROR = 1.2  # expected memory over measured memory, at most: docs/planning.md
TAKES_LESS = (
    "lower batch_size or seq_length, set fsdp_activation_checkpointing=true, or add ranks; "
    "see `mamba-fsdp plan`"
)


@dataclass
class TrainContext:
    """Everything that the training loop works on."""

    start: StartingPoint
    world: World
    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    state: TrainState
    loss_scale: LossScale
    schedule: RunSchedule
    loader: Loader
    checkpointer: Checkpointer
    # Bytes of the text that each validation predicts; the first one counts them.
    validation_bytes: float | None = None

    @property
    def settings(self) -> TrainConfig:
        return self.start.settings

    @property
    def data(self) -> Data:
        return self.start.data


def show(start: StartingPoint, world: World, folder: RunFolder, say: Say) -> None:
    """Prints what a run that starts from `start` would do. Verifies the checkpoint. All ranks call it. Raises UserError
    where the run would."""
    choose_backends(start.settings, world, folder, say)
    if start.checkpoint:
        path = start.origin.path
        whole = find_checkpoint(path, world, say, found=start.checkpoint)
        start = whole_start(start, whole.path, world, folder, say)
    for line in start.lines:
        say(line)


def set_up(start: StartingPoint, world: World, folder: RunFolder, say: Say) -> TrainContext:
    """Returns what the loop needs. All ranks call it. Raises UserError where the machine can't train so, and where model
    and checkpoint don't fit together."""
    settings = start.settings
    batch_shape = split_step(settings, world.rank, world.size)
    tokens_per_step = batch_shape.global_batch * settings.data.seq_length
    backends = choose_backends(settings, world, folder, say)
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
    dtype = DTYPES[settings.training.precision(world.device.type)]
    optimizer = make_optimizer(parallel, parameters(settings.model), settings.optimizer, dtype)
    start = fill(start, parallel, optimizer, checkpointer, folder, say)
    assert start.schedule
    for line in start.lines:
        say(line)
    state = replace(start.state)
    loader = Loader(
        start.data.sources,
        start.data.sampler(settings, state),
        settings.data,
        batch_shape,
        vocab_size=settings.model.vocab_size,
        first_step=state.step,
        pin_memory=world.device.type == "cuda",
    )
    return TrainContext(
        start=start,
        world=world,
        parallel=parallel,
        optimizer=optimizer,
        state=state,
        loss_scale=LossScale(state, world.device, dynamic=dtype == torch.float16),
        schedule=start.schedule,
        loader=loader,
        checkpointer=checkpointer,
    )


def fill(
    start: StartingPoint,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    checkpointer: Checkpointer,
    folder: RunFolder,
    say: Say,
) -> StartingPoint:
    """Fills the shards of model and optimiser. Returns the StartingPoint that they have: `start`, or that of an older
    checkpoint if the newest turned out to be broken."""
    world = parallel.world
    path = start.origin.path
    if start.checkpoint:
        shards = parallel.shards(optimizer)
        if start.origin.is_own:
            restored = checkpointer.resume(shards, start.checkpoint)
        else:
            whole = find_checkpoint(path, world, say, shards=shards, found=start.checkpoint)
            restored = load(whole, shards, world)
        start = whole_start(start, restored.path, world, folder, say)
    elif start.weights:
        opened = start.weights.open(world)
        world.on_all_ranks(fill_parts, parallel.shards(), opened.slice)
    else:
        fill_at_random(start.settings, parallel)
    parallel.set_optimizer_steps(optimizer, start.state.optimizer_steps)
    return start


def whole_start(
    start: StartingPoint, path: Path, world: World, folder: RunFolder, say: Say
) -> StartingPoint:
    """Returns `start`, or the StartingPoint of the checkpoint `path`, if that of `start` turned out to be broken."""
    if start.checkpoint and start.checkpoint.path == path:
        return start
    return world.on_rank0(find_start, start.settings, folder.path, world, say, path)


def fill_at_random(settings: TrainConfig, parallel: ParallelModel) -> None:
    """Fills the model with random weights. A weight depends only on the seed, its tensor's name and its index, not on
    the number of ranks."""
    spec = parameters(settings.model)
    seed = settings.training.seed

    def initial(name: str, start: int, stop: int) -> torch.Tensor:
        return initial_part(name, spec[name], seed, start, stop)

    parallel.world.run_local(fill_parts, parallel.shards(), initial)


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
        f"{training.precision(world.device.type)}, {strategy} on {world.size} x {world.device.type}"
    )
    if world.device.type in first_use.DEVICES and not training.dry_run:
        choice, origin = first_use.choose(settings, world, folder.path)
        say(f"kernels    {choice}; {origin}")
    else:
        uses = settings.operator_uses(world.device.type)
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


def build_model(settings: TrainConfig, world: World, backends: dict[str, str]) -> ParallelModel:
    """Returns the parallelized model; its parameters have no values yet."""
    dtype = DTYPES[settings.training.precision(world.device.type)]
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
