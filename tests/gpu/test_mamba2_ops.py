"""On a GPU with mamba-ssm and causal-conv1d: the fused Mamba-2 and attention forms against the portable ones."""

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.ops import kernels
from mamba_fsdp.ops.attention import attention
from mamba_fsdp.ops.ssd import mamba2_inner, ssd


@pytest.fixture(autouse=True, scope="module")
def fused_or_skip():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try:
        kernels.resolve("fused", "cuda")
    except UserError as error:
        pytest.skip(str(error))


def leaves(dtype, **tensors):
    """Leaf tensors on the GPU: parameters of the recurrence in float32, the rest in `dtype`."""
    single = ("A", "D", "dt_bias", "norm_weight", "initial_state")
    return {n: t.to("cuda", torch.float32 if n in single else dtype).requires_grad_() for n, t in tensors.items()}


def scan_inputs(dtype, length=300, heads=8, headdim=64, groups=1, d_state=128):
    torch.manual_seed(0)
    return leaves(dtype, x=torch.randn(2, length, heads, headdim), dt=torch.randn(2, length, heads) - 3,
                  A=-torch.rand(heads) * 4, B=torch.randn(2, length, groups, d_state),
                  C=torch.randn(2, length, groups, d_state), D=torch.randn(heads), dt_bias=torch.randn(heads))


def mixer_inputs(dtype, length=300, groups=1, d_state=128):
    torch.manual_seed(0)
    d_inner, heads, d_model = 512, 8, 256
    channels = d_inner + 2 * groups * d_state
    tensors = leaves(dtype, zxbcdt=torch.randn(2, length, d_inner + channels + heads),
                     conv_weight=torch.randn(channels, 1, 4) / 2, conv_bias=torch.randn(channels),
                     dt_bias=torch.randn(heads) - 3, A=-torch.rand(heads) * 4, D=torch.randn(heads),
                     norm_weight=torch.randn(d_inner), out_proj_weight=torch.randn(d_model, d_inner) / 20)
    return tensors, dict(norm_eps=1e-5, headdim=64, ngroups=groups, d_state=d_state, chunk_size=128)


def boundaries(length=300):
    starts = torch.zeros(2, length, dtype=torch.int32, device="cuda")
    starts[0, [40, 41, 128, 250]] = 1
    starts[1, [200]] = 1
    return starts.cumsum(1).int() + 3


def compare(operator, tensors, tolerance, **rest):
    """Outputs and gradients of both forms, as RMS errors relative to the portable form in float64."""
    exact = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    outs = operator(**tensors, **rest, kernels="fused"), operator(**exact, **rest, kernels="portable")
    weights = torch.randn(outs[0].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    fused, portable = ((out, *torch.autograd.grad((out * weights).sum(), list(inputs.values())))
                       for out, inputs in zip(outs, (tensors, exact)))
    for name, actual, expected in zip(("output", *tensors), fused, portable):
        error = (actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


# float32 products may run in TF32 inside the kernels, which has ten bits.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 5e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bounded", [False, True])
def test_fused_scan(dtype, tolerance, groups, bounded):
    """The fused scan's outputs and gradients are the portable form's, boundaries included."""
    documents = boundaries() if bounded else None
    compare(ssd, scan_inputs(dtype, groups=groups), tolerance, chunk_size=128, documents=documents)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 5e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bounded", [False, True])
def test_fused_mixer(dtype, tolerance, groups, bounded):
    """The whole-block form's outputs and gradients are the portable form's: layout, norm groups, boundaries."""
    tensors, rest = mixer_inputs(dtype, groups=groups)
    compare(mamba2_inner, tensors, tolerance, **rest, documents=boundaries() if bounded else None)


def test_fused_states():
    """An initial state goes into the row's first document, whatever its number; the last state comes out."""
    inputs = {n: t.detach() for n, t in scan_inputs(torch.float32).items()}
    state = torch.randn(2, 8, 64, 128, device="cuda")
    for documents in (None, boundaries()):
        rest = dict(chunk_size=128, documents=documents, initial_state=state, return_last_state=True)
        for fused, portable in zip(ssd(**inputs, **rest, kernels="fused"), ssd(**inputs, **rest)):
            assert (fused - portable).norm() <= 5e-3 * portable.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_mixer_does_not_leak(dtype):
    """A document's outputs and gradients don't see the others."""
    tensors, rest = mixer_inputs(dtype)
    documents = (torch.arange(300, device="cuda") >= 130).int().expand(2, 300)
    out = mamba2_inner(**tensors, **rest, documents=documents, kernels="fused")
    grad, = torch.autograd.grad(out[:, 130:].float().square().sum(), tensors["zxbcdt"])
    assert not grad[:, :130].any() and grad[:, 130:].any()
    with torch.no_grad():
        tensors["zxbcdt"][:, :130] *= -3
    changed = mamba2_inner(**tensors, **rest, documents=documents, kernels="fused")
    assert torch.equal(changed[:, 130:], out[:, 130:])


@pytest.mark.parametrize("bounded", [False, True])
def test_attention_on_the_gpu(bounded):
    """Attention in bf16, grouped-query, is the float64 result up to bf16's rounding; documents don't leak."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 300, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    documents = boundaries() if bounded else None
    out = attention(q, k, v, documents=documents, kernels="fused")
    exact = attention(q.double(), k.double(), v.double(), documents=documents)
    assert (out - exact).norm() <= 1e-2 * exact.norm()
    if bounded:
        v[0, :250] += 5
        assert torch.equal(attention(q, k, v, documents=documents, kernels="fused")[0, 250:], out[0, 250:])
