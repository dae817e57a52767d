"""The form of the state-spaces release (github.com/state-spaces/mamba): pytorch_model.bin and its MambaConfig.

Tensor names are ours. What is not in its config.json (biases, the layers' defaults) is what its classes take when
nothing is said.
"""

from config.model_config import Layer
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fields import model_config, pattern

NORM_EPS = 1e-5  # fixed there
MLP_MULTIPLE = 128  # its GatedMLP rounds the width up to a multiple of this
INITIALIZATION = ("dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "conv_init")
EXECUTION = ("use_fast_path", "use_mem_eff_path", "layer_idx")


def read_config(fields):
    """Fields of a config.json -> ModelConfig. Raises UserError that names what can't be represented."""
    path = fields.path
    values = dict(d_model=fields.take("d_model"), n_layer=fields.take("n_layer"), vocab_size=fields.take("vocab_size"),
                  pad_vocab_size_multiple=fields.take("pad_vocab_size_multiple", 8),
                  tie_embeddings=fields.take("tie_embeddings", True, kind=bool), norm_eps=NORM_EPS)
    fields.expect("rms_norm", True, True, "a LayerNorm")
    fields.ignore("residual_in_fp32", "fused_add_norm")  # how it computes, not what
    d_intermediate = -(-fields.take("d_intermediate", 0, least=0) // MLP_MULTIPLE) * MLP_MULTIPLE
    attention_layers = fields.take("attn_layer_idx", [], kind=list)
    outside = [i for i in attention_layers if i not in range(values["n_layer"])]
    if outside:
        fields.refuse("attn_layer_idx", f"names layers {outside} of a model of {values['n_layer']}")
    ssm, attention = fields.inner("ssm_cfg"), fields.inner("attn_cfg")
    fields.finish()

    mixer = ssm.take("layer", "Mamba1", kind=str).lower()
    if mixer not in ("mamba1", "mamba2"):
        ssm.refuse("layer", f"is {mixer!r}; this program knows Mamba1 and Mamba2")
    mixers = ["attention" if i in attention_layers else mixer for i in range(values["n_layer"])]
    layers = [Layer(name, d_intermediate > 0) for name in mixers]
    values.update(layers=pattern(layers), d_intermediate=d_intermediate)
    if len(attention_layers) < values["n_layer"]:
        values.update(_ssm_values(ssm, mixer, values["d_model"]))
    if attention_layers:
        values.update(_attention_values(attention, values["d_model"]))
    return model_config(path, **values)


def _ssm_values(ssm, mixer, d_model):
    values = dict(d_state=ssm.take("d_state", 16 if mixer == "mamba1" else 128), d_conv=ssm.take("d_conv", 4),
                  expand=ssm.take("expand", 2))
    ssm.expect("bias", False, False)
    ssm.expect("conv_bias", True, True, "a convolution without bias")
    ssm.ignore(*INITIALIZATION, *EXECUTION)
    if mixer == "mamba1":
        values["dt_rank"] = ssm.take_dt_rank("dt_rank")
    else:
        values.update(headdim=ssm.take("headdim", 64), ngroups=ssm.take("ngroups", 1),
                      chunk_size=ssm.take("chunk_size", 256))
        d_inner = values["expand"] * d_model
        ssm.expect("d_ssm", d_inner, d_inner, "an MLP beside the SSM")
        ssm.expect("D_has_hdim", False, False)
        ssm.expect("rmsnorm", True, True, "a mixer without norm")
        ssm.expect("norm_before_gate", False, False)
        ssm.refuse_limit("dt_limit")
    ssm.finish()
    return values


def _attention_values(attention, d_model):
    n_head = attention.take("num_heads")
    head_dim = attention.take("head_dim", d_model // n_head)
    values = dict(n_head=n_head, n_kv_head=attention.take("num_heads_kv", n_head), head_dim=head_dim,
                  rotary_dim=attention.take("rotary_emb_dim", 0, least=0),
                  rope_theta=attention.take("rotary_emb_base", 10000.0, kind=float))
    attention.expect("causal", True, False, "attention to the future")
    attention.expect("qkv_proj_bias", False, True)
    attention.expect("out_proj_bias", False, True)
    for name in ("d_conv", "mlp_dim"):
        attention.expect(name, 0, 0)
    attention.expect("softmax_scale", None, None)
    attention.expect("rotary_emb_interleaved", False, False)
    attention.ignore("layer_idx")
    attention.finish()
    return values


def write_config(config):
    """ModelConfig -> the fields of a config.json, complete. Raises UserError for what the reference can't build."""
    layers = config.layer_list()
    mixers = {layer.mixer for layer in layers} - {"attention"}
    if len(mixers) > 1 or len({layer.mlp for layer in layers}) > 1:
        raise UserError("state-spaces' form has one kind of SSM layer and an MLP in every layer or in none, not "
                        f"layers={config.layers}; its own program could not load it")
    if config.norm_eps != NORM_EPS:
        raise UserError(f"state-spaces' form has norm_eps {NORM_EPS} built in, this model has {config.norm_eps}")
    if config.d_intermediate % MLP_MULTIPLE:
        raise UserError(f"state-spaces' form has MLPs of a multiple of {MLP_MULTIPLE}, this model's d_intermediate is "
                        f"{config.d_intermediate}")
    ssm, attention = {}, {}
    if mixers == {"mamba1"}:
        ssm = {"layer": "Mamba1", "d_state": config.d_state, "d_conv": config.d_conv, "expand": config.expand,
               "dt_rank": config.resolved_dt_rank}
    elif mixers == {"mamba2"}:
        ssm = {"layer": "Mamba2", "d_state": config.d_state, "d_conv": config.d_conv, "expand": config.expand,
               "headdim": config.headdim, "ngroups": config.ngroups, "chunk_size": config.chunk_size}
    if config.has("attention"):
        attention = {"causal": True, "d_conv": 0, "head_dim": config.resolved_head_dim, "num_heads": config.n_head,
                     "num_heads_kv": config.n_kv_head, "out_proj_bias": False, "qkv_proj_bias": False,
                     "rotary_emb_dim": config.resolved_rotary_dim, "rotary_emb_base": config.rope_theta}
    same = ("d_model", "d_intermediate", "n_layer", "vocab_size", "pad_vocab_size_multiple", "tie_embeddings")
    return {**{name: getattr(config, name) for name in same}, "ssm_cfg": ssm, "attn_cfg": attention,
            "attn_layer_idx": [i for i, layer in enumerate(layers) if layer.mixer == "attention"],
            "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True}
