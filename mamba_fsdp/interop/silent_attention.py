"""Adds silent attention to a model for an export to transformers, and removes it after an import.

transformers has no class for models in which all layers are Mamba-2 with an MLP. Bamba and Granite need at least one attention
layer, because they read the length of the cache from this layer. Falcon-H1 has an attention beside each Mamba-2 mixer, and
multiplies the output of the attention by a number in config.json. If this number is 0, the attention is silent: it does not
change the results. Such a model is therefore exported as a Falcon-H1 with one silent attention head per layer.
"""

from dataclasses import replace
from typing import Any

from mamba_fsdp.model.config import FIELDS, ModelConfig, attention_layer, rotary_attention_layer

SILENT = "attention_out"  # the multiplier of the attention's output
PLAIN = "mamba2+mlp"
WITH_ATTENTION = "mamba2/attention+mlp"
HEAD_DIM = 64  # a size that fast attention kernels support


def with_silent_attention(config: ModelConfig) -> ModelConfig:
    """Returns the model with silent attention. Returns the model itself if it has layers other than Mamba-2 with an MLP."""
    if any((layer.mixer, layer.mlp) != ("mamba2", True) for layer in config.layer_list()):
        return config
    defaults: dict[str, Any] = {
        name: leaf.default
        for name, leaf in FIELDS.items()
        if leaf.metadata["needs"] in (attention_layer, rotary_attention_layer)
    }
    multipliers = ",".join(filter(None, [config.applicable_multipliers(), f"{SILENT}=0.0"]))
    heads = {"n_head": 1, "n_kv_head": 1, "head_dim": HEAD_DIM}
    return replace(config, layers=WITH_ATTENTION, multipliers=multipliers, **{**defaults, **heads})


def without_silent_attention(config: ModelConfig) -> ModelConfig:
    """Returns the model without its attention if the attention is silent in every layer. Otherwise returns the model
    itself."""
    layers = config.layer_list()
    if config.multiplier(SILENT) or any(layer.mixer != "mamba2/attention" for layer in layers):
        return config
    if not all(layer.mlp for layer in layers):
        return config
    plain = replace(config, layers=PLAIN)
    return replace(plain, multipliers=plain.applicable_multipliers())
