"""Counts where the time of a training step on one H100 goes; nothing is measured.

    python -m benchmarks.kernels.step

8 x 2048 tokens in bf16 without recomputing, in our own kernels (no mamba-ssm), each mixer in one call, not compiled by
torch.compile. The assumptions, which mamba_fsdp/planning/roofline.py shares: products at 65 % of the peak, memory at 80 %
of its rate.

- products: the FLOPs of the matrices.
- recurrence: the kernels of scan or SSD and convolution, by the cycles that `python -m benchmarks.kernels` models, or by
  their bytes if these take longer.
- norms: the bytes that the kernels must pass; before, the bytes that plain PyTorch's operations read and write.
- loss: the bytes that its operations read and write, without its products.
- rest: the bytes of all other operations of the blocks, such as casts of weights and copies, and AdamW's.
"""

import argparse
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernels.compiler import compile_all, kernels_of
from benchmarks.kernels.install import triton_folder
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.lm import Block, MambaLM
from mamba_fsdp.model.presets import preset
from mamba_fsdp.model.spec import (
    flops_per_token,
    operator_uses,
    parameter_count,
    recurrence_flops,
)
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.ops.loss import CHUNK_ON_GPU
from mamba_fsdp.ops.norm import add_rms_norm
from mamba_fsdp.ops.norm.triton import ROWS
from mamba_fsdp.ops.triton import RUNS
from mamba_fsdp.planning.devices import INSTANCES
from mamba_fsdp.planning.passes import META, make_network, make_streams, no_kernels, storages
from mamba_fsdp.planning.roofline import ADAMW_BYTES, EFFICIENCY
from mamba_fsdp.settings.train_config import TrainConfig

MODELS = ("mamba-1.4b", "mamba2-1.3b", "mamba2-2.7b")
STACKS = {"torch2.2": "2.2.0", "current": "3.6.0"}  # and their Triton
BATCH, LENGTH = 8, 2048
TOKENS = BATCH * LENGTH
H100 = INSTANCES["p5.4xlarge"]
MEMORY = H100.bandwidth * 1e9 * EFFICIENCY["memory"]
PRODUCTS = H100.tflops() * 1e12 * EFFICIENCY["products"]
CYCLES = 132 * 4 * 1.755e9 * 32  # of all lanes, a second
# Bytes an element of the gated norm in Mamba-2's mixer before it had a kernel, counted at e9d10cd: plain PyTorch, or one
# kernel a pass by torch.compile.
GATED_BEFORE = {"torch2.2": 234, "current": 24}
# Bytes of SSD an element (benchmarks/RESULTS.md: a token of mamba2-2.7b), forward and backward. The backward pass
# computes the output again.
SSD_BYTES = 21e3 / 5120, (21e3 + 179.5e3) / 5120
# Kernels of a layer, forward and backward, by how their names begin.
SCAN = (["forward"], ["backward"])
SSD = (["steps", "forward,"], ["steps", "forward,", "steps", "back,", "near", "far", "finish"])
CONV = (["forward"], ["forward", "backward"])


class Moved(TorchDispatchMode):
    """Counts the bytes that operations read and write, but for products and our norms."""

    LEFT_OUT = ("mm", "addmm", "bmm", "empty", "new_empty", "empty_like")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if function.namespace == "mamba_fsdp":
            if name.startswith("add_norm"):
                return RUNS[name](*arguments)
            with self:  # the operator's own operations
                return RUNS[name](*arguments)
        result = function(*arguments, **(named or {}))
        before = storages(arguments)
        is_view = not function._schema.is_mutable and storages(result).keys() <= before.keys()
        if name not in self.LEFT_OUT and not is_view:
            self.bytes += sum(size_of(tree) for tree in (arguments, result))
        return result


def size_of(tree: Any) -> int:
    """Returns the bytes of the tensors in a tree, each as large as it is, not as its storage."""
    leaves, _ = torch.utils._pytree.tree_flatten(tree)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def plain_norm_bytes(channels: int) -> float:
    """Returns the bytes an element of the reference's norm of a residual sum, forward and backward."""
    shape = (1, 1024, channels)
    with META:
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        residual = torch.empty(shape, requires_grad=True)
        weight = torch.empty(channels, requires_grad=True)
        with Moved() as moved:
            outputs = add_rms_norm(x, residual, weight, 1e-5, torch.bfloat16)
            torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
    return moved.bytes / x.numel()


def loss_bytes(network: MambaLM) -> int:
    with META, Moved() as moved:
        hidden, _ = make_streams(network, 1, TOKENS)
        labels = torch.zeros(1, TOKENS, dtype=torch.int64)
        network.loss(hidden, labels, chunk=CHUNK_ON_GPU).backward()
    return moved.bytes


def rest_bytes(network: MambaLM, block: Block) -> int:
    with META, no_kernels(), Moved() as moved:
        streams = make_streams(network, BATCH, LENGTH)
        outputs = block(*streams)
        torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
    return moved.bytes


def cycles(version: str, operator: str, names: list[str]) -> float:
    """Returns the modelled cycles an element of these kernels together."""
    known = [name for name, kernel in kernels_of(operator).items() if 90 in kernel.ccs]
    asked = [next(name for name in known if name.startswith(begin)) for begin in names]
    total = 0.0
    for made in compile_all(triton_folder(version), [(operator, name, 90) for name in asked]):
        assert not made.error, made.error
        total += made.cycles
    return total


def recurrence_seconds(config: ModelConfig, version: str) -> float:
    """Returns the seconds of a layer's scan or SSD and of its convolution."""
    channels = TOKENS * config.d_inner
    seconds = 0.0
    is_mamba1 = config.has("mamba1")
    for conv, scan, ssd, ssd_bytes in zip(CONV, SCAN, SSD, SSD_BYTES):
        if is_mamba1:
            seconds += channels * config.d_state * cycles(version, "scan", scan) / CYCLES
        else:
            by_cycles = channels * cycles(version, "ssd", ssd) / CYCLES
            seconds += max(by_cycles, channels * ssd_bytes / MEMORY)
        convolved = channels if is_mamba1 else channels * (1 + 2 * config.d_state / config.d_inner)
        moved = 4 if conv == CONV[0] else 4 + 6
        seconds += convolved * max(cycles(version, "conv", conv) / CYCLES, moved / MEMORY)
    return seconds


def floor(kernel: str) -> float:
    """Returns the bytes an element that a kernel of the norms must pass."""
    return kernels_of("norm")[f"{kernel} channels"].floor


def milliseconds(name: str, stack: str) -> dict[str, float]:
    settings = TrainConfig(ModelConfig(**preset(name)))
    settings = settings.changed(mixed_precision="bf16")
    config = settings.model
    uses = operator_uses(config, torch.bfloat16)
    first = dict.fromkeys(uses, "triton")
    backends = resolve_backends("auto", "cuda", uses, ("triton",), preferred=first).backends
    with META:
        network = make_network(settings, backends, False, "cuda")
    layers = config.n_layer
    flops = flops_per_token(config, LENGTH) - 3 * layers * recurrence_flops(config, LENGTH)
    of_sums = TOKENS * config.d_model * (layers + 1)
    gated = 0 if config.has("mamba1") else TOKENS * config.d_inner * layers
    parts = 8 / ROWS  # of the weight's gradient, in fp32, written and read
    before = of_sums * plain_norm_bytes(config.d_model) + gated * GATED_BEFORE[stack]
    after = of_sums * (floor("sum, 2048") + floor("sum, back, 2048") + parts)
    after += gated * (floor("gated, 4096") + floor("gated, back, 4096") + parts)
    rest = layers * rest_bytes(network, network.backbone.layers[1])
    seconds = {
        "products": TOKENS * flops / PRODUCTS,
        "recurrence": layers * recurrence_seconds(config, STACKS[stack]),
        "loss": loss_bytes(network) / MEMORY,
        "rest": (rest + ADAMW_BYTES * parameter_count(config)) / MEMORY,
        "norms before": before / MEMORY,
        "norms": after / MEMORY,
    }
    return {part: 1e3 * taken for part, taken in seconds.items()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes no words but --help
    print(
        "| model | stack | products | recurrence | loss | rest | norms, before | now | step, before | now |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in MODELS:
        for stack in STACKS:
            found = milliseconds(name, stack)
            before = found.pop("norms before")
            now = found.pop("norms")
            rest = sum(found.values())
            cells = [*found.values(), before, now, rest + before, rest + now]
            print(f"| {name} | {stack} |", " | ".join(f"{cell:.0f}" for cell in cells), "|")


if __name__ == "__main__":
    main()
