"""Tests starts from existing weights: the model takes their shape, and settings that contradict it are refused."""

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.settings import resolve

THERE = ModelConfig(d_model=48, n_layer=3, layers="mamba2", headdim=16, vocab_size=99)


def take(**given):
    texts = {key: str(value) for key, value in given.items()}
    config = resolve.resolve_settings({"init_from": "there", **texts})
    return resolve.adopt_model(config, THERE, "init_from there").model


def test_weights_determine_the_shape_of_the_model():
    assert take(learning_rate=1).d_model == 48 and take().layers == "mamba2"
    assert take(d_model=48, headdim=16, chunk_size=32).chunk_size == 32


@pytest.mark.parametrize(
    "given, message",
    [
        ({"d_model": 64}, r"d_model=64 \(there 48\)"),
        ({"model_name": "mamba2-130m"}, "n_layer=24"),
        (
            {"n_layer": 2, "layers": "mamba2"},
            r"ask for: n_layer=2 \(there 3\); leave out the settings that differ$",
        ),
    ],
)
def test_settings_of_another_shape_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        take(**given)


def test_a_setting_without_effect_on_the_layers_of_the_weights_is_reported():
    config = resolve.resolve_settings({"init_from": "there", "chunk_size": "32"})
    adopted = resolve.adopt_model(config, ModelConfig(d_model=48), "init_from there")
    assert adopted.notes == ("chunk_size=32 has no effect without a mamba2 or mamba3 layer",)
    assert not config.notes and config.model.d_model == 128
