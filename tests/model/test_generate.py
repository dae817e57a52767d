"""Generation: one token at a time is the full forward, and drawing obeys its settings."""

import pytest
import torch

from config.model_config import ModelConfig
from mamba_fsdp.model.generate import draw, generate
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.lm import MambaLM

FAMILIES = {
    "mamba1": dict(layers="mamba1"),
    "mamba2": dict(layers="mamba2", headdim=16, ngroups=2),
    "hybrid": dict(layers="mamba2+mlp,attention+mlp", headdim=16, n_head=4, n_kv_head=2, rotary_dim=4, d_intermediate=48),
    "llama": dict(layers="attention+mlp", n_head=4, n_kv_head=1, d_intermediate=48, tie_embeddings=False),
}


def small_model(family, **more):
    config = ModelConfig(d_model=32, n_layer=3, vocab_size=50, **FAMILIES[family])
    model = MambaLM(config, **more)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), config, seed=1) * (3 if "embedding" in name else 1))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_at_a_time_equals_the_full_forward(family):
    model = small_model(family)
    tokens = torch.randint(0, 50, (2, 70), generator=torch.Generator().manual_seed(0))
    state = model.allocate_state(2, 70)
    steps = torch.stack([model.step(tokens[:, position], state) for position in range(70)], dim=1)
    torch.testing.assert_close(steps, model(tokens), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_is_the_likeliest_continuation(family):
    model = small_model(family)
    prompt = torch.tensor([[3, 1, 4]])
    row = prompt
    for token in generate(model, prompt, length=8, temperature=0):
        assert token.item() == model(row)[0, -1, :50].argmax().item()
        row = torch.cat([row, token[:, None]], dim=1)
    assert row.shape == (1, 11)


@pytest.mark.parametrize("family", ["mamba1", "mamba2"])
def test_an_ssm_state_does_not_grow(family):
    model = small_model(family)

    def size(length):
        return sum(tensor.numel() for layer in model.allocate_state(1, length)["layers"] for tensor in layer.values())
    assert size(10) == size(10_000)


def test_equal_seeds_give_equal_texts():
    model = small_model("mamba1")

    def text(seed):
        return torch.stack(list(generate(model, torch.tensor([[7]]), length=20, generator=torch.Generator().manual_seed(seed)))).flatten().tolist()
    assert text(1) == text(1) != text(2)


def test_drawing_keeps_to_top_k_and_top_p_and_follows_the_probabilities():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)

    def shares(**how):
        drawn = draw(logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **how}, generator=generator)
        return (drawn.bincount(minlength=4) / len(drawn)).tolist()
    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.02)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.02)
    assert shares(top_p=0.7) == pytest.approx([0.625, 0.375, 0, 0], abs=0.02)
    assert shares(top_p=0.01) == [1, 0, 0, 0]
    assert shares(temperature=0) == [1, 0, 0, 0]
    assert shares(temperature=0.5)[0] == pytest.approx(0.25 / (0.25 + 0.09 + 0.0225 + 0.0025), abs=0.02)


def test_padding_of_the_vocabulary_is_never_drawn():
    model = small_model("mamba1")
    with torch.no_grad():
        model.lm_head.weight[50:] = 100 * torch.sign(model.lm_head.weight[:6])
    assert all(token.item() < 50 for token in generate(model, torch.tensor([[1]]), length=50, temperature=2.0))
