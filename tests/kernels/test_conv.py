"""The convolution's kernels beside the reference backend in float64: widths, documents, odd sizes, slices, bf16."""

from dataclasses import fields
from functools import partial

import pytest
import torch
from compare import assert_like_reference, evaluate

from mamba_fsdp.ops.conv import causal_conv_silu
from mamba_fsdp.ops.conv import triton as backend
from mamba_fsdp.settings.model_config import ModelConfig
from tests.support.definitions import assert_no_leak

WIDTHS = {field.name: field for field in fields(ModelConfig)}["d_conv"].metadata["bounds"].limits
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


@pytest.mark.parametrize("width", range(WIDTHS["at_least"], WIDTHS["at_most"] + 1))
def test_documents_and_widths(width):
    assert_like_reference(kernels, reference, leaves(width=width), seq_idx=DOCUMENTS)


@pytest.mark.parametrize("batch, length, channels", [(1, 1, 1), (1, 8, 3), (1, 9, 17)])
def test_odd_sizes(batch, length, channels):
    assert_like_reference(kernels, reference, leaves(batch, length, channels))


@pytest.mark.parametrize("batch, length", [(0, 4), (2, 0)])
def test_empty(batch, length):
    got = evaluate(kernels, leaves(batch, length))
    assert got["output 0"].shape == (batch, length, 5) and not got["gradient of weight"].any()


def test_bf16_with_weights_in_fp32():
    values = leaves(dtype=torch.bfloat16)
    values["weight"] = values["weight"].float()
    got = assert_like_reference(kernels, reference, values, seq_idx=DOCUMENTS)
    assert got["output 0"].dtype == torch.bfloat16
    assert got["gradient of weight"].dtype == torch.float32


def test_no_leak_between_documents():
    seq_idx = (torch.arange(13) >= 6).int().expand(2, 13)
    assert_no_leak(partial(kernels, seq_idx=seq_idx), leaves(), 6, names=["x"])
