"""Tests mamba_fsdp.model.spec (numbers of parameters, FLOPs, operator uses) and mamba_fsdp.model.presets (names)."""

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.presets import PRESETS, model_title, preset
from mamba_fsdp.model.spec import flops_per_token, operator_uses, parameter_count

PUBLISHED = {  # {preset: number of parameters in the released checkpoint}
    "mamba-130m": 129_135_360, "mamba-370m": 371_516_416, "mamba-790m": 793_204_224, "mamba-1.4b": 1_372_178_432,
    "mamba-2.8b": 2_768_345_600, "mamba2-130m": 128_989_632, "mamba2-2.7b": 2_702_599_680, "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320, "llama2_34b": 33_743_970_304, "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248, "llama3_70b": 70_553_706_496, "mamba3-siso-187m": 186_849_600,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_numbers_of_parameters(name):
    assert parameter_count(ModelConfig(**preset(name))) == PUBLISHED[name]


EACH = "mamba1+mlp,mamba2,mamba3,gdn,attention"


def test_operator_uses_of_a_model():
    """operator_uses lists the operators of a model with the sizes that decide whether a backend can be used: channels,
    rows, and the elements of the widest projection for 10 tokens."""
    uses = operator_uses(ModelConfig(layers=EACH, n_layer=5), "bf16", tokens=10)
    sizes = {
        name: [(use.channels, use.rows) for use in found if use.channels or use.rows]
        for name, found in uses.items()
    }
    assert sizes == {
        **dict.fromkeys(("norm", "loss", "mamba1", "ssd"), []),
        "scan": [(16, 0)],
        "conv": [(256, 0), (288, 0), (288, 0)],
        "mamba2": [(0, 548)],
        "gdn": [(16, 0)],
        "attention": [(16, 0)],
    }
    assert {use.elements for found in uses.values() for use in found} == {10 * 768}
    in_parts = operator_uses(ModelConfig(layers=EACH, n_layer=5), "bf16", in_parts=True)
    assert uses.keys() - in_parts.keys() == {"mamba1", "mamba2"}
    odd = ModelConfig(layers="mamba1,mamba2", bcdt_norm_eps=1e-6, ssm_norm="before")
    assert list(operator_uses(odd, "bf16")) == ["norm", "loss", "conv", "scan", "ssd"]


def test_flops_by_hand_of_each_kind_of_layer():
    """flops_per_token equals 6 times the multiply-adds per token of the forward pass, which are counted by hand here. A
    multiply-add is 2 FLOPs, and the backward pass takes twice as many as the forward pass."""
    vocabulary = dict(d_model=8, vocab_size=32, d_state=4, d_conv=4)
    head = 32 * 8

    mamba1 = ModelConfig(layers="mamba1", n_layer=2, **vocabulary)  # d_inner 16, dt_rank 1
    layer = 8 * 32 + 16 * 4 + 16 * (1 + 8) + 1 * 16 + 16 * 4 * 3 + 16 * 8
    assert flops_per_token(mamba1, 2048) == 6 * (2 * layer + head)

    mamba2 = ModelConfig(layers="mamba2", n_layer=1, headdim=4, ngroups=2, **vocabulary)  # 4 heads
    layer = 8 * (16 + 16 + 16 + 4) + (16 + 16) * 4 + 16 * 4 * 3 + 16 * 8
    assert flops_per_token(mamba2, 2048) == 6 * (layer + head)

    mamba3 = ModelConfig(layers="mamba3", n_layer=1, headdim=4, ngroups=2, **vocabulary)
    layer = 8 * (16 + 16 + 16 + 3 * 4 + 1) + 16 * 4 * 3 + 16 * 8
    assert flops_per_token(mamba3, 2048) == 6 * (layer + head)

    gdn = ModelConfig(layers="gdn", n_layer=1, headdim=4, ngroups=2, **vocabulary)
    layer = 8 * (8 + 8 + 16 + 16 + 4 + 4) + (16 + 16) * 4 + 16 * 4 * 4 + 16 * 8
    assert flops_per_token(gdn, 2048) == 6 * (layer + head)

    llama = ModelConfig(
        layers="attention+mlp",
        n_layer=3,
        n_head=4,
        n_kv_head=2,
        d_intermediate=24,
        d_model=8,
        vocab_size=32,
        tie_embeddings=False,
    )  # head_dim 2
    layer = 8 * (8 + 4 + 4) + 8 * 8 + 2 * 8 * 1024 + 8 * 48 + 24 * 8
    assert flops_per_token(llama, 2048) == 6 * (3 * layer + head)


@pytest.mark.parametrize(
    "spelling, name",
    [
        ("state-spaces/mamba-130m", "mamba-130m"),
        ("state-spaces/mamba2-2.7b", "mamba2-2.7b"),
        ("mamba_2.8b", "mamba-2.8b"),
        ("ibm-ai-platform/Bamba-9B", "mamba_9.8b"),
        ("meta-llama/Llama-2-7b-hf", "llama2_7b"),
        ("llama3-8b", "llama3_8b"),
        ("llama2_34bcode", "llama2_34b"),
        ("7b", "llama2_7b"),
        ("mistralai/Mamba-Codestral-7B-v0.1", "mamba-codestral-7b"),
    ],
)
def test_other_spellings_of_preset_names(spelling, name):
    assert preset(spelling) == {"model_name": name, **PRESETS[name]}


def test_the_title_of_a_changed_preset_is_custom():
    # The chunk size does not change results.
    assert model_title(ModelConfig(**preset("mamba2-130m"), chunk_size=64)) == "mamba2-130m"
    assert (
        model_title(ModelConfig(**{**preset("mamba2-130m"), "d_model": 512}))
        == "custom (from mamba2-130m)"
    )
    assert model_title(ModelConfig(n_layer=6)) == "custom (from demo)"


def test_an_unknown_preset_is_an_error_with_suggestions():
    with pytest.raises(UserError, match="did you mean mamba-130m"):
        preset("mamba-130")
    with pytest.raises(UserError, match="choose one of demo, mamba-130m, .*llama3_70b"):
        preset("gpt2")
