"""Generation: prompts of several lengths are continued by what the full forward finds likeliest, and drawing obeys its
settings."""

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.inference.decoding import draw, generate
from tests.support.models import FAMILIES, small_model

pytestmark = pytest.mark.torch22


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_is_the_likeliest_continuation(family):
    """Of each prompt in a batch, whatever the others' lengths."""
    model = small_model(family)
    prompts = torch.tensor([[3, 1, 4, 1, 5], [9, 2, -1, -1, -1], [6, 5, 3, 5, -1]])
    steps = torch.stack(list(generate(model, prompts, length=4, temperature=0)), dim=1)
    assert steps.shape == (3, 7)
    for prompt, length, tokens in zip(prompts, (5, 2, 4), steps):
        text = prompt[:length]
        for token in tokens[length - 2 : length + 2]:
            assert token == model(text[None])[0, -1, :50].argmax()
            text = torch.cat([text, token[None]])


def test_drawing_keeps_to_top_k_and_top_p_and_follows_the_probabilities():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)

    def shares(**how):
        drawn = draw(
            logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **how}, generator=generator
        )
        return (drawn.bincount(minlength=4) / len(drawn)).tolist()

    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.02)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.02)
    assert shares(top_p=0.7) == pytest.approx([0.625, 0.375, 0, 0], abs=0.02)
    assert shares(top_k=3, top_p=0.9) == pytest.approx(
        [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0], abs=0.02
    )
    assert shares(top_p=0.01) == shares(top_p=1e-50) == [1, 0, 0, 0]
    assert shares(temperature=0) == shares(temperature=1e-30) == [1, 0, 0, 0]
    assert shares(temperature=0.5)[0] == pytest.approx(
        0.25 / (0.25 + 0.09 + 0.0225 + 0.0025), abs=0.02
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_is_drawn_from_logits_that_are_not_finite(value, temperature):
    """Also where those of the prompt were."""
    logits = torch.randn(2, 99, generator=torch.Generator().manual_seed(0))
    logits[1, 70] = value
    with pytest.raises(UserError, match="not finite"):
        draw(logits, temperature, 0, 1.0, torch.Generator())


def test_padding_of_the_vocabulary_is_never_drawn():
    model = small_model("mamba1")
    with torch.no_grad():
        model.lm_head.weight[50:] = 100 * torch.sign(model.lm_head.weight[:6])
    assert all(
        token.item() < 50
        for token in generate(model, torch.tensor([[1]]), length=50, temperature=2.0)
    )
