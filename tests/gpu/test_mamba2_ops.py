"""On a GPU with mamba-ssm and causal-conv1d: the fused Mamba-2 and attention backends against the reference ones."""

import pytest
import torch

from config.model_config import ModelConfig
from mamba_fsdp.model.layers import Mamba2
from mamba_fsdp.model.spec import operator_uses
from mamba_fsdp.ops.attention import attention
from mamba_fsdp.ops.backends import resolve_backends, why_unavailable
from mamba_fsdp.ops.ssd import ssd


@pytest.fixture(autouse=True, scope="module")
def fused_or_skip():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    reason = why_unavailable("mamba2", "fused")
    if reason:
        pytest.skip(reason)


def leaves(dtype, **tensors):
    """Leaf tensors on the GPU: parameters of the recurrence in float32, the rest in `dtype`."""
    single = ("A", "A_log", "D", "dt_bias", "norm__weight", "initial_state")
    return {
        n: t.to("cuda", torch.float32 if n in single else dtype).requires_grad_()
        for n, t in tensors.items()
    }


def scan_inputs(dtype, length=300, heads=8, headdim=64, groups=1, d_state=128):
    torch.manual_seed(0)
    return leaves(
        dtype,
        x=torch.randn(2, length, heads, headdim),
        dt=torch.randn(2, length, heads) - 3,
        A=-torch.rand(heads) * 4,
        B=torch.randn(2, length, groups, d_state),
        C=torch.randn(2, length, groups, d_state),
        D=torch.randn(heads),
        dt_bias=torch.randn(heads),
    )


def mixer_inputs(dtype, length=300, groups=1, d_state=128):
    torch.manual_seed(0)
    d_inner = 512
    heads = 8
    d_model = 256
    channels = d_inner + 2 * groups * d_state
    tensors = leaves(
        dtype,
        x=torch.randn(2, length, d_model),
        in_proj__weight=torch.randn(d_inner + channels + heads, d_model) / d_model**0.5,
        conv1d__weight=torch.randn(channels, 1, 4) / 2,
        conv1d__bias=torch.randn(channels),
        dt_bias=torch.randn(heads) - 3,
        A_log=(torch.rand(heads) * 4).log(),
        D=torch.randn(heads),
        norm__weight=torch.randn(d_inner),
        out_proj__weight=torch.randn(d_model, d_inner) / 20,
    )
    config = ModelConfig(
        layers="mamba2", d_model=d_model, d_state=d_state, ngroups=groups, chunk_size=128
    )
    return tensors, dict(config=config)


def mixer(backend, config, x, seq_idx=None, **weights):
    """A Mamba-2 layer: in one call where it is fused."""
    backends = resolve_backends(
        backend, "cuda", operator_uses(config, x.dtype, seq_idx is not None)
    ).backends
    assert ("mamba2" in backends) == (backend == "fused")
    weights = {name.replace("__", "."): value for name, value in weights.items()}
    return torch.func.functional_call(Mamba2(config, backends), weights, (x, seq_idx))


def boundaries(length=300):
    starts = torch.zeros(2, length, dtype=torch.int32, device="cuda")
    starts[0, [40, 41, 128, 250]] = 1
    starts[1, [200]] = 1
    return starts.cumsum(1).int() + 3


def compare(operator, tensors, tolerance, **rest):
    """Outputs and gradients of both backends, as RMS errors relative to the reference backend in float64."""
    exact = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    outs = (
        operator(**tensors, **rest, backend="fused"),
        operator(**exact, **rest, backend="reference"),
    )
    weights = torch.randn(
        outs[0].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    fused, reference = (
        (out, *torch.autograd.grad((out * weights).sum(), list(inputs.values())))
        for out, inputs in zip(outs, (tensors, exact))
    )
    for name, actual, expected in zip(("output", *tensors), fused, reference):
        error = (
            actual.double() - expected
        ).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


# float32 products may run in TF32 inside the kernels, which has ten bits.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 5e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bounded", [False, True])
def test_fused_scan(dtype, tolerance, groups, bounded):
    """The fused scan's outputs and gradients are the reference backend's, boundaries included."""
    seq_idx = boundaries() if bounded else None
    compare(ssd, scan_inputs(dtype, groups=groups), tolerance, chunk_size=128, seq_idx=seq_idx)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 5e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bounded", [False, True])
def test_fused_mixer(dtype, tolerance, groups, bounded):
    """The whole-block backend's outputs and gradients are the reference backend's: layout, norm groups, boundaries."""
    tensors, rest = mixer_inputs(dtype, groups=groups)
    compare(mixer, tensors, tolerance, **rest, seq_idx=boundaries() if bounded else None)


@pytest.mark.parametrize("bounded", [False, True])
def test_attention_on_the_gpu(bounded):
    """Attention in bf16, grouped-query, is the float64 result up to bf16's rounding; documents don't leak."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 300, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    seq_idx = boundaries() if bounded else None
    out = attention(q, k, v, seq_idx=seq_idx)
    exact = attention(q.double(), k.double(), v.double(), seq_idx=seq_idx)
    assert (out - exact).norm() <= 1e-2 * exact.norm()
    if bounded:
        v[0, :250] += 5
        assert torch.equal(attention(q, k, v, seq_idx=seq_idx)[0, 250:], out[0, 250:])
