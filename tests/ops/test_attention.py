"""Attention, rotary positions and the step, against their definitions in float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mamba_fsdp.ops.attention import BACKENDS, Documents, attention, rotary
from tests.kernels.compare import assert_like, evaluate
from tests.support.memory import LargestTensor

FLASH = BACKENDS["flash"]

pytestmark = pytest.mark.torch22


def plain_attention(q, k, v, seq_idx=None):
    """Row by row, head by head, from the definition."""
    batch, length, heads, head_dim = q.shape
    out = torch.zeros_like(q)
    for row in range(batch):
        for head in range(heads):
            shared = head * k.shape[2] // heads
            for i in range(length):
                start = (
                    0 if seq_idx is None else int((seq_idx[row] == seq_idx[row, i]).nonzero()[0])
                )
                seen = slice(start, i + 1)
                weights = (k[row, seen, shared] @ q[row, i, head] / head_dim**0.5).softmax(0)
                out[row, i, head] = weights @ v[row, seen, shared]
    return out


def inputs(batch=2, length=9, heads=4, kv_heads=2, head_dim=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    return {
        name: torch.randn(
            (batch, length, count, head_dim), generator=generator, dtype=torch.float64
        ).to(dtype)
        for name, count in counts.items()
    }


DOCUMENTS = torch.tensor(
    [[0, 0, 0, 0, 1, 1, 2, 2, 2], [2, 3, 3, 3, 3, 3, 3, 3, 3]], dtype=torch.int32
)  # the second row begins with the number that ends the first


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("seq_idx", [None, DOCUMENTS], ids=["whole", "seq_idx"])
def test_equals_the_definition(kv_heads, seq_idx):
    """Causal, every ratio of query to key heads, only within a document; gradients too."""
    values = inputs(kv_heads=kv_heads)
    documents = None if seq_idx is None else Documents.of(seq_idx)
    found = evaluate(attention, values, documents=documents)
    assert_like(found, evaluate(plain_attention, values, seq_idx=seq_idx), 1e-12)


def masked_attention(q, k, v, bounds_q, bounds_k, longest_q, longest_k, window_size, enable_gqa):
    """As torch's varlen_attn, on any device, with a mask."""
    assert torch.equal(bounds_q, bounds_k) and bounds_q.dtype == torch.int32
    assert longest_q == longest_k == bounds_q.diff().max() and window_size == (-1, 0) and enable_gqa
    number = torch.bucketize(torch.arange(len(q)), bounds_q, right=True)
    mask = (number[:, None] == number[None]).tril()
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(k), 0) for t in (k, v))
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.skipif(bool(FLASH.why_unavailable()), reason="this PyTorch has no varlen_attn")
def test_flash_is_given_the_documents_bounds(monkeypatch):
    """What it hands to PyTorch's kernel for CUDA gives what the reference does."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", masked_attention)
    tensors = inputs(length=9)
    documents = Documents.of(DOCUMENTS)
    torch.testing.assert_close(
        attention(**tensors, documents=documents, backend="flash"),
        attention(**tensors, documents=documents),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_nothing_is_larger_than_the_queries(is_packed, backend):
    """Forward and backward, on tensors without content: no tensor of (length, length), no repeated keys."""
    if is_packed and BACKENDS[backend] == FLASH and FLASH.why_unavailable():
        pytest.skip("this PyTorch has no varlen_attn")
    length = 32768
    documents = None
    if is_packed:
        documents = Documents([500] * (length // 500) + [length % 500])
    with FakeTensorMode(), LargestTensor() as largest:
        q, k, v = (
            torch.empty(1, length, heads, 64, dtype=torch.bfloat16, requires_grad=True)
            for heads in (8, 2, 2)
        )
        attention(q, k, v, documents=documents, backend=backend).sum().backward()
        assert k.grad.shape == k.shape
    assert largest.bytes == q.nbytes


def test_rotary_turns_pairs():
    """Channels i and i + rotary_dim/2 turn together as a complex number; the channels behind rotary_dim stay."""
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 0, 7])
    turned = rotary(x, positions, 6, 100.0)
    angles = positions[:, None] * 100.0 ** (-torch.arange(3) / 3)
    numbers = (
        torch.complex(x[..., :3], x[..., 3:6]) * torch.polar(torch.ones(5, 3), angles)[:, None]
    )
    torch.testing.assert_close(
        turned[..., :6], torch.cat([numbers.real, numbers.imag], -1), atol=1e-6, rtol=1e-6
    )
    assert torch.equal(turned[..., 6:], x[..., 6:])
    assert torch.equal(turned[:, 0], x[:, 0])
