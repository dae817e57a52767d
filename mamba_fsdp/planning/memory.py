"""Computes the memory of a device in training, in bytes: parameters are counted, passes are measured (passes.py).

Each part of expected_memory is a function below. FSDP2's buffers are as in torch 2.13.
tests/trainer/test_simulate.py compares the parts with a whole step on fake tensors. NCCL's buffers, gaps between
allocations and CUDA's own memory are not counted; estimate.py adds a rough figure for them.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.model import spec
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.parallel.parallelize import choose_strategy, select_recomputed
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.passes import PassBytes, measure
from mamba_fsdp.settings.train_config import TrainConfig

FP32 = 4  # bytes


@dataclass(frozen=True)
class Workload:
    """The training run to count the memory of. backends: operator -> backend, as ops/backends.py chooses them.
    measured: passes of the same settings, with any share of recomputing blocks."""

    settings: TrainConfig
    world: World
    backends: dict[str, str]
    measured: PassBytes | None = None

    @property
    def model(self) -> ModelConfig:
        return self.settings.model

    @property
    def width(self) -> int:
        """Returns the bytes of an element in the compute dtype."""
        return DTYPES[self.settings.training.precision(self.world.device.type)].itemsize

    @property
    def tokens(self) -> int:
        """Returns the tokens of a micro-batch that a device computes."""
        return self.settings.training.batch_size * self.settings.own_positions()

    @property
    def sharing(self) -> int:
        """Returns the number of ranks that share each sequence."""
        return self.settings.parallel.context_parallel

    @cached_property
    def strategy(self) -> str:
        return choose_strategy(self.settings.parallel, self.world)

    @property
    def is_sharded(self) -> bool:
        return self.strategy in ("fsdp", "hsdp")

    @property
    def shard_ranks(self) -> int:
        """Returns the number of ranks over which a weight is sharded."""
        if self.strategy == "fsdp":
            return self.world.size
        return self.world.local_size if self.strategy == "hsdp" else 1

    @cached_property
    def recomputes(self) -> list[bool]:
        """Returns, for each block, whether it recomputes its activations."""
        parallel = self.settings.parallel
        share = Fraction(0)
        if parallel.fsdp_activation_checkpointing:
            share = parallel.selective_share()
        return select_recomputed(self.model.n_layer, share)

    @property
    def repeats(self) -> list[float]:
        """Returns each block's work relative to one forward and one backward pass: 4/3 if it recomputes, else 1. A
        backward pass takes twice the work of a forward pass."""
        return [4 / 3 if recomputes else 1.0 for recomputes in self.recomputes]

    @property
    def mixers(self) -> list[tuple[str, float]]:
        """Returns every mixer of the blocks, with the entry of `repeats` of its block."""
        layers = zip(self.model.layer_list(), self.repeats)
        return [(mixer, repeats) for layer, repeats in layers for mixer in layer.mixers]

    @cached_property
    def parameters(self) -> list[spec.Parameter]:
        return list(spec.parameters(self.model).values())

    @property
    def parameter_count(self) -> int:
        """Returns the number of elements of all parameters."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def head_size(self) -> int:
        """Returns the number of elements of the output layer."""
        return spec.output_layer(self.model).size

    @property
    def outside_size(self) -> int:
        """Returns the number of elements of the matrices outside the blocks."""
        return self.head_size * (1 if self.model.tie_embeddings else 2)

    @cached_property
    def block_sizes(self) -> list[int]:
        """Returns the number of elements of each block's matrices and convolutions."""
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
        """Returns the parameters that Muon updates."""
        if self.settings.optimizer.optimizer != "muon":
            return []
        return [parameter for parameter in self.parameters if parameter.rows]

    def most_owned(self, costs: list[int]) -> float:
        """Returns approximately the largest cost of a rank, if Muon gives each of its parameters to one rank. costs: of
        each parameter."""
        return max([sum(costs) / self.world.size, *costs])

    @cached_property
    def passes(self) -> PassBytes:
        if self.measured:
            return self.measured
        return measure(self.settings, self.backends, self.is_sharded, self.world.device.type)

    @property
    def kept(self) -> list[int]:
        """Returns the bytes that each block keeps until its backward pass; a block that recomputes keeps only its two
        inputs."""
        inputs = self.tokens * (FP32 + self.width) * self.model.d_model
        return [
            inputs if recomputes else block.kept
            for recomputes, block in zip(self.recomputes, self.passes.blocks)
        ]


def state_memory(work: Workload) -> dict[str, int]:
    """Returns, by part, the bytes that stay from step to step, on the rank that holds most."""
    weights = held_bytes(work, work.parameters)
    return {
        "weights": weights,
        "gradients": gradients_bytes(work),
        # AdamW has two moments of each weight, Muon one.
        "moments": 2 * weights - held_bytes(work, work.of_muon),
    }


def expected_memory(work: Workload) -> dict[str, int]:
    """Returns all bytes by part, on the rank that holds most. It takes seconds, because it runs the passes."""
    passing = {
        "gathered": gathered_bytes(work),
        "activations": activations_bytes(work),
        "loss": loss_bytes(work),
    }
    muon = max(0, muon_bytes(work) - sum(passing.values()))
    return state_memory(work) | passing | {"muon": muon}


def held_bytes(work: Workload, parameters: list[spec.Parameter]) -> int:
    """Returns the bytes that a rank holds of these parameters, in fp32. Sharding cuts a parameter by rows over the
    ranks of a shard group; parameters that compute in fp32 stay whole."""
    elements = 0
    for parameter in parameters:
        if parameter.fp32:
            elements += parameter.size
        else:
            rows = parameter.shape[0]
            elements += math.ceil(rows / work.shard_ranks) * (parameter.size // rows)
    return FP32 * elements


def muon_bytes(work: Workload) -> int:
    """Returns the bytes of Muon's step beyond the gradients that it frees: momenta, buffers to send and receive, and
    steps. No activations are held at that time."""
    gradients = held_bytes(work, work.of_muon)
    held = gradients // FP32
    owned = work.most_owned([parameter.size for parameter in work.of_muon])
    replicas = work.world.size // work.shard_ranks
    elements = held + (2 + replicas) * owned
    if work.world.size > 1:  # a single rank receives the buffer that it sends
        elements += held
    return int(work.width * elements - gradients)


def gradients_bytes(work: Workload) -> int:
    """Returns the bytes of the gradients. They are sharded as the weights are; with accumulate_unsharded, they are
    whole."""
    if work.is_sharded and work.settings.parallel.accumulate_unsharded:
        return FP32 * work.parameter_count
    return held_bytes(work, work.parameters)


def gathered_bytes(work: Workload) -> int:
    """Returns the bytes of the copies that sharding makes: the matrices outside the blocks in the compute dtype; and of
    the largest block, the weights as received and as used, and the gradients to reduce, in fp32."""
    if not work.is_sharded:
        return 0
    return work.width * work.outside_size + (2 * work.width + FP32) * max(work.block_sizes)


def activations_bytes(work: Workload) -> int:
    """Returns the bytes that the blocks keep for the backward pass plus the bytes that it takes, in the block where the
    sum is largest."""
    kept_before = 0
    most = 0
    for kept, block in zip(work.kept, work.passes.blocks):
        most = max(most, kept_before + block.kept + block.working)
        kept_before += kept
    return most


def loss_bytes(work: Workload) -> int:
    """Returns the bytes by which the final norm and the loss exceed the backward passes of the blocks. With sharding,
    the gradient of the output layer stays until the backward passes are over, and during the loss no block's weights
    are gathered."""
    beyond = sum(work.kept) + work.passes.loss - activations_bytes(work)
    if not work.is_sharded:
        return max(0, beyond)
    blocks_gathered = gathered_bytes(work) - work.width * work.outside_size
    return max(work.width * work.head_size, beyond - blocks_gathered)


def products_of(model: ModelConfig, part: spec.Spec) -> list[spec.Parameter]:
    """Returns the parameters that a mixer or MLP multiplies with: matrices (outputs, inputs) and a convolution
    (channels, 1, width)."""
    return [parameter for parameter in part.parameters(model).values() if parameter.decay]
