"""The mixers as layers.py composes them of operators: Mamba-3 against its definition in float64, and all in bf16. Of the
others, tests/interop holds outputs and gradients to those of transformers and of mamba-ssm."""

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.layers import MIXERS
from mamba_fsdp.ops.backends import OPERATORS, REFERENCE

pytestmark = pytest.mark.torch22
MIXER = {
    "mamba1": ModelConfig(layers="mamba1", d_model=6, d_state=4, dt_rank=2),
    "mamba2": ModelConfig(
        layers="mamba2", d_model=8, headdim=4, ngroups=2, d_state=3, chunk_size=64
    ),
    "mamba3": ModelConfig(layers="mamba3", d_model=8, headdim=4, ngroups=2, d_state=8),
    "mamba3-softplus": ModelConfig(
        layers="mamba3",
        d_model=8,
        headdim=4,
        d_state=6,
        decay_activation="softplus",
    ),
}


def mixer(kind, backend="reference", dtype=torch.float64):
    """A mixer in the given backend, where its operators have it, with random weights."""
    backends = REFERENCE | {
        operator: backend for operator in ("conv", "scan", "ssd") if backend in OPERATORS[operator]
    }
    layer = MIXERS[MIXER[kind].layers](MIXER[kind], backends).to(torch.float64)
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


def define_mamba3(layer, x):
    """The recurrence of arXiv 2603.15569 position by position, of each head by itself, in complex numbers."""
    config = layer.config
    heads = config.n_ssm_head
    groups = config.ngroups
    of_groups = groups * config.d_state
    angles = layer.in_proj.weight.shape[0] - 2 * config.d_inner - 2 * of_groups - 3 * heads
    sizes = [config.d_inner] * 2 + [of_groups] * 2 + [heads] * 3 + [angles]
    z, x, B, C, dt, A, trapezoid, angle = (x @ layer.in_proj.weight.T).split(sizes, dim=2)
    positive = {"softplus": F.softplus(A), "heavy_tail": torch.where(A > 0, 1 + A, 1 / (1 - A))}
    A = -positive[config.decay_activation].clamp(min=1e-4)
    delta = F.softplus(dt + layer.dt_bias)
    share = torch.sigmoid(trapezoid)

    def normed(t, weight, bias):
        t = t.unflatten(2, (groups, -1))
        t = t / (t.square().mean(3, keepdim=True) + config.norm_eps).sqrt() * weight
        return t.repeat_interleave(heads // groups, dim=2) + bias[:, 0]

    def turned(t, angle):
        pairs = torch.view_as_complex(t[..., : 2 * angles].unflatten(2, (angles, 2)))
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([torch.view_as_real(pairs).flatten(2), t[..., 2 * angles :]], dim=2)

    B = normed(B, layer.B_norm.weight, layer.B_bias)
    C = normed(C, layer.C_norm.weight, layer.C_bias)
    x = x.unflatten(2, (heads, -1))
    state = former = total = 0
    ys = []
    for t in range(x.shape[1]):
        total = total + torch.pi * torch.tanh(angle[:, t, None]) * delta[:, t, :, None]
        alpha = torch.exp(A[:, t] * delta[:, t])[..., None, None]
        own = (share[:, t] * delta[:, t])[..., None, None]
        of_former = ((1 - share[:, t]) * delta[:, t])[..., None, None]
        added = x[:, t, :, :, None] * turned(B[:, t], total)[:, :, None]
        state = alpha * state + of_former * alpha * former + own * added
        former = added
        y = (state * turned(C[:, t], total)[:, :, None]).sum(-1)
        ys.append(y + layer.D[:, None] * x[:, t])
    return (torch.stack(ys, dim=1).flatten(2) * F.silu(z)) @ layer.out_proj.weight.T


@pytest.mark.parametrize("kind", ["mamba3", "mamba3-softplus"])
def test_equals_its_definition(kind):
    layer = mixer(kind)
    x = inputs(kind)
    actual = layer(x)
    expected = define_mamba3(layer, x)
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


@pytest.mark.parametrize("kind", MIXER)
def test_takes_fp32_weights_with_bf16_activations(kind, backend):
    """bf16 out, gradients in the types of what they belong to, and an RMS error of at most 1 % of the RMS output."""
    layer = mixer(kind, backend, torch.float32)
    x = inputs(kind, dtype=torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(value.grad.dtype == value.dtype for value in (x, *layer.parameters()))
    exact = mixer(kind)(x.double())
    assert (y - exact).abs().max() <= 0.03 * exact.abs().max()
    assert (y - exact).square().mean().sqrt() <= 0.01 * exact.square().mean().sqrt()
