"""One position of a whole model in C is that of its modules, and who can't be served so steps as before."""

import pytest
import torch

from config.model_config import ModelConfig
from mamba_fsdp.model import generate as generating
from mamba_fsdp.model.generate import generate
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.native_step import native_step
from mamba_fsdp.ops import cpp
from tests.support.models import small_model, some_tokens

pytestmark = [
    pytest.mark.torch22,
    pytest.mark.skipif(bool(cpp.why_unavailable()), reason="no C compiler"),
]
# Sizes that fill no vector, an output layer of its own, several groups, blocks of both kinds.
SHAPES = {
    "mamba1": dict(
        layers="mamba1,mamba1+mlp", d_model=40, dt_rank=3, d_conv=3, tie_embeddings=False
    ),
    "mamba2": dict(layers="mamba2+mlp,mamba2", d_model=32, headdim=8, ngroups=2, d_state=5),
    "both": dict(layers="mamba1+mlp,mamba2", d_model=144, headdim=16, d_intermediate=70),
}


def model_of(shape, dtype=torch.float64):
    torch.manual_seed(0)
    model = (
        MambaLM(ModelConfig(n_layer=2, vocab_size=50, **shape), compute_dtype=dtype)
        .to(dtype)
        .requires_grad_(False)
    )
    for name, parameter in model.named_parameters():
        parameter.normal_(0.5 if "A_log" in name else 0.0, 0.3)
    return model


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("rows", [1, 6])
@torch.no_grad()
def test_steps_in_c_are_those_of_the_modules(shape, dtype, bound, rows, monkeypatch):
    model, tokens = model_of(shape, dtype), some_tokens(rows, 14)
    if rows > 1:  # several threads
        monkeypatch.setattr("mamba_fsdp.model.native_step.ALONE", 0)
    states = [model.allocate_state(rows, 14) for _ in range(2)]
    for state in states:
        model.prefill(tokens[:, :2], state)
    step = native_step(model, states[1])
    for position in range(2, 14):
        expected = model.step(tokens[:, position], states[0])
        torch.testing.assert_close(step(tokens[:, position]), expected, rtol=bound, atol=bound)
    assert states[0]["position"] == states[1]["position"]
    for one, other in zip(*(state["layers"] for state in states)):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=bound, atol=bound)


def test_who_is_not_served_and_the_text_is_the_same(monkeypatch):
    model = small_model("mamba1")
    assert native_step(small_model("hybrid"), small_model("hybrid").allocate_state(1, 9)) is None
    assert (
        native_step(small_model("mamba1", compute_dtype=torch.bfloat16), model.allocate_state(1, 9))
        is None
    )
    calls, fast = [], native_step
    monkeypatch.setattr(
        generating, "native_step", lambda *given: calls.append(fast(*given)) or calls[-1]
    )
    prompt = torch.tensor([[3, 1, 4]])
    ours = torch.stack([*generate(model, prompt, length=20, temperature=0)])
    assert calls and calls[0]
    monkeypatch.setattr(
        cpp, "library", lambda dtype: (_ for _ in ()).throw(cpp.Unavailable("no compiler"))
    )
    assert (
        torch.equal(ours, torch.stack([*generate(model, prompt, length=20, temperature=0)]))
        and calls[1] is None
    )


@pytest.mark.parametrize("family", ["mamba1", "mamba2", "hybrid"])
def test_prompts_of_different_lengths_together_are_each_alone(family):
    model = small_model(family)
    prompts = [torch.tensor(ids) for ids in ([3], [1, 4, 1, 5, 9, 2, 6, 5], [7, 7])]
    together = torch.stack([*generate(model, prompts, length=12, temperature=0)], dim=1)
    for row, prompt in zip(together, prompts):
        assert torch.equal(
            row, torch.cat([*generate(model, prompt[None], length=12, temperature=0)])
        )
    assert len({tuple(row.tolist()) for row in together}) > 1
