"""Resolved settings never change: whoever has them knows what everybody else has."""

import dataclasses

import pytest

from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.settings.train_config import all_settings


def test_no_setting_can_be_assigned():
    settings = resolve_settings({"d_model": "64"})
    for name, (section, _) in all_settings().items():
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(getattr(settings, section), name, settings.value(name))
    for field in dataclasses.fields(settings):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(settings, field.name, getattr(settings, field.name))


def test_others_are_made_of_them():
    settings = resolve_settings({"d_model": "64"})
    others = settings.changed(d_model=32, learning_rate=1.0, seq_length=8)
    assert (others.model.d_model, others.optimizer.learning_rate) == (32, 1.0)
    assert others.data.seq_length == 8 and others.explicit == {"d_model"}
    assert settings.model.d_model == 64 and settings.data.seq_length == 256
