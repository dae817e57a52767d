"""Gives a model of Mamba-2 layers with MLPs an attention head beside each mixer that adds nothing to the output, and
takes it away again.

No class of transformers has such layers alone: Bamba and Granite, which have them next to attention layers, ask an
attention layer for the length of the cache. Falcon-H1 has an attention beside each Mamba-2, multiplied by a number of
its config.json, which may be 0.
"""

from dataclasses import replace
from typing import Any

from mamba_fsdp.model.config import FIELDS, ModelConfig, attention_layer, rotary_attention_layer

SILENT = "attention_out"  # the multiplier that is 0
PLAIN = "mamba2+mlp"
WITH_ATTENTION = "mamba2/attention+mlp"
HEAD_DIM = 64  # fast attention kernels do not have every size


def with_silent_attention(config: ModelConfig) -> ModelConfig:
    """Returns the model with silent attention, or itself if it has other layers than Mamba-2 with an MLP."""
    if any((layer.mixer, layer.mlp) != ("mamba2", True) for layer in config.layer_list()):
        return config
    usual: dict[str, Any] = {
        name: leaf.default
        for name, leaf in FIELDS.items()
        if leaf.metadata["needs"] in (attention_layer, rotary_attention_layer)
    }
    multipliers = ",".join(filter(None, [config.applicable_multipliers(), f"{SILENT}=0.0"]))
    heads = {"n_head": 1, "n_kv_head": 1, "head_dim": HEAD_DIM}
    return replace(config, layers=WITH_ATTENTION, multipliers=multipliers, **{**usual, **heads})


def without_silent_attention(config: ModelConfig) -> ModelConfig:
    """Returns the model without its attention if that is silent in each layer, else the model itself."""
    layers = config.layer_list()
    if config.multiplier(SILENT) or any(layer.mixer != "mamba2/attention" for layer in layers):
        return config
    if not all(layer.mlp for layer in layers):
        return config
    plain = replace(config, layers=PLAIN)
    return replace(plain, multipliers=plain.applicable_multipliers())
