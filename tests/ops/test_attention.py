"""Attention, rotary positions and the step, against their definitions in float64."""

import pytest
import torch

from mamba_fsdp.ops.attention import attention, rotary

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
    shapes = ((batch, length, count, head_dim) for count in (heads, kv_heads, kv_heads))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


DOCUMENTS = torch.tensor(
    [[0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.int32
)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("seq_idx", [None, DOCUMENTS], ids=["whole", "seq_idx"])
def test_equals_the_definition(kv_heads, seq_idx):
    """Causal, every ratio of query to key heads, only within a document; gradients too."""
    q, k, v = inputs(kv_heads=kv_heads)
    actual = attention(q, k, v, seq_idx=seq_idx)
    expected = plain_attention(q, k, v, seq_idx)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad((actual * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
    ):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("seq_idx", [None, DOCUMENTS[:1, :5]], ids=["whole", "seq_idx"])
def test_gradcheck(seq_idx):
    """Gradients are those of finite differences."""
    tensors = inputs(batch=1, length=5, head_dim=2)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, seq_idx=seq_idx), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_leak_between_documents(dtype):
    """Whatever one document holds, the other's outputs and gradients stay bitwise the same, both ways."""

    def run(changed):
        tensors = inputs(length=150, head_dim=16, dtype=dtype)
        weights = torch.randn(2, 150, 4, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        with torch.no_grad():
            for tensor in (*tensors, weights):
                tensor[:, changed] = 3 * tensor[:, changed].flip(1) + 1
        out = attention(*tensors, seq_idx=(torch.arange(150) >= 70).int().expand(2, 150))
        return out, *torch.autograd.grad((out * weights).sum(), tensors)

    first = slice(0, 70)
    second = slice(70, 150)
    unchanged = run(slice(0, 0))
    for changed, kept in ((first, second), (second, first)):
        for a, b in zip(unchanged, run(changed)):
            assert torch.equal(a[:, kept], b[:, kept]) and not torch.equal(
                a[:, changed], b[:, changed]
            )


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
