"""The forms of transformers: MambaForCausalLM, Mamba2ForCausalLM, BambaForCausalLM, LlamaForCausalLM.

Each form says which layers it can hold, how its config.json and our ModelConfig translate, and of which of its tensors,
one below the other, each of ours consists. Field names and defaults are those of transformers 4.57 and 5.23.

transformers before 5 normalises Mamba-2's output over all channels, the reference and we over each group: there a model
with ngroups > 1 loads, but computes something else.
"""

from abc import ABC, abstractmethod
from typing import Any

from config.model_config import Layer, ModelConfig
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fields import Fields, Fixed, Settings, model_config, pattern, write_fields
from mamba_fsdp.model.spec import EMBEDDING, LM_HEAD, parameters

NORM = "backbone.norm_f.weight"

# Fields that say how to initialise, run, cache, sample or label, and nothing about what the model computes.
WITHOUT_EFFECT = (
    "architectures", "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path",
    "name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "use_cache", "initializer_range",
    "max_position_embeddings", "return_dict", "id2label", "label2id", "max_length", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "num_beams", "num_beam_groups", "num_return_sequences",
    "residual_in_fp32", "_attn_implementation", "_attn_implementation_autoset")
MAMBA_WITHOUT_EFFECT: tuple[str, ...] = (
    "time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme",
    "rescale_prenorm_residual", "use_mambapy", "use_associative_scan",
    # What the first conversions of state-spaces' weights left in config.json beside transformers' own names.
    "d_model", "n_layer", "d_inner", "ssm_cfg", "rms_norm", "fused_add_norm", "pad_vocab_size_multiple", "layer_types")


class Form(ABC):
    """One architecture of transformers: the tables of interop/fields.py, and what no table can say."""

    architecture: str
    model_type: str
    holds: str  # its layers in words
    layers: set[Layer]
    settings: Settings = {"vocab_size": ("vocab_size",), "hidden_size": ("d_model",), "num_hidden_layers": ("n_layer",)}
    fixed: Fixed = {"hidden_act": ("silu", "silu", "another activation")}
    ignored: tuple[str, ...] = ()  # its fields that mean nothing, beside WITHOUT_EFFECT
    top: dict[str, str]  # our name: theirs, of the parameters outside the layers
    layer_prefix: str
    tensors: dict[str, list[str]] = {}  # our name within a layer, `mixer` by its kind: theirs, one below the other
    mamba = "mixer"  # what they call the SSM in a layer

    def fits(self, config: ModelConfig) -> bool:
        """Whether the form can hold this model."""
        return set(config.layer_list()) <= self.layers

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """ModelConfig -> the fields of config.json that say what the model computes, all of them: defaults differ."""
        return {"architectures": [self.architecture], "model_type": self.model_type,
                **write_fields(config, self.settings, self.fixed), "vocab_size": config.padded_vocab_size,
                **self.more_fields(config)}

    def read_config(self, fields: Fields) -> ModelConfig:
        """Fields of a config.json -> ModelConfig. Raises UserError that names what can't be represented."""
        values = fields.take_settings(self.settings)
        fields.expect(self.fixed)
        self.add_values(fields, values)
        fields.ignore(*WITHOUT_EFFECT, *self.ignored)
        fields.finish()
        return model_config(fields.path, **values, pad_vocab_size_multiple=1)

    @abstractmethod
    def more_fields(self, config: ModelConfig) -> dict[str, Any]:
        """The fields of config.json that are in no table."""

    @abstractmethod
    def add_values(self, fields: Fields, values: dict[str, Any]) -> None:
        """Add the settings that follow from fields in no table to `values`, those of the tables."""


class Mamba(Form):
    architecture, model_type = "MambaForCausalLM", "mamba"
    holds, layers = "layers mamba1 without MLP", {Layer("mamba1", False)}
    settings = {**Form.settings, "state_size": ("d_state", 16), "conv_kernel": ("d_conv", 4), "expand": ("expand", 2),
                "layer_norm_epsilon": ("norm_eps", 1e-5), "tie_word_embeddings": ("tie_embeddings", True)}
    fixed = {**Form.fixed, "use_bias": (False, False), "use_conv_bias": (True, True, "a convolution without bias")}
    ignored = MAMBA_WITHOUT_EFFECT
    top = {EMBEDDING: "backbone.embeddings.weight", NORM: NORM, LM_HEAD: LM_HEAD}
    layer_prefix = "backbone.layers."

    def more_fields(self, config):
        return {"residual_in_fp32": True, "time_step_rank": config.resolved_dt_rank,
                "intermediate_size": config.d_inner}

    def add_values(self, fields, values):
        d_inner = values["expand"] * values["d_model"]
        fields.expect({"intermediate_size": (d_inner, d_inner, "and not expand * hidden_size")})
        values |= {"layers": "mamba1", "dt_rank": fields.take("time_step_rank", 0)}


class Mamba2(Mamba):
    architecture, model_type = "Mamba2ForCausalLM", "mamba2"
    holds, layers = "layers mamba2 without MLP", {Layer("mamba2", False)}
    settings = {**Mamba.settings, "state_size": ("d_state", 128), "tie_word_embeddings": ("tie_embeddings", False),
                "head_dim": ("headdim", 64), "n_groups": ("ngroups", 8), "chunk_size": ("chunk_size", 256)}
    fixed = {**Mamba.fixed, "rms_norm": (True, True)}
    ignored = ("time_step_rank", "intermediate_size", *MAMBA_WITHOUT_EFFECT)

    def more_fields(self, config):
        return {"residual_in_fp32": True, "time_step_rank": config.resolved_dt_rank, "num_heads": config.n_ssm_head}

    def add_values(self, fields, values):
        heads = values["expand"] * values["d_model"] // values["headdim"]
        fields.expect({"num_heads": (heads, 128, "and not expand * hidden_size / head_dim")})
        fields.refuse_limit("time_step_limit")
        values["layers"] = "mamba2"


class Llama(Form):
    architecture, model_type = "LlamaForCausalLM", "llama"
    holds, layers = "layers attention+mlp, rotary over whole heads", {Layer("attention", True)}
    settings = {**Form.settings, "intermediate_size": ("d_intermediate",), "num_attention_heads": ("n_head", 32),
                "num_key_value_heads": ("n_kv_head", None), "head_dim": ("head_dim", None),
                "rms_norm_eps": ("norm_eps", 1e-6), "tie_word_embeddings": ("tie_embeddings", False)}
    fixed = {**Form.fixed, "attention_bias": (False, False), "mlp_bias": (False, False),
             "attention_dropout": (0.0, 0.0)}
    ignored: tuple[str, ...] = ("pretraining_tp",)
    top = {EMBEDDING: "model.embed_tokens.weight", NORM: "model.norm.weight", LM_HEAD: LM_HEAD}
    layer_prefix = "model.layers."
    tensors = {"norm.weight": ["input_layernorm.weight"], "norm2.weight": ["post_attention_layernorm.weight"],
               "mlp.fc1.weight": ["mlp.up_proj.weight", "mlp.gate_proj.weight"],
               "mlp.fc2.weight": ["mlp.down_proj.weight"], "attention.out_proj.weight": ["self_attn.o_proj.weight"],
               "attention.in_proj.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"]}

    def fits(self, config):
        return (super().fits(config) and config.resolved_rotary_dim == config.resolved_head_dim
                and config.d_model % config.n_head == 0)

    def more_fields(self, config):
        return {"rope_theta": config.rope_theta,
                "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}

    def add_values(self, fields, values):
        values["layers"] = "attention+mlp"
        _add_attention(fields, values, *_rotary(fields, share=1.0))


class Bamba(Llama):
    architecture, model_type = "BambaForCausalLM", "bamba"
    holds, layers = "layers mamba2+mlp and attention+mlp", {Layer("mamba2", True), Layer("attention", True)}
    settings = {**Llama.settings, "rms_norm_eps": ("norm_eps", 1e-5), "mamba_n_groups": ("ngroups", 1),
                "mamba_d_state": ("d_state", 256), "mamba_d_conv": ("d_conv", 4), "mamba_expand": ("expand", 2),
                "mamba_chunk_size": ("chunk_size", 256)}
    fixed = {**Llama.fixed, "mamba_conv_bias": (True, True, "a convolution without bias"),
             "mamba_proj_bias": (False, False)}
    ignored = ("num_logits_to_keep", "z_loss_coefficient", "layers_block_type", "layer_types")
    top = {**Llama.top, NORM: "model.final_layernorm.weight"}
    tensors = {**Llama.tensors, "norm2.weight": ["pre_ff_layernorm.weight"],
               "mlp.fc1.weight": ["feed_forward.up_proj.weight", "feed_forward.gate_proj.weight"],
               "mlp.fc2.weight": ["feed_forward.down_proj.weight"]}
    mamba = "mamba"

    def fits(self, config):
        return Form.fits(self, config) and config.n_ssm_head * config.headdim == config.d_inner

    def more_fields(self, config):
        share = config.resolved_rotary_dim / config.resolved_head_dim if config.has("attention") else 0.5
        rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": share}  # as transformers 4 reads it
        return {**rope, "rope_parameters": {"rope_type": "default", **rope},
                "attn_layer_indices": [i for i, layer in enumerate(config.layer_list()) if layer.mixer == "attention"],
                "mamba_n_heads": config.n_ssm_head, "mamba_d_head": config.headdim}

    def add_values(self, fields, values):
        attention = fields.take("attn_layer_indices", [], kind=list)
        layers = [Layer("attention" if i in attention else "mamba2", True) for i in range(values["n_layer"])]
        d_inner, heads = values["expand"] * values["d_model"], fields.take("mamba_n_heads", 128)
        headdim = fields.content.pop("mamba_d_head", "auto")
        if d_inner % heads or headdim not in ("auto", d_inner // heads):
            fields.refuse("mamba_d_head", f"is {headdim} with {heads} heads and {d_inner} channels")
        fields.refuse_limit("time_step_limit")
        values |= {"layers": pattern(layers), "headdim": d_inner // heads}
        rotary = _rotary(fields, share=0.5)
        if attention:
            _add_attention(fields, values, *rotary)
        else:
            del values["n_head"], values["n_kv_head"], values["head_dim"]


FORMS = (Mamba(), Mamba2(), Llama(), Bamba())  # Llama first: Bamba can hold most of what it holds


def form_for(config: ModelConfig) -> Form:
    """The form that holds a model. Raises UserError where transformers has none."""
    for form in FORMS:
        if form.fits(config):
            return form
    known = ", ".join(f"{form.architecture} ({form.holds})" for form in FORMS)
    raise UserError(f"transformers has no model with layers={config.layers}; it has {known}")


def form_of(fields: Fields) -> Form:
    """The form that a config.json names. Raises UserError for any other model."""
    model_type, architectures = fields.content.get("model_type"), fields.content.get("architectures")
    if not isinstance(architectures or [], list) or not all(isinstance(name, str) for name in architectures or []):
        fields.refuse("architectures", "is no list of names")
    for form in FORMS:
        if model_type == form.model_type and (architectures is None or form.architecture in architectures):
            return form
    kind = f"type {model_type!r} ({', '.join(architectures or ['no architecture'])})"
    raise UserError(f"{fields.path}: a model of {kind}; this program reads {', '.join(f.architecture for f in FORMS)}")


def parts(form: Form, config: ModelConfig) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """{our name: [(their name, its shape), ...]}: ours is theirs one below the other."""
    layers, result = config.layer_list(), {}
    for name, parameter in parameters(config).items():
        if name in form.top:
            theirs = [form.top[name]]
        else:
            index, part = name.removeprefix("backbone.layers.").split(".", 1)
            mixer = layers[int(index)].mixer
            names = form.tensors.get(part.replace("mixer", mixer, 1), [part.replace("mixer", form.mamba, 1)])
            theirs = [f"{form.layer_prefix}{index}.{there}" for there in names]
        rows, *columns = parameter.shape
        shares = [config.n_head, config.n_kv_head, config.n_kv_head] if len(theirs) == 3 else [1] * len(theirs)
        result[name] = [(there, (rows * share // sum(shares), *columns)) for there, share in zip(theirs, shares)]
    return result


def _rotary(fields, share):
    """(rope theta, rotated share of each head) in transformers 4's fields or 5's, which must agree; not scaled ones."""
    inner = [fields.inner("rope_scaling"), fields.inner("rope_parameters")]
    for rope in inner:
        rope.expect({name: ("default", "default", "scaled rotary embeddings") for name in ("rope_type", "type")})
    values = []
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", share)):
        given = {rope.take(name, kind=float) for rope in (fields, *inner) if name in rope}
        if len(given) > 1:
            fields.refuse(name, f"is given twice, as {' and '.join(map(str, sorted(given)))}")
        values.append(given.pop() if given else default)
    for rope in inner:
        rope.finish()
    return values


def _add_attention(fields, values, theta, share):
    values["n_kv_head"] = values["n_kv_head"] or values["n_head"]
    values["head_dim"] = values["head_dim"] or values["d_model"] // values["n_head"]
    values |= {"rope_theta": theta, "rotary_dim": int(values["head_dim"] * share)}
    if values["rotary_dim"] % 2:
        fields.refuse("partial_rotary_factor", f"{share} rotates {values['rotary_dim']} of {values['head_dim']} "
                                               "channels, an odd number")
