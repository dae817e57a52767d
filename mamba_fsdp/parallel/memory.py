"""What a device holds at least while it trains: arithmetic on the model's description, in bytes. No tensor is made.

weights      fp32. Sharding cuts each by rows over its group of ranks, but those that compute in fp32 stay whole
gradients    as the weights; with accumulate_unsharded all of them, whole
moments      AdamW's two, each as the weights
copies       of weights in the compute dtype. With sharding: what is outside the blocks, two blocks and the gradients of
             one, gathered. Without, in half precision: all that blocks multiply with, until their backward pass
activations  for each token of a micro-batch and each part of a block: the fp32 residual stream and the norm's output,
             what products and convolution put out, what the last product takes in. A block that recomputes keeps its
             two inputs alone, until it is its turn in the backward pass. In the loss: the gradients of its two inputs,
             the logits of one chunk and their gradient

Beside that: what kernels keep for themselves (about as much as the activations again in the portable forms), buffers of
collectives, gaps between allocations, on a GPU half a gigabyte of CUDA's own.
"""

from fractions import Fraction

import torch

from config.model_config import Layer, ModelConfig
from config.train_config import ParallelConfig
from mamba_fsdp.model import spec
from mamba_fsdp.ops.loss.portable import CHUNK
from mamba_fsdp.parallel.blocks import selected
from mamba_fsdp.parallel.parallelize import choose_strategy
from mamba_fsdp.parallel.world import World


def expected_memory(model: ModelConfig, settings: ParallelConfig, world: World, *, dtype: torch.dtype,
                    tokens: int) -> dict[str, int]:
    """Bytes by the names above, on the rank that holds most. dtype: the compute dtype; tokens: of a micro-batch."""
    strategy = choose_strategy(settings, world)
    sharded, ranks = strategy in ("fsdp", "hsdp"), {"fsdp": world.size, "hsdp": world.local_size}.get(strategy, 1)
    weights = 4 * sum(_part(parameter, ranks) for parameter in spec.parameters(model).values())

    layers, width, d_model = model.layer_list(), dtype.itemsize, model.d_model
    share = settings.selective_share() if settings.fsdp_activation_checkpointing else Fraction(0)
    recomputes = selected(len(layers), share)
    multiplied = [sum(found.size for part in spec.layer_parts(layer).values() for found in _products(model, part))
                  for layer in layers]
    outside = spec.embedding(model).size * (1 if model.tie_embeddings else 2)
    if sharded:
        copies = width * (outside + 3 * max(multiplied))
    else:
        copies = width * sum(size for size, again in zip(multiplied, recomputes) if not again) if width < 4 else 0

    in_full = [_activations(model, layer, width) for layer in layers]
    kept = [(4 + width) * d_model if again else full for full, again in zip(in_full, recomputes)]
    most = max([sum(kept), *(sum(kept[:index]) + full for index, full in enumerate(in_full))])
    loss = spec.output_layer(model).size * 4 + 2 * 4 * model.padded_vocab_size * min(CHUNK, tokens)
    gradients = 4 * spec.parameter_count(model) if sharded and settings.accumulate_unsharded else weights
    return {"weights": weights, "gradients": gradients, "moments": 2 * weights, "copies": copies,
            "activations": tokens * (most + width * d_model) + loss}


def _part(parameter, ranks):
    """The most elements of a parameter that one of `ranks` holds."""
    rows = parameter.shape[0]
    return parameter.size if parameter.fp32 else -(-rows // ranks) * (parameter.size // rows)


def _products(model: ModelConfig, part: spec.Spec) -> list[spec.Parameter]:
    """What a mixer or MLP multiplies with: matrices (outputs, inputs), and a convolution (channels, 1, width)."""
    return [parameter for parameter in part.parameters(model).values() if parameter.decay]


def _activations(model: ModelConfig, layer: Layer, width: int) -> int:
    """Bytes per token that a block keeps for its backward pass."""
    total = 0
    for part in spec.layer_parts(layer).values():
        products = _products(model, part)
        total += (4 + width) * model.d_model + width * sum(product.shape[0] for product in products)
        total += sum(width * last.size // last.shape[0] for last in products[-1:])
    return total
