"""Tests mamba_fsdp.model.config: patterns of layers, sizes that are derived from others, and errors for models that
can't be built."""

from pathlib import Path

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.model.config import FIELDS, Layer, ModelConfig, parse_model_config


@pytest.mark.parametrize(
    "pattern, count, layers",
    [
        ("mamba1", 2, ["mamba1", "mamba1"]),
        ("2*mamba2+mlp, attention", 5, ["mamba2+mlp", "mamba2+mlp", "attention"] * 2),
        ("mamba2/attention+mlp,mlp", 3, ["mamba2/attention+mlp", "mlp", "mamba2/attention+mlp"]),
        ("999999999*gdn", 2, ["gdn", "gdn"]),
    ],
)
def test_a_pattern_is_repeated_or_cut(pattern, count, layers):
    found = ModelConfig(layers=pattern, n_layer=count).layer_list()
    assert [layer.mixer + "+mlp" * layer.mlp for layer in found] == layers[:count]
    assert found[0] == Layer(layers[0].removesuffix("+mlp"), layers[0].endswith("+mlp"))


ATTENTION = {"layers": "attention", "n_head": 4, "n_kv_head": 2}
REFUSED = [
    ({"layers": "mamba9"}, "can't read 'mamba9'"),
    ({"layers": "mamba2+attn"}, "did you mean attention"),
    ({"layers": "2*mamba22"}, "did you mean mamba2"),
    ({"layers": "mamba2/"}, "can't read 'mamba2/'"),
    ({"layers": "0*mamba1"}, "contains no layer"),
    ({"layers": "mamba2", "headdim": 48}, "headdim 48 does not divide expand * d_model = 256"),
    ({"layers": "gdn", "d_ssm": 96}, "headdim 64 does not divide d_ssm = 96"),
    ({"layers": "mamba3", "ngroups": 3}, "ngroups 3 does not divide the 4 SSM heads"),
    ({"layers": "attention", "n_head": 6}, "n_head 6 does not divide d_model 128"),
    (ATTENTION | {"n_kv_head": 3}, "n_kv_head 3 does not divide n_head 4"),
    (ATTENTION | {"rotary_dim": 34}, "rotary_dim 34 must be even and at most head_dim 32"),
    (ATTENTION | {"rotary_dim": 7}, "rotary_dim 7 must be even"),
    (ATTENTION | {"rope_scaling": "liner,factor=2"}, "its numbers are not the ones"),
    (ATTENTION | {"rope_scaling": "dynamic,factor=2"}, "its numbers are not the ones"),
    (ATTENTION | {"rope_scaling": "linear,factor=0"}, "all numbers must be above 0"),
    ({"multipliers": "ssm_q=2"}, "this model has no multiplier 'ssm_q'"),
    ({"multipliers": "ssm_inn=2"}, "did you mean ssm_in"),
    ({"d_modle": 64}, "d_modle is not a model setting"),
    ({"d_model": "64"}, "d_model is '64', but expected whole number"),
    ({"n_layer": 10_001}, "n_layer is 10001, but"),
    ({"d_conv": 5}, "d_conv is 5, but"),
    ({"tie_embeddings": 1}, "tie_embeddings is 1, but expected true|false"),
]


@pytest.mark.parametrize("values, message", REFUSED, ids=str)
def test_models_that_can_not_be_built_are_errors_that_name_the_file(values, message):
    with pytest.raises(UserError) as refused:
        parse_model_config(Path("config.json"), values)
    assert str(refused.value).startswith("config.json: ") and message in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        ATTENTION | {"rotary_dim": 32, "rope_scaling": "linear,factor=2"},
        ATTENTION | {"d_model": 130, "head_dim": 33},
        {"layers": "mamba2", "d_ssm": 192, "headdim": 48, "ngroups": 2},
        {"multipliers": "embedding=2,ssm_in=1.5,ssm_dt=3", "layers": "mamba2"},
    ],
    ids=str,
)
def test_valid_models_are_accepted(values):
    assert parse_model_config(Path("config.json"), values) == ModelConfig(**values)


def test_sizes_have_lower_bounds():
    """Each size has a lower bound. `least` contains some of the bounds. All other bounds are 1, or 0 if 0 means that
    the size is derived from other settings."""
    least = {"vocab_size": 2, "d_conv": 2, "rotary_dim": -1}
    for name, leaf in FIELDS.items():
        if leaf.type is int:
            lowest = least.get(name, 1 if leaf.default else 0)
            leaf.metadata["bounds"].check(lowest)
            with pytest.raises(UserError, match=f"{name} is {lowest - 1}, but must be at least"):
                parse_model_config(Path("config.json"), {name: lowest - 1})


def test_sizes_that_are_derived_from_others():
    """Sizes that are not given are derived from others. A config that gives these sizes explicitly has the same
    structure."""
    short = ModelConfig(layers="mamba1+mlp,attention", d_model=200, vocab_size=4090, n_head=10)
    sizes = dict(dt_rank=13, d_ssm=400, d_intermediate=640, vocab_size=4096)
    rotation = dict(head_dim=20, rotary_dim=20)
    explicit = dict(layers="1*mamba1+mlp,attention", d_model=200, n_head=10, **sizes, **rotation)
    written_out = ModelConfig(**explicit)
    assert short.structure() == written_out.structure()
    for name, value in {"dt_rank": 12, "d_ssm": 384, "tie_embeddings": False, "n_layer": 5}.items():
        other = ModelConfig(**explicit | {name: value})
        assert other.structure() != short.structure(), name
    assert "chunk_size" not in short.structure() and short.resolved_head_dim == 20
    assert ModelConfig(n_head=8, d_model=104, layers="attention").resolved_rotary_dim == 12


def test_factors_are_one_unless_they_are_given():
    model = ModelConfig(layers="mamba1", multipliers="embedding=12,mlp_in=3, ssm_out=0.5")
    assert model.multiplier("embedding") == 12 and model.multiplier("logits") == 1
    assert model.applicable_multipliers() == "embedding=12, ssm_out=0.5"
