"""Whole models with kernels: loss and gradients are those of the reference backends, with documents and in parts."""

import pytest
import torch

from config.model_config import ModelConfig
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.ops.backends import OPERATORS, REFERENCE
from mamba_fsdp.ops.conv import triton as conv

SIZES = dict(d_model=10, n_layer=2, vocab_size=50)
MODELS = {
    "mamba1": ModelConfig(layers="mamba1", d_state=4, dt_rank=2, **SIZES),
    "mamba2": ModelConfig(
        layers="mamba2+mlp", d_state=4, headdim=5, ngroups=2, d_conv=3, d_intermediate=8, **SIZES
    ),
}
KERNELS = REFERENCE | {
    operator: "triton" for operator in ("conv", "norm") if "triton" in OPERATORS[operator]
}


@pytest.fixture(autouse=True)
def short_programs(monkeypatch):
    for table in conv.FORWARD, conv.BACKWARD:
        monkeypatch.setitem(table, (8, 0), {"ROWS": 8, "CHANNELS": 32, "num_warps": 1})


def model(name, backends, dtype=torch.float32):
    built = MambaLM(MODELS[name], backends=backends, compute_dtype=dtype, reset_at_documents=True)
    with torch.no_grad():
        for key, parameter in built.named_parameters():
            parameter.copy_(
                initial_value(key, parameters(built.config)[key], 1)
                * (3 if "embedding" in key else 1)
            )
    return built


def tokens(length, batch=2):
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_training(name):
    inputs = tokens(13)
    seq_idx = torch.tensor([[0] * 4 + [1] * 2 + [2] * 7, [5] * 13])
    results = []
    for backends, dtype in (KERNELS, torch.float32), (REFERENCE, torch.float64):
        built = model(name, backends, dtype).to(dtype)
        loss = built(inputs, inputs.roll(-1, 1), seq_idx=seq_idx)
        loss.backward()
        results.append(
            {"loss": loss.detach()} | {key: p.grad for key, p in built.named_parameters()}
        )
    for key, expected in results[1].items():
        assert (results[0][key] - expected).abs().max() <= 3e-6 * expected.abs().max(), key


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_parts_and_steps(name):
    """The state that the kernels leave is that of the reference backends."""
    with torch.no_grad():
        whole = model(name, REFERENCE)(tokens(9))
        built = model(name, KERNELS)
        state = built.allocate_state(2, 9)
        parts = [
            built.prefill(tokens(9)[:, :5], state),
            built.prefill(tokens(9)[:, 5:7], state),
            *(built.step(tokens(9)[:, position], state) for position in (7, 8)),
        ]
    for position, logits in zip((4, 6, 7, 8), parts):
        torch.testing.assert_close(logits, whole[:, position], rtol=1e-5, atol=1e-5)
