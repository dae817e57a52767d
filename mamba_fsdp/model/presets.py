"""Looks up the settings of published models by name. They are stored in models.yaml."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import read_field
from mamba_fsdp.model.config import FIELDS, ModelConfig
from mamba_fsdp.storage.text_yaml import load_yaml
from mamba_fsdp.text import suggest_name


def read_table(file: Path, leaves: Mapping[str, dataclasses.Field]) -> dict[str, dict[str, Any]]:
    """Returns {key: {setting: value}} of a YAML table. A key is one name or several, separated by spaces.

    leaves: the dataclass field of each setting, by name."""
    return {
        key: {name: read_field(name, leaves[name], text) for name, text in values.items()}
        for key, values in load_yaml(file, is_own=True).items()
    }


def normalize_name(name: str) -> str:
    """Returns a preset's name in a normal form. Different spellings of the same name have the same normal form."""
    name = name.lower().rpartition("/")[2].removesuffix("-hf").removesuffix("_4k")
    return name.replace("-", "").replace("_", "")


MODELS = read_table(Path(__file__).with_name("models.yaml"), FIELDS)
PRESETS = {names.split()[0]: values for names, values in MODELS.items()}
SPELLINGS = {normalize_name(name): names.split()[0] for names in MODELS for name in names.split()}


def preset(name: str, where: str = "") -> dict[str, Any]:
    """Returns the ModelConfig fields of the preset `name`. Their model_name is the preset's canonical name.

    Names from the Hugging Face hub and from fms-fsdp work too: a leading organisation, a trailing -hf or _4k, upper and
    lower case, and the choice between - and _ don't matter. (In fms-fsdp, _4k selects a shorter context; here this is
    the setting seq_length.)

    Raises UserError for an unknown name, and suggests the nearest one. where: the place that contains the name, for the
    message, as in " (in my.yaml)".
    """
    spelled = SPELLINGS.get(normalize_name(name))
    if spelled is None:
        hint = suggest_name(name, PRESETS, f"choose one of {', '.join(PRESETS)}")
        raise UserError(f"model_name={name}: there is no such preset{where}; {hint}")
    return {"model_name": spelled, **PRESETS[spelled]}


def model_title(model: ModelConfig) -> str:
    """Returns a name for a model: its preset's name, or "custom (from PRESET)" if its structure differs from the
    preset."""
    named = ModelConfig(**preset(model.model_name))
    if model.structure() == named.structure():
        return model.model_name
    return f"custom (from {model.model_name})"
