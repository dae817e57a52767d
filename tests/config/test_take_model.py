"""Starting from weights: their shape is the model's, and settings that say otherwise are refused."""

import pytest

from config import settings
from config.model_config import ModelConfig
from mamba_fsdp.errors import UserError

THERE = ModelConfig(d_model=48, n_layer=3, layers="mamba2", headdim=16, vocab_size=99)


def take(**given):
    config, explicit = settings.resolve({key: str(value) for key, value in given.items()})
    settings.take_model(config, THERE, explicit)
    return config.model


def test_the_weights_give_the_shape():
    assert take(learning_rate=1).d_model == 48 and take().layers == "mamba2"
    assert take(d_model=48, chunk_size=32).chunk_size == 32


@pytest.mark.parametrize("given, message", [({"d_model": 64}, r"d_model=64 \(there 48\)"), ({"model_name": "mamba2-130m"}, "n_layer=24")])
def test_other_settings_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        take(**given)
