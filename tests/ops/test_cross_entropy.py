"""The chunked output layer and loss against PyTorch's own, in value, gradients and memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mamba_fsdp.ops.loss import linear_cross_entropy


def inputs(tokens=23, d_model=6, vocab=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, d_model, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, d_model, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("chunk", [1, 4, 23, 100])
def test_equals_cross_entropy(chunk):
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(loss, expected)
    wanted = (hidden, weight)
    for a, e in zip(
        torch.autograd.grad(loss * 0.37, wanted), torch.autograd.grad(expected * 0.37, wanted)
    ):
        torch.testing.assert_close(a, e)


def test_gradcheck():
    hidden, weight, labels = inputs(tokens=7)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, labels, chunk=3), (hidden, weight)
    )
    weights = torch.linspace(0, 2, 7)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, labels, weights, chunk=3), (hidden, weight)
    )


@pytest.mark.parametrize("tokens", [0, 6])
def test_nothing_counted(tokens):
    """No counted token: a loss of 0 and gradients of 0, never NaN."""
    hidden, weight, labels = inputs(tokens=tokens)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


def test_huge_logits_stay_finite():
    hidden, weight, labels = inputs(dtype=torch.float32)
    loss = linear_cross_entropy(hidden * 1e6, weight, labels)
    loss.backward()
    assert loss.isfinite() and hidden.grad.isfinite().all()


def test_backward_twice():
    """A kept graph gives the same gradients again."""
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(
        loss, (hidden, weight), torch.tensor(2.0, dtype=torch.float64), retain_graph=True
    )
    second = torch.autograd.grad(loss, (hidden, weight), torch.tensor(2.0, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_side_frozen(frozen):
    hidden, weight, labels = inputs()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    linear_cross_entropy(hidden, weight, labels).backward()
    assert (hidden.grad is None) == (frozen == "hidden") and (weight.grad is None) == (
        frozen == "weight"
    )


@pytest.mark.torch22
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)],
    ids=str,
)
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_weights_multiply_each_tokens_loss(dtype, tolerance, chunk):
    """Value and gradients are those of float64, of weights from 0 to 3; a label that is ignored stays so."""
    hidden, weight, labels = inputs(tokens=40, d_model=8, dtype=dtype)
    weights = 3 * torch.rand(40, generator=torch.Generator().manual_seed(1))
    weights[::3] = 0
    loss = linear_cross_entropy(hidden, weight, labels, weights, chunk=chunk)
    exact = [value.detach().double().requires_grad_() for value in (hidden, weight)]
    expected = (
        F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="none") * weights.double()
    ).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=0)
    for a, e in zip(
        torch.autograd.grad(loss * 0.37, (hidden, weight)),
        torch.autograd.grad(expected * 0.37, exact),
    ):
        assert (a.double() - e).abs().max() <= tolerance * e.abs().max()


def test_weights_of_one_change_no_bit():
    hidden, weight, labels = inputs(dtype=torch.float32)
    plain, weighted = (
        linear_cross_entropy(hidden, weight, labels, weights) for weights in (None, torch.ones(23))
    )
    first, second = (torch.autograd.grad(loss, (hidden, weight)) for loss in (plain, weighted))
    assert torch.equal(plain, weighted) and all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("label", [11, 1000, -1])
def test_labels_outside_the_vocabulary_are_refused(label):
    hidden, weight, labels = inputs()
    labels[3] = label
    with pytest.raises((RuntimeError, IndexError)):
        linear_cross_entropy(hidden, weight, labels)


def test_bf16_sums_in_float32():
    """The loss of many tokens and the weight's gradient are as exact as the bf16 matrix products that make them."""
    hidden, weight, labels = inputs(tokens=3000, d_model=16, vocab=50, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, chunk=100)
    assert loss.dtype == torch.float32
    exact = [v.detach().double().requires_grad_() for v in (hidden, weight)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum")
    assert (loss.double() - expected).abs() <= 1e-3 * expected
    for a, e in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, exact)
    ):
        assert (a.double() - e).abs().max() <= 0.01 * e.abs().max()


@pytest.mark.torch22
@pytest.mark.parametrize(
    "dtype, factor", [(torch.bfloat16, 1 / 16300), (torch.float16, 1 / 3_000_000)], ids=str
)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
def test_the_factor_before_the_loss_is_not_rounded(dtype, factor, weight_dtype):
    """Half-precision gradients are those of float64 times the factor, whatever of it the dtype could hold.

    Their own rounding errs to both sides; measured is what they are too long or too short by as a whole.
    """
    hidden, weight, labels = inputs(tokens=400, d_model=16, vocab=50, dtype=dtype)
    hidden, weight = (4 * value.detach() for value in (hidden, weight))
    weight = weight.to(weight_dtype or dtype)
    exact = [value.double().requires_grad_() for value in (hidden, weight)]
    expected = torch.autograd.grad(
        F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum") * factor, exact
    )
    ours = [value.requires_grad_() for value in (hidden, weight)]
    actual = torch.autograd.grad(linear_cross_entropy(*ours, labels, chunk=100) * factor, ours)
    for a, e in zip(actual, expected):
        assert abs((a.double() * e).sum() / (e * e).sum() - 1) < 1e-3


def test_fp32_weight_with_bf16_hidden():
    hidden, weight, labels = inputs(dtype=torch.bfloat16)
    weight = weight.detach().float().requires_grad_()
    linear_cross_entropy(hidden, weight, labels).backward()
    assert weight.grad.dtype == torch.float32 and hidden.grad.dtype == torch.bfloat16


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_logits_of_one_chunk_at_a_time():
    hidden, weight, labels = inputs(tokens=512, d_model=4, vocab=300)
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, weight, labels, chunk=16).backward()
    assert largest.elements <= 16 * 300


def test_without_gradients_none_are_made():
    hidden, weight, labels = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels, reduction="sum"))
