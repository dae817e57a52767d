"""Looks up the recipe of a model in recipes.yaml: the settings that it is trained with by default."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mamba_fsdp.fields import default
from mamba_fsdp.model.presets import normalize_name, read_table
from mamba_fsdp.settings.train_config import OptimizerConfig, ScheduleConfig, all_settings

RECIPES_FILE = Path(__file__).with_name("recipes.yaml")
FIELDS = {name: field for name, (_, field) in all_settings().items()}
RECIPES = {
    normalize_name(name): values
    for names, values in read_table(RECIPES_FILE, FIELDS).items()
    for name in names.split()
}
PUBLISHED = "published"
TUNED = "tuned"  # also a name in RECIPES
DEMO = "demo"  # model_name of each model without a preset
# The width and the tokens per step for which the learning rate of TUNED was measured. For other trainings, the
# learning rate is inversely proportional to the width, and proportional to a power of the tokens per step (docs/tuning.md).
TUNED_WIDTH = 128
TUNED_BATCH = 2048
BATCH_EXPONENT = 0.5
ADAMW_RATIO = 0.5  # the best learning rate of AdamW, divided by the best learning rate of Muon
MAX_BATCH_RATIO = (
    4  # the power was not measured for larger batches, so the learning rate does not grow further
)


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
    return dict(chosen)


def default_recipe(model_name: str, from_weights: bool) -> str:
    """Returns the default of the setting `recipe`: TUNED for training the demo or a model of the user's own from
    random weights, PUBLISHED otherwise."""
    is_own = normalize_name(model_name) == DEMO
    return TUNED if is_own and not from_weights else PUBLISHED


def tuned_recipe(usual: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the optimizer and the schedule of the recipe TUNED, with the learning rate for this width and batch.

    The number of ranks is not known here. Without global_batch_size, the learning rate is chosen for the batch of one rank.

    usual: the values of all settings without this recipe. chosen: the settings that the user gave."""
    tuned = RECIPES[TUNED]
    values = {**usual, **tuned, **chosen}
    samples = values["global_batch_size"]
    if not samples:
        samples = values["batch_size"] * values["gradient_accumulation_steps"]
    width_ratio = max(1, values["d_model"] / TUNED_WIDTH)
    batch_ratio = min(samples * values["seq_length"] / TUNED_BATCH, MAX_BATCH_RATIO)
    rate = tuned["learning_rate"] * batch_ratio**BATCH_EXPONENT / width_ratio
    if values["optimizer"] == "adamw":
        rate *= ADAMW_RATIO
    names = {*vars(OptimizerConfig()), *vars(ScheduleConfig())} - {"recipe"}
    defaults = {name: default(FIELDS[name]) for name in names}
    return defaults | tuned | {"learning_rate": float(f"{rate:.2g}")}
