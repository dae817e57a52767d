"""Tests mamba_fsdp.ops.attention and rotary positions against their definitions in float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mamba_fsdp.ops.attention import BACKENDS, Documents, attention, reference, rotary
from tests.support.compare import assert_like, evaluate
from tests.support.memory import LargestTensor

pytestmark = pytest.mark.torch22


def plain_attention(q, k, v, seq_idx=None):
    """Computes causal attention with the scores of all heads and positions in one tensor."""
    length = q.shape[1]
    share = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(share, dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    if seq_idx is not None:
        hidden = hidden | (seq_idx[:, None, :, None] != seq_idx[:, None, None, :])
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def inputs(length=9, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    counts = {"q": 4, "k": kv_heads, "v": kv_heads}
    return {
        name: torch.randn(2, length, count, 6, generator=generator, dtype=torch.float64)
        for name, count in counts.items()
    }


# The document number of each position in two rows. The second row begins with the number at the end of the first row,
# although it is another document.
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 2 + [2] * 3, [2] + [3] * 8], dtype=torch.int32)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_equals_the_definition(kv_heads, length):
    """Causal attention and its gradients equal the definition for several ratios of query heads to key heads. If there
    is only one query, it belongs to the last position, and attends to all keys."""
    values = inputs(length=length, kv_heads=kv_heads)
    assert_like(evaluate(attention, values), evaluate(plain_attention, values), 1e-12)
    last = attention(**values | {"q": values["q"][:, -1:]})
    torch.testing.assert_close(last, attention(**values)[:, -1:])
    empty = {name: value.to("meta") for name, value in values.items()}
    assert attention(**empty).shape == values["q"].shape


ARGUMENTS = (
    "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask".split()
)


def flash_kernel(q, k, v, bounds_q, bounds_k, longest_q, longest_k, dropout, causal, debug):
    """Replaces torch's CUDA operator on any device, and checks its arguments. The last query of a document attends to
    all keys of the document."""
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    assert longest_q == bounds_q.diff().max() and longest_k == bounds_k.diff().max()
    assert dropout == 0.0 and causal is True and debug is False
    documents = Documents(bounds_k.diff().tolist(), bounds_q.diff().tolist())
    return BACKENDS["reference"].packed_attention(q, k, v, documents), None, None, None, None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asking", [1, 4, 9])
def test_documents_do_not_attend_to_each_other(backend, asking, monkeypatch):
    """Queries attend only to keys of their own document. Outputs and gradients equal the definition for whole rows,
    and for the last positions of a row, which can lack the queries of a document."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_kernel)
    monkeypatch.setattr(reference, "MASK_ELEMENTS", 12)  # makes a mask for two queries at a time
    documents = Documents.asked_by_last(DOCUMENTS, asking)
    if asking == 9:
        documents = Documents.of(DOCUMENTS)

    def of_the_last(q, k, v):
        return plain_attention(q, k, v, DOCUMENTS)[:, -asking:]

    def ours(q, k, v):
        return attention(q[:, -asking:], k, v, documents=documents, backend=backend)

    values = inputs()
    assert_like(evaluate(ours, values), evaluate(of_the_last, values), 1e-12)


def test_flash_calls_an_operator_that_torch_has_with_gradients():
    """The installed torch has the operator that the flash backend calls, with the arguments in this order and with
    gradients."""
    schema = torch._C._get_schema("aten::_flash_attention_forward", "")
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert names == ARGUMENTS
    assert torch._C._dispatch_has_kernel_for_dispatch_key(schema.name, "Autograd")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("documents", [None, Documents([500] * 65 + [268])], ids=["row", "packed"])
def test_no_tensor_is_larger_than_the_queries(documents, backend):
    """Neither the forward nor the backward pass creates a tensor that is larger than the queries, such as a tensor of
    shape (length, length) or repeated keys."""
    if documents and backend == "flash" and torch.__version__.startswith("2.2."):
        pytest.skip("torch 2.2's operator takes no bounds of tensors without content")
    with FakeTensorMode(), LargestTensor() as largest:
        q, k, v = (
            torch.empty(1, 32768, heads, 64, dtype=torch.bfloat16, requires_grad=True)
            for heads in (8, 2, 2)
        )
        attention(q, k, v, documents=documents, backend=backend).sum().backward()
        assert k.grad.shape == k.shape
    assert largest.bytes == q.nbytes


def test_rotary_positions_rotate_pairs_of_channels():
    """Rotary positions rotate channels i and i + rotary_dim/2 like the two parts of a complex number, and do not
    change the channels after rotary_dim."""
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 0, 7])
    found = rotary(x, positions, 6, 100.0)
    angles = positions[:, None, None] * 100.0 ** (-torch.arange(3) / 3)
    before, after = (torch.complex(t[..., :3], t[..., 3:6]) for t in (x, found))
    torch.testing.assert_close(after, before * torch.exp(1j * angles), atol=1e-6, rtol=1e-6)
    assert torch.equal(found[..., 6:], x[..., 6:])
