"""Tests the format of state-spaces: bitwise round trips, published config files, and comparisons with the reference
implementation."""

import dataclasses
import json
import sys

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop import state_spaces
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.fields import Fields
from mamba_fsdp.interop.weights import read_weights
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.presets import PRESETS
from tests.support.mamba_ssm_install import mamba_ssm_folder, triton_environment
from tests.support.processes import run_program
from tests.support.small_models import (
    BAMBA,
    CONFIGS,
    GROUPED,
    MAMBA3,
    assert_same,
    model_of,
    random_state,
    write_ours,
)

MODELS = {
    "mamba1": CONFIGS["mamba1-untied-rank"],
    "mamba2": GROUPED,
    "hybrid": CONFIGS["hybrid-odd-heads"],
    "attention": CONFIGS["llama-grouped"],
}


@pytest.mark.parametrize("config", [*MODELS.values(), MAMBA3], ids=[*MODELS, "mamba3"])
def test_native_to_state_spaces_to_native_is_bitwise(config, tmp_path):
    state = random_state(config)
    write_model(
        write_ours(tmp_path / "ours", config, state), tmp_path / "theirs", format="state-spaces"
    )
    assert_same(read_weights(tmp_path / "theirs"), config, state)
    write_model(tmp_path / "theirs", tmp_path / "back", format="pth")
    assert_same(read_weights(tmp_path / "back"), config, state)


@pytest.mark.slow
def test_the_reference_implementation_loads_exports_with_equal_results_and_saves_readable_files(
    project, tmp_path
):
    """The reference implementation loads our exports of Mamba-1, Mamba-2, a hybrid and an attention model, has the
    same logits, loss and gradients, and saves files that we can read.

    The models have no rotary positions, because mamba_ssm needs a GPU library for them.
    """
    models = {name: dataclasses.replace(config, rotary_dim=0) for name, config in MODELS.items()}
    tokens = torch.randint(0, 40, (2, 37), generator=torch.Generator().manual_seed(0))
    for name, config in models.items():
        write_model(
            write_ours(tmp_path / "ours" / name, config),
            tmp_path / "models" / name / "exported",
            format="state-spaces",
        )
        torch.save(tokens, tmp_path / "models" / name / "tokens.pt")
    arguments = [
        project / "tests/support/reference_on_cpu.py",
        mamba_ssm_folder(),
        tmp_path / "models",
    ]
    done = run_program(sys.executable, *arguments, **triton_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    for name, config in models.items():
        state = random_state(config)
        theirs = torch.load(tmp_path / "models" / name / "answer.pt", weights_only=True)
        ours = model_of(config, state.get)
        torch.testing.assert_close(ours(tokens), theirs["logits"], rtol=1e-4, atol=1e-5)
        loss = ours(tokens[:, :-1], labels=tokens[:, 1:]) / tokens[:, 1:].numel()
        torch.testing.assert_close(loss, theirs["loss"], rtol=1e-5, atol=0)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
        assert gradients.keys() == theirs["gradients"].keys()
        for parameter, expected in theirs["gradients"].items():
            atol = 1e-4 * expected.abs().max().item()
            torch.testing.assert_close(gradients[parameter], expected, rtol=1e-3, atol=atol)
        assert_same(read_weights(tmp_path / "models" / name / "saved"), config, state)


def fields(tmp_path, **content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    return Fields.read(tmp_path / "config.json")


PUBLISHED_1 = {
    "ssm_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
    "vocab_size": 50277,
}
PUBLISHED_2 = {
    **PUBLISHED_1,
    "ssm_cfg": {"layer": "Mamba2"},
    "d_intermediate": 0,
    "attn_layer_idx": [],
    "attn_cfg": {},
    "tie_embeddings": True,
    "pad_vocab_size_multiple": 16,
}


@pytest.mark.parametrize(
    "preset, content",
    [
        ("mamba-130m", {"d_model": 768, "n_layer": 24, **PUBLISHED_1}),
        ("mamba2-1.3b", {"d_model": 2048, "n_layer": 48, **PUBLISHED_2}),
        ("mamba_9.8b", BAMBA),
    ],
)
def test_published_config_files_are_the_presets(preset, content, tmp_path):
    config = state_spaces.read_config(fields(tmp_path, **content))
    assert config == ModelConfig(model_name=preset, **PRESETS[preset])


LOST = {  # {preset: part of the message with the setting that the format can't represent}
    "falcon-mamba-7b": "bcdt_norm_eps=1e-06",
    "llama3.1_8b": "rope_scaling=llama3",
    "granite-4.0-h-micro": "multipliers=embedding=12",
    "falcon-h1-0.5b": "layers=mamba2/attention",
    "falcon-h1-7b": "layers=mamba2/attention",
    "nemotron-h-8b": "layers=mamba2,mlp",
    "nemotron-nano-9b-v2": "layers=mamba2,mlp",
    "nemotron-3-nano-4b": "can't represent this model: headdim 80",
    "olmo-hybrid-7b": "layers=3.gdn",
    "qwen3.5-0.8b": "layers=3.gdn",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_survives_a_round_trip_through_state_spaces(preset, tmp_path):
    config = ModelConfig(model_name=preset, **PRESETS[preset])
    if preset in LOST:
        with pytest.raises(UserError, match=LOST[preset]):
            state_spaces.write_config(config)
        return
    assert state_spaces.read_config(fields(tmp_path, **state_spaces.write_config(config))) == config


def test_mlps_have_the_width_of_the_reference(tmp_path):
    content = {**BAMBA, "d_model": 64, "n_layer": 2, "attn_layer_idx": [], "d_intermediate": 130}
    assert state_spaces.read_config(fields(tmp_path, **content)).d_intermediate == 256
