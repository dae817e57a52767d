"""transformers' folders in and out: the same model to the bit, and the same logits from their code and ours; gradients
are test_families.py's."""

import pytest
import torch
import transformers

from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.weights import read_weights
from tests.support.small_models import (
    CONFIGS,
    GROUPED,
    assert_same,
    model_of,
    random_state,
    write_ours,
)

pytestmark = pytest.mark.torch22
TOLERANCE = dict(rtol=2e-4, atol=2e-5)  # fp32, two orders of summation
TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5


def load(folder):
    """Their model, and what their loader complains about, which has to be nothing."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(
        report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    ), report
    return model.eval()


@pytest.mark.parametrize("name", [*CONFIGS, "grouped"])
def test_a_model_is_the_same_there_and_back(name, tmp_path):
    """To the bit when it is read again, from transformers' form and from ours; the same logits."""
    config = CONFIGS.get(name, GROUPED)
    state = random_state(config)
    write_model(write_ours(tmp_path / "ours", config, state), tmp_path / "hf")
    write_model(tmp_path / "hf", tmp_path / "back", format="pth")
    for place in ("hf", "back", "back/consolidated.00.pth"):
        assert_same(read_weights(tmp_path / place), config, state)
    if config is GROUPED and not TRANSFORMERS_5:
        return  # 4 normalises Mamba-2's output over all groups at once
    ours = model_of(config, state.get)
    theirs = load(tmp_path / "hf")
    tokens = torch.randint(0, config.vocab_size, (2, 37), generator=torch.manual_seed(1))
    with torch.no_grad():
        logits = theirs(tokens, use_cache=False).logits
        torch.testing.assert_close(ours(tokens), logits, **TOLERANCE)


def their_configs():
    attention = dict(
        vocab_size=50, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40
    )
    yield transformers.MambaConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, state_size=5, time_step_rank=3
    )
    yield transformers.MambaConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=1, conv_kernel=2, tie_word_embeddings=False
    )
    yield transformers.Mamba2Config(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=2,
        state_size=16,
        num_heads=6,
        head_dim=8,
        n_groups=1,
    )
    yield transformers.Mamba2Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=16,
        n_groups=1,
        tie_word_embeddings=TRANSFORMERS_5,
        layer_norm_epsilon=1e-6,
    )  # 4 can't save tied ones
    yield transformers.LlamaConfig(hidden_size=24, num_hidden_layers=2, **attention)
    yield transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, head_dim=10, tie_word_embeddings=True, **attention
    )
    yield transformers.BambaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_state=16,
        **attention,
    )
    yield transformers.BambaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        attn_layer_indices=[],
        mamba_n_heads=4,
        mamba_d_state=16,
        **attention,
    )


@pytest.mark.parametrize(
    "their_config", list(their_configs()), ids=lambda config: config.model_type
)
def test_their_models_give_the_same_logits_here_and_come_back_bitwise(their_config, tmp_path):
    """Models that transformers itself made and saved, with whatever its config.json holds."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(their_config).eval()
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
    back = load(tmp_path / "back").state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in theirs.state_dict().items())


def test_files_that_transformers_has_cut_are_read(tmp_path):
    config, state = CONFIGS["hybrid"], random_state(CONFIGS["hybrid"])
    write_model(write_ours(tmp_path / "ours", config, state), tmp_path / "hf")
    load(tmp_path / "hf").save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
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
