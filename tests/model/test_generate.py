"""Generation: a prompt at once and one token at a time are the full forward, and drawing obeys its settings."""

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.inference.decoding import draw, generate
from tests.support.models import FAMILIES, small_model, some_tokens

pytestmark = pytest.mark.torch22


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [0, 1, 2, 33])
@torch.no_grad()
def test_prompt_and_steps_equal_the_full_forward(family, prompt):
    """Whether a prompt is shorter than the convolution's width or not, and without one."""
    model = small_model(family, compute_dtype=torch.float64).double()
    tokens = some_tokens(2, 41)
    state = model.allocate_state(2, 41)
    logits = [model.prefill(tokens[:, :prompt], state)] if prompt else []
    logits += [model.step(tokens[:, position], state) for position in range(prompt, 41)]
    expected = model(tokens)[:, prompt - 1 if prompt else 0 :]
    # Rotary angles are fp32 in every precision, hence not 1e-12.
    torch.testing.assert_close(torch.stack(logits, dim=1), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_is_the_likeliest_continuation(family):
    model = small_model(family)
    row = prompt = torch.tensor([[3, 1, 4]])
    for token in generate(model, prompt, length=8, temperature=0):
        assert token.item() == model(row)[0, -1, :50].argmax().item()
        row = torch.cat([row, token[:, None]], dim=1)
    assert row.shape == (1, 11)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_several_lengths_share_a_batch(family):
    model = small_model(family)
    prompts = torch.tensor([[3, 1, 4, 1, 5], [9, 2, -1, -1, -1], [6, 5, 3, 5, -1]])
    steps = torch.stack(list(generate(model, prompts, length=4, temperature=0)), dim=1)
    assert steps.shape == (3, 7)
    for row, length in enumerate((5, 2, 4)):
        alone = generate(model, prompts[row : row + 1, :length], length=4, temperature=0)
        assert steps[row, length - 2 :][:4].tolist() == [int(token) for token in alone]


def test_a_full_cache_is_refused_and_never_overwritten():
    model = small_model("llama")
    state = model.allocate_state(1, 3)
    model.prefill(torch.tensor([[1, 2, 3]]), state)
    with pytest.raises(AssertionError, match="3 positions"):
        model.step(torch.tensor([4]), state)


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
