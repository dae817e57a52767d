"""How long a training step takes on a kind of machine, by a roofline: arithmetic alone, nothing is run.

A device multiplies at a share of its peak, moves bytes at a share of its memory's rate, and sends at a share of its
links'; those of EFFICIENCY, one for each kind of work. docs/planning.md holds them against published rates.

products    2 FLOPs per multiply-add and token, three times (forward, two gradients), a fourth in blocks that recompute
attention   q . k, weights . v of half the positions, 3.5 times (Dao 2023, arXiv 2307.08691, section 4)
recurrence  as long as moving STATE bytes for each state and token: of Mamba-2 fitted to published rates of mamba-ssm;
            of Mamba-1, nowhere published, assumed after Dao and Gu 2024 (arXiv 2405.21060), section 9.3
memory      of what a block keeps six passes (written, read twice, and so its gradient), of what only passes two; copies
            of FSDP2; AdamW 40 bytes a weight
launch      LAUNCH a block, assumed: what starting its kernels takes the host longer than running them the device
network     an all-gather brings (n - 1) / n of the weights to each of n devices, over the node's links and the network
            at once; a reduce-scatter the same in fp32, an all-reduce twice (Thakur et al. 2005); each hop of a ring
            takes HOP. What blocks send overlaps with computing; the first gathering and the last reduction do not
"""

from config.devices import Instance
from config.train_config import TrainConfig
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.model import spec
from mamba_fsdp.parallel.memory import activation_bytes, recomputing
from mamba_fsdp.parallel.parallelize import choose_strategy
from mamba_fsdp.parallel.world import World

EFFICIENCY = {"products": 0.65, "attention": 0.45, "memory": 0.8, "links": 0.75, "network": 0.7}
STATE, HOP, LAUNCH = (
    {"mamba1": 12, "mamba2": 3},
    5e-6,
    5e-4,
)  # bytes; seconds; seconds, forward and backward
FP32 = 16  # times slower than bf16 are products in fp32, about, on each of the devices


def step_seconds(
    settings: TrainConfig, world: World, machine: Instance, passes: int, backends: dict[str, str]
) -> dict[str, float]:
    """Seconds of a step by the names above, of `passes` micro-batches; network: only what is not hidden, and `hidden`
    the rest, which the step does not take longer for. backends: as in expected_memory."""
    model, length = settings.model, settings.data.seq_length
    tokens, width = (
        passes * settings.training.batch_size * length,
        DTYPES[settings.training.mixed_precision].itemsize,
    )
    flops = {"products": 3.0 * 2 * spec.output_layer(model).size, "attention": 0.0}
    states, moved = 0.0, 6.0 * width * model.padded_vocab_size
    for layer, again in zip(model.layer_list(), recomputing(settings)):
        times = 4 / 3 if again else 1.0
        flops["products"] += (
            3
            * times
            * 2
            * sum(
                each.size
                for part in spec.layer_parts(layer).values()
                for each in part.parameters(model).values()
                if each.decay and len(each.shape) == 2
            )
        )
        if layer.mixer == "attention":
            flops["attention"] += (3.5 + again) * spec.MIXERS["attention"].flops(model, length)
        else:
            states += times * model.d_inner * model.d_state * STATE.get(layer.mixer, 0)
        kept, working = activation_bytes(model, layer, width, backends)
        moved += times * (6 * kept + 2 * working)

    peak, rate = (
        machine.tflops() * 1e12 / (FP32 if width == 4 else 1),
        machine.bandwidth * 1e9 * EFFICIENCY["memory"],
    )
    found = {name: tokens * amount / (peak * EFFICIENCY[name]) for name, amount in flops.items()}
    sent, exposed, local = _network(settings, world, machine, passes, width)
    found |= {"recurrence": tokens * states / rate, "memory": (tokens * moved + local) / rate}
    found["launch"] = max(0.0, passes * model.n_layer * LAUNCH - sum(found.values()))
    beyond = max(0.0, sent - sum(found.values()))
    return {**found, "network": exposed + beyond, "hidden": sent - beyond}


def _network(settings, world, machine, passes, width):
    """(seconds that may overlap with computing, that may not, bytes that copies and AdamW move) of a step."""
    parallel, strategy = settings.parallel, choose_strategy(settings.parallel, world)
    count, nodes, layers = (
        spec.parameter_count(settings.model),
        world.size // world.local_size,
        settings.model.n_layer,
    )
    outside = spec.output_layer(settings.model).size * (1 if settings.model.tie_embeddings else 2)
    blocks, reductions = count - outside, 1 if parallel.accumulate_unsharded else passes
    network = machine.network / 8 * 1e9 * EFFICIENCY["network"]

    def seconds(size, calls, across):  # of an all-gather or reduce-scatter over so many nodes
        links = (
            (world.local_size - 1) / world.local_size / (machine.nvlink * 1e9 * EFFICIENCY["links"])
        )
        between = (across - 1) / across / network if across > 1 else 0.0
        return size * max(links, between) + calls * (across * world.local_size - 1) * HOP

    if strategy == "none":
        return 0.0, 0.0, 40 * count
    if strategy == "ddp":
        return (
            2 * seconds(4 * blocks, layers, nodes),
            2 * seconds(4 * outside, 1, nodes),
            40 * count,
        )
    group = nodes if strategy == "fsdp" else 1
    gathers = passes * seconds(width * blocks, layers, group)
    overlapping = 2 * gathers + reductions * seconds(4 * blocks, layers, group)
    exposed = passes * seconds(width * outside, 1, group) + reductions * seconds(
        4 * outside, 1, group
    )
    if (
        strategy == "hsdp" and nodes > 1
    ):  # each rank's shard with those of the other nodes, all at once by one network
        overlapping += 2 * 4 * count * (nodes - 1) / nodes / network
    return (
        overlapping,
        exposed,
        passes * count * (6 * width + 8) + 40 * count / (group * world.local_size),
    )
