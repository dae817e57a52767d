"""Measures the memory of a forward and a backward pass without a GPU.

One block of each kind and the loss run on torch's meta device, where tensors have a shape and a dtype but no content. A
dispatch mode counts the bytes of the storages that exist. Operators run their Python code and allocate their buffers,
but they do not launch kernels.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.model.lm import Block, MambaLM
from mamba_fsdp.ops.attention import Documents
from mamba_fsdp.ops.backends import OPERATORS
from mamba_fsdp.ops.loss import tokens_per_chunk
from mamba_fsdp.ops.triton import RUNS
from mamba_fsdp.parallel.context import ContextGroup
from mamba_fsdp.settings.train_config import TrainConfig

META = torch.device("meta")
KERNEL_MODULES = ("mamba_fsdp.ops.scan.triton_kernels", "mamba_fsdp.ops.ssd.triton_kernels")
# Longer sequences are extrapolated, because some backends make a call for each position.
MAX_POSITIONS = 8192
MAX_GDN_POSITIONS = 2048  # lower, because GDN makes a hundred calls per chunk


@dataclass(frozen=True)
class BlockBytes:
    """The bytes that a block allocates for a micro-batch."""

    saved: int  # bytes that are saved for the backward pass
    working: int  # peak of the backward pass, in addition to `saved`


@dataclass(frozen=True)
class PassBytes:
    """The bytes that the forward and the backward pass of a micro-batch allocate."""

    blocks: list[BlockBytes]
    loss: int  # bytes for the final norm and the loss, in addition to `saved` of all blocks


class StorageBytes(TorchDispatchMode):
    """A dispatch mode that counts the bytes of storages: `current` is the size of all storages that operations have
    created and that still exist, `peak` its maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if function.namespace == "mamba_fsdp":
            run = RUNS[function.overloadpacket.__name__]
            with self:  # so that the buffers of the operator are counted too
                return run(*arguments)
        result = function(*arguments, **(named or {}))
        old = storages((arguments, named))
        for identity, storage in storages(result).items():
            if identity not in old:  # the result is neither a view nor written in place
                size = storage.nbytes()
                self.current += size
                weakref.finalize(storage, self.on_free, size)
        self.peak = max(self.peak, self.current)
        return result

    def on_free(self, size: int) -> None:
        self.current -= size


def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Returns {id of the storage: storage} for the tensors in a pytree. torch uses the same object for a storage as
    long as it exists."""
    leaves, _ = tree_flatten(tree)
    found = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
    return {id(storage): storage for storage in found}


class FakeKernel:
    """Replaces a module of Triton kernels, a kernel in it, and a kernel with a grid. Calling it does nothing."""

    def __getattr__(self, name: str) -> "FakeKernel":
        return self

    def __getitem__(self, grid: Any) -> "FakeKernel":
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        pass


class FakeContextGroup(ContextGroup):
    """A context group that does not communicate. It returns tensors of the right shapes."""

    def gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size, *x.shape)

    def shift(self, x: Tensor, step: int) -> Tensor:
        return torch.zeros_like(x)

    def scatter_sum(self, parts: Tensor) -> Tensor:
        return parts.new_empty(parts.shape[1:])


@contextlib.contextmanager
def fake_kernels() -> Iterator[None]:
    """Replaces the modules of Triton kernels inside the block, so that operators run on the meta device."""
    modules: Any = sys.modules
    saved = {name: modules[name] for name in KERNEL_MODULES if name in modules}
    modules.update(dict.fromkeys(KERNEL_MODULES, FakeKernel()))
    try:
        # A dispatch mode sees only the operations of its own thread, so the backward pass must run in this thread.
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        for name in KERNEL_MODULES:
            del modules[name]
        modules.update(saved)


def measure_passes(
    settings: TrainConfig, backends: dict[str, str], is_sharded: bool, device_type: str
) -> PassBytes:
    """Returns the bytes that the passes of a micro-batch allocate.

    Weights are not counted, but copies of weights in the compute dtype are. Unsharded gradients are not counted either,
    because they exist before the passes."""
    tokens = settings.training.batch_size * settings.positions_per_rank()
    layers = settings.model.layer_list()
    first_of_each = sorted({layers.index(layer) for layer in layers})
    with META, fake_kernels():
        network = make_network(settings, backends, is_sharded, device_type)
        blocks = network.backbone.layers
        bytes_by_layer = {}
        for index in first_of_each:
            layer = layers[index]
            max_positions = MAX_GDN_POSITIONS if "gdn" in layer.mixers else MAX_POSITIONS
            bytes_by_layer[layer] = block_bytes(network, blocks[index], settings, max_positions)
        loss = loss_bytes(network, tokens, tokens_per_chunk(device_type))
    return PassBytes([bytes_by_layer[layer] for layer in layers], loss)


def make_network(
    settings: TrainConfig, backends: dict[str, str], is_sharded: bool, device_type: str
) -> MambaLM:
    """Returns the model with the weights and gradients that it has at the start of a pass."""
    model = settings.model
    dtype = DTYPES[settings.training.precision(device_type)]
    context_parallel_size = settings.parallel.context_parallel
    network = MambaLM(
        model,
        backends={
            operator: runnable_backend(operator, name) for operator, name in backends.items()
        },
        compute_dtype=dtype,
        reset_at_documents=settings.data.reset_at_documents,
    )
    fp32_names = network.fp32_parameter_names()
    for name, parameter in network.named_parameters():
        if not is_sharded:
            parameter.grad = torch.empty_like(parameter)
        elif name not in fp32_names:
            parameter.data = parameter.to(dtype)
    if context_parallel_size > 1:
        network.enable_context_parallel(
            FakeContextGroup(context_parallel_size - 1, context_parallel_size, None, META)
        )
    return network


def runnable_backend(operator: str, backend: str) -> str:
    """Returns a backend that runs without a device and allocates about as much memory as `backend`."""
    if backend != "fused":
        return backend
    return "triton" if "triton" in OPERATORS[operator] else "reference"


def make_streams(network: MambaLM, *shape: int) -> tuple[Tensor, Tensor]:
    """Returns the inputs of a block, (hidden, residual)."""
    size = (*shape, network.config.d_model)
    hidden = torch.empty(size, dtype=network.compute_dtype, requires_grad=True)
    return hidden, torch.empty(size, requires_grad=True)


def block_bytes(
    network: MambaLM, block: Block, settings: TrainConfig, max_positions: int
) -> BlockBytes:
    """Measures the bytes that a block allocates in its forward and backward pass. Sequences with more than
    `max_positions` positions are extrapolated."""
    batch_size = settings.training.batch_size
    context_parallel_size = settings.parallel.context_parallel
    resets = settings.data.reset_at_documents

    def run(positions: int) -> list[int]:
        seq_idx = None
        documents = None
        if resets:
            seq_idx = torch.zeros(batch_size, context_parallel_size * positions, dtype=torch.int32)
        if resets or context_parallel_size > 1:
            asking = [positions] * batch_size if context_parallel_size > 1 else None
            documents = Documents([context_parallel_size * positions] * batch_size, asking)
        streams = make_streams(network, batch_size, positions)
        with StorageBytes() as counter:
            hidden, residual = block(*streams, seq_idx, documents)
            saved = counter.current - hidden.nbytes  # the next block frees hidden after adding it
            gradients = [torch.empty_like(hidden), torch.empty_like(residual)]
            counter.peak = 0
            torch.autograd.backward([hidden, residual], gradients)
        return [saved, counter.peak - hidden.nbytes - saved]

    return BlockBytes(
        *extrapolate(run, settings.positions_per_rank(), max_positions, max_positions // 2)
    )


def loss_bytes(network: MambaLM, tokens: int, chunk: int) -> int:
    """Measures the bytes that the final norm and the loss allocate in their forward and backward pass."""

    def run(tokens: int) -> list[int]:
        labels = torch.zeros(1, tokens, dtype=torch.int64)
        streams = make_streams(network, 1, tokens)
        with StorageBytes() as counter:
            network.loss(network.final_norm(*streams), labels, chunk=chunk).backward()
        return [counter.peak]

    return extrapolate(run, tokens, 3 * chunk, chunk)[0]


def extrapolate(
    run: Callable[[int], list[int]], size: int, max_positions: int, step: int
) -> list[int]:
    """Returns run(size). Sizes above `max_positions` are extrapolated linearly from run(max_positions) and
    run(max_positions - step)."""
    if size <= max_positions:
        return run(size)
    longer = run(max_positions)
    shorter = run(max_positions - step)
    steps = (size - max_positions) / step
    return [int(more + (more - less) * steps) for more, less in zip(longer, shorter)]
