"""Looks up the recipe of a model in recipes.yaml: the settings that it is trained with by default."""

from pathlib import Path
from typing import Any

from mamba_fsdp.model.presets import normalize_name, read_table
from mamba_fsdp.settings.train_config import all_settings

RECIPES_FILE = Path(__file__).with_name("recipes.yaml")
LEAVES = {name: leaf for name, (_, leaf) in all_settings().items()}
RECIPES = {
    normalize_name(name): values
    for names, values in read_table(RECIPES_FILE, LEAVES).items()
    for name in names.split()
}


def recipe_name(model_name: str) -> str:
    """Returns the name of the recipe for a model: the organisation, as in organisation/model, if it has a recipe, otherwise
    the model's name, otherwise "others"."""
    organisation, _, _ = model_name.partition("/")
    for name in (organisation, model_name):
        if normalize_name(name) in RECIPES:
            return name
    return "others"


def recipe(model_name: str, from_weights: bool = False) -> dict[str, Any]:
    """Returns the settings that the model `model_name` is trained with.

    from_weights: whether training starts from trained weights. The recipe is then "others" with this model's seq_length,
    because the learning rate of a training from scratch would damage the weights."""
    others = RECIPES["others"]
    chosen = RECIPES[normalize_name(recipe_name(model_name))]
    if from_weights:
        return others | {"seq_length": chosen["seq_length"]}
    return chosen
