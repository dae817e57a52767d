"""The published models by name, from models.yaml, and the settings they are trained with, from recipes.yaml."""

from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError, near_name
from mamba_fsdp.settings.fields import read_field
from mamba_fsdp.settings.model_config import ModelConfig
from mamba_fsdp.settings.text_yaml import load_yaml
from mamba_fsdp.settings.train_config import all_settings

FILE = Path(__file__).with_name("models.yaml")
RECIPES_FILE = Path(__file__).with_name("recipes.yaml")


def read_table(file: Path) -> dict[str, dict[str, Any]]:
    """Returns {key of the file, which is one name or several: the settings that differ from the
    defaults}."""
    leaves = all_settings()
    return {
        key: {name: read_field(name, leaves[name][1], text) for name, text in values.items()}
        for key, values in load_yaml(file, is_own=True).items()
    }


def plain(name: str) -> str:
    """Returns `name` without the parts that do not matter in the name of a preset."""
    name = name.lower().rpartition("/")[2].removesuffix("-hf").removesuffix("_4k")
    return name.replace("-", "").replace("_", "")


MODELS = read_table(FILE)
PRESETS = {names.split()[0]: values for names, values in MODELS.items()}
SPELLINGS = {plain(name): names.split()[0] for names in MODELS for name in names.split()}
RECIPES = {
    plain(name): values
    for names, values in read_table(RECIPES_FILE).items()
    for name in names.split()
}


def preset(name: str) -> dict[str, Any]:
    """Returns the ModelConfig fields of the preset that `name` means, with the preset's own name as
    model_name.

    Names of the Hugging Face hub and of fms work too: a leading organisation, a trailing -hf or _4k
    (fms-fsdp's shorter context, which is seq_length here), case and the choice between - and _ don't
    matter. Raises UserError, which suggests the nearest name.
    """
    spelled = SPELLINGS.get(plain(name))
    if spelled is None:
        hint = near_name(name, PRESETS, f"choose one of {', '.join(PRESETS)}")
        raise UserError(f"model_name={name}: there is no such preset; {hint}")
    return {"model_name": spelled, **PRESETS[spelled]}


def recipe_name(model_name: str) -> str:
    """Returns the name of the recipe for a model of this name; a leading organisation may have a recipe of its own."""
    organisation, _, _ = model_name.partition("/")
    for name in (organisation, model_name):
        if plain(name) in RECIPES:
            return name
    return "others"


def recipe(model_name: str, from_weights: bool = False) -> dict[str, Any]:
    """Returns the settings that a model of this name is trained with. from_weights: returns the recipe of `others` with
    this model's seq_length, because a recipe for training from scratch would spoil trained weights."""
    others = RECIPES["others"]
    chosen = RECIPES[plain(recipe_name(model_name))]
    if from_weights:
        return others | {"seq_length": chosen["seq_length"]}
    return chosen


def title(model: ModelConfig) -> str:
    """Returns the name of a ModelConfig: the name of its preset if it has the preset's structure."""
    named = ModelConfig(**preset(model.model_name))
    if model.structure() == named.structure():
        return model.model_name
    return f"custom (from {model.model_name})"
