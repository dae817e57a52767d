"""Families of others: a small model of each computes in transformers' class what it computes here, with the same
gradients, and comes back from it bit for bit."""

import dataclasses
import json
import random
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.architectures import architecture_for
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.weights import read_description, read_weights
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.ops.rope import frequencies
from tests.support.small_models import (
    CONFIGS,
    GROUPED,
    assert_same,
    model_of,
    random_state,
    write_ours,
)

pytestmark = pytest.mark.torch22
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
TOLERANCE = 1e-5  # of a tensor's largest value
TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5


ALIKE = dict(n_layer=2, vocab_size=53)
SSM = dict(headdim=8, d_state=16, expand=3, chunk_size=8)
ATTENTION = dict(n_head=4, n_kv_head=2, head_dim=16)
UNTIED = dict(tie_embeddings=False)
FALCON_MULTIPLIERS = (
    "embedding=0.3,logits=0.35,attention_k=0.4,ssm_in=0.45,ssm_out=0.5,ssm_z=0.55,ssm_x=0.6,ssm_B=0.65,ssm_C=0.7,"
    "ssm_dt=0.75,mlp_gate=0.8,mlp_out=0.85,attention_in=0.9,attention_out=0.95"
)


def granite(**sizes):
    multipliers = "embedding=0.4,residual=0.5,logits_divisor=0.6,attention_q=0.7"
    sizes = {**ALIKE, **SSM, "n_head": 4, "n_kv_head": 2, "d_model": 64, "n_layer": 4, **sizes}
    return ModelConfig(d_intermediate=37, multipliers=multipliers, **sizes)


def falcon_h1(**sizes):
    sizes = {**ALIKE, **SSM, **ATTENTION, "d_model": 48, "rope_theta": 1e11, **sizes}
    layers = "mamba2/attention+mlp"
    return ModelConfig(
        layers=layers, d_intermediate=41, multipliers=FALCON_MULTIPLIERS, d_ssm=72, **sizes
    )


FALCON_MAMBA = ModelConfig(
    layers="mamba1", d_model=32, d_state=5, dt_rank=3, d_ssm=40, bcdt_norm_eps=0.03, **ALIKE
)
NEMOTRON_H = ModelConfig(
    layers="mlp,mamba2,attention,mamba2,mlp",
    rotary_dim=0,
    ngroups=3,
    d_model=40,
    d_ssm=48,
    d_intermediate=29,
    mlp_activation="relu2",
    **{**ALIKE, **SSM, **ATTENTION, **UNTIED, "n_layer": 5},
)
GDN_LENGTHS = (1, 64, 101)  # below and at a chunk, and over several


def gdn(seed, **family):
    """A model with Gated DeltaNet, of sizes that the seed draws."""
    draw = random.Random(seed).randint
    ngroups, headdim = draw(1, 4), draw(3, 16)
    sizes = dict(ngroups=ngroups, headdim=headdim, d_ssm=ngroups * draw(1, 3) * headdim)
    sizes |= dict(d_state=draw(3, 16), d_model=draw(20, 50), d_intermediate=draw(20, 50))
    layers = f"{draw(1, 2)}*gdn+mlp,attention+mlp"
    return ModelConfig(
        layers=layers, n_layer=3, vocab_size=53, norm_eps=1e-6, **ATTENTION, **sizes, **family
    )


OLMO_HYBRID = dict(qk_norm="whole", norm_position="after_attention", gdn_norm_eps=1e-5)
QWEN = dict(attention_gate=True, qk_norm="head", rope_theta=1e7)
MODELS = {
    "MambaForCausalLM": [CONFIGS["mamba1"], CONFIGS["mamba1-untied-rank"]],
    "Mamba2ForCausalLM": [CONFIGS["mamba2-untied-wide"]],
    "LlamaForCausalLM": [CONFIGS["llama"], CONFIGS["llama-grouped"]],
    "BambaForCausalLM": [CONFIGS["hybrid"], CONFIGS["hybrid-odd-heads"]],
    "FalconMambaForCausalLM": [FALCON_MAMBA],
    "GraniteMoeHybridForCausalLM": [
        granite(layers="attention+mlp,mamba2+mlp", rotary_dim=16),
        granite(layers="mamba2+mlp,2*attention+mlp", rotary_dim=0, **UNTIED),
    ],
    "FalconH1ForCausalLM": [
        falcon_h1(ssm_norm="after", ngroups=3),
        falcon_h1(ssm_norm="before", ngroups=3, norm_eps=1e-6),
        falcon_h1(ssm_norm="none", **UNTIED),
    ],
}
if TRANSFORMERS_5:
    # 4 has no Nemotron-H, can't save tied weights of Mamba2, and normalises its output over all groups at once.
    MODELS["NemotronHForCausalLM"] = [NEMOTRON_H]
    MODELS["OlmoHybridForCausalLM"] = [
        gdn(1, **OLMO_HYBRID, **UNTIED, rotary_dim=0, allow_neg_eigval=True),
        gdn(2, **OLMO_HYBRID, rope_theta=5e5),
    ]
    MODELS["Qwen3_5ForCausalLM"] = [
        gdn(4, **QWEN, rotary_dim=4),
        gdn(5, **QWEN, **UNTIED, rotary_dim=8),
    ]
    MODELS["Mamba2ForCausalLM"] += [CONFIGS["mamba2"], GROUPED]
CASES = [(name, config) for name, configs in MODELS.items() for config in configs]


def load(folder, **how):
    """Their model, for which their loader misses nothing and has nothing left."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **how
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return model.eval()


def assert_close(found, expected, name):
    error = (found - expected).abs().max()
    # Of one token some gradients are 0, but for rounding.
    assert error <= TOLERANCE * expected.abs().max() + 1e-12, (name, error)


def gradients_by_our_name(architecture, config, theirs):
    """{our name: its gradient} of their model, whose parameters have other names than its files may have."""
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found = {}
    for our_name, stored in architecture.stored_tensors(config).items():
        names = []
        for tensor in stored:
            name = re.sub("[qkv]_conv1d", "conv1d", tensor.name)
            name = name.replace("attention_layer_norm", "input_layernorm")
            name = name.replace("feedforward_layer_norm", "post_attention_layernorm")
            if name not in gradients:
                name = name.replace("backbone.", "model.")
            names.append(name)
        rows = [gradients[name] for name in dict.fromkeys(names)]
        if our_name.endswith(tuple(architecture.swapped)):
            rows = rows[0].chunk(2)[::-1]
        found[our_name] = torch.cat(rows)
    return found


def compare(ours, theirs, architecture, length):
    """Logits, and the gradients of a loss that leaves out a part of one text."""
    vocab_size = ours.config.vocab_size
    tokens = torch.randint(0, vocab_size, (2, length))
    labels = torch.randint(0, vocab_size, (2, length))
    labels[0, length // 3 : 2 * length // 3 + 1] = IGNORED_LABEL
    logits = theirs(tokens, use_cache=False).logits
    assert_close(ours(tokens), logits, f"logits of {length}")
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    ours(tokens, labels=labels).backward()
    expected = gradients_by_our_name(architecture, ours.config, theirs)
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, expected[name], f"{name} of {length}")
    theirs.zero_grad()
    ours.zero_grad()


@pytest.mark.parametrize(("class_name", "config"), CASES, ids=[name for name, _ in CASES])
def test_a_family_is_the_same_model_in_their_class(class_name, config, tmp_path, monkeypatch):
    state = random_state(config)
    architecture = architecture_for(config)
    assert architecture.class_name == class_name
    write_model(write_ours(tmp_path / "ours", config, state), tmp_path / "hf")
    theirs = load(tmp_path / "hf", torch_dtype=torch.float32)
    assert type(theirs).__name__ == class_name

    theirs = theirs.double()
    ours = model_of(config, state.get, torch.float64)
    lengths = (37,)
    with monkeypatch.context() as exact:  # what their code casts to fp32, it casts to float64
        stand_in = types.SimpleNamespace(**vars(torch) | {"float32": torch.float64})
        exact.setattr(sys.modules[type(theirs).__module__], "torch", stand_in)
        if config.has("gdn"):  # which enlarges what the others may round
            lengths = GDN_LENGTHS
            exact.setattr(torch.Tensor, "float", torch.Tensor.double)
        for length in lengths:
            compare(ours, theirs, architecture, length)

    theirs.float().save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    write_model(tmp_path / "theirs", tmp_path / "back", format="pth")
    for folder in ("hf", "theirs", "back"):
        weights = read_weights(tmp_path / folder)
        assert_same(weights, config, state)


@pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers 4 has no Qwen3.5")
def test_the_language_model_of_a_release_with_pictures_and_mtp(tmp_path):
    """As docs/models.md says, and nothing is said of what transformers has left out."""
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
    assert_close(model_of(weights.config, weights.get)(tokens), logits, "logits")


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
    "yarn, attention_factor": {
        "factor": 0.5,
        "mscale": 2.0,
        "mscale_all_dim": 0.8,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("case", ROPE)
def test_scaled_rotary_positions_are_those_of_transformers(case, tmp_path):
    """Of a text longer than the original length: logits, and what comes back from its class. And to the bit, what each
    pair of channels turns by in a large one, and what cosines and sines are multiplied by."""
    kind = case.split(",")[0]
    if TRANSFORMERS_5:
        numbers = {**ROPE[case], "original_max_position_embeddings": 8192}
        large = transformers.LlamaConfig(
            max_position_embeddings=8192,
            rope_theta=5e5,
            rope_scaling={"rope_type": kind, **numbers},
        )
        turns, _ = ROPE_INIT_FUNCTIONS[kind](large, "cpu", seq_len=20_000)
        numbers = {"beta_fast": 32.0, "beta_slow": 1.0, **numbers}
        found = frequencies(128, 5e5, torch.device("cpu"), (kind, numbers), 20_000)
        assert torch.equal(found, turns)
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
    tokens = torch.randint(0, 50, (2, 60))
    logits = theirs(tokens, use_cache=False).logits
    plain = dataclasses.replace(weights.config, rope_scaling="")
    assert_close(model_of(weights.config, weights.get)(tokens), logits, kind)
    assert (model_of(plain, weights.get)(tokens) - logits).abs().max() > 1e-3

    ours = write_ours(
        tmp_path / "ours", weights.config, {n: weights.get(n) for n in weights.shapes}
    )
    write_model(ours, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert torch.equal(back(tokens, use_cache=False).logits, logits)
    assert read_weights(tmp_path / "back").config == weights.config
