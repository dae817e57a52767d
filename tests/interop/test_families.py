"""Hybrids of others: random small models of every family compute in transformers' class what they compute here, with the
same gradients, and come back from it bit for bit."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.transformers_layouts import layout_for
from mamba_fsdp.interop.weights import read_description, read_weights
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.ops.rope import frequencies
from mamba_fsdp.settings.model_config import ModelConfig
from tests.support.small_models import assert_same, model_of, random_state, write_ours

pytestmark = pytest.mark.torch22
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
TOLERANCE = 1e-5  # of a tensor's largest value
TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5


def falcon_mamba(draw):
    return dict(
        layers="mamba1",
        d_state=draw.randint(2, 9),
        dt_rank=draw.randint(2, 9),
        d_ssm=8 * draw.randint(2, 9),
        bcdt_norm_eps=draw.choice([1e-6, 1e-4, 0.03]),
    )


def codestral_mamba(draw):
    ngroups = draw.choice([1, 2, 3]) if TRANSFORMERS_5 else 1  # see test_transformers.py
    tied = TRANSFORMERS_5 and draw.choice([True, False])  # 4 can't save tied ones
    return dict(layers="mamba2", **mamba2(draw), ngroups=ngroups, tie_embeddings=tied)


def mamba2(draw):
    return dict(headdim=8, d_state=draw.choice([16, 24]), expand=3, chunk_size=draw.choice([8, 16]))


def attention(draw):
    n_kv_head = draw.choice([1, 2])
    return dict(
        n_head=n_kv_head * draw.choice([1, 2, 3]),
        n_kv_head=n_kv_head,
        head_dim=draw.choice([8, 16]),
    )


def nemotron_h(draw):
    mixers = ["mamba2", "attention", "mlp", *draw.choices(["mamba2", "attention", "mlp"], k=2)]
    draw.shuffle(mixers)
    return dict(
        layers=",".join(mixers),
        n_layer=5,
        **mamba2(draw),
        **attention(draw),
        rotary_dim=0,
        ngroups=draw.choice([1, 3]),
        d_ssm=24 * draw.randint(1, 4),
        d_intermediate=draw.randint(20, 60),
        mlp_activation="relu2",
        tie_embeddings=False,
    )


def granite(draw):
    layers = ["mamba2+mlp", "attention+mlp", draw.choice(["mamba2+mlp", "attention+mlp"])]
    draw.shuffle(layers)
    sizes = attention(draw)
    head_dim = 24 if TRANSFORMERS_5 else sizes["head_dim"]  # 4 computes it from the width
    return dict(
        layers=",".join(layers),
        n_layer=4,
        **mamba2(draw),
        **sizes,
        d_model=head_dim * sizes["n_head"],
        rotary_dim=[0, sizes["head_dim"], 0][draw.seed_number],
        d_intermediate=draw.randint(20, 60),
        multipliers=multipliers(draw, "embedding", "residual", "logits_divisor", "attention_q"),
    )


def falcon_h1(draw):
    names = "embedding logits attention_k ssm_in ssm_out ssm_z ssm_x ssm_B ssm_C ssm_dt mlp_gate mlp_out"
    sizes = attention(draw)
    return dict(
        layers="mamba2/attention+mlp",
        **mamba2(draw),
        **sizes,
        d_model=24 * sizes["n_head"],
        ngroups=draw.choice([1, 3]),
        d_ssm=24 * draw.randint(1, 4),
        ssm_norm=["after", "before", "none"][draw.seed_number],
        rope_theta=1e11,
        d_intermediate=draw.randint(20, 60),
        multipliers=multipliers(draw, *names.split(), "attention_in", "attention_out"),
    )


def multipliers(draw, *names):
    return ",".join(f"{name}={draw.uniform(0.3, 0.8)}" for name in names)


FAMILIES = {
    "FalconMambaForCausalLM": falcon_mamba,
    "Mamba2ForCausalLM": codestral_mamba,
    "GraniteMoeHybridForCausalLM": granite,
    "FalconH1ForCausalLM": falcon_h1,
}
if TRANSFORMERS_5:  # which alone has it
    FAMILIES["NemotronHForCausalLM"] = nemotron_h


def random_config(family, seed):
    draw = random.Random(f"{family} {seed}")
    draw.seed_number = seed
    general = dict(
        d_model=8 * draw.randint(3, 6),
        n_layer=draw.randint(2, 4),
        vocab_size=draw.randint(40, 70),
        tie_embeddings=draw.choice([True, False]),
        norm_eps=draw.choice([1e-5, 1e-6]),
    )
    config = ModelConfig(**general | FAMILIES[family](draw))
    config.check()
    return config


def assert_close(found, expected, name):
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE, (name, error)


def theirs_by_our_name(layout, config, tensors):
    """{our name: the tensor}, of theirs by the names in their model, where files may say backbone."""
    found = {}
    for name, parts in layout.parts(config).items():
        rows = []
        for part, _ in parts:
            loaded = part if part in tensors else part.replace("backbone.", "model.")
            rows.append(tensors[loaded])
        if name.endswith(tuple(layout.swapped)):
            rows = rows[0].chunk(2)[::-1]
        found[name] = torch.cat(rows)
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_same_model_in_their_class(family, seed, tmp_path):
    config = random_config(family, seed)
    state = random_state(config, seed)
    layout = layout_for(config)
    assert layout.architecture == family
    write_model(write_ours(tmp_path / "ours", config, state), tmp_path / "hf")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, torch_dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(theirs).__name__ == family

    theirs = theirs.double().eval()  # though their norms stay in fp32
    ours = model_of(config, state.get, torch.float64)
    tokens = torch.randint(0, config.vocab_size, (2, 38))
    labels = tokens[:, 1:]
    logits = theirs(tokens[:, :-1], use_cache=False).logits
    assert_close(ours(tokens[:, :-1]), logits, "logits")
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    ours(tokens[:, :-1], labels=labels).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected = theirs_by_our_name(layout, config, gradients)
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, expected[name], name)

    theirs.float().save_pretrained(tmp_path / "back")
    back = read_weights(tmp_path / "back")
    assert_same(back, config, state)
    assert back.config.structure() == config.structure()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_presets_with_their_numbers_of_parameters(name, tmp_path):
    published = PUBLISHED[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(published["config"]))
    config = read_description(file).config
    assert parameter_count(config) == published["parameters"]
    assert config.model_name == name


@pytest.mark.parametrize(
    "name, changes, said",
    [
        ("granite-4.0-h-micro", {"num_local_experts": 62}, "is 62, mixtures of experts, of which"),
        ("granite-4.0-h-micro", {"layer_types": ["mamba"]}, "is 40, with 1 layers"),
        ("falcon-h1-7b", {"mlp_multipliers": [1.0]}, "has 1 numbers, not 2"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "ME*E"}, "has 'E', mixtures of experts, of"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "MX"}, "has 'X', no layer that this"),
        ("nemotron-h-8b", {"num_nextn_predict_layers": 1}, "is 1, layers that predict further"),
    ],
)
def test_what_a_family_has_beyond_ours_is_refused_by_name(name, changes, said, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED[name]["config"] | changes))
    with pytest.raises(UserError, match=f"[a-z_]+ {said}"):
        read_description(file)


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
    "yarn, shrunk": {"factor": 0.5},
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


@pytest.mark.parametrize(
    "text",
    [
        "longrope,factor=2",
        "linear",
        "linear,factor=x",
        "llama3,factor=8",
        "linear,beta=1",
        "linear,factor=-2",
    ],
)
def test_a_rope_scaling_that_lacks_something_is_refused(text):
    with pytest.raises(UserError, match="rope_scaling"):
        ModelConfig(layers="attention", rope_scaling=text).check()
