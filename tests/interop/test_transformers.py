"""Folders that transformers itself made; of those that we make: test_families.py."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.weights import read_weights
from tests.support.small_models import (
    CONFIGS,
    assert_same,
    model_of,
    random_state,
    write_ours,
)

pytestmark = pytest.mark.torch22
TOLERANCE = dict(rtol=2e-4, atol=2e-5)  # fp32, two orders of summation


ATTENTION = dict(vocab_size=50, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40)
THEIR_CONFIGS = [
    transformers.MambaConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=1, conv_kernel=2, tie_word_embeddings=False
    ),
    transformers.Mamba2Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=16,
        n_groups=1,
        layer_norm_epsilon=1e-6,
    ),
    transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, head_dim=10, tie_word_embeddings=True, **ATTENTION
    ),
    transformers.BambaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_state=16,
        **ATTENTION,
    ),
]


@pytest.mark.parametrize("their_config", THEIR_CONFIGS, ids=lambda config: config.model_type)
def test_their_models_give_the_same_logits_here_and_come_back_bitwise(their_config, tmp_path):
    """Models that transformers itself made and saved, with whatever its config.json holds."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(their_config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "hf")

    weights = read_weights(tmp_path / "hf")
    tokens = torch.randint(0, 50, (2, 29))
    with torch.no_grad():
        torch.testing.assert_close(
            model_of(weights.config, weights.get)(tokens),
            theirs(tokens, use_cache=False).logits,
            **TOLERANCE,
        )
    ours = write_model(tmp_path / "hf", tmp_path / "ours", format="pth")
    write_model(ours, tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in theirs.state_dict().items())


def test_files_that_transformers_has_cut_are_read(tmp_path):
    config, state = CONFIGS["hybrid"], random_state(CONFIGS["hybrid"])
    write_model(write_ours(tmp_path / "ours", config, state), tmp_path / "hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf").save_pretrained(
        tmp_path / "theirs", max_shard_size="20KB"
    )
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    assert_same(read_weights(tmp_path / "theirs"), config, state)


@pytest.mark.parametrize("format", ["hf", "state-spaces"])
def test_a_chosen_type_leaves_what_has_to_be_fp32(format, tmp_path):
    config, state = CONFIGS["mamba1"], random_state(CONFIGS["mamba1"])
    write_model(
        write_ours(tmp_path / "ours", config, state), tmp_path / "out", format=format, dtype="bf16"
    )
    weights = read_weights(tmp_path / "out")
    for name, tensor in state.items():
        fp32 = name.endswith((".A_log", ".D", ".dt_proj.bias"))
        assert torch.equal(weights.get(name), tensor if fp32 else tensor.bfloat16()), name
