"""Tests the Mamba-3 layer of mamba_fsdp.model.layers against the definition of its recurrence, in float64.

tests/interop compares the other mixers with transformers and mamba-ssm.
"""

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.layers import Mamba3
from mamba_fsdp.ops.backends import REFERENCE

pytestmark = pytest.mark.torch22
CONFIGS = {
    "heavy_tail": ModelConfig(layers="mamba3", d_model=8, headdim=4, ngroups=2, d_state=8),
    "softplus": ModelConfig(
        layers="mamba3", d_model=8, headdim=4, d_state=6, decay_activation="softplus"
    ),
}


def define_mamba3(layer, x):
    """Computes the recurrence of arXiv 2603.15569 position by position and head by head, with complex numbers."""
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


@pytest.mark.parametrize("activation", CONFIGS)
def test_mamba3_equals_its_definition(activation):
    layer = Mamba3(CONFIGS[activation], REFERENCE).double()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in layer.named_parameters():
        scale = parameter.shape[1] ** -0.5 if name.endswith("proj.weight") else 1.0
        parameter.data.normal_(std=scale, generator=generator)
    x = torch.randn(2, 70, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    found, expected = (
        [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]
        for y in (layer(x), define_mamba3(layer, x))
    )
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
