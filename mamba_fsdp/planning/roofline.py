"""Estimates the time of a training step on a kind of machine with a roofline model. This module only calculates; it
does not run the model that is trained.

The model assumes that a device reaches a certain fraction of its peak FLOP/s, of its memory bandwidth and of the rate
of its links. EFFICIENCY contains the fraction for each kind of work. docs/planning.md compares the results with
published rates. Each part of step_seconds has a function below.
"""

from dataclasses import dataclass

from mamba_fsdp.model import spec
from mamba_fsdp.planning.devices import Instance
from mamba_fsdp.planning.memory import FP32, Workload, matmul_parameters
from mamba_fsdp.settings.train_config import NEWTON_SCHULZ_ITERATIONS

EFFICIENCY = {"products": 0.65, "attention": 0.45, "memory": 0.8, "links": 0.75, "network": 0.7}
# Cost of the recurrence, as equivalent bytes per state and token. The cost of Mamba-2 is fitted to published rates of
# mamba-ssm. There are no published rates of Mamba-1, and its cost is an assumption from Dao and Gu 2024 (arXiv
# 2405.21060), section 9.3. Gated DeltaNet is assumed to cost twice as much as Mamba-2, because it has twice as many
# products.
STATE_BYTES = {"mamba1": 12, "mamba2": 3, "mamba3": 3, "gdn": 6}
HOP_SECONDS = 5e-6  # latency of each hop of a ring
# Host time to launch the kernels of a block, forward and backward. It was measured by benchmarks/launches.py on a core
# of an AMD EPYC for Mamba-1 and Mamba-2 without sharding. Other layers and the overhead of sharding have not been
# measured.
BLOCK_LAUNCH_SECONDS = 1.1e-3
FP32_SLOWDOWN = 16  # fp32 products take about 16 times as long as bf16 products on these devices
ADAMW_BYTES = 40  # bytes that AdamW moves for each weight


@dataclass
class Traffic:
    """The time that communication between ranks takes in a step."""

    overlapping: float = 0.0  # seconds that can overlap with computation
    # Seconds that can't overlap: communication for the matrices outside the blocks, context parallelism and Muon.
    exposed: float = 0.0


def step_seconds(work: Workload, machine: Instance, passes: int) -> dict[str, float]:
    """Returns {part: seconds} for a step of `passes` micro-batches.

    The time of the step is the sum of all parts except `hidden`. `hidden` is the communication that overlaps with
    computation, `network` the communication that does not."""
    tokens = passes * work.tokens
    products_rate = machine.tflops() * 1e12
    if work.width == FP32:
        products_rate /= FP32_SLOWDOWN
    memory_rate = machine.bandwidth * 1e9 * EFFICIENCY["memory"]
    seconds = {
        "products": tokens * products_flops(work) / (products_rate * EFFICIENCY["products"]),
        "attention": tokens * attention_flops(work) / (products_rate * EFFICIENCY["attention"]),
        "recurrence": tokens * recurrence_bytes(work) / memory_rate,
        "memory": (passes * moved_bytes(work) + copied_bytes(work, passes)) / memory_rate,
    }
    computing = sum(seconds.values())
    launching = passes * work.model.n_layer * BLOCK_LAUNCH_SECONDS
    seconds["launch"] = max(0.0, launching - computing)
    traffic = network_traffic(work, machine, passes)
    beyond = max(0.0, traffic.overlapping - max(launching, computing))
    seconds["muon"] = muon_flops(work) / (products_rate * EFFICIENCY["products"])
    seconds["network"] = traffic.exposed + beyond
    seconds["hidden"] = traffic.overlapping - beyond
    return seconds


def products_flops(work: Workload) -> float:
    """Returns the FLOPs per token of products with weights. Each product is computed three times (forward pass,
    gradients of input and weight), and a fourth time in blocks that recompute. A multiply-add is 2 FLOPs."""
    multiplied = 3.0 * work.head_size
    for layer, repeats in zip(work.model.layer_list(), work.repeats):
        for part in spec.layer_parts(layer).values():
            for product in matmul_parameters(work.model, part):
                if len(product.shape) == 2:  # not a convolution
                    multiplied += 3 * repeats * product.size
    return 2 * multiplied


def muon_flops(work: Workload) -> float:
    """Returns the FLOPs of Muon's orthogonalization on the rank with the most work.

    A Newton-Schulz iteration on an r x c matrix, with r <= c, takes two products of r x r x c and one of r x r x r."""
    iterations = NEWTON_SCHULZ_ITERATIONS[work.settings.optimizer.muon_coefficients]
    costs = []
    for parameter in work.muon_parameters:
        sides = [sorted((rows, parameter.shape[1])) for rows in parameter.rows.values()]
        multiplied = sum(2 * shorter**2 * longer + shorter**3 for shorter, longer in sides)
        costs.append(2 * iterations * multiplied)
    return work.max_rank_cost(costs)


def attention_flops(work: Workload) -> float:
    """Returns the FLOPs per token of the two products of attention, q . k and weights . v, over half the positions.

    Forward and backward pass together take 3.5 times the FLOPs of the forward pass (Dao 2023, arXiv 2307.08691, section
    4). Blocks that recompute take the forward pass once more."""
    forward = spec.MIXERS["attention"].flops(work.model, work.settings.data.seq_length)
    repeated = [repeats for mixer, repeats in work.mixers if mixer == "attention"]
    return forward * sum(0.5 + 3 * repeats for repeats in repeated)


def recurrence_bytes(work: Workload) -> float:
    """Returns the cost of the recurrences per token, as the number of bytes that could be moved in the same time:
    STATE_BYTES for each element of a state."""
    states = work.model.d_inner * work.model.d_state
    return states * sum(repeats * STATE_BYTES.get(mixer, 0) for mixer, repeats in work.mixers)


def moved_bytes(work: Workload) -> float:
    """Returns the bytes that a micro-batch reads from and writes to the device's memory.

    A tensor that a block saves for the backward pass counts six times: it and its gradient are written once and read
    twice. Other tensors of a block count twice. The logits count six times too."""
    moved = 6.0 * work.width * work.model.padded_vocab_size * work.tokens
    for block, repeats in zip(work.passes.blocks, work.repeats):
        moved += repeats * (6 * block.saved + 2 * block.working)
    return moved


def copied_bytes(work: Workload, passes: int) -> float:
    """Returns the bytes that a step moves independently of its number of tokens: in AdamW and, with sharding, in the
    copies of FSDP2."""
    count = work.parameter_count
    if not work.is_sharded:
        return ADAMW_BYTES * count
    return passes * count * (6 * work.width + 8) + ADAMW_BYTES * count / work.shard_ranks


@dataclass(frozen=True)
class Links:
    """The rates of the links between the devices of a node and between nodes."""

    local_size: int  # devices per node
    link_rate: float  # bytes per second from a device to the other devices of its node
    network_rate: float  # bytes per second from a node to other nodes

    def all_gather_seconds(self, size: float, calls: int, nodes: int) -> float:
        """Returns the seconds of `calls` all-gathers or reduce-scatters over `nodes` nodes. size: total bytes of all
        calls."""
        over_links = size * (self.local_size - 1) / self.local_size / self.link_rate
        over_network = size * (nodes - 1) / nodes / self.network_rate
        hops = calls * (nodes * self.local_size - 1)
        return max(over_links, over_network) + hops * HOP_SECONDS

    def all_to_all_seconds(self, largest: float, total: float, ranks: int) -> float:
        """Returns the seconds of an all-to-all over `ranks` ranks. largest: bytes that the rank with the most data
        sends. total: bytes that all ranks send."""
        nodes = ranks // self.local_size
        if nodes > 1:
            moving = max(largest, total / nodes) * (nodes - 1) / nodes / self.network_rate
        else:
            moving = largest * (ranks - 1) / ranks / self.link_rate
        return moving + (ranks - 1) * HOP_SECONDS


def network_traffic(work: Workload, machine: Instance, passes: int) -> Traffic:
    """Returns the communication time of a step with `passes` micro-batches.

    An all-gather brings (n - 1) / n of the weights to each of n devices, over the links of the nodes and the network at
    the same time. A reduce-scatter moves as many elements in fp32, an all-reduce twice as many (Thakur et al. 2005).
    The communication for blocks can overlap with computation."""
    if work.strategy == "none":
        return Traffic()
    links = Links(
        local_size=work.world.local_size,
        link_rate=machine.nvlink * 1e9 * EFFICIENCY["links"],
        network_rate=machine.network / 8 * 1e9 * EFFICIENCY["network"],
    )
    nodes = work.world.size // links.local_size
    shared_rate = (
        links.link_rate if work.context_parallel_size <= links.local_size else links.network_rate
    )
    exposed = passes * context_parallel_bytes(work) / shared_rate + muon_exchange(work, links)
    layers = work.model.n_layer
    outside = work.non_block_size
    count = work.parameter_count
    blocks = count - outside
    if work.strategy == "ddp":
        return Traffic(
            overlapping=2 * links.all_gather_seconds(FP32 * blocks, layers, nodes),
            exposed=2 * links.all_gather_seconds(FP32 * outside, 1, nodes) + exposed,
        )
    across = nodes if work.strategy == "fsdp" else 1
    reductions = 1 if work.settings.parallel.accumulate_unsharded else passes
    traffic = Traffic(
        overlapping=2 * passes * links.all_gather_seconds(work.width * blocks, layers, across)
        + reductions * links.all_gather_seconds(FP32 * blocks, layers, across),
        exposed=exposed
        + passes * links.all_gather_seconds(work.width * outside, 1, across)
        + reductions * links.all_gather_seconds(FP32 * outside, 1, across),
    )
    if work.strategy == "hsdp" and nodes > 1:
        # Each rank reduces its shard with the replicas on the other nodes. All ranks of a node share its network.
        traffic.overlapping += 2 * FP32 * count * (nodes - 1) / nodes / links.network_rate
    return traffic


def muon_exchange(work: Workload, links: Links) -> float:
    """Returns the seconds of Muon's communication. For each parameter, the ranks of a shard group send their parts of
    the momentum to the owner, and the owner sends the update to all ranks that store a part of the parameter."""
    if not work.muon_parameters:
        return 0.0
    sizes = [work.width * parameter.size for parameter in work.muon_parameters]
    owned = work.max_rank_cost(sizes)
    replicas = work.world.size // work.shard_ranks
    momenta = links.all_to_all_seconds(owned, sum(sizes) / replicas, work.shard_ranks)
    return momenta + links.all_to_all_seconds(
        replicas * owned, replicas * sum(sizes), work.world.size
    )


def context_parallel_bytes(work: Workload) -> float:
    """Returns the bytes that a rank receives in a micro-batch because of context parallelism.

    SSM layers exchange states and their gradients, in fp32. Attention exchanges keys and values, and their gradients in
    fp32. Blocks that recompute receive states, keys and values twice."""
    if work.context_parallel_size == 1:
        return 0.0
    model = work.model
    sequences = work.settings.training.batch_size
    states = work.context_parallel_size * sequences * model.d_inner * model.d_state
    keys = work.context_parallel_size * work.tokens * 2 * model.n_kv_head * model.resolved_head_dim
    received = 0.0
    for mixer, repeats in work.mixers:
        forward = 2 if repeats > 1 else 1
        if mixer == "attention":
            received += keys * (forward * work.width + FP32)
        elif mixer in STATE_BYTES:
            received += states * (forward + 1) * FP32
    return received
