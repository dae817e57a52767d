"""Sets up a run from its starting point: creates its model, optimizer, data loader and checkpointer."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.restore import find_checkpoint, load
from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.loader import Loader, split_step
from mamba_fsdp.errors import MEMORY_ADVICE, UserError
from mamba_fsdp.model.init import initial_values
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.presets import model_title
from mamba_fsdp.model.spec import parameter_count, parameters
from mamba_fsdp.ops.backends import BackendChoice, resolve_backends
from mamba_fsdp.parallel.context import ContextGroup
from mamba_fsdp.parallel.model import ParallelModel, fill_shards
from mamba_fsdp.parallel.parallelize import choose_strategy, parallelize
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.estimate import local_machine
from mamba_fsdp.planning.memory import Workload, expected_memory, state_memory
from mamba_fsdp.reporting.console import PrintLine
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.text import format_count, format_quantity
from mamba_fsdp.trainer import kernel_selection
from mamba_fsdp.trainer.fingerprint import code_digest
from mamba_fsdp.trainer.optimizer import LossScale, make_optimizer
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.schedule import RunSchedule
from mamba_fsdp.trainer.starting_point import RunData, StartingPoint, find_starting_point

MAX_ESTIMATE_ERROR = 1.2  # the largest ratio of expected to measured memory, see docs/planning.md


@dataclass
class TrainContext:
    """The objects that the training loop works on."""

    start: StartingPoint
    world: World
    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    state: TrainState
    loss_scale: LossScale
    schedule: RunSchedule
    loader: Loader
    checkpointer: Checkpointer
    kernels: BackendChoice
    # {source: bytes of the text in a validation}, see _count_predicted_bytes; None before the first validation.
    validation_bytes: dict[str, float] | None = None

    @property
    def settings(self) -> TrainConfig:
        return self.start.settings

    @property
    def data(self) -> RunData:
        return self.start.data

    def environment_fingerprint(self) -> dict[str, Any]:
        """Returns facts about the ranks, the device and the software. The event of a start records them.

        Together with the settings, the data and the position in the data, these facts determine the results of a step
        bitwise.
        """
        device = local_machine().device
        if device == "cpu":
            device = f"CPU with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        return {
            "ranks": self.world.size,
            "ranks_per_node": self.world.local_size,
            "device": device,
            "kernels": str(BackendChoice(self.kernels.backends)),
            "torch": torch.__version__,
            "code": code_digest(),
            "global_batch": self.schedule.global_batch,
        }


@dataclass
class RunSetup:
    """Sets up a run from its starting point. All ranks call each method at the same point.

    The methods raise UserError if this machine can't train with the settings, or if the checkpoint or the weights do
    not fit the model.
    """

    start: StartingPoint
    world: World
    folder: RunFolder
    print_line: PrintLine

    def print_plan(self, shape: World) -> None:
        """Prints the plan of the run on the ranks of `shape`, for a dry run. Also verifies the checkpoint."""
        self.choose_backends(shape)
        found = self.start.checkpoint
        if found:
            path = self.start.origin.path
            self.use_checkpoint(
                find_checkpoint(path, self.world, self.print_line, found=found).path, shape
            )
        self.print_start()

    def make_context(self) -> TrainContext:
        """Creates the objects that the training loop works on, and loads the weights and the optimizer's state."""
        settings = self.start.settings
        world = self.world
        kernels = self.choose_backends(world)
        parallel = build_model(settings, world, kernels.backends)
        batch_shape = split_step(settings, world.rank, world.size)
        tokens_per_step = batch_shape.global_batch * settings.data.seq_length
        dtype = DTYPES[settings.training.precision(world.device.type)]
        optimizer = make_optimizer(parallel, parameters(settings.model), settings.optimizer, dtype)
        checkpointer = Checkpointer(
            self.folder.path,
            world,
            self.folder.lease,
            keep=settings.checkpoint.keep_checkpoints,
            keep_every=settings.checkpoint.keep_every.steps(tokens_per_step),
            asynchronous=settings.checkpoint.async_checkpoint,
            report=self.print_line,
        )
        self.load_weights(parallel, optimizer, checkpointer)
        self.print_start()
        start = self.start
        assert start.schedule
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
            kernels=kernels,
        )

    def choose_backends(self, shape: World) -> BackendChoice:
        """Selects a backend for each operator.

        Prints the model, the kernels, and the expected memory on the ranks of `shape`.

        Raises UserError if no backend is usable for an operator, or if a GPU certainly has too little memory.
        """
        settings = self.start.settings
        model = settings.model
        world = self.world
        device = world.device.type
        precision = settings.training.precision(device)
        strategy = choose_strategy(settings.parallel, shape)
        self.print_line(
            f"model      {model_title(model)}: {parameter_count(model):,} parameters, {format_count(model.n_layer, 'layer')}, "
            f"{precision}, {strategy.replace('none', 'no sharding')} on {shape.size} x {device}"
        )
        is_dry = settings.training.dry_run
        if device in kernel_selection.TESTED_DEVICES and not is_dry:
            choice, origin = kernel_selection.select_kernels(
                settings, world, strategy, self.folder.path, self.folder.lease.write
            )
            self.print_line(f"kernels    {choice}; {origin}")
        else:
            uses = settings.operator_uses(device)
            choice = resolve_backends(settings.training.kernels, device, uses)
            self.print_line(f"kernels    {choice}")
        work = Workload(settings, shape, choice.backends)
        if device == "cuda" or is_dry:
            memory = world.on_rank0(expected_memory, work)
            estimate = "about"
        else:  # skip the slow estimate on a CPU, because nothing is rejected there
            memory = state_memory(work)
            estimate = "at least"
        rows = ", ".join(
            f"{name} {format_quantity(size, 'B')}" for name, size in memory.items() if size
        )
        self.print_line(
            f"memory     {estimate} {format_quantity(sum(memory.values()), 'B')} a device: {rows}"
        )
        check_memory(memory, shape, self.print_line)
        return choice

    def load_weights(
        self,
        parallel: ParallelModel,
        optimizer: torch.optim.Optimizer,
        checkpointer: Checkpointer,
    ) -> None:
        """Initializes model and optimizer: from a checkpoint, from weights, or at random."""
        start = self.start
        found = start.checkpoint
        shards = parallel.shards(optimizer)
        if found:
            if start.origin.is_own:
                verified = checkpointer.resume(shards, found)
            else:
                path = start.origin.path
                verified = find_checkpoint(
                    path, self.world, self.print_line, shards=shards, found=found
                )
                load(verified, shards, self.world)
            self.use_checkpoint(verified.path, self.world)
        elif start.weights:
            start.weights.open(
                self.world, lambda weights: fill_shards(parallel.shards(), weights.slice)
            )
        else:
            initialize_weights(start.settings, parallel)
        parallel.set_optimizer_steps(optimizer, self.start.state.optimizer_steps)

    def use_checkpoint(self, path: Path, shape: World) -> None:
        """Finds a new starting point for the checkpoint at `path`, if the present starting point has another
        checkpoint.

        That other checkpoint turned out to be damaged, and the older one at `path` is used instead.
        """
        if self.start.checkpoint and self.start.checkpoint.path != path:
            self.start = self.world.on_rank0(
                find_starting_point,
                self.start.settings,
                self.folder.path,
                shape,
                self.print_line,
                path,
            )

    def print_start(self) -> None:
        for line in self.start.lines:
            self.print_line(line)


def initialize_weights(settings: TrainConfig, parallel: ParallelModel) -> None:
    """Initializes the model with random weights.

    A weight depends only on the seed, the name of its tensor and its index, and not on the number of ranks.
    """
    spec = parameters(settings.model)
    seed = settings.training.seed

    def initial(name: str, start: int, stop: int) -> torch.Tensor:
        return initial_values(name, spec[name], seed, start, stop)

    parallel.world.run_local(fill_shards, parallel.shards(), initial)


def check_memory(memory: dict[str, int], world: World, print_line: PrintLine) -> None:
    """Compares the expected memory with the available memory.

    memory: {part: bytes} of one device. Prints a warning if a GPU has less memory or, on CPUs, if the ranks of this
    machine need more than 40 % of its memory. Raises UserError if a GPU certainly has too little memory.
    """
    available = local_machine().memory * 1e9
    needed = sum(memory.values())
    on_gpu = world.device.type == "cuda"
    if on_gpu and needed > MAX_ESTIMATE_ERROR * available:
        raise UserError(
            f"the training needs about {format_quantity(needed, 'B')} of memory on each GPU, but a GPU has only "
            f"{format_quantity(available, 'B')}: {MEMORY_ADVICE}"
        )
    if on_gpu and needed > available:
        print_line(
            f"warning    the training can run out of memory: each GPU has only {format_quantity(available, 'B')}: {MEMORY_ADVICE}"
        )
    on_machine = needed * world.local_size
    if not on_gpu and on_machine > 0.4 * available:
        print_line(
            f"warning    the ranks need {format_quantity(on_machine, 'B')} of the machine's {format_quantity(available, 'B')}: {MEMORY_ADVICE}"
        )


def build_model(settings: TrainConfig, world: World, backends: dict[str, str]) -> ParallelModel:
    """Builds the sharded model for this rank. Its parameters are not initialized."""
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
        network.enable_context_parallel(ContextGroup.create(world, sharing))
    return parallelize(network, settings.parallel, world=world, compute_dtype=dtype)
