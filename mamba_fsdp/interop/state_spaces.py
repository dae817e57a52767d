"""Reads and writes the config.json of models in the format of github.com/state-spaces/mamba. Their weights are in
pytorch_model.bin.

The names of the tensors are the same as in this program. A field that is missing in config.json has the default of the classes
in mamba_ssm.
"""

from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fields import (
    TABLES,
    Fields,
    Table,
    lost_settings,
    model_config,
    pattern,
    write_fields,
)
from mamba_fsdp.model.config import Layer, ModelConfig

NORM_EPS = 1e-5  # a constant in mamba_ssm
MLP_MULTIPLE = 128  # GatedMLP in mamba_ssm rounds the width up to a multiple of this

TABLE: Table = TABLES["state_spaces"]


def read_config(fields: Fields) -> ModelConfig:
    """Reads the model that a config.json describes. Raises UserError for a field that this program can't represent."""
    values = fields.pop_settings(TABLE["model"])
    values["norm_eps"] = NORM_EPS
    values["d_intermediate"] = -(-values["d_intermediate"] // MLP_MULTIPLE) * MLP_MULTIPLE
    fields.expect(TABLE["model_fixed"])
    fields.ignore("residual_in_fp32", "fused_add_norm")  # they do not change the model
    attention_layers = fields.pop_indices("attn_layer_idx", values["n_layer"])
    ssm = fields.inner("ssm_cfg")
    attention = fields.inner("attn_cfg")
    fields.finish()

    ssm_mixer = ssm.pop("layer", "Mamba1", kind=str).lower()
    if ssm_mixer not in TABLE["ssm"]:
        ssm.refuse("layer", f"is {ssm_mixer!r}; this program supports Mamba1, Mamba2 and Mamba3")
    mixers = [
        "attention" if index in attention_layers else ssm_mixer
        for index in range(values["n_layer"])
    ]
    has_mlp = values["d_intermediate"] > 0
    values["layers"] = pattern([Layer(mixer, has_mlp) for mixer in mixers])
    if ssm_mixer in mixers:
        values |= _ssm_values(ssm, ssm_mixer, values["d_model"])
    if attention_layers:
        values |= _attention_values(attention, values["d_model"])
    return model_config(fields.path, **values)


def _ssm_values(ssm: Fields, mixer: str, d_model: int) -> Table:
    values = ssm.pop_settings(TABLE["ssm"][mixer])
    ssm.expect(TABLE["ssm_fixed"][mixer])
    if mixer == "mamba2":
        d_inner = values["expand"] * d_model
        ssm.expect({"d_ssm": (d_inner, d_inner, "an MLP next to the SSM")})
        ssm.expect_no_limit("dt_limit")
    ssm.ignore(*TABLE["ssm_ignored"])
    ssm.finish()
    return values


def _attention_values(attention: Fields, d_model: int) -> Table:
    values = attention.pop_settings(TABLE["attention"])
    values["n_kv_head"] = values["n_kv_head"] or values["n_head"]
    values["head_dim"] = values["head_dim"] or d_model // values["n_head"]
    attention.expect(TABLE["attention_fixed"] | TABLE["attention_absent"])
    attention.ignore("layer_idx")
    attention.finish()
    return values


def write_config(config: ModelConfig) -> Table:
    """Returns all fields of a config.json. Raises UserError for a model that mamba_ssm can't build."""
    layers = config.layer_list()
    ssm = {}
    for mixer in TABLE["ssm"].keys() & {layer.mixer for layer in layers}:
        ssm = {"layer": mixer.capitalize(), **write_fields(config, TABLE["ssm"][mixer], {})}
    attention = {}
    if config.has_mixer("attention"):
        attention = write_fields(config, TABLE["attention"], TABLE["attention_fixed"])
    fields = {
        **write_fields(config, TABLE["model"], TABLE["model_fixed"]),
        "ssm_cfg": ssm,
        "attn_cfg": attention,
        "attn_layer_idx": [i for i, layer in enumerate(layers) if layer.mixer == "attention"],
        "residual_in_fp32": True,
        "fused_add_norm": True,
    }
    try:
        lost = lost_settings(config, read_config(Fields(Path(), fields)))
    except UserError as error:
        reason = str(error).removeprefix(".: ")
        raise UserError(
            f"the format of state-spaces can't represent this model: {reason}"
        ) from None
    if lost:
        raise UserError(f"a state-spaces model can't have {lost[0]}; mamba_ssm could not load it")
    return fields
