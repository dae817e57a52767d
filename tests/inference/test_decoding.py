"""Tests mamba_fsdp.inference.decoding: the most likely continuation, and random draws with temperature, top_k and
top_p."""

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.inference.decoding import draw, generate
from tests.support.models import small_model

pytestmark = pytest.mark.torch22


def test_prompts_of_several_lengths_share_a_batch_and_continue_with_the_most_likely_tokens():
    model = small_model("everything")
    prompts = torch.tensor([[3, 1, 4, 1, 5], [9, 2, -1, -1, -1], [6, 0, 3, 5, -1]])
    steps = torch.stack(list(generate(model, prompts, length=4, temperature=0)), dim=1)
    assert steps.shape == (3, 7)
    for row, length in enumerate((5, 2, 4)):
        text = prompts[row, :length]
        for token in steps[row, length - 2 :][:4]:
            assert token == model(text[None])[0, -1, :50].argmax()
            text = torch.cat([text, token[None]])


LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(20_000, 1)
SHARES = [  # arguments of `draw`, and the expected frequency of each token
    ({}, [0.5, 0.3, 0.15, 0.05]),
    ({"top_k": 2}, [0.625, 0.375, 0, 0]),
    ({"top_p": 0.7}, [0.625, 0.375, 0, 0]),
    ({"top_k": 3, "top_p": 0.9}, [0.526, 0.316, 0.158, 0]),
    ({"top_p": 1e-50}, [1, 0, 0, 0]),
    ({"temperature": 0}, [1, 0, 0, 0]),
    ({"temperature": 1e-30}, [1, 0, 0, 0]),
    ({"temperature": 0.5}, [0.685, 0.247, 0.062, 0.007]),
]


@pytest.mark.parametrize("how, shares", SHARES)
def test_draw_respects_top_k_and_top_p_and_follows_the_probabilities(how, shares):
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **how}
    drawn = draw(LOGITS, **settings, generator=torch.Generator().manual_seed(0))
    found = drawn.bincount(minlength=4) / len(drawn)
    assert found.tolist() == pytest.approx(shares, abs=0.02)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_an_error(value):
    logits = torch.zeros(2, 99)
    logits[1, 70] = value
    for temperature in (0, 1):
        with pytest.raises(UserError, match="not finite"):
            draw(logits, temperature, 0, 1.0, torch.Generator())


def test_padding_tokens_of_the_vocabulary_are_never_drawn():
    model = small_model("mamba1")
    with torch.no_grad():
        model.lm_head.weight[50:] = 100 * torch.sign(model.lm_head.weight[:6])
    tokens = {int(token) for token in generate(model, torch.tensor([[1]]), length=50)}
    assert len(tokens) > 1 and max(tokens) < 50
