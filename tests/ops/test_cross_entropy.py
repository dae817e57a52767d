"""Tests linear_cross_entropy, the chunked output layer and loss, against PyTorch: its value, its gradients and its
memory."""

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.ops.loss import linear_cross_entropy
from tests.support.compare import assert_like, double, evaluate
from tests.support.memory import LargestTensor


def inputs(tokens=23, d_model=6, vocab=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, d_model, generator=generator, dtype=torch.float64).to(dtype)
        for rows in (tokens, vocab)
    )
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("tokens", [0, 6])
def test_without_counted_tokens_loss_and_gradients_are_0(tokens):
    """If all labels are ignored, the loss and all gradients are 0, not NaN."""
    hidden, weight, labels = inputs(tokens=tokens)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


def test_huge_logits_stay_finite():
    hidden, weight, labels = inputs(dtype=torch.float32)
    loss = linear_cross_entropy(hidden * 1e6, weight, labels)
    loss.backward()
    assert loss.isfinite() and hidden.grad.isfinite().all()


def definition(hidden, weight, labels, token_weights=1):
    losses = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    return (losses * token_weights).sum()


@pytest.mark.torch22
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)],
    ids=str,
)
@pytest.mark.parametrize("chunk", [7, 40, 100])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_cross_entropy(dtype, tolerance, chunk, weighted):
    """Loss and gradients equal PyTorch's cross_entropy in float64, also with token weights between 0 and 3 and with
    ignored labels. The loss does not depend on whether gradients are computed."""
    hidden, weight, labels = inputs(tokens=40, d_model=8, dtype=dtype)
    leaves = {"hidden": hidden, "weight": weight}
    how = {"labels": labels}
    if weighted:
        how["token_weights"] = 3 * torch.rand(40, generator=torch.Generator().manual_seed(1))
        how["token_weights"][::3] = 0
    found = evaluate(linear_cross_entropy, leaves, chunk=chunk, **how)
    assert_like(found, evaluate(definition, double(leaves), **how), tolerance)
    with torch.no_grad():
        assert linear_cross_entropy(**leaves, chunk=chunk, **how) == found["output 0"]


@pytest.mark.parametrize("label", [11, 1000, -1])
def test_labels_outside_the_vocabulary_are_refused(label):
    hidden, weight, labels = inputs()
    labels[3] = label
    with pytest.raises((RuntimeError, IndexError)):
        linear_cross_entropy(hidden, weight, labels)


@pytest.mark.torch22
@pytest.mark.parametrize(
    "dtype, of_weight, factor",
    [
        (torch.bfloat16, torch.bfloat16, 1 / 16300),
        (torch.float16, torch.float32, 1 / 3_000_000),
    ],
    ids=str,
)
def test_the_factor_before_the_loss_is_not_rounded(dtype, of_weight, factor):
    """If the loss is multiplied by a factor, half-precision gradients equal those in float64, even if their dtype
    can't represent the factor exactly.

    Rounding errors of single elements have both signs. The test therefore measures the error of the length of the
    gradient.
    """
    hidden, weight, labels = inputs(tokens=400, d_model=16, vocab=50, dtype=dtype)
    leaves = {"hidden": 4 * hidden, "weight": (4 * weight).to(of_weight)}

    def scaled(function):
        return lambda **given: function(labels=labels, **given) * factor

    found = evaluate(scaled(linear_cross_entropy), leaves)
    exact = evaluate(scaled(definition), double(leaves))
    for name in ("gradient of hidden", "gradient of weight"):
        projection = (found[name].double() * exact[name]).sum() / exact[name].square().sum()
        assert abs(projection - 1) < 1e-3


@pytest.mark.parametrize("asked, chunk", [(100, 100), (None, 1024)])
def test_only_the_logits_of_one_chunk_exist_at_a_time(asked, chunk):
    hidden, weight, labels = inputs(tokens=1500, d_model=2, vocab=300)
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, weight, labels, chunk=asked).backward()
    assert largest.bytes == chunk * 300 * 8
