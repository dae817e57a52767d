"""What a device holds while it trains: arithmetic on the model's description, in bytes. No tensor is made.

Each part of expected_memory is a function below. Sources: the backends in mamba_fsdp/ops say what each keeps and takes;
FSDP2's buffers are those of torch 2.13. tests/train/test_simulate.py holds all of it against a step on fake tensors.
What the reference backends take beside what they keep is not counted: with them it is a lower limit. Nor are NCCL's
buffers, gaps between allocations and CUDA's own memory (estimate.py adds a guess of those).
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from config.model_config import Layer, ModelConfig
from config.train_config import TrainConfig
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.model import spec
from mamba_fsdp.ops.loss import CHUNK
from mamba_fsdp.parallel.parallelize import choose_recomputed, choose_strategy
from mamba_fsdp.parallel.world import World

FP32 = 4  # bytes
SCAN_STRIDE = 64  # positions from one kept state of Mamba-1's scan to the next


class BlockBytes(NamedTuple):
    """Bytes of a block per token."""

    kept: float  # for its backward pass
    working: float  # beside that while it runs


@dataclass(frozen=True)
class Workload:
    """What the formulas read of a training. backends: operator -> backend, as ops/backends.py chooses them."""

    settings: TrainConfig
    world: World
    backends: dict[str, str]

    @property
    def model(self) -> ModelConfig:
        return self.settings.model

    @property
    def width(self) -> int:
        """Bytes of an element in the compute dtype."""
        return DTYPES[self.settings.training.mixed_precision].itemsize

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.settings.training.batch_size * self.settings.data.seq_length

    @cached_property
    def strategy(self) -> str:
        return choose_strategy(self.settings.parallel, self.world)

    @property
    def is_sharded(self) -> bool:
        return self.strategy in ("fsdp", "hsdp")

    @property
    def shard_ranks(self) -> int:
        """Ranks over which a weight is cut."""
        if self.strategy == "fsdp":
            return self.world.size
        return self.world.local_size if self.strategy == "hsdp" else 1

    @cached_property
    def recomputes(self) -> list[bool]:
        """Which of the blocks recompute their activations."""
        parallel = self.settings.parallel
        share = Fraction(0)
        if parallel.fsdp_activation_checkpointing:
            share = parallel.selective_share()
        return choose_recomputed(self.model.n_layer, share)

    @property
    def repeats(self) -> list[float]:
        """How much more each block computes than a forward and a backward pass (of twice that): 4/3, or 1."""
        return [4 / 3 if recomputes else 1.0 for recomputes in self.recomputes]

    @property
    def head_size(self) -> int:
        """Elements of the output layer."""
        return spec.output_layer(self.model).size

    @property
    def outside_size(self) -> int:
        """Elements of the matrices outside the blocks."""
        return self.head_size * (1 if self.model.tie_embeddings else 2)

    @cached_property
    def block_sizes(self) -> list[int]:
        """Elements of what each block multiplies with."""
        return [
            sum(
                product.size
                for part in spec.layer_parts(layer).values()
                for product in _products(self.model, part)
            )
            for layer in self.model.layer_list()
        ]

    @cached_property
    def block_bytes(self) -> list[BlockBytes]:
        return [block_bytes(self, layer) for layer in self.model.layer_list()]

    @property
    def kept_per_token(self) -> list[float]:
        """Bytes that each block keeps until its backward pass: one that recomputes only its two inputs."""
        inputs = (FP32 + self.width) * self.model.d_model
        return [
            inputs if recomputes else block.kept
            for recomputes, block in zip(self.recomputes, self.block_bytes)
        ]


def expected_memory(
    settings: TrainConfig, world: World, backends: dict[str, str]
) -> dict[str, int]:
    """Returns bytes by part, on the rank that holds most."""
    work = Workload(settings, world, backends)
    parts = {
        "weights": weights_bytes(work),
        "gradients": gradients_bytes(work),
        "moments": 2 * weights_bytes(work),  # AdamW's two
        "gathered": gathered_bytes(work),
        "activations": activations_bytes(work),
        "loss": loss_bytes(work),
    }
    return {name: int(size) for name, size in parts.items()}


def weights_bytes(work: Workload) -> int:
    """Weights are fp32. Sharding cuts each by rows over its group of ranks; those that compute in fp32 stay whole."""
    elements = 0
    for parameter in spec.parameters(work.model).values():
        if parameter.fp32:
            elements += parameter.size
        else:
            rows = parameter.shape[0]
            elements += math.ceil(rows / work.shard_ranks) * (parameter.size // rows)
    return FP32 * elements


def gradients_bytes(work: Workload) -> int:
    """Gradients lie as the weights do; with accumulate_unsharded all of them are whole."""
    if work.is_sharded and work.settings.parallel.accumulate_unsharded:
        return FP32 * spec.parameter_count(work.model)
    return weights_bytes(work)


def gathered_bytes(work: Workload) -> int:
    """Copies in the compute dtype. With sharding: what is outside the blocks; of the largest block the weights twice, as
    they come and as they are used, and the gradients, which are reduced in fp32. Without, in half precision: what
    blocks multiply with, until their backward pass."""
    if work.is_sharded:
        return work.width * work.outside_size + (3 * work.width + FP32) * max(work.block_sizes)
    if work.width == FP32:
        return 0
    return work.width * sum(
        size for size, recomputes in zip(work.block_sizes, work.recomputes) if not recomputes
    )


def activations_bytes(work: Workload) -> float:
    """What the blocks keep for the backward pass, and what it takes in the block where both are most."""
    kept_before = 0.0
    most = 0.0
    for kept, block in zip(work.kept_per_token, work.block_bytes):
        most = max(most, kept_before + block.kept + block.working)
        kept_before += kept
    total = work.tokens * most
    if "mamba1" in work.backends:
        # What its programs, a thousand at least, write down within a chunk.
        model = work.model
        programs = max(1024, work.settings.training.batch_size * model.d_inner // 32)
        total += programs * SCAN_STRIDE // 2 * (model.d_state + 2) * 32 * FP32
    return total


def loss_bytes(work: Workload) -> float:
    """What the gradients of the loss's two inputs and the logits of one chunk take beyond what the backward pass does."""
    model = work.model
    width = work.width
    final_norm = (FP32 + width) * model.d_model
    kept = work.tokens * (sum(work.kept_per_token) + final_norm)
    head_copies = FP32
    if width < FP32:
        head_copies += width if work.is_sharded else 2 * width
    logits = 2 * FP32 * min(CHUNK, work.tokens) * model.padded_vocab_size
    at_loss = kept + head_copies * work.head_size + work.tokens * width * model.d_model + logits
    beyond = at_loss - activations_bytes(work)
    if work.is_sharded:
        blocks_gathered = gathered_bytes(work) - width * work.outside_size
        return max(width * work.head_size, beyond - blocks_gathered)
    return max(0, beyond)


def block_bytes(work: Workload, layer: Layer) -> BlockBytes:
    """Returns what a block keeps and takes: its mixer, its MLP, and the norms' inputs."""
    width = work.width
    norm_input = (FP32 + width) * work.model.d_model
    mixer = _mixer_bytes(work, layer)
    kept = norm_input + mixer.kept
    working = mixer.working
    if layer.mlp:
        # Both halves of fc1, the gate's SiLU, their product: gone when it is the mixer's turn.
        intermediate = width * work.model.resolved_d_intermediate
        mlp_kept = norm_input + 4 * intermediate
        kept += mlp_kept
        working = max(working - mlp_kept, 2 * intermediate)
    return BlockBytes(kept, working + norm_input)


def _mixer_bytes(work: Workload, layer: Layer) -> BlockBytes:
    if layer.mixer == "attention":
        return _attention_bytes(work)
    if layer.mixer in work.backends:
        return _mamba1_bytes(work) if layer.mixer == "mamba1" else _mamba2_bytes(work)
    # The reference backends keep what each product comes to, and the input of the last.
    products = _products(work.model, spec.MIXERS[layer.mixer])
    outputs = sum(product.shape[0] for product in products)
    last = products[-1]
    return BlockBytes(work.width * (outputs + last.size // last.shape[0]), 0.0)


def _mamba1_bytes(work: Workload) -> BlockBytes:
    """Keeps xz, [dt, B, C] and states; takes nine of u, dt, y and their gradients."""
    model = work.model
    elements = 2 * model.d_inner + model.resolved_dt_rank + 2 * model.d_state
    states = model.d_state * model.d_inner
    return BlockBytes(
        kept=work.width * elements + FP32 * states / SCAN_STRIDE,
        working=8 * work.width * model.d_inner + states / 4,
    )


def _mamba2_bytes(work: Workload) -> BlockBytes:
    """Keeps [z, x, B, C, dt]; takes the states of both ways, a chunk of 32 each."""
    model = work.model
    states = model.d_state
    rows = _products(model, spec.MIXERS["mamba2"])[0].shape[0]
    chunk = max(16, min(32, 4096 // max(16, states)))
    convolved = model.d_inner + 2 * model.ngroups * states
    working = work.width * (convolved + rows + (4 + 2 * states / chunk) * model.d_inner)
    working += model.n_ssm_head * (states / 2 + 12 + 16 * math.ceil(states / 64))
    return BlockBytes(work.width * rows + 4 * model.ngroups, working)


def _attention_bytes(work: Workload) -> BlockBytes:
    """Keeps q, k, v and what comes out; turns positions in fp32."""
    model = work.model
    heads = model.n_head * model.resolved_head_dim
    if model.n_kv_head < model.n_head:
        elements = 4 * heads
    else:
        rows = _products(model, spec.MIXERS["attention"])[0].shape[0]
        elements = rows + heads * (3 if model.resolved_rotary_dim else 1)
    return BlockBytes(work.width * elements + 4 * model.n_head, 5 * work.width * heads)


def _products(model: ModelConfig, part: spec.Spec) -> list[spec.Parameter]:
    """What a mixer or MLP multiplies with: matrices (outputs, inputs), and a convolution (channels, 1, width)."""
    return [parameter for parameter in part.parameters(model).values() if parameter.decay]
