"""Estimates the memory in bytes that training takes on a device. The parameters are counted; the memory of forward and
backward passes is measured by passes.py.

Each part of expected_memory has a function below. The buffers of FSDP2 are counted as in torch 2.13.
tests/trainer/test_simulate.py compares the parts with a whole step on fake tensors. The buffers of NCCL, gaps between
allocations and the memory of CUDA itself are not counted here; estimate.py adds a rough estimate of them.
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
from mamba_fsdp.planning.passes import PassBytes, measure_passes
from mamba_fsdp.settings.train_config import TrainConfig

FP32 = 4  # bytes per element


@dataclass(frozen=True)
class Workload:
    """A training run to estimate, as seen from one rank.

    backends: {operator: backend}, see ops/backends.py. measured: the passes if they were measured before; they do not
    depend on the fraction of recomputing blocks."""

    settings: TrainConfig
    world: World
    backends: dict[str, str]
    measured: PassBytes | None = None

    @property
    def model(self) -> ModelConfig:
        return self.settings.model

    @property
    def width(self) -> int:
        """Returns the bytes per element of the compute dtype."""
        return DTYPES[self.settings.training.precision(self.world.device.type)].itemsize

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of a micro-batch on one device."""
        return self.settings.training.batch_size * self.settings.positions_per_rank()

    @property
    def context_parallel_size(self) -> int:
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
        """Returns the work of each block relative to one forward and one backward pass: 4/3 if it recomputes, else 1.
        This assumes that a backward pass takes twice as much work as a forward pass."""
        return [4 / 3 if recomputes else 1.0 for recomputes in self.recomputes]

    @property
    def mixers(self) -> list[tuple[str, float]]:
        """Returns (mixer, repeats of its block) for every mixer of the model."""
        layers = zip(self.model.layer_list(), self.repeats)
        return [(mixer, repeats) for layer, repeats in layers for mixer in layer.mixers]

    @cached_property
    def parameters(self) -> list[spec.Parameter]:
        return list(spec.parameters(self.model).values())

    @property
    def parameter_count(self) -> int:
        """Returns the total number of elements of all parameters."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def head_size(self) -> int:
        """Returns the number of elements of the output layer."""
        return spec.output_layer(self.model).size

    @property
    def non_block_size(self) -> int:
        """Returns the number of elements of the matrices outside the blocks."""
        return self.head_size * (1 if self.model.tie_embeddings else 2)

    @cached_property
    def block_sizes(self) -> list[int]:
        """Returns the number of elements of each block's matrices and convolutions."""
        return [
            sum(
                product.size
                for part in spec.layer_parts(layer).values()
                for product in matmul_parameters(self.model, part)
            )
            for layer in self.model.layer_list()
        ]

    @cached_property
    def muon_parameters(self) -> list[spec.Parameter]:
        """Returns the parameters that Muon updates."""
        if self.settings.optimizer.optimizer != "muon":
            return []
        return [parameter for parameter in self.parameters if parameter.rows]

    def max_rank_cost(self, costs: list[int]) -> float:
        """Returns approximately the cost of the most expensive rank. Muon assigns each parameter to one rank, its
        owner.

        costs: the cost of each parameter."""
        return max([sum(costs) / self.world.size, *costs])

    @cached_property
    def passes(self) -> PassBytes:
        if self.measured:
            return self.measured
        return measure_passes(self.settings, self.backends, self.is_sharded, self.world.device.type)

    @property
    def saved(self) -> list[int]:
        """Returns the bytes that each block saves for its backward pass. A block that recomputes saves only its two
        inputs."""
        inputs = self.tokens * (FP32 + self.width) * self.model.d_model
        return [
            inputs if recomputes else block.saved
            for recomputes, block in zip(self.recomputes, self.passes.blocks)
        ]


def state_memory(work: Workload) -> dict[str, int]:
    """Returns {part: bytes} of the memory that is allocated all the time, on the rank where it is largest."""
    weights = stored_bytes(work, work.parameters)
    return {
        "weights": weights,
        "gradients": gradients_bytes(work),
        # AdamW has two moments for each weight, Muon has one.
        "moments": 2 * weights - stored_bytes(work, work.muon_parameters),
    }


def expected_memory(work: Workload) -> dict[str, int]:
    """Returns {part: bytes} of all the memory, on the rank where it is largest. The part `muon` is what
    Muon's step needs beyond the memory of the passes. The function takes seconds, because it measures the passes."""
    passing = {
        "gathered": gathered_bytes(work),
        "activations": activations_bytes(work),
        "loss": loss_bytes(work),
    }
    muon = max(0, muon_bytes(work) - sum(passing.values()))
    return state_memory(work) | passing | {"muon": muon}


def stored_bytes(work: Workload, parameters: list[spec.Parameter]) -> int:
    """Returns the bytes of these parameters on one rank, in fp32. Sharding splits a parameter by rows over the ranks of
    a shard group. Parameters that compute in fp32 are replicated."""
    elements = 0
    for parameter in parameters:
        if parameter.fp32:
            elements += parameter.size
        else:
            rows = parameter.shape[0]
            elements += math.ceil(rows / work.shard_ranks) * (parameter.size // rows)
    return FP32 * elements


def muon_bytes(work: Workload) -> int:
    """Returns the bytes that Muon's step needs in addition to the gradients that it frees: momenta, send and receive
    buffers, and updates. No activations exist at that time."""
    gradients = stored_bytes(work, work.muon_parameters)
    local = gradients // FP32
    owned = work.max_rank_cost([parameter.size for parameter in work.muon_parameters])
    replicas = work.world.size // work.shard_ranks
    elements = local + (2 + replicas) * owned
    if work.world.size > 1:  # a single rank does not need a separate receive buffer
        elements += local
    return int(work.width * elements - gradients)


def gradients_bytes(work: Workload) -> int:
    """Returns the bytes of the gradients. They are sharded like the weights, except with accumulate_unsharded."""
    if work.is_sharded and work.settings.parallel.accumulate_unsharded:
        return FP32 * work.parameter_count
    return stored_bytes(work, work.parameters)


def gathered_bytes(work: Workload) -> int:
    """Returns the bytes of the copies that sharding makes.

    The copies are the matrices outside the blocks in the compute dtype, and three copies of the largest block: its
    weights as received, its weights as used, and its gradients in fp32 before they are reduced."""
    if not work.is_sharded:
        return 0
    return work.width * work.non_block_size + (2 * work.width + FP32) * max(work.block_sizes)


def activations_bytes(work: Workload) -> int:
    """Returns the peak of the activations: the bytes that all blocks have saved for the backward pass, plus the bytes
    that the backward pass of the current block needs, at the block where the sum is largest."""
    saved_before = 0
    peak = 0
    for saved, block in zip(work.saved, work.passes.blocks):
        peak = max(peak, saved_before + block.saved + block.working)
        saved_before += saved
    return peak


def loss_bytes(work: Workload) -> int:
    """Returns the bytes of the final norm and the loss beyond the peak of the activations.

    With sharding, there are two differences: the gradient of the output layer exists until the end of the backward
    passes, and no block's weights are gathered during the loss."""
    beyond = sum(work.saved) + work.passes.loss - activations_bytes(work)
    if not work.is_sharded:
        return max(0, beyond)
    blocks_gathered = gathered_bytes(work) - work.width * work.non_block_size
    return max(work.width * work.head_size, beyond - blocks_gathered)


def matmul_parameters(model: ModelConfig, part: spec.Spec) -> list[spec.Parameter]:
    """Returns the parameters of a mixer or MLP that take part in products: the matrices (outputs, inputs) and the
    convolution (channels, 1, width)."""
    return [parameter for parameter in part.parameters(model).values() if parameter.decay]
