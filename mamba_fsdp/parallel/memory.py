"""What a device holds while it trains: arithmetic on the model's description, in bytes. No tensor is made.

weights      fp32. Sharding cuts each by rows over its group of ranks, but those that compute in fp32 stay whole
gradients    as the weights; with accumulate_unsharded all of them, whole
moments      AdamW's two, each as the weights
gathered     in the compute dtype. With sharding: what is outside the blocks; of the largest block the weights twice, as
             they come and as they are used, and the gradients, which are reduced in fp32. Without, in half
             precision: what blocks multiply with, until their backward pass
activations  what the blocks keep for the backward pass, and what it takes in the block where both are most. A block
             that recomputes keeps its two inputs alone, until it is its turn
loss         the gradients of its two inputs, the logits of one chunk: what they are more than the backward pass takes

Sources: the backends in mamba_fsdp/ops say what each keeps and takes; FSDP2's buffers as torch 2.13 holds them.
tests/train/test_simulate.py holds both against a step on fake tensors. What the reference backends take beside what they
keep is not counted: there it is a lower limit. Nor are NCCL's buffers, gaps between allocations, CUDA's own memory.
"""

from fractions import Fraction

from config.model_config import Layer, ModelConfig
from config.train_config import TrainConfig
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.model import spec
from mamba_fsdp.ops.loss.reference import CHUNK
from mamba_fsdp.parallel.parallelize import choose_recomputed, choose_strategy
from mamba_fsdp.parallel.world import World

STATES = 64  # positions from one kept state of Mamba-1's scan to the next


def expected_memory(
    settings: TrainConfig, world: World, backends: dict[str, str]
) -> dict[str, int]:
    """Bytes by the names above, on the rank that holds most. backends: operator -> backend, as ops/backends.py chooses."""
    model, parallel, width = (
        settings.model,
        settings.parallel,
        DTYPES[settings.training.mixed_precision].itemsize,
    )
    strategy, tokens = (
        choose_strategy(parallel, world),
        settings.training.batch_size * settings.data.seq_length,
    )
    sharded, ranks = (
        strategy in ("fsdp", "hsdp"),
        {"fsdp": world.size, "hsdp": world.local_size}.get(strategy, 1),
    )
    weights = 4 * sum(_part(parameter, ranks) for parameter in spec.parameters(model).values())

    layers, d_model, head = model.layer_list(), model.d_model, spec.output_layer(model).size
    recomputes = recomputing(settings)
    multiplied = [
        sum(
            found.size
            for part in spec.layer_parts(layer).values()
            for found in _products(model, part)
        )
        for layer in layers
    ]
    outside = head * (1 if model.tie_embeddings else 2)
    gathered = width * outside + (3 * width + 4) * max(multiplied) if sharded else 0
    if not sharded and width < 4:
        gathered = width * sum(size for size, again in zip(multiplied, recomputes) if not again)

    costs = [activation_bytes(model, layer, width, backends) for layer in layers]
    kept = [(4 + width) * d_model if again else full for again, (full, _) in zip(recomputes, costs)]
    behind = tokens * (sum(kept) + (4 + width) * d_model)  # the final norm's
    activations = max(
        tokens * (sum(kept[:index]) + full + working) for index, (full, working) in enumerate(costs)
    )
    if "mamba1" in backends:  # what its programs, a thousand at least, write down within a chunk
        programs = max(1024, settings.training.batch_size * model.d_inner // 32)
        activations += programs * STATES // 2 * (model.d_state + 2) * 32 * 4
    loss = (4 + (width if width < 4 else 0) * (1 if sharded else 2)) * head
    loss += tokens * width * d_model + 8 * min(CHUNK, tokens) * model.padded_vocab_size
    ends = (width + 4) * outside if sharded else 8 * head * model.tie_embeddings
    loss = max(
        width * head * sharded,
        behind + loss - activations - (gathered - width * outside) * sharded,
        ends - activations - gathered,
    )
    gradients = (
        4 * spec.parameter_count(model) if sharded and parallel.accumulate_unsharded else weights
    )
    return {
        "weights": weights,
        "gradients": gradients,
        "moments": 2 * weights,
        "gathered": gathered,
        "activations": int(activations),
        "loss": int(loss),
    }


def recomputing(settings: TrainConfig) -> list[bool]:
    """Which of the blocks recompute."""
    parallel = settings.parallel
    share = parallel.selective_share() if parallel.fsdp_activation_checkpointing else Fraction(0)
    return choose_recomputed(settings.model.n_layer, share)


def _part(parameter, ranks):
    """The most elements of a parameter that one of `ranks` holds."""
    rows = parameter.shape[0]
    return parameter.size if parameter.fp32 else -(-rows // ranks) * (parameter.size // rows)


def _products(model: ModelConfig, part: spec.Spec) -> list[spec.Parameter]:
    """What a mixer or MLP multiplies with: matrices (outputs, inputs), and a convolution (channels, 1, width)."""
    return [parameter for parameter in part.parameters(model).values() if parameter.decay]


def activation_bytes(
    model: ModelConfig, layer: Layer, width: int, backends: dict[str, str]
) -> tuple[float, float]:
    """Bytes per token that a block (keeps for its backward pass, takes beside that while it runs)."""
    d_model, d_inner, states = model.d_model, model.d_inner, model.d_state
    kept, working = (4 + width) * d_model, 0.0
    rows = [product.shape[0] for product in _products(model, spec.MIXERS[layer.mixer])]
    if (
        layer.mixer == "mamba1" and "mamba1" in backends
    ):  # xz, [dt, B, C], states; nine of u, dt, y, their gradients
        kept += (
            width * (2 * d_inner + model.resolved_dt_rank + 2 * states)
            + 4 * states * d_inner / STATES
        )
        working = 8 * width * d_inner + states * d_inner / 4
    elif (
        layer.mixer == "mamba2" and "mamba2" in backends
    ):  # [z, x, B, C, dt]; states of both ways, a chunk of 32 each
        kept += width * rows[0] + 4 * model.ngroups
        chunk = max(16, min(32, 4096 // max(16, states)))
        convolved = d_inner + 2 * model.ngroups * states
        working = width * (convolved + rows[0] + (4 + 2 * states / chunk) * d_inner)
        working += model.n_ssm_head * (states / 2 + 12 + 16 * -(-states // 64))
    elif layer.mixer == "attention":  # q, k, v, what comes out; turned in fp32
        heads = model.n_head * model.resolved_head_dim
        kept += (
            width
            * (
                4 * heads
                if model.n_kv_head < model.n_head
                else rows[0] + heads * (3 if model.resolved_rotary_dim else 1)
            )
            + 4 * model.n_head
        )
        working = 5 * width * heads
    else:
        kept += width * (
            sum(rows)
            + sum(
                last.size // last.shape[0]
                for last in _products(model, spec.MIXERS[layer.mixer])[-1:]
            )
        )
    if (
        layer.mlp
    ):  # both halves of fc1, the gate's SiLU, their product: gone when it is the mixer's turn
        behind = (4 + width) * d_model + 4 * width * model.resolved_d_intermediate
        kept, working = (
            kept + behind,
            max(working - behind, 2 * width * model.resolved_d_intermediate),
        )
    return kept, working + (4 + width) * d_model
