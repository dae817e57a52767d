"""The causal convolution with SiLU, both CPU backends, against conv1d in float64, and at documents' edges."""

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.ops.conv import causal_conv_silu


def inputs(batch=2, length=70, channels=5, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return [
        v.requires_grad_()
        for v in (randn(batch, length, channels), randn(channels, 1, width), randn(channels))
    ]


def definition(x, weight, bias):
    out = F.conv1d(x.transpose(1, 2), weight, bias, padding=weight.shape[2] - 1, groups=x.shape[2])
    return F.silu(out[..., : x.shape[1]]).transpose(1, 2)


def check(actual, expected, values, tolerance):
    pairs = [
        (actual, expected),
        *zip(
            torch.autograd.grad(actual.square().sum(), values),
            torch.autograd.grad(expected.square().sum(), values),
        ),
    ]
    for a, e in pairs:
        assert (a - e).abs().max() <= tolerance * e.abs().max()


@pytest.mark.parametrize("width", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 67, 130])
def test_equals_conv1d(backend, length, width):
    values = inputs(length=length, width=width)
    check(causal_conv_silu(*values, backend=backend), definition(*values), values, 1e-12)


@pytest.mark.parametrize(
    "cuts", [[], [1], [1, 2], [30], [62, 64, 66], [10, 69], list(range(1, 70))]
)
def test_documents_equal_separate_rows(backend, cuts):
    """Forward and gradients: a document's convolution is that of a row of its own."""
    values = inputs(batch=1)
    seq_idx = torch.zeros(1, 70, dtype=torch.int32)
    for cut in cuts:
        seq_idx[:, cut:] += 1
    pieces = [
        definition(piece, *values[1:])
        for piece in values[0].split(torch.bincount(seq_idx[0]).tolist(), dim=1)
    ]
    check(
        causal_conv_silu(*values, seq_idx=seq_idx, backend=backend),
        torch.cat(pieces, dim=1),
        values,
        1e-12,
    )


def test_one_document_never_changes_another(backend):
    seq_idx = (torch.arange(50)[None] >= 20).int()

    def second(noise):
        x, weight, bias = (v.detach().float() for v in inputs(batch=1, length=50))
        x[:, :20] += noise
        x.requires_grad_()
        out = causal_conv_silu(x, weight, bias, seq_idx=seq_idx, backend=backend)
        (grad,) = torch.autograd.grad(out[:, 20:].sum(), x)
        assert not grad[:, :20].any()
        return out[:, 20:], grad[:, 20:]

    for before, after in zip(second(0.0), second(1e6)):
        assert torch.equal(before, after)


@pytest.mark.parametrize("batch, length", [(0, 4), (2, 0)])
def test_empty(backend, batch, length):
    values = inputs(batch=batch, length=length)
    out = causal_conv_silu(*values, backend=backend)
    out.sum().backward()
    assert out.shape == (batch, length, 5) and not values[1].grad.any()
