"""Attention, rotary positions and the step, against their definitions in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from mamba_fsdp.ops.attention import BACKENDS, Documents, attention, rotary
from mamba_fsdp.ops.backends import Use
from tests.support.compare import assert_like, evaluate
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


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_one_query_sees_all_keys_and_shapes_need_no_content(kv_heads):
    values = inputs(kv_heads=kv_heads)
    whole = attention(**values)
    last = attention(**values | {"q": values["q"][:, -1:]})
    torch.testing.assert_close(last, whole[:, -1:])
    empty = {name: value.to("meta") for name, value in values.items()}
    assert attention(**empty).shape == whole.shape


ARGUMENTS = (
    "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask".split()
)


def masked_attention(q, k, v, bounds_q, bounds_k, longest_q, longest_k, dropout, causal, debug):
    """As torch's operator for CUDA, on any device, with a mask: a document's last query sees its last key."""
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    assert longest_q == bounds_q.diff().max() and longest_k == bounds_k.diff().max()
    assert dropout == 0.0 and causal is True and debug is False
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    outs = []
    for number in range(len(bounds_q) - 1):
        of_q, of_k = (
            slice(*bounds[number : number + 2].tolist()) for bounds in (bounds_q, bounds_k)
        )
        by_head = [t.transpose(0, 1) for t in (q[of_q], k[of_k], v[of_k])]
        of_q, of_k, _ = (t.shape[1] for t in by_head)
        mask = torch.ones(of_q, of_k, dtype=torch.bool).tril(of_k - of_q)
        out = F.scaled_dot_product_attention(*by_head, attn_mask=mask)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs), None, None, None, None


def test_flash_is_given_the_documents_bounds(monkeypatch):
    """What it hands to PyTorch's kernel for CUDA gives what the reference does, of whole rows and of their last
    positions."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", masked_attention)
    tensors = inputs(length=9)
    documents = Documents.of(DOCUMENTS)
    for asking in (9, 4):
        if asking < 9:
            documents = Documents.asked_by_last(DOCUMENTS, asking)
            tensors["q"] = tensors["q"][:, -asking:]
        torch.testing.assert_close(
            attention(**tensors, documents=documents, backend="flash"),
            attention(**tensors, documents=documents),
        )


def test_flash_calls_an_operator_that_torch_has_with_gradients():
    """Of either stack, with arguments in this order."""
    schema = torch._C._get_schema("aten::_flash_attention_forward", "")
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert names == ARGUMENTS
    assert torch._C._dispatch_has_kernel_for_dispatch_key(schema.name, "Autograd")


def test_flash_repeats_itself_where_it_is_told_to(monkeypatch):
    use = Use("attention", torch.bfloat16, True, channels=64, deterministic=True)
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu130")
    assert FLASH.why_not(use) is None
    monkeypatch.setattr(torch, "__version__", "2.2.2+cu121")
    assert "adds with atomics" in FLASH.why_not(use)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_nothing_is_larger_than_the_queries(is_packed, backend):
    """Forward and backward, on tensors without content: no tensor of (length, length), no repeated keys."""
    if is_packed and backend == "flash" and torch.__version__.startswith("2.2."):
        pytest.skip("torch 2.2's operator takes no bounds of tensors without content")
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
