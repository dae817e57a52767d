"""The convolution's kernels beside the reference backend in float64: widths, documents, odd sizes, slices, every dtype."""

from dataclasses import fields

import pytest
import torch
from compare import assert_like, assert_like_reference, assert_same_bits, double, evaluate
from torch._subclasses.fake_tensor import FakeTensorMode

from config.model_config import ModelConfig
from mamba_fsdp.ops.conv import causal_conv_silu
from mamba_fsdp.ops.conv import triton as backend

WIDTHS = {field.name: field for field in fields(ModelConfig)}["d_conv"].metadata["bounds"]
DOCUMENTS = torch.tensor(
    [[0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4, 5, 6], [3] * 8 + [4] * 5]
)  # ends before, at, after 8


def reference(x, weight, bias, seq_idx=None):
    return causal_conv_silu(x, weight, bias, seq_idx=seq_idx)


def kernels(x, weight, bias, seq_idx=None):
    return causal_conv_silu(x, weight, bias, seq_idx=seq_idx, backend="triton")


def leaves(batch=2, length=13, channels=5, width=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return dict(
        x=randn(batch, length, channels), weight=randn(channels, 1, width), bias=randn(channels)
    )


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Sizes that a few rows fill, so that programs meet in a sequence."""

    def set_blocks(rows=8, channels=16):
        for table in backend.FORWARD, backend.BACKWARD:
            monkeypatch.setitem(table, (8, 0), {"ROWS": rows, "CHANNELS": channels, "num_warps": 1})

    set_blocks()
    return set_blocks


@pytest.mark.slow
@pytest.mark.parametrize("width", range(WIDTHS.at_least, WIDTHS.at_most + 1))
def test_documents_and_widths(width):
    for seq_idx in None, DOCUMENTS:
        assert_like_reference(kernels, reference, leaves(width=width), seq_idx=seq_idx)


@pytest.mark.parametrize("width", [WIDTHS.at_least - 1, WIDTHS.at_most + 1])
def test_other_widths_are_refused(width):
    with pytest.raises(AssertionError):
        kernels(**leaves(width=width))


@pytest.mark.parametrize(
    "batch, length, channels", [(1, 1, 1), (1, 2, 5), (1, 8, 3), (1, 9, 16), (1, 3, 17)]
)
def test_odd_sizes(batch, length, channels):
    assert_like_reference(kernels, reference, leaves(batch, length, channels))


@pytest.mark.parametrize("batch, length", [(0, 4), (2, 0)])
def test_empty(batch, length):
    got = evaluate(kernels, leaves(batch, length))
    assert got["output 0"].shape == (batch, length, 5) and not got["gradient of weight"].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Weights in half precision and in fp32."""
    values = leaves(dtype=dtype)
    assert_like_reference(kernels, reference, values, seq_idx=DOCUMENTS)
    got = evaluate(kernels, values | {"weight": values["weight"].float()})
    assert got["output 0"].dtype == dtype and got["gradient of weight"].dtype == torch.float32


@pytest.mark.slow
def test_slices_and_spread_gradients():
    """A slice of a projection's rows, spread document indices, gradients with strides of 0 and with a spread last
    dimension."""
    values = leaves()
    x = values.pop("x")
    wide = torch.cat([torch.full_like(x, 1e9), x, torch.full_like(x, 1e9)], dim=-1)
    seq_idx = DOCUMENTS.repeat_interleave(3, dim=1)[:, ::3]
    first, second = (
        lambda wide, f=f, **rest: f(wide[..., 5:10], **rest) for f in (kernels, reference)
    )
    assert_like_reference(first, second, dict(wide=wide, **values), seq_idx=seq_idx)
    for spread in (
        lambda y: y.sum(),
        lambda y: y.transpose(1, 2).contiguous().transpose(1, 2).square().sum(),
    ):
        results = []
        for function, inputs in (
            (kernels, dict(x=x, **values)),
            (reference, double(dict(x=x, **values))),
        ):
            inputs = {name: value.detach().requires_grad_() for name, value in inputs.items()}
            results.append(
                dict(
                    zip(
                        inputs,
                        torch.autograd.grad(spread(function(**inputs)), list(inputs.values())),
                    )
                )
            )
        assert_like(*results)


def test_gradient_into_a_view():
    """As a whole mixer asks for it: beside the gradient of the gate, nothing else touched."""
    values = leaves()
    grad = torch.ones(2, 13, 5)
    both = torch.full((2, 13, 10), 7.0)
    written, *_ = backend.conv_backward(grad, *values.values(), None, grad_x=both[..., :5])
    expected, *_ = backend.conv_backward(grad, *values.values(), None)
    assert (
        torch.equal(both[..., :5], expected)
        and written.data_ptr() == both.data_ptr()
        and (both[..., 5:] == 7).all()
    )


@pytest.mark.slow
def test_the_grid_leaves_no_trace(blocks):
    first = evaluate(kernels, leaves(channels=17))
    assert_same_bits(first, evaluate(kernels, leaves(channels=17)))
    blocks(channels=32)
    assert_same_bits(first, evaluate(kernels, leaves(channels=17)))


def test_one_document_never_changes_another():
    seq_idx = (torch.arange(13)[None] >= 6).int()
    results = []
    for noise in 0.0, 1e6:
        values = leaves(batch=1)
        values["x"][:, :6] += noise
        results.append(
            evaluate(lambda **v: kernels(**v, seq_idx=seq_idx)[:, 6:], values)["output 0"]
        )
    assert torch.equal(*results)


def test_compiled_without_a_break():
    torch._dynamo.reset()
    compiled = torch.compile(kernels, fullgraph=True, backend="aot_eager")
    values = leaves(batch=1, length=3)
    assert_same_bits(evaluate(kernels, values), evaluate(compiled, values))


def test_without_content():
    """Fake tensors have the shapes, dtypes and strides of real ones."""
    values = leaves(length=3, dtype=torch.bfloat16)
    real = evaluate(kernels, values)
    with FakeTensorMode():
        values = {
            name: torch.empty(v.shape, dtype=v.dtype).requires_grad_() for name, v in values.items()
        }
        out = kernels(**values)
        fake = [out, *torch.autograd.grad(out.float().sum(), list(values.values()))]
    for tensor, expected in zip(fake, real.values()):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
