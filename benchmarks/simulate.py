"""Simulates a training step of one rank without computing: reports its peak memory and its collectives, for any model on any
number of ranks.

    python -m benchmarks.simulate PRESET RANKS [--length 64] [--context 1] [--recompute]

The step of the training loop runs on fake tensors, which have a shape, a dtype and a device but no content, in a fake
process group. A large model takes a minute. Sharded models need a torch with FSDP2.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from benchmarks.measure import command_line, table
from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.loader import Batch, split_step
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.presets import preset
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.ops.attention import Documents
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.ops.triton import RUNS
from mamba_fsdp.parallel.context import ContextGroup
from mamba_fsdp.parallel.parallelize import choose_strategy, parallelize
from mamba_fsdp.parallel.world import CPU, World
from mamba_fsdp.planning.passes import fake_kernels
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.clock import Clock
from mamba_fsdp.trainer.loop import take_step
from mamba_fsdp.trainer.optimizer import LossScale, make_optimizer
from mamba_fsdp.trainer.schedule import Schedule


class Collective(NamedTuple):
    name: str  # the name in c10d, such as allreduce_, _allgather_base_, _reduce_scatter_base_
    dtype: torch.dtype
    numel: int  # number of elements of the gathered output, or of the input that is reduced
    ranks: int  # number of participating ranks


class Simulated(NamedTuple):
    collectives: list[Collective]  # the collectives of the step, in order
    # Bytes at the peak of the total, by part: weights, gradients, moments, passing (all other tensors).
    peak: dict[str, int]


def simulate(settings: TrainConfig, size: int, rank: int = 0, *, inside: bool = False) -> Simulated:
    """Simulates a step of the rank `rank` of `size` ranks, with eight ranks per node and with Triton backends where they exist.

    inside: whether to count the buffers that Triton backends allocate while they run. An exception is raised if the step reads
    a number from a tensor. Does not support sharding_strategy=ddp, and must not be called while a process group exists."""
    training = settings.training
    data = settings.data
    dtype = DTYPES[training.precision("cuda")]
    documents = data.reset_at_documents
    sharing = settings.parallel.context_parallel
    uses = settings.operator_uses("cuda")
    backends = resolve_backends(training.kernels, "cuda", uses, assumed=("triton",)).backends
    world = _World(rank, size, min(size, 8), CPU)
    assert choose_strategy(settings.parallel, world) != "ddp", "its reducer reads what it sends"
    tokens = torch.zeros(training.batch_size, data.seq_length, dtype=torch.int64)
    batch = Batch(
        tokens,
        tokens,
        tokens.int() if documents else None,
        weights=tokens.float() if data.position_weighting else None,
        documents=Documents([data.seq_length] * training.batch_size) if documents else None,
    )
    batch_shape = split_step(settings, rank, size)
    if batch_shape.sequence_slice:
        batch = batch_shape.sequence_slice.of(batch)
    with _process_group(world), FakeTensorMode(), _Watch(inside) as watch:
        network = MambaLM(
            settings.model, backends=backends, compute_dtype=dtype, reset_at_documents=documents
        )
        if sharing > 1:
            network.enable_context_parallel(ContextGroup.create(world, sharing))
        parallel = parallelize(network, settings.parallel, world=world, compute_dtype=dtype)
        optimizer = make_optimizer(parallel, parameters(settings.model), settings.optimizer, dtype)
        moments = [
            shard.data
            for shard in parallel.shards(optimizer)
            if shard.name.startswith("optimizer/")
        ]
        batches = [_fake(batch)] * batch_shape.grad_accumulation_steps
        state = TrainState()
        parts: Any = SimpleNamespace(
            settings=settings,
            world=world,
            parallel=parallel,
            optimizer=optimizer,
            state=state,
            loss_scale=LossScale(state, CPU, dynamic=dtype == torch.float16),
            schedule=SimpleNamespace(
                tokens_per_step=batch_shape.global_batch * data.seq_length,
                lr=Schedule("constant", 1),
            ),
            loader=SimpleNamespace(step=lambda step: batches),
            checkpointer=SimpleNamespace(is_writing=bool, wait_for_copies=bool, save_phase=bool),
        )
        stop: Any = SimpleNamespace(check=bool)
        watch.built = len(watch.sizes)
        take_step(parts, Clock(0, size), stop)
        weights = list(parallel.parameters().values())
        gradients = [parameter.grad for parameter in weights if parameter.grad is not None]
        return Simulated(
            watch.collectives, watch.peak(weights=weights, gradients=gradients, moments=moments)
        )


class _World(World):
    """A world in which copies between host and device have no content."""

    def copy_to_device(self, numbers):
        return torch.zeros(len(numbers), dtype=torch.float64, device=self.device)

    def start_copy_to_host(self, numbers):
        return numbers.tolist


class _Batch(Batch):
    def total_weight(self):
        return float(self.labels.numel())


def _fake(batch: Batch) -> _Batch:
    """Returns the batch with fake tensors. Must be called in the context of a FakeTensorMode."""
    fields = batch._asdict()
    for name, field in fields.items():
        if isinstance(field, torch.Tensor):
            fields[name] = torch.zeros(field.shape, dtype=field.dtype)
    return _Batch(**fields)


@contextlib.contextmanager
def _process_group(world: World) -> Iterator[None]:
    """Creates the fake process group. Inside the block, device meshes are made of real tensors, and backward passes run in this
    thread, because a dispatch mode sees only the operations of its own thread."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def real(*arguments, make=DeviceMesh.from_group, **named):
        with unset_fake_temporarily():
            return make(*arguments, **named)

    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        with (
            mock.patch.object(DeviceMesh, "from_group", real),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield
    finally:
        dist.destroy_process_group()


class _Watch(TorchDispatchMode):
    """A dispatch mode that records collectives, and each allocation, resize and release of storage on the device."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.collectives = []
        self.number_of = {}  # {address of an existing storage: its number}
        self.sizes = []  # [(number of a storage, its new size)]
        self.built = (
            0  # the length of `sizes` before the step, after the model was built and sharded
        )

    def __enter__(self):
        def resize(storage, size, resize=torch.UntypedStorage.resize_):
            resize(storage, size)
            self.note(storage)

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", resize)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if (
            self.inside and function.namespace == "mamba_fsdp"
        ):  # runs the operator without its kernels
            with (
                self,
                mock.patch.object(FakeTensor, "is_meta", True),
                fake_kernels(),
            ):
                return RUNS[function.overloadpacket.__name__](*arguments)
        result = function(*arguments, **(named or {}))
        tensors = [
            leaf for leaf in tree_flatten((arguments, result))[0] if isinstance(leaf, torch.Tensor)
        ]
        if function.namespace == "c10d":
            group = next(
                dist.ProcessGroup.unbox(each)
                for each in arguments
                if isinstance(each, torch.ScriptObject)
            )
            largest = max(tensors, key=torch.Tensor.numel)
            name = function.overloadpacket.__name__
            self.collectives.append(Collective(name, largest.dtype, largest.numel(), group.size()))
        for tensor in tensors:
            if tensor.device == CPU:
                self.note(tensor.untyped_storage())
        return result

    def note(self, storage):
        address = storage._cdata
        if address not in self.number_of:
            self.number_of[address] = len(self.sizes)
            weakref.finalize(storage, lambda: self.sizes.append((self.number_of.pop(address), 0)))
        self.sizes.append((self.number_of[address], storage.nbytes()))

    def peak(self, **parts):
        """Returns {part: bytes} at the peak of the total. parts: {part: tensors}; all other tensors are in `passing`."""
        part_of = {
            self.number_of[tensor.untyped_storage()._cdata]: part
            for part, tensors in parts.items()
            for tensor in tensors
        }
        now = {}
        held = dict.fromkeys([*parts, "passing"], 0)
        most = {}
        for turn, (number, size) in enumerate(self.sizes):
            if number >= self.built or number in part_of:
                held[part_of.get(number, "passing")] += size - now.get(number, 0)
                now[number] = size
            if turn >= self.built and sum(held.values()) > sum(most.values()):
                most = dict(held)
        return most


def main():
    parser = command_line(__doc__)
    parser.add_argument("preset")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--length", type=int, default=64, help="tokens per sample")
    parser.add_argument("--context", type=int, default=1, help="ranks that share each sample")
    parser.add_argument("--recompute", action="store_true", help="recompute activations")
    given = parser.parse_args()
    settings = TrainConfig(ModelConfig(**preset(given.preset)))
    settings = settings.with_values(
        seq_length=given.length,
        batch_size=1,
        context_parallel=given.context,
        fsdp_activation_checkpointing=given.recompute,
    )
    found = simulate(settings, given.ranks, inside=True)
    rows: list[dict[str, object]] = []
    for part, size in found.peak.items():
        rows.append({"memory or collective": part, "GB": f"{size / 1e9:.3f}", "calls": ""})
    for each, calls in Counter(found.collectives).items():
        size = each.numel * each.dtype.itemsize
        title = f"{each.name}, {each.dtype}"
        rows.append({"memory or collective": title, "GB": f"{size / 1e9:.3f}", "calls": calls})
    print(table(rows))


if __name__ == "__main__":
    main()
