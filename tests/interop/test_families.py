"""Tests published models: their config files equal our presets, a release with a vision model gives an error with
advice, and scaled rotary positions equal those of transformers."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.weights import read_description, read_weights
from mamba_fsdp.model.spec import parameter_count
from tests.support.small_models import model_of, write_ours

pytestmark = pytest.mark.torch22
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5


@pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers 4 has no Qwen3.5")
def test_the_language_model_of_a_release_with_pictures_and_mtp(tmp_path):
    """A release with a vision model is refused. Its language model can be read after it has been saved with the steps
    in docs/models.md, without errors about the parts that transformers leaves out."""
    sizes = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    sizes |= dict(hidden_size=32, intermediate_size=24, head_dim=8, vocab_size=53)
    sizes |= dict(num_attention_heads=4, linear_num_key_heads=2, linear_num_value_heads=4)
    sizes |= dict(linear_key_head_dim=8, linear_value_head_dim=12)
    release = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(
            text_config={**PUBLISHED["qwen3.5-0.8b"]["config"], **sizes},
            vision_config=dict(depth=1, hidden_size=8, num_heads=2, intermediate_size=8),
            tie_word_embeddings=True,
        )
    )
    state = {**release.state_dict(), "mtp.fc.weight": torch.ones(2)}
    release.save_pretrained(tmp_path / "release", state_dict=state)
    with pytest.raises(UserError, match="is 'qwen3_5', a model with vision; save its language"):
        read_weights(tmp_path / "release")
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "release").eval()
    theirs.save_pretrained(tmp_path / "theirs")
    weights = read_weights(tmp_path / "theirs")
    tokens = torch.randint(0, 53, (2, 30))
    logits = theirs(tokens, use_cache=False).logits
    torch.testing.assert_close(model_of(weights.config, weights.get)(tokens), logits)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_presets_with_their_numbers_of_parameters(name, tmp_path):
    published = PUBLISHED[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(published["config"]))
    config = read_description(file).config
    assert parameter_count(config) == published["parameters"]
    assert config.model_name == name


ROPE = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 3.0},
    "yarn, mscale": {"factor": 4.0, "beta_fast": 3.0, "mscale": 2.0, "mscale_all_dim": 0.8},
    "yarn, mscale alone": {"factor": 4.0, "beta_fast": 3.0, "mscale": 2.0},
    "yarn, beyond the first and last pair": {"factor": 4.0, "beta_fast": 1e4, "beta_slow": 1e-4},
    "yarn, equal bounds": {"factor": 4.0, "beta_fast": 3.3, "beta_slow": 3.3},
    "yarn, attention_factor": {
        "factor": 0.5,
        "mscale": 2.0,
        "mscale_all_dim": 0.8,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("case", ROPE)
def test_scaled_rotary_positions_equal_those_of_transformers(case, tmp_path):
    """With scaled rotary positions, the logits equal those of transformers for a text that is longer than the
    original length, also after an export."""
    kind = case.split(",")[0]
    original = 20
    rope = {"rope_type": kind, **ROPE[case]}
    if kind == "llama3":
        rope["original_max_position_embeddings"] = original
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=40,
        max_position_embeddings=original,
        rope_theta=100.0,
        rope_scaling=rope,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    weights = read_weights(tmp_path / "hf")
    _, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=60)
    assert weights.config.rope[1].get("attention_factor", 1.0) == factor
    ours = model_of(weights.config, weights.get)
    for length in (10, 60):
        tokens = torch.randint(0, 50, (2, length))
        logits = theirs(tokens, use_cache=False).logits
        torch.testing.assert_close(ours(tokens), logits)
    plain = dataclasses.replace(weights.config, rope_scaling="")
    assert (model_of(plain, weights.get)(tokens) - logits).abs().max() > 1e-3

    state = {name: weights.get(name) for name in weights.shapes}
    write_model(write_ours(tmp_path / "ours", weights.config, state), tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert torch.equal(back(tokens, use_cache=False).logits, logits)
