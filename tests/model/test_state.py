"""Tests the states that a model returns: a sequence that is read in windows, each with the states of the previous one,
has the results of a single long window."""

import pytest
import torch

from tests.support.models import FAMILIES, small_model, some_tokens

pytestmark = pytest.mark.torch22
LENGTH = 41
# {name: lengths of windows}. They cover single tokens, as in generation, windows that are shorter than the convolution,
# and windows of unequal length.
WINDOWS = {
    "tokens": [1] * LENGTH,
    "prompt": [33] + [1] * 8,
    "short": [1, 2, 2, 36],
    "long": [20, 21],
}


def read_windows(model, tokens, lengths, **options):
    """Calls the model on each window. Returns (the result of each window, the states after the last window)."""
    results = []
    states = []
    for window in tokens.split(lengths, dim=1):
        result, states = model(window, states, **options)
        results.append(result)
    return results, states


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", WINDOWS.values(), ids=WINDOWS)
@torch.no_grad()
def test_windows_equal_one_long_window(family, lengths):
    model = small_model(family, compute_dtype=torch.float64).double()
    tokens = some_tokens(2, LENGTH)
    logits, _ = read_windows(model, tokens, lengths)
    # The tolerance is not 1e-12, because rotary angles are fp32 in every precision.
    torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_flow_through_the_states(family):
    """The gradients of the summed losses of two windows equal the gradients of the loss of one long window."""
    model = small_model(family, compute_dtype=torch.float64).double()
    tokens = some_tokens(2, LENGTH)
    labels = some_tokens(2, LENGTH)
    model(tokens, labels=labels).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    first, states = model(tokens[:, :23], [], labels=labels[:, :23])
    second, _ = model(tokens[:, 23:], states, labels=labels[:, 23:])
    (first + second).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_states_that_were_given_are_not_changed():
    """A call does not change the states that it is given. Several continuations of one text can therefore start from
    the same states."""
    model = small_model("hybrid")
    tokens = some_tokens(1, 12)
    _, states = model(tokens[:, :6], [])
    first, _ = model(tokens[:, 6:], states)
    again, _ = model(tokens[:, 6:], states)
    assert torch.equal(first, again)
