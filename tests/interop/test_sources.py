"""Tests that weights can be read from a run, a checkpoint, a file or a folder, with their tokenizer and dtype."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
import transformers

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop import convert
from mamba_fsdp.interop.convert import publish, write_mean, write_model
from mamba_fsdp.interop.places import Origin, find_origin
from mamba_fsdp.interop.weights import read_weights
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.presets import preset
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.settings.train_config import CheckpointConfig
from mamba_fsdp.verbs import average
from tests.support.checkpoints import open_run, saved_state
from tests.support.disk import Disk
from tests.support.small_models import (
    CONFIGS,
    assert_same,
    random_state,
    write_ours,
    write_tokenizer,
)

pytestmark = pytest.mark.torch22
CONFIG = CONFIGS["hybrid"]


@pytest.fixture
def run(tmp_path):
    """Creates a run folder with checkpoints of steps 1 and 2, and a tokenizer. Returns its path."""
    write_tokenizer(tmp_path / "run" / "tokenizer")
    checkpointer = open_run(tmp_path / "run", asynchronous=False)
    for step in (1, 2):
        save(checkpointer, step, CONFIG, "made of it")
    return tmp_path / "run"


def save(checkpointer, step, config, tokenizer):
    shards = []
    for name, tensor in random_state(config, seed=step).items():
        flat = tensor.flatten()
        shape = tuple(tensor.shape)
        shards.append(Shard(name, shape, 0, flat))
        shards.append(Shard(f"optimizer/{name}/exp_avg", shape, 0, torch.zeros_like(flat)))
    state = saved_state(config, TrainState(step=step, tokenizer=tokenizer), seq_length=24)
    checkpointer.save(step, shards, state)


def test_the_mean_of_checkpoints_is_a_model_with_their_tokenizer(run, monkeypatch):
    monkeypatch.setattr(convert, "ELEMENTS_PER_CHUNK", 100)
    models = [run / f"checkpoints/step_0000000{step}" for step in (1, 2)]
    write_mean(models, [0.25, 0.75], run / "mean")
    mean = read_weights(run / "mean")
    one, two = (random_state(CONFIG, seed) for seed in (1, 2))
    expected = {name: 0.25 * one[name].double() + 0.75 * two[name].double() for name in one}
    assert_same(mean, CONFIG, {name: tensor.float() for name, tensor in expected.items()})
    assert mean.tokenizer_path == run / "mean/tokenizer"


def test_different_models_have_no_mean(run, call, tmp_path):
    """Models that differ in their config or tokenizer can't be averaged, even if their tensors have the same shapes. An
    average is also refused if the sum of its weights is infinite."""
    checkpointer = open_run(tmp_path / "other", asynchronous=False)
    save(checkpointer, 1, replace(CONFIG, norm_eps=0.1), "made of it")
    save(checkpointer, 3, CONFIG, "another")
    larger = open_run(tmp_path / "larger", asynchronous=False)
    save(larger, 1, replace(CONFIG, vocab_size=99), "made of it")
    ours = run / "checkpoints/step_00000002"
    messages = {
        "other/checkpoints/step_00000001": "the models differ in norm_eps; choose",
        "other/checkpoints/step_00000003": "the models differ in tokenizer; choose",
        "larger/checkpoints/step_00000001": r"does not fit the model: .*embedding.weight has the shape .1",
    }
    for checkpoint, message in messages.items():
        with pytest.raises(UserError, match=message):
            write_mean([tmp_path / checkpoint, ours], [0.5, 0.5], tmp_path / "mean")
    code, output = call(average, run, tmp_path / "mean", "--last=2", "--weights=1e308,1e308")
    assert code == 2 and "their sum must be positive and finite" in output
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("source", [".", "checkpoints/step_00000002"])
def test_a_run_is_published_and_exported_with_its_tokenizer(run, source):
    """The model that a run publishes contains the weights and the tokenizer of the run. It can be exported from the
    path of the run, the folder of the published model, or the file in this folder."""
    published = run / "pth" / "step_00000002"
    published.parent.mkdir(exist_ok=True)
    publish(run / source, published)
    assert_same(read_weights(published), CONFIG, random_state(CONFIG, seed=2))
    assert next(read_weights(run / source).tokenizer_identities()) == "made of it"
    for number, name in enumerate((run / source, published, published / "consolidated.00.pth")):
        out = write_model(name, run / f"out-{number}")
        config = transformers.AutoConfig.from_pretrained(out)
        assert (config.eos_token_id, config.max_position_embeddings) == (0, 24)
        assert transformers.AutoTokenizer.from_pretrained(out).eos_token_id == 0
        generation = json.loads((out / "generation_config.json").read_text())
        padding = [61, 62, 63]  # token ids that only pad the vocabulary to 64
        assert generation == {"eos_token_id": 0, "pad_token_id": 0, "suppress_tokens": padding}
        assert_same(read_weights(out), CONFIG, random_state(CONFIG, seed=2))


def test_an_export_contains_the_given_tokenizer(tmp_path):
    """An export contains the given tokenizer and its eos. Without a tokenizer, its config does not have the default
    special tokens of transformers."""
    ours = write_ours(tmp_path / "ours", CONFIGS["mamba2"])
    tokenizer = write_tokenizer(tmp_path / "letters")
    with pytest.raises(UserError, match="/ours: a model, not a tokenizer; "):
        write_model(ours, tmp_path / "hf", tokenizer=str(ours))
    write_model(ours, tmp_path / "hf", tokenizer=str(tokenizer))
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 0
    write_model(ours, tmp_path / "without")
    assert json.loads((tmp_path / "without" / "config.json").read_text())["eos_token_id"] is None
    assert sorted(os.listdir(tmp_path / "without")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("format", ["hf", "state-spaces"])
def test_a_chosen_dtype_keeps_parameters_that_must_be_fp32(format, tmp_path):
    state = random_state(CONFIGS["mamba1"])
    ours = write_ours(tmp_path / "ours", CONFIGS["mamba1"], state)
    weights = read_weights(write_model(ours, tmp_path / "out", format=format, dtype="bf16"))
    for name, tensor in state.items():
        expected = tensor
        if not name.endswith((".A_log", ".D", ".dt_proj.bias")):
            expected = tensor.bfloat16()
        assert torch.equal(weights.get(name), expected), name
    if format == "hf":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["torch_dtype"] == "bfloat16"


def test_a_file_without_config_json(tmp_path):
    """A file without a config.json can be read with the name of its preset, and every tensor is compared with the
    preset. The error for a missing name explains how to find it."""
    demo = ModelConfig(**preset("demo"))
    state = random_state(demo)
    file = tmp_path / "lonely.pth"
    torch.save(state, file)
    with pytest.raises(UserError, match="no config.json next to it, .* give its preset.* inspect"):
        read_weights(file)
    with pytest.raises(UserError, match="does not fit the model"):
        read_weights(file, model_name="mamba-130m")
    write_model(file, tmp_path / "ours", format="pth", model_name="demo")
    assert_same(read_weights(tmp_path / "ours"), demo, state)


def test_the_own_checkpoint_of_a_run_has_priority_over_a_named_one(run, tmp_path):
    """A run starts from its own checkpoint, otherwise from init_from or load_ckpt_path, otherwise from random
    weights. It is an error if the path of init_from or load_ckpt_path does not exist."""
    own, new, nowhere = (str(place) for place in (run, tmp_path / "new", tmp_path / "nowhere"))
    file = str(tmp_path / "a.pth")
    (tmp_path / "a.pth").touch()
    for words, origin in (
        ({"save_ckpt_path": own, "init_from": nowhere}, Origin("save_ckpt_path", own, True)),
        ({"init_from": own}, Origin("init_from", own)),
        ({"load_ckpt_path": new}, Origin()),
        ({"load_ckpt_path": own}, Origin("load_ckpt_path", own, True)),
        ({"load_ckpt_path": file}, Origin("load_ckpt_path", file)),
    ):
        found = find_origin(CheckpointConfig(**{"save_ckpt_path": new, **words}))
        assert found == origin and found.is_own == (origin.path == own and len(words) == 2)
    for name in ("init_from", "load_ckpt_path"):
        with pytest.raises(UserError, match="nowhere: there is no such file or folder"):
            find_origin(CheckpointConfig(save_ckpt_path=new, **{name: nowhere}))


def test_a_single_storage_error_does_not_end_an_export(run, tmp_path, monkeypatch):
    """If any single call of the storage fails, the mean of checkpoints and the published model are still complete."""
    checkpoints = [run / f"checkpoints/step_0000000{step}" for step in (1, 2)]
    place = tmp_path / "out"

    def prepare():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()

    def write_all(_):
        write_mean(checkpoints, [0.25, 0.75], place / "mean")
        publish(run, place / "pth")

    def read():
        files = ("mean/model.safetensors", "pth/config.json")
        return [(place / name).read_bytes() for name in files]

    disk = Disk(monkeypatch, tmp_path)
    disk.check_single_failures(prepare, write_all, read, step=5)
    assert len(disk.calls) > 50
