"""Tests mamba_fsdp.model.init: the distributions of initial values, and that a value depends only on the parameter, the
seed and the position in the parameter."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.model import init
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.init import initial_values
from mamba_fsdp.model.spec import parameters

pytestmark = pytest.mark.torch22
CONFIG = ModelConfig(
    layers="mamba1+mlp,mamba2,attention",
    d_model=256,
    n_layer=6,
    headdim=1,
    vocab_size=1000,
    d_intermediate=300,
    tie_embeddings=False,
)
SPEC = parameters(CONFIG)


@pytest.fixture(autouse=True, params=[init.BLOCK_ELEMENTS, 1000], ids=["one block", "many blocks"])
def block(request, monkeypatch):
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", request.param)


def value_of(name, seed=0):
    parameter = SPEC[name]
    return initial_values(name, parameter, seed, 0, parameter.size).view(parameter.shape)


def uniform_between(value, low, high):
    width = high - low
    noise = 4 * width / math.sqrt(12 * value.numel())
    return (
        low <= value.min() < low + 0.03 * width
        and high - 0.03 * width < value.max() <= high
        and abs(value.mean() - (low + high) / 2) < noise
        and value.std().item() == pytest.approx(width / math.sqrt(12), rel=0.1)
    )


@pytest.mark.parametrize(
    "name, inputs",
    [
        ("backbone.layers.0.mixer.in_proj.weight", 256),
        ("backbone.layers.0.mixer.x_proj.weight", 512),
        ("backbone.layers.0.mixer.conv1d.weight", 4),
        ("backbone.layers.0.mixer.conv1d.bias", 4),
        ("backbone.layers.0.mixer.dt_proj.weight", 16),
        ("backbone.layers.0.mlp.fc1.weight", 256),
        ("backbone.layers.1.mixer.in_proj.weight", 256),
        ("backbone.layers.1.mixer.conv1d.weight", 4),
        ("backbone.layers.2.mixer.in_proj.weight", 256),
        ("lm_head.weight", 256),
        # The weights of projections into the residual stream are divided by sqrt(n_layer). In layers with an MLP, too,
        # the divisor is not sqrt(2 n_layer).
        ("backbone.layers.0.mixer.out_proj.weight", 512 * 6),
        ("backbone.layers.1.mixer.out_proj.weight", 512 * 6),
        ("backbone.layers.2.mixer.out_proj.weight", 256 * 6),
        ("backbone.layers.0.mlp.fc2.weight", 300 * 6),
    ],
)
def test_matrices_and_convolutions_are_uniform(name, inputs):
    assert uniform_between(value_of(name), -(inputs**-0.5), inputs**-0.5)


def test_the_embedding_is_normal():
    value = value_of("backbone.embedding.weight") / 0.02
    for deviations, share in ((1, 0.683), (2, 0.954), (3, 0.9973)):
        assert (value.abs() < deviations).float().mean().item() == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize(
    "name", ["backbone.layers.0.mixer.dt_proj.bias", "backbone.layers.1.mixer.dt_bias"]
)
def test_dt_is_log_uniform_between_a_thousandth_and_a_tenth(name):
    dt = F.softplus(value_of(name).double())
    assert uniform_between(dt.log(), math.log(0.001), math.log(0.1))


def test_constant_and_log_initial_values():
    assert torch.equal(
        value_of("backbone.layers.0.mixer.A_log")[7], torch.log(torch.arange(1.0, 17.0))
    )
    assert uniform_between(value_of("backbone.layers.1.mixer.A_log").exp(), 1, 16)
    for name in SPEC:
        if name.endswith((".D", "norm.weight", "norm2.weight", "norm_f.weight")):
            assert (value_of(name) == 1).all(), name


def test_a_slice_equals_the_slice_of_the_whole_parameter():
    choose = random.Random(0)
    for name, parameter in SPEC.items():
        whole = value_of(name).flatten()
        for _ in range(5):
            start, stop = sorted(choose.randint(0, len(whole)) for _ in range(2))
            part = initial_values(name, parameter, 0, start, stop)
            assert torch.equal(part, whole[start:stop]), (name, start, stop)
