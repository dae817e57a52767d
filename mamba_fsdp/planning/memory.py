"""What a device holds while it trains: arithmetic on the model's description, in bytes. No tensor is made.

Each part of expected_memory is a function below. Sources: the backends in mamba_fsdp/ops say what each keeps and takes;
FSDP2's buffers are those of torch 2.13. tests/trainer/test_simulate.py holds all of it against a step on fake tensors.
What the reference backends take beside what they keep is not counted: with them it is a lower limit. Nor are NCCL's
buffers, gaps between allocations and CUDA's own memory (estimate.py adds a guess of those).
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.loader import own_positions
from mamba_fsdp.model import spec
from mamba_fsdp.ops.loss import CHUNK
from mamba_fsdp.parallel.parallelize import choose_recomputed, choose_strategy
from mamba_fsdp.parallel.world import World
from mamba_fsdp.settings.model_config import Layer, ModelConfig
from mamba_fsdp.settings.train_config import TrainConfig

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
        """Tokens of a micro-batch that a device computes."""
        return self.settings.training.batch_size * own_positions(self.settings)

    @property
    def sharing(self) -> int:
        """Ranks that share each sequence."""
        return self.settings.parallel.context_parallel

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
    def mixers(self) -> list[tuple[str, float]]:
        """Every mixer of the blocks, and how often its block `repeats`."""
        layers = zip(self.model.layer_list(), self.repeats)
        return [(mixer, repeats) for layer, repeats in layers for mixer in layer.mixers]

    @cached_property
    def parameters(self) -> list[spec.Parameter]:
        return list(spec.parameters(self.model).values())

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
                for product in products_of(self.model, part)
            )
            for layer in self.model.layer_list()
        ]

    @cached_property
    def of_muon(self) -> list[spec.Parameter]:
        """The parameters that Muon updates."""
        if self.settings.optimizer.optimizer != "muon":
            return []
        return [parameter for parameter in self.parameters if parameter.rows]

    def most_owned(self, costs: list[int]) -> float:
        """What falls to the rank that has most of it, about, where Muon gives each of its parameters to one rank. costs:
        of each parameter."""
        return max([sum(costs) / self.world.size, *costs])

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
    weights = held_bytes(work, work.parameters)
    parts = {
        "weights": weights,
        "gradients": gradients_bytes(work),
        # Of each weight AdamW has two; Muon one of each of its own.
        "moments": 2 * weights - held_bytes(work, work.of_muon),
        "gathered": gathered_bytes(work),
        "activations": activations_bytes(work),
        "loss": loss_bytes(work),
    }
    passing = parts["gathered"] + parts["activations"] + parts["loss"]
    parts["muon"] = max(0, muon_bytes(work) - passing)
    return {name: int(size) for name, size in parts.items()}


def held_bytes(work: Workload, parameters: list[spec.Parameter]) -> int:
    """Weights are fp32. Sharding cuts each by rows over its group of ranks; those that compute in fp32 stay whole."""
    elements = 0
    for parameter in parameters:
        if parameter.fp32:
            elements += parameter.size
        else:
            rows = parameter.shape[0]
            elements += math.ceil(rows / work.shard_ranks) * (parameter.size // rows)
    return FP32 * elements


def muon_bytes(work: Workload) -> float:
    """What Muon's step takes, when activations are gone, beyond the gradients that it frees: momenta, what is sent and
    received of them, and the steps."""
    gradients = held_bytes(work, work.of_muon)
    held = gradients / FP32
    owned = work.most_owned([parameter.size for parameter in work.of_muon])
    replicas = work.world.size // work.shard_ranks
    elements = held + (2 + replicas) * owned
    if work.world.size > 1:  # else what is sent is received
        elements += held
    return work.width * elements - gradients


def gradients_bytes(work: Workload) -> int:
    """Gradients lie as the weights do; with accumulate_unsharded all of them are whole."""
    if work.is_sharded and work.settings.parallel.accumulate_unsharded:
        return FP32 * spec.parameter_count(work.model)
    return held_bytes(work, work.parameters)


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
        programs = max(1024, work.settings.training.batch_size * work.model.d_inner // 32)
        kept_states = SCAN_STRIDE // 4 + 1
        total += programs * kept_states * (work.model.d_state + 4) * 32 * FP32
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
    """Returns what a block keeps and takes: its mixers, its MLP, and the norms' inputs."""
    norm_input = (FP32 + work.width) * work.model.d_model
    mixers = [_mixer_bytes(work, mixer) for mixer in layer.mixers]
    kept = norm_input + sum(mixer.kept for mixer in mixers)
    working = max(mixer.working for mixer in mixers)
    if layer.mlp:  # gone when it is the mixer's turn
        mlp = _mlp_bytes(work)
        mlp_kept = norm_input + mlp.kept
        kept += mlp_kept
        working = max(working - mlp_kept, mlp.working)
    return BlockBytes(kept, working + norm_input)


def _mlp_bytes(work: Workload) -> BlockBytes:
    """Keeps both halves of fc1, the gate's SiLU and their product; or the ReLU and its square."""
    intermediate = work.width * work.model.resolved_d_intermediate
    is_gated = work.model.mlp_activation == "swiglu"
    return BlockBytes((4 if is_gated else 2) * intermediate, 2 * intermediate)


def _mixer_bytes(work: Workload, mixer: str) -> BlockBytes:
    if mixer == "mlp":
        return _mlp_bytes(work)
    if mixer == "attention":
        return _attention_bytes(work)
    if mixer == "mamba3":
        return _mamba3_bytes(work)
    if mixer in work.backends:
        return _mamba1_bytes(work) if mixer == "mamba1" else _mamba2_bytes(work)
    if work.sharing > 1:
        return _parts_bytes(work, mixer)
    # The reference backends keep what each product comes to, and the input of the last.
    products = products_of(work.model, spec.MIXERS[mixer])
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
    """Keeps [z, x, B, C, dt]; takes the states of one way for each pair of chunks of 32, and then what is more: five of
    the gated norm's in fp32 as plain PyTorch makes them, or the states of the other way with y, dy, x and dx."""
    model = work.model
    states = model.d_state
    rows = _projected(model, "mamba2")
    chunk = max(16, min(32, 4096 // max(16, states)))
    convolved = model.d_inner + 2 * model.ngroups * states
    of_states = work.width * model.d_inner * states / (2 * chunk)
    of_norm = (2 * work.width + 5 * FP32) * model.d_inner
    of_scan = of_states + 4 * work.width * model.d_inner
    of_scan += model.n_ssm_head * (states / 2 + 12 + 24)
    working = work.width * (convolved + rows) + of_states + max(of_norm, of_scan)
    return BlockBytes(work.width * rows + 4 * model.ngroups, working)


def _parts_bytes(work: Workload, mixer: str) -> BlockBytes:
    """Of a Mamba mixer that has its sequences in parts: keeps what each operator takes and gives."""
    model = work.model
    channels = model.d_inner
    if mixer == "mamba1":
        # xz, the convolution's input and output, dt, y; dt and delta in fp32; the states of both scans.
        states = FP32 * model.d_state * channels / SCAN_STRIDE
        kept = work.width * 6 * channels + 2 * FP32 * channels + 2 * states
        return BlockBytes(kept, _mamba1_bytes(work).working)
    # [z, x, B, C, dt], the convolution's input and output, y and what it reads of the entering state.
    whole = _mamba2_bytes(work)
    convolved = channels + 2 * model.ngroups * model.d_state
    kept = whole.kept + work.width * 2 * (convolved + channels)
    of_norm = 0
    if work.backends["norm"] == "reference":
        of_norm = 4 * FP32 * channels
    # What the norm kept is gone when SSD's gradients are made.
    return BlockBytes(kept + of_norm, max(0, whole.working - of_norm))


def _mamba3_bytes(work: Workload) -> BlockBytes:
    """Keeps [z, x, B, C, dt, A, trapezoid, angles], each head's B and C in fp32 and as the SSD takes them, its angles with
    their cosines and sines, and x and y three times; takes the gradients of B and C. Measured on fake tensors."""
    model = work.model
    rows = _projected(model, "mamba3")
    of_heads = model.n_ssm_head * model.d_state
    kept: float = work.width * (rows + 2 * of_heads + 3 * model.d_inner)
    kept += FP32 * (2.75 * of_heads + 1.5 * model.d_inner) + 2 * of_heads
    working = 4 * FP32 * of_heads + model.d_inner * (2 + model.d_state / 8)
    return BlockBytes(kept, working)


def _attention_bytes(work: Workload) -> BlockBytes:
    """Keeps q, k, v, those of k and v of all ranks that share the sequence, and what comes out; turns positions in
    fp32."""
    model = work.model
    heads = model.n_head * model.resolved_head_dim
    keys = model.n_kv_head * model.resolved_head_dim
    elements = 2 * heads + 2 * keys
    working = 5 * work.width * heads
    if work.sharing > 1:
        of_all_ranks = 2 * keys * work.sharing
        elements += of_all_ranks
        working += (FP32 + work.width) * of_all_ranks
    if model.resolved_rotary_dim:
        elements += heads + keys
    return BlockBytes(work.width * elements + 4 * model.n_head, working)


def _projected(model: ModelConfig, mixer: str) -> int:
    """Outputs of a mixer's first product."""
    return products_of(model, spec.MIXERS[mixer])[0].shape[0]


def products_of(model: ModelConfig, part: spec.Spec) -> list[spec.Parameter]:
    """What a mixer or MLP multiplies with: matrices (outputs, inputs), and a convolution (channels, 1, width)."""
    return [parameter for parameter in part.parameters(model).values() if parameter.decay]
