"""The mixers as layers.py composes them of operators, against their definitions in float64."""

import pytest
import torch
import torch.nn.functional as F

from config.model_config import ModelConfig
from mamba_fsdp.model.layers import MIXERS
from mamba_fsdp.ops.backends import OPERATORS, REFERENCE
from tests.support.definitions import loop, recurrence

pytestmark = pytest.mark.torch22
MIXER = {
    "mamba1": ModelConfig(layers="mamba1", d_model=6, d_state=4, dt_rank=2),
    "mamba2": ModelConfig(
        layers="mamba2", d_model=8, headdim=4, ngroups=2, d_state=3, chunk_size=64
    ),
}
BOTH = pytest.mark.parametrize("kind", MIXER)


def mixer(kind, backend="reference", dtype=torch.float64):
    """A mixer in the given backend, where its operators have it, with random weights."""
    backends = REFERENCE | {
        operator: backend for operator in ("conv", "scan", "ssd") if backend in OPERATORS[operator]
    }
    layer = MIXERS[kind](MIXER[kind], backends).to(torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(generator=generator)
            if name.endswith("proj.weight"):
                parameter /= parameter.shape[1] ** 0.5
    return layer.to(dtype)


def inputs(kind, length=70, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, length, MIXER[kind].d_model, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def convolve(layer, x):
    weight = layer.conv1d.weight
    bias = layer.conv1d.bias
    out = F.conv1d(x.transpose(1, 2), weight, bias, padding=3, groups=x.shape[2])[..., : x.shape[1]]
    return F.silu(out).transpose(1, 2)


def define_mamba1(layer, x):
    x, z = (x @ layer.in_proj.weight.T).chunk(2, dim=-1)
    x = convolve(layer, x)
    dt, B, C = (x @ layer.x_proj.weight.T).split([2, 4, 4], dim=-1)
    A = -torch.exp(layer.A_log)
    zero = layer.A_log.new_zeros(x.shape[0], *layer.A_log.shape)
    y, _ = loop(x, dt @ layer.dt_proj.weight.T, A, B, C, layer.D, z, layer.dt_proj.bias, zero)
    return y @ layer.out_proj.weight.T


def define_mamba2(layer, x):
    """PyTorch's conv1d, the recurrence, the norm after the gate per group, and out_proj."""
    z, xbc, dt = (x @ layer.in_proj.weight.T).split([16, 28, 4], dim=2)
    x, B, C = convolve(layer, xbc).split([16, 6, 6], dim=2)
    B, C = (t.unflatten(2, (2, 3)) for t in (B, C))
    y, _ = recurrence(
        x.unflatten(2, (4, 4)), dt, -torch.exp(layer.A_log), B, C, layer.D, layer.dt_bias
    )
    gated = (y.flatten(2) * F.silu(z)).unflatten(2, (2, 8))
    normed = (gated / (gated.square().mean(3, keepdim=True) + 1e-5).sqrt()).flatten(
        2
    ) * layer.norm.weight
    return normed @ layer.out_proj.weight.T


DEFINITIONS = {"mamba1": define_mamba1, "mamba2": define_mamba2}


@BOTH
def test_equals_its_definition(kind, backend):
    layer = mixer(kind, backend)
    x = inputs(kind)
    actual = layer(x)
    expected = DEFINITIONS[kind](layer, x)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    names, wanted = zip(("x", x), *layer.named_parameters())
    for name, a, e in zip(
        names,
        torch.autograd.grad(actual.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
    ):
        torch.testing.assert_close(
            a, e, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )


@BOTH
def test_takes_fp32_weights_with_bf16_activations(kind, backend):
    """bf16 out, gradients in the types of what they belong to, and an RMS error of at most 1 % of the RMS output."""
    layer = mixer(kind, backend, torch.float32)
    x = inputs(kind, dtype=torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(value.grad.dtype == value.dtype for value in (x, *layer.parameters()))
    exact = DEFINITIONS[kind](layer.double(), x.double())
    assert (y - exact).abs().max() <= 0.03 * exact.abs().max()
    assert (y - exact).square().mean().sqrt() <= 0.01 * exact.square().mean().sqrt()


@BOTH
@torch.no_grad()
def test_prompt_and_steps_equal_the_whole(kind, backend):
    """A prompt at once, then one token at a time; and every position as a token."""
    layer = mixer(kind, backend)
    x = inputs(kind)
    whole = layer(x)
    for prompt in (0, 2, 33):
        state = layer.allocate_state(2, 70, torch.float64, "cpu")
        if prompt:
            torch.testing.assert_close(
                layer(x[:, :prompt], state=state), whole[:, :prompt], rtol=1e-9, atol=1e-9
            )
        for t in range(prompt, 70):
            one = layer(x[:, t : t + 1], state=state, position=t)
            torch.testing.assert_close(one, whole[:, t : t + 1], rtol=1e-9, atol=1e-9)
