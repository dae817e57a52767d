"""The form of the state-spaces release (github.com/state-spaces/mamba): pytorch_model.bin and its MambaConfig.

Tensor names are ours. What is not in its config.json (biases, the layers' defaults) is what its classes take when
nothing is said.
"""

from typing import Any

from config.model_config import Layer, ModelConfig
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fields import TABLES, Fields, model_config, pattern, write_fields

NORM_EPS = 1e-5  # fixed there
MLP_MULTIPLE = 128  # its GatedMLP rounds the width up to a multiple of this

FORM = TABLES["state_spaces"]


def read_config(fields: Fields) -> ModelConfig:
    """Fields of a config.json -> ModelConfig. Raises UserError that names what can't be represented."""
    values = fields.take_settings(FORM["model"]) | {"norm_eps": NORM_EPS}
    values["d_intermediate"] = -(-values["d_intermediate"] // MLP_MULTIPLE) * MLP_MULTIPLE
    fields.expect(FORM["model_fixed"])
    fields.ignore("residual_in_fp32", "fused_add_norm")  # how it computes, not what
    attention_layers = fields.take("attn_layer_idx", [], kind=list)
    if outside := [i for i in attention_layers if i not in range(values["n_layer"])]:
        fields.refuse("attn_layer_idx", f"names layers {outside} of a model of {values['n_layer']}")
    ssm, attention = fields.inner("ssm_cfg"), fields.inner("attn_cfg")
    fields.finish()

    mixer = ssm.take("layer", "Mamba1", kind=str).lower()
    if mixer not in FORM["ssm"]:
        ssm.refuse("layer", f"is {mixer!r}; this program knows Mamba1 and Mamba2")
    mixers = ["attention" if i in attention_layers else mixer for i in range(values["n_layer"])]
    values["layers"] = pattern([Layer(name, values["d_intermediate"] > 0) for name in mixers])
    if mixer in mixers:
        values |= _ssm_values(ssm, mixer, values["d_model"])
    if attention_layers:
        values |= _attention_values(attention, values["d_model"])
    return model_config(fields.path, **values)


def _ssm_values(ssm, mixer, d_model):
    values = ssm.take_settings(FORM["ssm"][mixer])
    ssm.expect(FORM["ssm_fixed"][mixer])
    if mixer == "mamba2":
        d_inner = values["expand"] * d_model
        ssm.expect({"d_ssm": (d_inner, d_inner, "an MLP beside the SSM")})
        ssm.check_limit("dt_limit")
    ssm.ignore(*FORM["ssm_ignored"])
    ssm.finish()
    return values


def _attention_values(attention, d_model):
    values = attention.take_settings(FORM["attention"])
    values["n_kv_head"] = values["n_kv_head"] or values["n_head"]
    values["head_dim"] = values["head_dim"] or d_model // values["n_head"]
    attention.expect(FORM["attention_fixed"] | FORM["attention_absent"])
    attention.ignore("layer_idx")
    attention.finish()
    return values


def write_config(config: ModelConfig) -> dict[str, Any]:
    """ModelConfig -> the fields of a config.json, complete. Raises UserError for what the reference can't build."""
    layers = config.layer_list()
    mixers = {layer.mixer for layer in layers} - {"attention"}
    if len(mixers) > 1 or mixers - FORM["ssm"].keys() or len({layer.mlp for layer in layers}) > 1:
        raise UserError(
            "state-spaces' form has one kind of SSM layer and an MLP in every layer or in none, not "
            f"layers={config.layers}; its own program could not load it"
        )
    if config.norm_eps != NORM_EPS:
        raise UserError(
            f"state-spaces' form has norm_eps {NORM_EPS} built in, this model has {config.norm_eps}"
        )
    if (width := config.resolved_d_intermediate) % MLP_MULTIPLE:
        raise UserError(
            f"state-spaces' form has MLPs of a multiple of {MLP_MULTIPLE}, this model's d_intermediate is "
            f"{width}"
        )
    attention = (
        write_fields(config, FORM["attention"], FORM["attention_fixed"])
        if config.has("attention")
        else {}
    )
    ssm = [
        {"layer": mixer.capitalize(), **write_fields(config, FORM["ssm"][mixer], {})}
        for mixer in mixers
    ]
    return {
        **write_fields(config, FORM["model"], FORM["model_fixed"]),
        "ssm_cfg": ssm[0] if ssm else {},
        "attn_cfg": attention,
        "attn_layer_idx": [i for i, layer in enumerate(layers) if layer.mixer == "attention"],
        "residual_in_fp32": True,
        "fused_add_norm": True,
    }
