"""Tests the ready runs and recipes: each can be resolved, describes the model that it names, fits on a few AWS
machines, and has the same settings under each of its names."""

import re

import pytest

from mamba_fsdp.model.presets import SPELLINGS
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.planning.devices import INSTANCES
from mamba_fsdp.planning.estimate import estimate
from mamba_fsdp.settings.recipes import (
    BATCH_EXPONENT,
    MAX_BATCH_RATIO,
    RECIPES_FILE,
    recipe,
)
from mamba_fsdp.settings.resolve import as_dict, note_on_recipe, ready_runs, resolve_settings
from mamba_fsdp.storage.text_yaml import load_yaml

WORDS = [word for words in load_yaml(RECIPES_FILE) for word in words.split()]
RECIPES = [word for word in WORDS if "num_steps" in recipe(word)]

PARAMETERS = {"mamba-130m": 0.13e9, "mamba2-2.7b": 2.7e9, "llama2_70b": 69e9}


def differing(one, other):
    """Returns {name: both values} of the settings that differ."""
    one, other = as_dict(one), as_dict(other)
    return {
        name: (value, other[section][name])
        for section in one
        for name, value in one[section].items()
        if value != other[section][name]
    }


@pytest.mark.slow
def test_each_recipe_resolves_to_the_model_that_it_names_and_fits_a_gpu():
    names = {*ready_runs(), *RECIPES}
    assert len(names) >= 17
    for name in names:
        settings = resolve_settings({}, name)
        parameters = parameter_count(settings.model)
        assert "model_name" in settings.explicit, name
        assert parameters == pytest.approx(PARAMETERS.get(name, parameters), rel=0.02), name
        nodes = 4 if "llama" in name else 1
        assert estimate(settings, nodes, INSTANCES["p4de.24xlarge"]).fits, name


def test_a_model_name_means_the_same_as_model_name_and_as_config():
    paths_and_workers = {"dataset_path", "datasets", "weights", "save_ckpt_path", "num_workers"}
    intervals = {"eval_interval", "eval_batches", "checkpoint_interval", "report_interval"}
    for word in (*RECIPES, *SPELLINGS):
        by_config = resolve_settings({}, word)
        kept = differing(by_config, resolve_settings({"model_name": word}))
        assert kept.pop("sharding_strategy", ("fsdp", "auto")) == ("fsdp", "auto"), word
        assert kept.keys() <= paths_and_workers | intervals, word


def test_the_lines_that_the_demo_and_readme_print_train_as_the_demo_does(project):
    """The commands that the demo and the README show train like the demo, except for the settings that they
    contain."""
    demo = resolve_settings({}, "demo")
    text = "".join(
        (project / file).read_text()
        for file in ("mamba_fsdp/launch/local_training.py", "README.md")
    )
    lines = re.findall(r"^.*\./1\.train\.sbatch (--dataset_path=[^\n\"]*)", text, flags=re.M)
    assert len(lines) == 2
    for line in lines:
        settings = resolve_settings(
            dict(word.removeprefix("--").split("=") for word in line.split())
        )
        assert differing(demo, settings).keys() <= settings.explicit | {"eval_batches"}


def test_a_given_setting_changes_only_that_setting_of_a_recipe():
    usual = resolve_settings({"model_name": "mamba-130m"})
    assert usual.optimizer.learning_rate == 0.003 and usual.training.global_batch_size == 256
    for given, others in {
        "learning_rate=1e-4": {"learning_rate"},
        "num_steps=500": {"num_steps"},
        "gradient_accumulation_steps=2": {"gradient_accumulation_steps", "global_batch_size"},
        "warmup_steps=9": {"warmup_steps", "warmup_ratio"},
    }.items():
        changed = resolve_settings({"model_name": "mamba-130m", **dict([given.split("=")])})
        assert differing(usual, changed).keys() == others


def test_models_without_a_preset_are_tuned_and_presets_published():
    for given, recipe_name, optimizer, rate in (
        ({}, "tuned", "muon", 0.02),
        ({"model_name": "demo", "layers": "mamba2"}, "tuned", "muon", 0.02),
        ({"model_name": "mamba-130m"}, "published", "adamw", 0.003),
        ({"model_name": "llama3_8b"}, "published", "adamw", 3e-4),
        ({"init_from": "x"}, "published", "adamw", 3e-4),
        ({"recipe": "published"}, "published", "adamw", 3e-3),
        ({"init_from": "x", "recipe": "tuned"}, "tuned", "muon", 0.02),
        ({"optimizer": "adamw"}, "tuned", "adamw", 0.01),
        ({"learning_rate": "1e-3", "optimizer": "adamw"}, "tuned", "adamw", 1e-3),
    ):
        found = resolve_settings(given).optimizer
        assert (found.recipe, found.optimizer, found.learning_rate) == (
            recipe_name,
            optimizer,
            rate,
        ), given


def test_the_tuned_recipe_keeps_a_presets_data_and_replaces_its_optimizer_and_schedule():
    published = resolve_settings({"model_name": "mamba-130m"})
    tuned = resolve_settings({"model_name": "mamba-130m", "recipe": "tuned"})
    changed = differing(published, tuned).keys()
    assert changed <= {*vars(tuned.optimizer), *vars(tuned.lr_schedule)}
    assert {"optimizer", "learning_rate", "warmup_ratio"} <= changed


def test_the_tuned_learning_rate_follows_width_and_batch():
    usual = resolve_settings({}).optimizer.learning_rate
    for given, ratio in (
        ({"d_model": 256}, 0.5),
        ({"d_model": 64}, 1),
        ({"batch_size": 16}, 2**BATCH_EXPONENT),
        ({"gradient_accumulation_steps": 2}, 2**BATCH_EXPONENT),
        ({"global_batch_size": 16}, 2**BATCH_EXPONENT),
        ({"seq_length": 128}, 0.5**BATCH_EXPONENT),
        ({"batch_size": 1024}, MAX_BATCH_RATIO**BATCH_EXPONENT),
    ):
        given = {name: str(value) for name, value in given.items()}
        found = resolve_settings(given).optimizer.learning_rate
        assert found == pytest.approx(ratio * usual, rel=0.03), given


def test_settings_of_other_launchers_train_with_their_recipes():
    for word in ("state-spaces/mamba-130m", "state-spaces/mamba-130m-hf", "7b", "llama3_8b_4k"):
        settings = resolve_settings({"model_name": word})
        assert settings.lr_schedule.schedule == "fms_cosine" and settings.data.seq_length == 4096
        assert settings.optimizer.learning_rate == 3e-4 and not settings.training.global_batch_size
        recipe_name, _, _ = word.partition("/")
        assert (
            f"schedule=fms_cosine: from the recipe {recipe_name} in " in note_on_recipe(settings)[0]
        )
    assert resolve_settings({}, "bamba-9b").lr_schedule.schedule == "fms_cosine"


def test_given_weights_are_not_trained_at_the_rate_of_a_start_from_scratch():
    for given in ({"init_from": "x"}, {"load_ckpt_path": "x.pth", "model_name": "mamba-130m"}):
        settings = resolve_settings(given)
        assert settings.optimizer.learning_rate == 3e-4 and not settings.training.global_batch_size
