"""How long a training step takes on a kind of machine, by a roofline: arithmetic alone, nothing is run.

A device multiplies at a share of its peak, moves bytes at a share of its memory's rate, and sends at a share of its
links': EFFICIENCY has one for each kind of work. docs/planning.md holds them against published rates. Each part of
step_seconds is a function below.
"""

from dataclasses import dataclass

from config.train_config import TrainConfig
from mamba_fsdp.model import spec
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.devices import Instance
from mamba_fsdp.planning.memory import FP32, Workload

EFFICIENCY = {"products": 0.65, "attention": 0.45, "memory": 0.8, "links": 0.75, "network": 0.7}
# Bytes for each state and token: of Mamba-2 fitted to published rates of mamba-ssm; of Mamba-1, nowhere published,
# assumed after Dao and Gu 2024 (arXiv 2405.21060), section 9.3.
STATE_BYTES = {"mamba1": 12, "mamba2": 3, "mamba3": 3}
HOP_SECONDS = 5e-6  # of a ring
BLOCK_LAUNCH_SECONDS = (
    5e-4  # forward and backward: what starting a block's kernels takes the host; assumed
)
FP32_SLOWDOWN = 16  # of products in fp32 against bf16, about, on each of the devices
ADAMW_BYTES = 40  # moved for each weight


@dataclass
class Traffic:
    """What the ranks send in a step."""

    overlapping: float = 0.0  # seconds that may overlap with computing
    exposed: float = 0.0  # seconds that may not: the first gathering and the last reduction


def step_seconds(
    settings: TrainConfig, world: World, machine: Instance, passes: int, backends: dict[str, str]
) -> dict[str, float]:
    """Returns seconds by part of a step of `passes` micro-batches. `hidden` is what is sent while the device computes,
    and adds nothing; `network` the rest of it. backends: as in expected_memory."""
    work = Workload(settings, world, backends)
    tokens = passes * work.tokens
    products_rate = machine.tflops() * 1e12
    if work.width == FP32:
        products_rate /= FP32_SLOWDOWN
    memory_rate = machine.bandwidth * 1e9 * EFFICIENCY["memory"]
    seconds = {
        "products": tokens * products_flops(work) / (products_rate * EFFICIENCY["products"]),
        "attention": tokens * attention_flops(work) / (products_rate * EFFICIENCY["attention"]),
        "recurrence": tokens * recurrence_bytes(work) / memory_rate,
        "memory": (tokens * moved_bytes(work) + copied_bytes(work, passes)) / memory_rate,
    }
    computing = sum(seconds.values())
    launching = passes * work.model.n_layer * BLOCK_LAUNCH_SECONDS
    seconds["launch"] = max(0.0, launching - computing)
    traffic = network_traffic(work, machine, passes)
    beyond = max(0.0, traffic.overlapping - sum(seconds.values()))
    seconds["network"] = traffic.exposed + beyond
    seconds["hidden"] = traffic.overlapping - beyond
    return seconds


def products_flops(work: Workload) -> float:
    """2 FLOPs per multiply-add and token, three times (forward, two gradients), a fourth in blocks that recompute."""
    multiplied = 3.0 * work.head_size
    for layer, repeats in zip(work.model.layer_list(), work.repeats):
        for part in spec.layer_parts(layer).values():
            for parameter in part.parameters(work.model).values():
                if parameter.decay and len(parameter.shape) == 2:
                    multiplied += 3 * repeats * parameter.size
    return 2 * multiplied


def attention_flops(work: Workload) -> float:
    """q . k and weights . v of half the positions, 3.5 times (Dao 2023, arXiv 2307.08691, section 4), and once more in
    blocks that recompute."""
    forward = spec.MIXERS["attention"].flops(work.model, work.settings.data.seq_length)
    flops = 0.0
    for layer, repeats in zip(work.model.layer_list(), work.repeats):
        if "attention" in layer.mixers:
            flops += (0.5 + 3 * repeats) * forward
    return flops


def recurrence_bytes(work: Workload) -> float:
    """Bytes per token whose moving takes as long as the recurrence: STATE_BYTES for each state."""
    states = work.model.d_inner * work.model.d_state
    moved = 0.0
    for layer, repeats in zip(work.model.layer_list(), work.repeats):
        for mixer in layer.mixers:
            moved += repeats * states * STATE_BYTES.get(mixer, 0)
    return moved


def moved_bytes(work: Workload) -> float:
    """Bytes per token through the device's memory: of what a block keeps six passes (written, read twice, and so its
    gradient), of what only passes two; the logits."""
    moved = 6.0 * work.width * work.model.padded_vocab_size
    for block, repeats in zip(work.block_bytes, work.repeats):
        moved += repeats * (6 * block.kept + 2 * block.working)
    return moved


def copied_bytes(work: Workload, passes: int) -> float:
    """Bytes of a step that do not depend on tokens: AdamW, and with sharding the copies of FSDP2."""
    count = spec.parameter_count(work.model)
    if not work.is_sharded:
        return ADAMW_BYTES * count
    return passes * count * (6 * work.width + 8) + ADAMW_BYTES * count / work.shard_ranks


def network_traffic(work: Workload, machine: Instance, passes: int) -> Traffic:
    """An all-gather brings (n - 1) / n of the weights to each of n devices, over the node's links and the network at
    once; a reduce-scatter the same in fp32, an all-reduce twice that (Thakur et al. 2005). What blocks send overlaps
    with computing."""
    local_size = work.world.local_size
    nodes = work.world.size // local_size
    network_rate = machine.network / 8 * 1e9 * EFFICIENCY["network"]
    link_rate = machine.nvlink * 1e9 * EFFICIENCY["links"]

    def seconds(size, calls, across):
        """Of all-gathers or reduce-scatters of `size` bytes together over so many nodes."""
        over_links = (local_size - 1) / local_size / link_rate
        over_network = (across - 1) / across / network_rate if across > 1 else 0.0
        hops = calls * (across * local_size - 1)
        return size * max(over_links, over_network) + hops * HOP_SECONDS

    if work.strategy == "none":
        return Traffic()
    shared_rate = link_rate if work.sharing <= local_size else network_rate
    of_sequences = passes * shared_bytes(work) / shared_rate
    layers = work.model.n_layer
    outside = work.outside_size
    count = spec.parameter_count(work.model)
    blocks = count - outside
    if work.strategy == "ddp":
        return Traffic(
            overlapping=2 * seconds(FP32 * blocks, layers, nodes),
            exposed=2 * seconds(FP32 * outside, 1, nodes) + of_sequences,
        )
    across = nodes if work.strategy == "fsdp" else 1
    reductions = 1 if work.settings.parallel.accumulate_unsharded else passes
    traffic = Traffic(
        overlapping=2 * passes * seconds(work.width * blocks, layers, across)
        + reductions * seconds(FP32 * blocks, layers, across),
        exposed=of_sequences
        + passes * seconds(work.width * outside, 1, across)
        + reductions * seconds(FP32 * outside, 1, across),
    )
    if work.strategy == "hsdp" and nodes > 1:
        # Each rank's shard with those of the other nodes, all at once by one network.
        traffic.overlapping += 2 * FP32 * count * (nodes - 1) / nodes / network_rate
    return traffic


def shared_bytes(work: Workload) -> float:
    """Bytes that a rank receives in a micro-batch of those which share its sequences: the states of all in fp32 and their
    gradients, or all keys and values and, in fp32, their gradients. Blocks that recompute receive the former twice."""
    if work.sharing == 1:
        return 0.0
    model = work.model
    sequences = work.settings.training.batch_size
    states = work.sharing * sequences * model.d_inner * model.d_state
    keys = work.sharing * work.tokens * 2 * model.n_kv_head * model.resolved_head_dim
    received = 0.0
    for layer, recomputes in zip(work.model.layer_list(), work.recomputes):
        forward = 2 if recomputes else 1
        for mixer in layer.mixers:
            if mixer == "attention":
                received += keys * (forward * work.width + FP32)
            elif mixer in STATE_BYTES:
                received += states * (forward + 1) * FP32
    return received
