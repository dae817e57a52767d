"""Tests that, with reset_at_documents, documents do not influence each other in any family of models, neither in the
forward nor in the backward pass."""

import pytest
import torch

from mamba_fsdp.ops import cpp
from tests.support.models import BACKENDS, FAMILIES, small_model, some_tokens

pytestmark = pytest.mark.torch22
# The lengths of three documents in a row of tokens. The second document begins at the start of a chunk of every
# operator, the third one within a chunk.
A = 64
B = 31
C = 17
DOCUMENTS = torch.repeat_interleave(
    torch.arange(3, dtype=torch.int32), torch.tensor([A, B, C])
).expand(2, -1)
MIDDLE = slice(A, A + B)
FORM_NAMES = [
    "reference",
    pytest.param(
        "cpp",
        marks=pytest.mark.skipif(
            bool(cpp.why_unavailable()), reason=f"no C backend: {cpp.why_unavailable()}"
        ),
    ),
]


def middle_logits_and_gradients(model, tokens, seq_idx):
    """Returns the logits of document B, and the gradients of the loss of its tokens with respect to all parameters."""
    labels = torch.full_like(tokens, -100)
    labels[:, A : A + B - 1] = tokens[:, A + 1 : A + B]
    logits = model(tokens, seq_idx=seq_idx)[:, MIDDLE]
    loss = model(tokens, labels=labels, seq_idx=seq_idx)
    return logits, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("backend", FORM_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_documents_change_no_bit_of_logits_and_gradients(family, backend):
    """The logits of document B and the gradients of its loss do not depend on the tokens of documents A and C. The
    logits also equal, up to rounding, the logits of a batch that contains only document B."""
    model = small_model(family, reset_at_documents=True, backends=BACKENDS[backend])
    tokens = some_tokens(2, A + B + C)
    changed = some_tokens(2, A + B + C, seed=1)
    changed[:, MIDDLE] = tokens[:, MIDDLE]
    logits, gradients = middle_logits_and_gradients(model, tokens, DOCUMENTS)
    same_logits, same_gradients = middle_logits_and_gradients(model, changed, DOCUMENTS)
    assert torch.equal(logits, same_logits)
    torch.testing.assert_close(logits, model(tokens[:, MIDDLE]), rtol=1e-4, atol=1e-4)
    for (name, _), gradient, same in zip(model.named_parameters(), gradients, same_gradients):
        # The gradient of the embedding sums over all positions, and other tokens change the order of this sum.
        if name == "backbone.embedding.weight":
            torch.testing.assert_close(gradient, same, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(gradient, same), name


def test_a_model_without_the_setting_does_not_accept_seq_idx():
    """A model that was built without reset_at_documents raises an AssertionError if it gets seq_idx. Otherwise it would
    silently train across the boundaries of documents."""
    with pytest.raises(AssertionError, match="not built"):
        small_model("mamba1")(some_tokens(2, A + B + C), seq_idx=DOCUMENTS)
