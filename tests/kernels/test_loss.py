"""Compares the Triton kernel of the loss with the reference backend: odd vocabularies, weights, ignored labels, bf16,
fp16."""

from functools import partial

import pytest
import torch

from mamba_fsdp.ops.loss import linear_cross_entropy
from mamba_fsdp.ops.loss import triton as backend
from tests.support.compare import assert_like_reference, equal, evaluate

kernels, reference = (
    partial(linear_cross_entropy, backend=name) for name in ("triton", "reference")
)


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Makes the blocks so small that a small vocabulary needs several."""
    monkeypatch.setattr(backend, "BLOCK", 64)


def leaves(vocab, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden": (12, 16), "weight": (vocab, 16)}
    return {n: torch.randn(size, generator=generator).to(dtype) for n, size in sizes.items()}


def labels_of(vocab):
    labels = torch.arange(12) * 7 % vocab
    labels[[1, 5]] = -100
    labels[2] = vocab - 1
    return labels


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("vocab", [5, 64, 130, 200])
def test_value_and_gradients(vocab, weighted):
    """Loss and gradients are right if the tokens are computed in three chunks. Without gradients, the loss is bitwise
    the same."""
    how = {"labels": labels_of(vocab), "chunk": 5}
    if weighted:
        how["token_weights"] = torch.arange(12.0) / 4
    got = assert_like_reference(kernels, reference, leaves(vocab), **how)
    with torch.no_grad():
        assert kernels(**leaves(vocab), **how) == got["output 0"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    """In half precision, the relative errors of the loss and of all gradients are at most twice the dtype's eps, and
    two runs give the same bits."""
    most = {
        "output 0": 2 * torch.finfo(dtype).eps,
        "gradient of weight": 2 * torch.finfo(dtype).eps,
    }
    how = {"labels": labels_of(200)}
    got = assert_like_reference(kernels, reference, leaves(200, dtype), most, **how)
    assert equal(got, evaluate(kernels, leaves(200, dtype), **how))


def test_huge_and_invalid_logits():
    """Huge logits give a finite loss. NaN logits, and labels outside the vocabulary, make the loss NaN, except for
    ignored tokens."""
    given = leaves(130)
    labels = labels_of(130)
    huge = assert_like_reference(
        kernels, reference, given | {"hidden": given["hidden"] * 1e6}, labels=labels
    )
    assert huge["output 0"].isfinite()
    given["hidden"][1] = float("nan")
    assert kernels(**given, labels=labels).isfinite()
    given["hidden"][3] = float("nan")
    assert kernels(**given, labels=labels).isnan()
    given = leaves(130)
    for label in (130, 1 << 40, -1):
        labels[3] = label
        assert kernels(**given, labels=labels).isnan()
