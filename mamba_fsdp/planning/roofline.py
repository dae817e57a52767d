"""Estimates the time of a training step on a kind of machine, by a roofline model: only arithmetic, nothing is run.

A device multiplies at a share of its peak, moves bytes at a share of its memory's rate, and sends at a share of its
links' rate. EFFICIENCY has the share for each kind of work; docs/planning.md compares the results with published rates.
Each part of step_seconds is a function below.
"""

from dataclasses import dataclass

from mamba_fsdp.model import spec
from mamba_fsdp.planning.devices import Instance
from mamba_fsdp.planning.memory import FP32, Workload, products_of

EFFICIENCY = {"products": 0.65, "attention": 0.45, "memory": 0.8, "links": 0.75, "network": 0.7}
# Bytes for each state and token. Mamba-2: fitted to published rates of mamba-ssm. Mamba-1: not published; assumed from
# Dao and Gu 2024 (arXiv 2405.21060), section 9.3. Gated DeltaNet: assumed from its products, twice as many as
# Mamba-2's.
STATE_BYTES = {"mamba1": 12, "mamba2": 3, "mamba3": 3, "gdn": 6}
HOP_SECONDS = 5e-6  # latency of each hop of a ring
# Host time to launch a block's kernels, forward and backward: of Mamba-1 and Mamba-2 without sharding, on a core of an AMD
# EPYC, measured by benchmarks/launches.py. Those of other layers, and what sharding adds, are not measured.
BLOCK_LAUNCH_SECONDS = 1.1e-3
FP32_SLOWDOWN = 16  # of products in fp32 compared with bf16, approximately, on all these devices
ADAMW_BYTES = 40  # moved for each weight
NEWTON_SCHULZ_ITERATIONS = 5  # as in trainer/muon.py


@dataclass
class Traffic:
    """The time that the ranks spend sending in a step."""

    overlapping: float = 0.0  # seconds that may overlap with computing
    exposed: float = 0.0  # seconds that can't overlap: the first all-gather, the last reduction


def step_seconds(work: Workload, machine: Instance, passes: int) -> dict[str, float]:
    """Returns the seconds of a step of `passes` micro-batches, by part. `hidden` is the time of sending while the
    device computes, which does not add to the step; `network` is the other time of sending."""
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
    """Returns the FLOPs per token of products: 2 per multiply-add, three times (forward, two gradients), and a fourth
    time in blocks that recompute."""
    multiplied = 3.0 * work.head_size
    for layer, repeats in zip(work.model.layer_list(), work.repeats):
        for part in spec.layer_parts(layer).values():
            for product in products_of(work.model, part):
                if len(product.shape) == 2:  # not a convolution
                    multiplied += 3 * repeats * product.size
    return 2 * multiplied


def muon_flops(work: Workload) -> float:
    """Returns the FLOPs of the rank that orthogonalises most. An iteration of Newton-Schulz on a matrix of r x c,
    with r the shorter side, takes two products of r x r x c and one of r x r x r."""
    costs = []
    for parameter in work.of_muon:
        sides = [sorted((rows, parameter.shape[1])) for rows in parameter.rows.values()]
        multiplied = sum(2 * shorter**2 * longer + shorter**3 for shorter, longer in sides)
        costs.append(2 * NEWTON_SCHULZ_ITERATIONS * multiplied)
    return work.most_owned(costs)


def attention_flops(work: Workload) -> float:
    """Returns the FLOPs per token of q . k and weights . v over half the positions, 3.5 times (Dao 2023, arXiv
    2307.08691, section 4), and once more in blocks that recompute."""
    forward = spec.MIXERS["attention"].flops(work.model, work.settings.data.seq_length)
    repeated = [repeats for mixer, repeats in work.mixers if mixer == "attention"]
    return forward * sum(0.5 + 3 * repeats for repeats in repeated)


def recurrence_bytes(work: Workload) -> float:
    """Returns the bytes per token that take as long to move as the recurrence takes: STATE_BYTES for each state."""
    states = work.model.d_inner * work.model.d_state
    return states * sum(repeats * STATE_BYTES.get(mixer, 0) for mixer, repeats in work.mixers)


def moved_bytes(work: Workload) -> float:
    """Returns the bytes that a micro-batch moves through the device's memory. A tensor that a block keeps is moved six
    times (written and read twice, and its gradient too), any other tensor of a block twice. The logits count too."""
    moved = 6.0 * work.width * work.model.padded_vocab_size * work.tokens
    for block, repeats in zip(work.passes.blocks, work.repeats):
        moved += repeats * (6 * block.kept + 2 * block.working)
    return moved


def copied_bytes(work: Workload, passes: int) -> float:
    """Returns the bytes that a step moves whatever its number of tokens: by AdamW and, with sharding, by FSDP2's
    copies."""
    count = work.parameter_count
    if not work.is_sharded:
        return ADAMW_BYTES * count
    return passes * count * (6 * work.width + 8) + ADAMW_BYTES * count / work.shard_ranks


@dataclass(frozen=True)
class Links:
    """The links between the devices of a node and between nodes."""

    local_size: int  # devices of a node
    link_rate: float  # bytes per second from a device to the others of its node
    network_rate: float  # bytes per second from a node to the others

    def gathering(self, size: float, calls: int, nodes: int) -> float:
        """Returns the seconds of `calls` all-gathers or reduce-scatters of `size` bytes in all over these nodes."""
        over_links = size * (self.local_size - 1) / self.local_size / self.link_rate
        over_network = size * (nodes - 1) / nodes / self.network_rate
        hops = calls * (nodes * self.local_size - 1)
        return max(over_links, over_network) + hops * HOP_SECONDS

    def exchanging(self, most: float, together: float, ranks: int) -> float:
        """Returns the seconds of an all-to-all of `ranks`. most: bytes of the rank that sends most; together: bytes of
        all ranks."""
        nodes = ranks // self.local_size
        if nodes > 1:
            moving = max(most, together / nodes) * (nodes - 1) / nodes / self.network_rate
        else:
            moving = most * (ranks - 1) / ranks / self.link_rate
        return moving + (ranks - 1) * HOP_SECONDS


def network_traffic(work: Workload, machine: Instance, passes: int) -> Traffic:
    """Returns the time that a step spends sending. An all-gather brings (n - 1) / n of the weights to each of n
    devices, over the node's links and the network at once; a reduce-scatter moves as many elements in fp32, an
    all-reduce twice as many (Thakur et al. 2005). The traffic of blocks overlaps with computing."""
    if work.strategy == "none":
        return Traffic()
    links = Links(
        local_size=work.world.local_size,
        link_rate=machine.nvlink * 1e9 * EFFICIENCY["links"],
        network_rate=machine.network / 8 * 1e9 * EFFICIENCY["network"],
    )
    nodes = work.world.size // links.local_size
    shared_rate = links.link_rate if work.sharing <= links.local_size else links.network_rate
    exposed = passes * shared_bytes(work) / shared_rate + muon_exchange(work, links)
    layers = work.model.n_layer
    outside = work.outside_size
    count = work.parameter_count
    blocks = count - outside
    if work.strategy == "ddp":
        return Traffic(
            overlapping=2 * links.gathering(FP32 * blocks, layers, nodes),
            exposed=2 * links.gathering(FP32 * outside, 1, nodes) + exposed,
        )
    across = nodes if work.strategy == "fsdp" else 1
    reductions = 1 if work.settings.parallel.accumulate_unsharded else passes
    traffic = Traffic(
        overlapping=2 * passes * links.gathering(work.width * blocks, layers, across)
        + reductions * links.gathering(FP32 * blocks, layers, across),
        exposed=exposed
        + passes * links.gathering(work.width * outside, 1, across)
        + reductions * links.gathering(FP32 * outside, 1, across),
    )
    if work.strategy == "hsdp" and nodes > 1:
        # Each rank reduces its shard with its replicas on the other nodes, all over one network at once.
        traffic.overlapping += 2 * FP32 * count * (nodes - 1) / nodes / links.network_rate
    return traffic


def muon_exchange(work: Workload, links: Links) -> float:
    """Returns the seconds in which the ranks of a shard group send each parameter's momentum to the owner, and the
    owner sends the step to all ranks that hold a part of the parameter."""
    if not work.of_muon:
        return 0.0
    sizes = [work.width * parameter.size for parameter in work.of_muon]
    owned = work.most_owned(sizes)
    replicas = work.world.size // work.shard_ranks
    momenta = links.exchanging(owned, sum(sizes) / replicas, work.shard_ranks)
    return momenta + links.exchanging(replicas * owned, replicas * sum(sizes), work.world.size)


def shared_bytes(work: Workload) -> float:
    """Returns the bytes that a rank receives in a micro-batch from the ranks that share its sequences. SSM layers send
    the states and their gradients in fp32; attention sends keys and values, and their gradients in fp32. Blocks that
    recompute receive states, keys and values twice."""
    if work.sharing == 1:
        return 0.0
    model = work.model
    sequences = work.settings.training.batch_size
    states = work.sharing * sequences * model.d_inner * model.d_state
    keys = work.sharing * work.tokens * 2 * model.n_kv_head * model.resolved_head_dim
    received = 0.0
    for mixer, repeats in work.mixers:
        forward = 2 if repeats > 1 else 1
        if mixer == "attention":
            received += keys * (forward * work.width + FP32)
        elif mixer in STATE_BYTES:
            received += states * (forward + 1) * FP32
    return received
