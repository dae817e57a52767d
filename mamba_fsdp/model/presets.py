"""Looks up the published models by name, in models.yaml."""

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
    """Returns {key of the file, which is one name or several: the settings that differ from the defaults}. leaves: the
    field of each setting."""
    return {
        key: {name: read_field(name, leaves[name], text) for name, text in values.items()}
        for key, values in load_yaml(file, is_own=True).items()
    }


def plain(name: str) -> str:
    """Returns `name` without the parts that do not matter in the name of a preset."""
    name = name.lower().rpartition("/")[2].removesuffix("-hf").removesuffix("_4k")
    return name.replace("-", "").replace("_", "")


MODELS = read_table(Path(__file__).with_name("models.yaml"), FIELDS)
PRESETS = {names.split()[0]: values for names, values in MODELS.items()}
SPELLINGS = {plain(name): names.split()[0] for names in MODELS for name in names.split()}


def preset(name: str, where: str = "") -> dict[str, Any]:
    """Returns the ModelConfig fields of the preset that `name` means, with the preset's own name as
    model_name.

    Names of the Hugging Face hub and of fms work too: a leading organisation, a trailing -hf or _4k
    (fms-fsdp's shorter context, which is seq_length here), case and the choice between - and _ don't
    matter. Raises UserError, which suggests the nearest name. where: as in " (in my.yaml)".
    """
    spelled = SPELLINGS.get(plain(name))
    if spelled is None:
        hint = suggest_name(name, PRESETS, f"choose one of {', '.join(PRESETS)}")
        raise UserError(f"model_name={name}: there is no such preset{where}; {hint}")
    return {"model_name": spelled, **PRESETS[spelled]}


def title(model: ModelConfig) -> str:
    """Returns the name of a ModelConfig: the name of its preset if it has the preset's structure."""
    named = ModelConfig(**preset(model.model_name))
    if model.structure() == named.structure():
        return model.model_name
    return f"custom (from {model.model_name})"
