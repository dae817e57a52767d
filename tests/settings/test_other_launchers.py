"""Tests that the published settings of other launchers are translated to settings with the same meaning."""

from pathlib import Path

import pytest
import yaml

from mamba_fsdp import command_line
from mamba_fsdp.errors import UserError
from mamba_fsdp.settings import other_launchers, resolve
from mamba_fsdp.settings.train_config import all_settings, setting_names

PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())


WORDS = {word: meant for words in PUBLISHED.values() for word, meant in words.items()}


@pytest.mark.parametrize("word", WORDS)
def test_a_published_setting_of_another_launcher_is_translated(word):
    name, _, value = word.partition("=")
    meant = WORDS[word] or {}
    if isinstance(meant, str):
        with pytest.raises(UserError) as caught:
            resolve.resolve_settings({name: value})
        assert meant in str(caught.value) and "did you mean" not in str(caught.value)
        return
    settings = resolve.resolve_settings({name: value})
    written = {}
    for section in resolve.as_dict(settings).values():
        written |= section
    assert {key: written[key] for key in settings.explicit - {"recipe"}} == meant
    assert not settings.explicit & {"recipe"} or written["recipe"] == "published"
    renamed = next(iter(meant), "") != name
    leaf = name.rpartition(".")[2]
    is_told = any(note.startswith(leaf) for note in settings.notes)
    assert is_told or not renamed, "the log says what it became"


@pytest.mark.slow
def test_every_argument_of_the_trainer_is_translated_or_refused():
    """Every argument of transformers' Trainer is a setting, is translated, or is refused with a reason. Its default
    value is accepted, except for None if the corresponding setting always has a value."""
    import dataclasses

    from transformers import TrainingArguments

    fields = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    assert not fields.keys() - setting_names().keys() - other_launchers.load_entries().keys()
    refused = set()
    for name, value in fields.items():
        if value is not dataclasses.MISSING:
            try:
                resolve.resolve_settings({name: str(value)})
            except UserError:
                refused.add(name)
    ours = "activation_checkpointing gradient_checkpointing eval_steps save_total_limit"
    assert refused == set(ours.split())


def test_each_entry_names_existing_settings():
    for entry in other_launchers.load_entries().values():
        assert entry.setting in {"", *all_settings()} and (entry.setting or entry.why), entry


def test_a_missing_config_file_of_another_launcher_names_the_ready_run():
    with pytest.raises(UserError, match="use --config=wikitext103 for this run"):
        resolve.resolve_settings({}, "configs/mamba_130m.yaml")
    with pytest.raises(UserError, match="give a path, a model's name or one of bamba-9b"):
        resolve.resolve_settings({}, "mine.yaml")


def test_a_flag_that_begins_with_no_is_not_a_negation():
    assert command_line.split_arguments(["--no_wandb", "--resume", "--tracker=x"])[1] == {
        "no_wandb": "True",
        "resume": "True",
        "tracker": "x",
    }


def test_two_names_of_a_setting_must_agree():
    def resolved(**given):
        return resolve.resolve_settings(given)

    settings = resolved(bf16="true", fp16="false")
    assert settings.training.mixed_precision == "bf16"
    assert settings.notes[0] == "bf16=true is mixed_precision=bf16 here"
    assert resolved(use_wandb="False", tracker="tensorboard").report.tracker == ["tensorboard"]
    several = resolved(tracker="tensorboard,wandb", use_wandb="true")
    assert several.report.tracker == ["tensorboard", "wandb"]
    for both in ({"bf16": "true", "fp16": "true"}, {"seq_len": "8", "seq_length": "16"}):
        with pytest.raises(UserError, match="given twice"):
            resolved(**both)
    assert resolved(seq_len="8", seq_length="8").data.seq_length == 8


def test_all_mistakes_are_reported_at_once(tmp_path):
    file = tmp_path / "composer.yaml"
    file.write_text(
        "data: {seq_len: 64, n_samples_to_skip: 5}\nscheduler: {name: step, t_wramup: 3ba}\n"
        "fsdp: {sharding_strategy: SHARD_GRAD_OP, verbose: true}\ntrainer: {eval_subset_num_batches: 16}\n"
    )
    with pytest.raises(UserError) as caught:
        resolve.resolve_settings({"batch_size": "two", "sharding_strategy": "fsdp"}, str(file))
    message = str(caught.value)
    assert "6 mistakes:" in message
    mistakes = "batch_size=two n_samples_to_skip=5 name=step t_wramup SHARD_GRAD_OP eval_subset"
    assert all(word in message for word in mistakes.split())


def test_a_section_of_another_launcher_is_only_a_prefix(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "data: {global_batch_size: 16, micro_batch_size: 8}\noptimizer: {lr: 1e-3}\n"
        "fsdp: {limit_all_gathers: false, activation_checkpointing: true}\n"
        "model: {activation_checkpointing: true}\nwandb: {project: mine}\ngeneral: {full_name: one}\n"
        "tracker: wandb\n"
    )
    settings = resolve.resolve_settings({}, str(file))
    assert (settings.training.global_batch_size, settings.optimizer.learning_rate) == (16, 1e-3)
    assert (settings.report.wandb_project, settings.report.wandb_name) == ("mine", "one")
