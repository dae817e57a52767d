"""The forms of transformers: MambaForCausalLM, Mamba2ForCausalLM, BambaForCausalLM, LlamaForCausalLM.

Each form says which layers it can hold, how its config.json and our ModelConfig translate, and of which of its tensors,
one below the other, each of ours consists. Field names and defaults are those of transformers 4.57 and 5.23.

transformers before 5 normalises Mamba-2's output over all channels, the reference and we over each group: there a model
with ngroups > 1 loads, but computes something else.
"""

import re

from config.model_config import Layer
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fields import model_config, pattern
from mamba_fsdp.model.spec import parameters

# Fields that say how to initialise, run, cache, sample or label, and nothing about what the model computes.
WITHOUT_EFFECT = (
    "architectures", "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path",
    "name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "use_cache", "initializer_range",
    "max_position_embeddings", "return_dict", "id2label", "label2id", "max_length", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "num_beams", "num_beam_groups", "num_return_sequences",
    "residual_in_fp32", "_attn_implementation", "_attn_implementation_autoset",
)
# What the first conversions of state-spaces' weights left in config.json beside transformers' own names.
LEFT_OVER = ("d_model", "n_layer", "d_inner", "ssm_cfg", "rms_norm", "fused_add_norm", "pad_vocab_size_multiple",
             "layer_types")
MAMBA_INITIALIZATION = ("time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme",
                        "rescale_prenorm_residual", "use_mambapy", "use_associative_scan")


class Mamba:
    architecture, model_type = "MambaForCausalLM", "mamba"
    holds = "layers mamba1 without MLP"
    layer_prefix = "backbone.layers."
    top = {"backbone.embedding.weight": "backbone.embeddings.weight",
           "backbone.norm_f.weight": "backbone.norm_f.weight", "lm_head.weight": "lm_head.weight"}

    def fits(self, config):
        return set(config.layer_list()) == {Layer("mamba1", False)}

    def write_config(self, config):
        return {**_mamba_fields(config), "intermediate_size": config.d_inner, "time_step_rank": config.resolved_dt_rank}

    def read_config(self, fields):
        values = _mamba_values(fields, tied=True)
        values["dt_rank"] = fields.take_dt_rank("time_step_rank")
        d_inner = values["expand"] * values["d_model"]
        fields.expect("intermediate_size", d_inner, d_inner, "and not expand * hidden_size")
        fields.ignore(*MAMBA_INITIALIZATION, *LEFT_OVER)
        return values | dict(layers="mamba1")

    def names(self, layer, part):
        return [part]


class Mamba2(Mamba):
    architecture, model_type = "Mamba2ForCausalLM", "mamba2"
    holds = "layers mamba2 without MLP"

    def fits(self, config):
        return set(config.layer_list()) == {Layer("mamba2", False)}

    def write_config(self, config):
        return {**_mamba_fields(config), "num_heads": config.n_ssm_head, "head_dim": config.headdim,
                "n_groups": config.ngroups, "chunk_size": config.chunk_size,
                "time_step_rank": config.resolved_dt_rank, "rms_norm": True}

    def read_config(self, fields):
        values = _mamba_values(fields, tied=False)
        values.update(headdim=fields.take("head_dim", 64), ngroups=fields.take("n_groups", 8),
                      chunk_size=fields.take("chunk_size", 256))
        heads = values["expand"] * values["d_model"] // values["headdim"]
        fields.expect("num_heads", heads, 128, "and not expand * hidden_size / head_dim")
        fields.expect("rms_norm", True, True)
        fields.refuse_limit("time_step_limit")
        fields.ignore("time_step_rank", "intermediate_size", *MAMBA_INITIALIZATION, *LEFT_OVER)
        return values | dict(layers="mamba2")


class Llama:
    architecture, model_type = "LlamaForCausalLM", "llama"
    holds = "layers attention+mlp, rotary over whole heads"
    layer_prefix = "model.layers."
    top = {"backbone.embedding.weight": "model.embed_tokens.weight", "backbone.norm_f.weight": "model.norm.weight",
           "lm_head.weight": "lm_head.weight"}
    mlp, norms = "mlp", {"norm.weight": "input_layernorm", "norm2.weight": "post_attention_layernorm"}

    def fits(self, config):
        return (set(config.layer_list()) == {Layer("attention", True)}
                and config.resolved_rotary_dim == config.resolved_head_dim and config.d_model % config.n_head == 0)

    def write_config(self, config):
        return {**_attention_fields(config), "rope_theta": config.rope_theta,
                "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}

    def read_config(self, fields):
        values = _attention_values(fields, eps_default=1e-6)
        theta, share = _rotary(fields, share=1.0)
        fields.ignore("pretraining_tp")
        rotary_dim = _rotary_dim(fields, values["head_dim"], share)
        return values | dict(layers="attention+mlp", rope_theta=theta, rotary_dim=rotary_dim)

    def names(self, layer, part):
        if part in ("norm.weight", "norm2.weight"):
            return [f"{self.norms[part]}.weight"]
        if part == "mlp.fc1.weight":
            return [f"{self.mlp}.up_proj.weight", f"{self.mlp}.gate_proj.weight"]
        if part == "mlp.fc2.weight":
            return [f"{self.mlp}.down_proj.weight"]
        if layer.mixer == "mamba2":
            return [part.replace("mixer", "mamba", 1)]
        return {"mixer.in_proj.weight": ["self_attn.q_proj.weight", "self_attn.k_proj.weight",
                                         "self_attn.v_proj.weight"],
                "mixer.out_proj.weight": ["self_attn.o_proj.weight"]}[part]


class Bamba(Llama):
    architecture, model_type = "BambaForCausalLM", "bamba"
    holds = "layers mamba2+mlp and attention+mlp"
    top = Llama.top | {"backbone.norm_f.weight": "model.final_layernorm.weight"}
    mlp, norms = "feed_forward", {"norm.weight": "input_layernorm", "norm2.weight": "pre_ff_layernorm"}

    def fits(self, config):
        return (set(config.layer_list()) <= {Layer("mamba2", True), Layer("attention", True)}
                and config.n_ssm_head * config.headdim == config.d_inner)

    def write_config(self, config):
        share = config.resolved_rotary_dim / config.resolved_head_dim if config.has("attention") else 0.5
        rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": share}  # as transformers 4 reads it
        return {**_attention_fields(config), **rope, "rope_parameters": {"rope_type": "default", **rope},
                "attn_layer_indices": [i for i, layer in enumerate(config.layer_list()) if layer.mixer == "attention"],
                "mamba_n_heads": config.n_ssm_head, "mamba_d_head": config.headdim, "mamba_n_groups": config.ngroups,
                "mamba_d_state": config.d_state, "mamba_d_conv": config.d_conv, "mamba_expand": config.expand,
                "mamba_chunk_size": config.chunk_size, "mamba_conv_bias": True, "mamba_proj_bias": False}

    def read_config(self, fields):
        values = _attention_values(fields, eps_default=1e-5)
        theta, share = _rotary(fields, share=0.5)
        attention = fields.take("attn_layer_indices", [], kind=list)
        layers = [Layer("attention" if i in attention else "mamba2", True) for i in range(values["n_layer"])]
        values.update(d_state=fields.take("mamba_d_state", 256), d_conv=fields.take("mamba_d_conv", 4),
                      expand=fields.take("mamba_expand", 2), ngroups=fields.take("mamba_n_groups", 1),
                      chunk_size=fields.take("mamba_chunk_size", 256))
        d_inner, heads = values["expand"] * values["d_model"], fields.take("mamba_n_heads", 128)
        head_dim = fields.content.pop("mamba_d_head", "auto")
        if d_inner % heads or head_dim not in ("auto", d_inner // heads):
            fields.refuse("mamba_d_head", f"is {head_dim} with {heads} heads and {d_inner} channels")
        fields.expect("mamba_conv_bias", True, True, "a convolution without bias")
        fields.expect("mamba_proj_bias", False, False)
        fields.refuse_limit("time_step_limit")
        fields.ignore("num_logits_to_keep", "z_loss_coefficient", "layers_block_type", "layer_types")
        values.update(layers=pattern(layers), headdim=d_inner // heads)
        if not attention:
            return {name: value for name, value in values.items() if name not in ("n_head", "n_kv_head", "head_dim")}
        return values | dict(rope_theta=theta, rotary_dim=_rotary_dim(fields, values["head_dim"], share))


FORMS = (Mamba(), Mamba2(), Llama(), Bamba())  # Llama first: Bamba can hold most of what it holds


def form_for(config):
    """The form that holds a model. Raises UserError where transformers has none."""
    for form in FORMS:
        if form.fits(config):
            return form
    raise UserError(f"transformers has no model with layers={config.layers}; it has "
                    + ", ".join(f"{form.architecture} ({form.holds})" for form in FORMS))


def form_of(fields):
    """The form that a config.json names. Raises UserError for any other model."""
    model_type, architectures = fields.content.get("model_type"), fields.content.get("architectures")
    for form in FORMS:
        if model_type == form.model_type and (architectures is None or form.architecture in architectures):
            return form
    kind = ", ".join(architectures or ["no architecture"])
    raise UserError(f"{fields.path}: a model of type {model_type!r} ({kind}); this program reads "
                    + ", ".join(form.architecture for form in FORMS))


def write_config(form, config):
    """ModelConfig -> the fields of config.json that say what the model computes, all of them: defaults differ."""
    return {"architectures": [form.architecture], "model_type": form.model_type, "vocab_size": config.padded_vocab_size,
            "hidden_size": config.d_model, "num_hidden_layers": config.n_layer, "hidden_act": "silu",
            "tie_word_embeddings": config.tie_embeddings, **form.write_config(config)}


def read_config(form, fields):
    """Fields of a config.json -> ModelConfig. Raises UserError that names what can't be represented."""
    values = form.read_config(fields)
    fields.expect("hidden_act", "silu", "silu", "another activation")
    fields.ignore(*WITHOUT_EFFECT)
    fields.finish()
    return model_config(fields.path, **values, pad_vocab_size_multiple=1)


def parts(form, config):
    """{our name: [(their name, its shape), ...]}: ours is theirs one below the other."""
    layers = config.layer_list()
    head_dim = config.resolved_head_dim
    result = {}
    for name, parameter in parameters(config).items():
        shape = parameter.shape
        match = re.fullmatch(r"backbone\.layers\.(\d+)\.(.+)", name)
        if not match:
            result[name] = [(form.top[name], shape)]
            continue
        layer = layers[int(match[1])]
        theirs = [f"{form.layer_prefix}{match[1]}.{part}" for part in form.names(layer, match[2])]
        if len(theirs) == 3:
            rows = [config.n_head * head_dim, config.n_kv_head * head_dim, config.n_kv_head * head_dim]
        else:
            rows = [shape[0] // len(theirs)] * len(theirs)
        result[name] = [(their_name, (count, *shape[1:])) for their_name, count in zip(theirs, rows)]
    return result


def _mamba_fields(config):
    return {"state_size": config.d_state, "conv_kernel": config.d_conv, "expand": config.expand,
            "layer_norm_epsilon": config.norm_eps, "use_bias": False, "use_conv_bias": True, "residual_in_fp32": True}


def _mamba_values(fields, tied):
    fields.expect("use_bias", False, False)
    fields.expect("use_conv_bias", True, True, "a convolution without bias")
    return dict(d_model=fields.take("hidden_size"), n_layer=fields.take("num_hidden_layers"),
                vocab_size=fields.take("vocab_size"), d_state=fields.take("state_size", 16 if tied else 128),
                d_conv=fields.take("conv_kernel", 4), expand=fields.take("expand", 2),
                norm_eps=fields.take("layer_norm_epsilon", 1e-5, kind=float),
                tie_embeddings=fields.take("tie_word_embeddings", tied, kind=bool))


def _attention_fields(config):
    return {"intermediate_size": config.d_intermediate, "num_attention_heads": config.n_head,
            "num_key_value_heads": config.n_kv_head, "head_dim": config.resolved_head_dim,
            "rms_norm_eps": config.norm_eps, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}


def _attention_values(fields, eps_default):
    for name in ("attention_bias", "mlp_bias"):
        fields.expect(name, False, False)
    fields.expect("attention_dropout", 0.0, 0.0)
    d_model, n_head = fields.take("hidden_size"), fields.take("num_attention_heads", 32)
    return dict(d_model=d_model, n_layer=fields.take("num_hidden_layers"), vocab_size=fields.take("vocab_size"),
                n_head=n_head, n_kv_head=fields.take("num_key_value_heads", n_head),
                head_dim=fields.take("head_dim", d_model // n_head), d_intermediate=fields.take("intermediate_size"),
                norm_eps=fields.take("rms_norm_eps", eps_default, kind=float),
                tie_embeddings=fields.take("tie_word_embeddings", False, kind=bool))


def _rotary(fields, share):
    """(rope theta, rotated share of each head) in transformers 4's fields or 5's, which must agree; not scaled ones."""
    places = [fields, fields.inner("rope_scaling"), fields.inner("rope_parameters")]
    for rope in places[1:]:
        for name in ("rope_type", "type"):
            rope.expect(name, "default", "default", "scaled rotary embeddings")
    values = []
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", share)):
        given = {rope.take(name, kind=float) for rope in places if name in rope}
        if len(given) > 1:
            fields.refuse(name, f"is given twice, as {' and '.join(map(str, sorted(given)))}")
        values.append(given.pop() if given else default)
    for rope in places[1:]:
        rope.finish()
    return values


def _rotary_dim(fields, head_dim, share):
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2:
        fields.refuse("partial_rotary_factor", f"{share} rotates {rotary_dim} of {head_dim} channels, an odd number")
    return rotary_dim
