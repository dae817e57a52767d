"""Settings: what is written is what is used, and what can't be is refused with the reason."""

import dataclasses
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import settings
from config.train_config import Duration, TrainConfig
from mamba_fsdp.errors import UserError


def resolve(config_file=None, **given_words):
    return settings.resolve(given_words, config_file)[0]


def refused(**given_words):
    with pytest.raises(UserError) as caught:
        resolve(**given_words)
    return str(caught.value)


def test_leaf_section_and_alias_name_the_same_setting(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("optimizer:\n  learning_rate: 3e-4\n")
    flat = tmp_path / "b.yaml"
    flat.write_text("learning_rate: 3e-4\n")
    values = [resolve(learning_rate="3e-4"), resolve(**{"optimizer.learning_rate": "3e-4"}), resolve(str(file)), resolve(str(flat))]
    assert {config.optimizer.learning_rate for config in values} == {3e-4}
    assert resolve(ckpt_save_path="x").checkpoint.save_ckpt_path == resolve(save_ckpt_path="x").checkpoint.save_ckpt_path == "x"
    assert resolve(model_variant="mamba-130m").model == resolve(model_name="mamba-130m").model


def test_command_line_beats_file_beats_preset_beats_default(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("model_name: mamba-130m\nn_layer: 3\nd_state: 8\n")
    model = resolve(str(file), d_state="4").model
    assert (model.d_state, model.n_layer, model.d_model, model.expand) == (4, 3, 768, 2)


@pytest.mark.parametrize("text", ["0123", "1e3", "true", "None", "[a]", "a=b"])
def test_text_stays_text(text, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(f"save_ckpt_path: '{text}'\n")
    assert resolve(save_ckpt_path=text).checkpoint.save_ckpt_path == text
    assert resolve(str(file)).checkpoint.save_ckpt_path == text


def test_a_run_id_with_a_leading_zero_survives_fire(project):
    done = subprocess.run([sys.executable, "-m", "mamba_fsdp", "settings", "save_ckpt_path", "--", "--save_ckpt_path=0123"],
                          cwd=project, capture_output=True, text=True)
    assert done.stdout == "0123\n", done.stderr


def test_false_is_false():
    assert resolve(tie_embeddings="False").model.tie_embeddings is False
    assert resolve(mixed_precision="False").training.mixed_precision == "fp32"
    assert "expected true or false" in refused(tie_embeddings="maybe")


@pytest.mark.parametrize("words, message", [
    ({"learing_rate": "1"}, "did you mean learning_rate"),
    ({"model.learning_rate": "1"}, "did you mean learning_rate"),
    ({"batch_size": "two"}, "batch_size=two: expected a whole number"),
    ({"batch_size": "2.5"}, "expected a whole number"),
    ({"batch_size": "0"}, "must be at least 1"),
    ({"learning_rate": "nan"}, "finite"),
    ({"learning_rate": "0"}, "must be above 0"),
    ({"schedule": "cosin"}, "one of cosine, wsd"),
    ({"num_steps": "ten"}, "no duration"),
    ({"num_steps": "1.5"}, "no duration"),
    ({"model_name": "mamba-131m"}, "mamba-130m"),
    ({"layers": "mamba3"}, "can't read 'mamba3'"),
    ({"layers": "0*mamba1"}, "names no layer"),
    ({"seq_length": "8", "data.seq_length": "9"}, "given twice"),
    ({"weights": "1,2", "datasets": "a"}, "one weight each"),
    ({"weights": "0,0", "datasets": "a,b"}, "all zero"),
    ({"global_batch_size": "9", "batch_size": "2"}, "no multiple"),
    ({"load_ckpt_path": "a", "init_from": "b"}, "give one"),
    ({"resuming_dataset": "true"}, "needs load_ckpt_path"),
    ({"resuming_dataset": "true", "load_ckpt_path": "a.pth"}, "needs load_ckpt_path"),
    ({"selective_checkpointing": "1/3"}, "does nothing without fsdp_activation_checkpointing"),
    ({"selective_checkpointing": "2", "fsdp_activation_checkpointing": "true"}, "above 0 and at most 1"),
    ({"selective_checkpointing": "1/0", "fsdp_activation_checkpointing": "true"}, "above 0 and at most 1"),
    ({"reentrant_checkpointing": "true"}, "does nothing without"),
    ({"decay_steps": "5"}, "belongs to schedule=wsd"),
    ({"layers": "mamba2", "headdim": "48"}, "does not divide"),
    ({"layers": "mamba2", "headdim": "64", "ngroups": "3"}, "does not divide"),
    ({"layers": "attention+mlp"}, "d_intermediate"),
    ({"d_intermediate": "64"}, "no layer"),
    ({"layers": "attention", "n_head": "6", "n_kv_head": "6"}, "does not divide d_model"),
    ({"layers": "attention", "n_kv_head": "3"}, "does not divide n_head"),
    ({"layers": "attention", "rotary_dim": "7"}, "must be even"),
])
def test_mistakes_are_refused_with_the_reason(words, message):
    assert message in refused(**words)


def test_a_wrong_file_is_refused_by_name(tmp_path):
    for content, message in (("a: [", "can't be read as YAML"), ("- 1\n", "name: value"), ("sed: 3\n", "did you mean seed"),
                             ("optimizer: 3\n", "is a section"), ("seed: 1\ntraining: {seed: 2}\n", "given twice"),
                             ("seed: 1\nd_model: 8\nseed: 2\n", "seed is given twice")):
        file = tmp_path / "wrong.yaml"
        file.write_text(content)
        with pytest.raises(UserError, match="wrong.yaml") as caught:
            resolve(str(file))
        assert message in str(caught.value)
    with pytest.raises(UserError, match="there is no file nowhere.yaml"):
        resolve("nowhere.yaml")


@given(st.integers(0, 10 ** 13), st.sampled_from(["steps", "tok"]), st.integers(1, 10 ** 7))
def test_a_duration_reads_what_it_writes_and_rounds_up(count, unit, tokens_per_step):
    duration = Duration.parse(str(Duration(count, unit)))
    assert duration == Duration(count, unit)
    steps = duration.steps(tokens_per_step)
    assert steps == count if unit == "steps" else (steps - 1) * tokens_per_step < count <= steps * tokens_per_step


def test_resolved_settings_survive_their_own_yaml(tmp_path):
    file = tmp_path / "resolved.yaml"
    before = resolve(datasets="a,b", weights="1,3", num_steps="5tok", layers="2*mamba1", mixed_precision="fp16")
    file.write_text(settings.as_yaml(before))
    assert resolve(str(file)) == before


def test_help_names_every_setting_with_its_meaning_and_bounds():
    page = settings.help_page()
    for section in dataclasses.fields(TrainConfig):
        for leaf in dataclasses.fields(section.default_factory):
            assert re.search(rf"--{leaf.name}=.*\(.+\)\n +\S", page), leaf.name
            assert all(alias in page for alias in leaf.metadata["aliases"])


def test_help_imports_neither_torch_nor_transformers(project):
    code = ("import runpy, sys; sys.argv = ['training.py', '--help']\n"
            "try: runpy.run_path('training.py', run_name='__main__')\n"
            "except SystemExit as done: assert done.code == 0\n"
            "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy imports'")
    subprocess.run([sys.executable, "-c", code], cwd=project, check=True, capture_output=True)


def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(project):
    done = subprocess.run([sys.executable, "training.py", "--learing_rate=1"], cwd=project, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: learing_rate: there is no such setting (on the command line); did you mean learning_rate?\n"
    done = subprocess.run([sys.executable, "training.py", "stray"], cwd=project, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: stray: settings are written --name=value\n")


def test_the_ready_runs_are_what_they_say(project):
    tokens_per_step = {}
    for file in sorted((project / "config").glob("*.yaml")):
        config = resolve(file.stem)
        assert config.checkpoint.save_ckpt_path == f"runs/{file.stem}" and config.data.dataset_path.startswith("data/")
        tokens_per_step[file.stem] = (config.training.global_batch_size or config.training.batch_size) * config.data.seq_length
    assert tokens_per_step == {"demo": 2048, "wikitext103": 65_536, "mambaoutai": 3_670_016, "bamba-9b": 1_572_864}
    outai = resolve("mambaoutai")
    assert outai.training.num_steps.steps(3_670_016) == 109_003 and outai.lr_schedule.warmup_steps.steps(3_670_016) == 275
