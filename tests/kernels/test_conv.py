"""Compares the Triton kernels of the convolution with the reference backend in float64: widths, documents, odd sizes,
bf16."""

from dataclasses import fields
from functools import partial

import pytest
import torch

from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.ops.conv import causal_conv_silu
from mamba_fsdp.ops.conv import triton as backend
from tests.ops.test_sequence_operators import draw
from tests.support.compare import assert_like_reference

WIDTHS = {field.name: field for field in fields(ModelConfig)}["d_conv"].metadata["bounds"].limits
# Documents end before, at and after position 8, where a block of rows ends.
DOCUMENTS = torch.tensor([[0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4, 5, 6], [3] * 8 + [4] * 5])


reference, kernels = (partial(causal_conv_silu, backend=name) for name in ("reference", "triton"))


def leaves(batch=2, length=13, channels=5, width=4, dtype=torch.float32):
    return draw("conv", dtype, b=batch, t=length, c=channels, w=width)


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Makes the blocks so small that a short sequence needs several programs."""
    for table in backend.FORWARD, backend.BACKWARD:
        monkeypatch.setitem(table, (8, 0), {"ROWS": 8, "CHANNELS": 16, "num_warps": 1})


@pytest.mark.parametrize("width", range(WIDTHS["at_least"], WIDTHS["at_most"] + 1))
def test_documents_and_widths(width):
    """Every width of the kernel that ModelConfig allows is right across documents. The widest one is tested with two
    blocks of channels, the others with two rows of a batch."""
    values = leaves(width=width)
    documents = DOCUMENTS
    if width == WIDTHS["at_most"]:
        values = leaves(1, channels=17, width=width)
        documents = DOCUMENTS[:1]
    assert_like_reference(kernels, reference, values, seq_idx=documents)


@pytest.mark.parametrize("batch, length, channels", [(1, 1, 1), (1, 8, 3), (0, 4, 5), (2, 0, 5)])
def test_odd_sizes(batch, length, channels):
    assert_like_reference(kernels, reference, leaves(batch, length=length, channels=channels))


def test_bf16_with_weights_in_fp32():
    values = leaves(1, dtype=torch.bfloat16)
    got = assert_like_reference(kernels, reference, values, seq_idx=DOCUMENTS[:1])
    assert got["output 0"].dtype == torch.bfloat16
    assert got["gradient of weight"].dtype == torch.float32
