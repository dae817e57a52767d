"""The causal convolution with SiLU, both CPU backends, against conv1d in float64, and at documents' edges. Documents that change: tests/model/test_documents.py."""

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.ops.conv import causal_conv_silu
from tests.support.compare import assert_like, double, evaluate


def inputs(batch=2, length=70, channels=5, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = dict(x=(batch, length, channels), weight=(channels, 1, width), bias=(channels,))
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def definition(x, weight, bias):
    out = F.conv1d(x.transpose(1, 2), weight, bias, padding=weight.shape[2] - 1, groups=x.shape[2])
    return F.silu(out[..., : x.shape[1]]).transpose(1, 2)


@pytest.mark.parametrize("width", [1, 2, 4, 9])
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130])
def test_equals_conv1d(backend, length, width):
    values = inputs(length=length, width=width)
    found = evaluate(causal_conv_silu, values, backend=backend)
    assert_like(found, evaluate(definition, values), 1e-12)


def test_bf16_is_as_exact_as_its_storage(backend):
    """With weights in fp32, whose gradients are in it."""
    values = inputs(dtype=torch.float32)
    values["x"] = values["x"].bfloat16()
    found = evaluate(causal_conv_silu, values, backend=backend)
    assert found["output 0"].dtype == found["gradient of x"].dtype == torch.bfloat16
    assert_like(found, evaluate(definition, double(values)), 2.0**-7)


@pytest.mark.parametrize(
    "cuts", [[], [1], [1, 2], [30], [62, 64, 66], [10, 69], list(range(1, 70))]
)
def test_documents_equal_separate_rows(backend, cuts):
    """Forward and gradients: a document's convolution is that of a row of its own."""
    values = inputs(batch=1)
    seq_idx = torch.zeros(1, 70, dtype=torch.int32)
    for cut in cuts:
        seq_idx[:, cut:] += 1
    lengths = torch.bincount(seq_idx[0]).tolist()

    def in_pieces(x, **others):
        return torch.cat([definition(piece, **others) for piece in x.split(lengths, 1)], 1)

    found = evaluate(causal_conv_silu, values, seq_idx=seq_idx, backend=backend)
    assert_like(found, evaluate(in_pieces, values), 1e-12)


@pytest.mark.parametrize("batch, length", [(0, 4), (2, 0)])
def test_empty(backend, batch, length):
    found = evaluate(causal_conv_silu, inputs(batch, length), backend=backend)
    assert found["output 0"].shape == (batch, length, 5)
    assert not found["gradient of weight"].any()
