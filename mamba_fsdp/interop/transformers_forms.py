"""The forms of transformers: MambaForCausalLM, Mamba2ForCausalLM, BambaForCausalLM, LlamaForCausalLM.

forms.yaml says which layers each can hold, how its config.json and our ModelConfig translate, and of which of its
tensors, one below the other, each of ours consists.

transformers before 5 normalises Mamba-2's output over all channels, the reference and we over each group: there a model
with ngroups > 1 loads, but computes something else.
"""

from typing import Any

from config.model_config import Layer, ModelConfig
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.fields import TABLES, Fields, model_config, pattern, write_fields
from mamba_fsdp.model.spec import parameters


class Form:
    """One architecture of transformers: what forms.yaml says of it, by the names there, and what no table can say:
    more_fields(config) returns the fields of config.json that are in none, add_values(fields, values) adds the settings
    that follow from such fields to those of the tables."""

    def __getattr__(self, name: str) -> Any:
        return TABLES[type(self).__name__][name]

    def fits(self, config: ModelConfig) -> bool:
        """Whether the form can hold this model."""
        return all([layer.mixer, layer.mlp] in self.layers for layer in config.layer_list())

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """ModelConfig -> the fields of config.json that say what the model computes, all of them: defaults differ."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **write_fields(config, self.settings, self.fixed),
            "vocab_size": config.padded_vocab_size,
            **self.more_fields(config),
        }

    def read_config(self, fields: Fields) -> ModelConfig:
        """Fields of a config.json -> ModelConfig. Raises UserError that names what can't be represented."""
        values = fields.take_settings(self.settings)
        fields.expect(self.fixed)
        self.add_values(fields, values)
        fields.ignore(*TABLES["any"]["ignored"], *self.ignored)
        fields.finish()
        return model_config(fields.path, **values, pad_vocab_size_multiple=1)


class Mamba(Form):
    def more_fields(self, config):
        return {
            "residual_in_fp32": True,
            "time_step_rank": config.resolved_dt_rank,
            "intermediate_size": config.d_inner,
        }

    def add_values(self, fields, values):
        d_inner = values["expand"] * values["d_model"]
        fields.expect({"intermediate_size": (d_inner, d_inner, "and not expand * hidden_size")})
        values |= {"layers": "mamba1", "dt_rank": fields.take("time_step_rank", 0)}


class Mamba2(Mamba):
    def more_fields(self, config):
        return {
            "residual_in_fp32": True,
            "time_step_rank": config.resolved_dt_rank,
            "num_heads": config.n_ssm_head,
        }

    def add_values(self, fields, values):
        heads = values["expand"] * values["d_model"] // values["headdim"]
        fields.expect({"num_heads": (heads, 128, "and not expand * hidden_size / head_dim")})
        fields.check_limit("time_step_limit")
        values["layers"] = "mamba2"


class Llama(Form):
    def fits(self, config):
        return (
            super().fits(config)
            and config.resolved_rotary_dim == config.resolved_head_dim
            and config.d_model % config.n_head == 0
        )

    def more_fields(self, config):
        return {
            "rope_theta": config.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        }

    def add_values(self, fields, values):
        values["layers"] = "attention+mlp"
        _add_attention(fields, values, *_rotary(fields, share=1.0))


class Bamba(Llama):
    def fits(self, config):
        return Form.fits(self, config) and config.n_ssm_head * config.headdim == config.d_inner

    def more_fields(self, config):
        share = (
            config.resolved_rotary_dim / config.resolved_head_dim
            if config.has("attention")
            else 0.5
        )
        rope = {
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": share,
        }  # as transformers 4 reads it
        return {
            **rope,
            "rope_parameters": {"rope_type": "default", **rope},
            "attn_layer_indices": [
                i for i, layer in enumerate(config.layer_list()) if layer.mixer == "attention"
            ],
            "mamba_n_heads": config.n_ssm_head,
            "mamba_d_head": config.headdim,
        }

    def add_values(self, fields, values):
        attention = fields.take("attn_layer_indices", [], kind=list)
        layers = [
            Layer("attention" if i in attention else "mamba2", True)
            for i in range(values["n_layer"])
        ]
        d_inner, heads = values["expand"] * values["d_model"], fields.take("mamba_n_heads", 128)
        headdim = fields.content.pop("mamba_d_head", "auto")
        if d_inner % heads or headdim not in ("auto", d_inner // heads):
            fields.refuse("mamba_d_head", f"is {headdim} with {heads} heads and {d_inner} channels")
        fields.check_limit("time_step_limit")
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
    model_type, architectures = (
        fields.content.get("model_type"),
        fields.content.get("architectures"),
    )
    if not isinstance(architectures or [], list) or not all(
        isinstance(name, str) for name in architectures or []
    ):
        fields.refuse("architectures", "is no list of names")
    for form in FORMS:
        if model_type == form.model_type and (
            architectures is None or form.architecture in architectures
        ):
            return form
    kind = f"type {model_type!r} ({', '.join(architectures or ['no architecture'])})"
    raise UserError(
        f"{fields.path}: a model of {kind}; this program reads {', '.join(f.architecture for f in FORMS)}"
    )


def parts(form: Form, config: ModelConfig) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """{our name: [(their name, its shape), ...]}: ours is theirs one below the other."""
    layers, result = config.layer_list(), {}
    for name, parameter in parameters(config).items():
        if name in form.top:
            theirs = [form.top[name]]
        else:
            index, part = name.removeprefix("backbone.layers.").split(".", 1)
            mixer = layers[int(index)].mixer
            names = form.tensors.get(
                part.replace("mixer", mixer, 1), [part.replace("mixer", form.mamba, 1)]
            )
            theirs = [f"{form.layer_prefix}{index}.{there}" for there in names]
        rows, *columns = parameter.shape
        shares = (
            [config.n_head, config.n_kv_head, config.n_kv_head]
            if len(theirs) == 3
            else [1] * len(theirs)
        )
        result[name] = [
            (there, (rows * share // sum(shares), *columns)) for there, share in zip(theirs, shares)
        ]
    return result


def _rotary(fields, share):
    """(rope theta, rotated share of each head) in transformers 4's fields or 5's, which must agree; not scaled ones."""
    inner = [fields.inner("rope_scaling"), fields.inner("rope_parameters")]
    for rope in inner:
        rope.expect(
            {
                name: ("default", "default", "scaled rotary embeddings")
                for name in ("rope_type", "type")
            }
        )
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
        fields.refuse(
            "partial_rotary_factor",
            f"{share} rotates {values['rotary_dim']} of {values['head_dim']} "
            "channels, an odd number",
        )
