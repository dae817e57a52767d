"""Measures the memory that a forward and a backward pass hold on a device, by running the model on tensors without
content.

A block of each kind and the loss run on torch's meta device; its tensors have only a shape, a dtype and a size. The
storages that exist are counted. Operators run their Python code and make their buffers, but launch no kernel.
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
LONGEST = 8192  # positions that are run; some backends make one call per position
LONGEST_OF_GDN = 2048  # GDN makes a hundred calls per chunk, all of the same memory


@dataclass(frozen=True)
class BlockBytes:
    """The bytes that a block holds of a micro-batch."""

    kept: int  # for its backward pass
    working: int  # at the peak of its backward pass, besides `kept`


@dataclass(frozen=True)
class PassBytes:
    """The bytes that the forward and the backward pass of a micro-batch hold."""

    blocks: list[BlockBytes]
    loss: int  # of the final norm and the loss, besides what the blocks keep


class HeldBytes(TorchDispatchMode):
    """A mode that counts the bytes of the storages that operations make, as long as the storages exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if function.namespace == "mamba_fsdp":
            run = RUNS[function.overloadpacket.__name__]
            with self:  # the buffers that the operator makes count too
                return run(*arguments)
        result = function(*arguments, **(named or {}))
        old = storages((arguments, named))
        for identity, storage in storages(result).items():
            if identity not in old:  # else a view, or written in place
                size = storage.nbytes()
                self.now += size
                weakref.finalize(storage, self.freed, size)
        self.most = max(self.most, self.now)
        return result

    def freed(self, size: int) -> None:
        self.now -= size


def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Returns the storages of the tensors in a tree, by their identity: a storage has one object as long as it exists."""
    leaves, _ = tree_flatten(tree)
    held = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
    return {id(storage): storage for storage in held}


class NoKernel:
    """A placeholder for a module of Triton kernels, for a kernel, and for its launch."""

    def __getattr__(self, name: str) -> "NoKernel":
        return self

    def __getitem__(self, grid: Any) -> "NoKernel":
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        pass


class NoRanks(ContextGroup):
    """A placeholder for the ranks that share a sequence. It sends nothing."""

    def gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size, *x.shape)

    def shift(self, x: Tensor, step: int) -> Tensor:
        return torch.zeros_like(x)

    def scatter_sum(self, parts: Tensor) -> Tensor:
        return parts.new_empty(parts.shape[1:])


@contextlib.contextmanager
def no_kernels() -> Iterator[None]:
    """Returns a context manager in which operators run on the meta device, without their kernels."""
    modules: Any = sys.modules
    kept = {name: modules[name] for name in KERNEL_MODULES if name in modules}
    modules.update(dict.fromkeys(KERNEL_MODULES, NoKernel()))
    try:
        with torch.autograd.set_multithreading_enabled(False):  # a mode sees its own thread
            yield
    finally:
        for name in KERNEL_MODULES:
            del modules[name]
        modules.update(kept)


def measure(
    settings: TrainConfig, backends: dict[str, str], is_sharded: bool, device_type: str
) -> PassBytes:
    """Returns the bytes that the passes of a micro-batch hold. Weights do not count; unsharded gradients, which exist
    before the passes, do not count either. Copies of weights in the compute dtype count."""
    tokens = settings.training.batch_size * settings.own_positions()
    layers = settings.model.layer_list()
    first_of_kind = sorted({layers.index(layer) for layer in layers})
    with META, no_kernels():
        network = make_network(settings, backends, is_sharded, device_type)
        blocks = network.backbone.layers
        of_kind = {}
        for index in first_of_kind:
            layer = layers[index]
            longest = LONGEST_OF_GDN if "gdn" in layer.mixers else LONGEST
            of_kind[layer] = block_bytes(network, blocks[index], settings, longest)
        loss = loss_bytes(network, tokens, tokens_per_chunk(device_type))
    return PassBytes([of_kind[layer] for layer in layers], loss)


def make_network(
    settings: TrainConfig, backends: dict[str, str], is_sharded: bool, device_type: str
) -> MambaLM:
    """Returns the model with its weights and gradients in the state at the start of a pass."""
    model = settings.model
    dtype = DTYPES[settings.training.precision(device_type)]
    sharing = settings.parallel.context_parallel
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
    if sharing > 1:
        network.enable_context_parallel(NoRanks(sharing - 1, sharing, None, META))
    return network


def runnable_backend(operator: str, backend: str) -> str:
    """Returns a backend that runs without a device and holds about as much memory as `backend`."""
    if backend != "fused":
        return backend
    return "triton" if "triton" in OPERATORS[operator] else "reference"


def make_streams(network: MambaLM, *shape: int) -> tuple[Tensor, Tensor]:
    """Returns the inputs of a block: hidden, and the residual stream to which hidden has yet to be added."""
    size = (*shape, network.config.d_model)
    hidden = torch.empty(size, dtype=network.compute_dtype, requires_grad=True)
    return hidden, torch.empty(size, requires_grad=True)


def block_bytes(network: MambaLM, block: Block, settings: TrainConfig, longest: int) -> BlockBytes:
    """Returns the bytes that a block holds, by running it forward and backward on at most `longest` positions."""
    batch_size = settings.training.batch_size
    sharing = settings.parallel.context_parallel
    resets = settings.data.reset_at_documents

    def run(positions: int) -> list[int]:
        seq_idx = None
        documents = None
        if resets:
            seq_idx = torch.zeros(batch_size, sharing * positions, dtype=torch.int32)
        if resets or sharing > 1:
            asking = [positions] * batch_size if sharing > 1 else None
            documents = Documents([sharing * positions] * batch_size, asking)
        streams = make_streams(network, batch_size, positions)
        with HeldBytes() as held:
            hidden, residual = block(*streams, seq_idx, documents)
            kept = held.now - hidden.nbytes  # the next block adds hidden and frees it
            gradients = [torch.empty_like(hidden), torch.empty_like(residual)]
            held.most = 0
            torch.autograd.backward([hidden, residual], gradients)
        return [kept, held.most - hidden.nbytes - kept]

    return BlockBytes(*extrapolated(run, settings.own_positions(), longest, longest // 2))


def loss_bytes(network: MambaLM, tokens: int, chunk: int) -> int:
    """Returns the bytes that the final norm and the loss hold, by running them forward and backward."""

    def run(tokens: int) -> list[int]:
        labels = torch.zeros(1, tokens, dtype=torch.int64)
        streams = make_streams(network, 1, tokens)
        with HeldBytes() as held:
            network.loss(network.final_norm(*streams), labels, chunk=chunk).backward()
        return [held.most]

    return extrapolated(run, tokens, 3 * chunk, chunk)[0]


def extrapolated(run: Callable[[int], list[int]], size: int, longest: int, step: int) -> list[int]:
    """Returns run(size). For a size above `longest`, extrapolates from run(longest) and run(longest - step)."""
    if size <= longest:
        return run(size)
    longer = run(longest)
    shorter = run(longest - step)
    steps = (size - longest) / step
    return [int(more + (more - less) * steps) for more, less in zip(longer, shorter)]
