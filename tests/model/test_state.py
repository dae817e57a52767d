"""Generation with a state: reading a prompt at once and then single tokens gives the logits of a full forward pass."""

import pytest
import torch

from tests.support.models import FAMILIES, small_model, some_tokens

pytestmark = pytest.mark.torch22


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [0, 1, 2, 33])
@torch.no_grad()
def test_prompt_and_steps_equal_the_full_forward(family, prompt):
    """The cases are: no prompt, prompts that are shorter than the convolution, and a longer prompt."""
    model = small_model(family, compute_dtype=torch.float64).double()
    tokens = some_tokens(2, 41)
    state = model.allocate_state(2, 41)
    logits = [model.prefill(tokens[:, :prompt], state)] if prompt else []
    logits += [model.step(tokens[:, position], state) for position in range(prompt, 41)]
    expected = model(tokens)[:, prompt - 1 if prompt else 0 :]
    # The tolerance is not 1e-12, because rotary angles are fp32 in every precision.
    torch.testing.assert_close(torch.stack(logits, dim=1), expected, rtol=1e-6, atol=1e-9)


def test_more_tokens_than_the_cache_has_room_for_are_an_error():
    model = small_model("llama")
    state = model.allocate_state(1, 3)
    model.prefill(torch.tensor([[1, 2, 3]]), state)
    with pytest.raises(AssertionError, match="3 positions"):
        model.step(torch.tensor([4]), state)
