"""What can't be converted exactly is refused by name, nothing is executed, and nothing is left half-written."""

import json
import os
import pickle
import resource
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop import pth_files
from mamba_fsdp.interop.architectures import architecture_for
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.places import find_origin
from mamba_fsdp.interop.weights import read_description
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.parallel.world import World
from mamba_fsdp.settings.resolve import resolve_settings, shown
from mamba_fsdp.trainer.starting_point import adopt_weights
from tests.support.small_models import (
    CONFIGS,
    assert_same,
    random_state,
    write_ours,
)

pytestmark = pytest.mark.torch22


def exported(folder, name="mamba2", **options):
    return write_model(write_ours(folder / "ours", CONFIGS[name]), folder / "hf", **options)


def change_config(folder, **changes):
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))


def their_config(folder, name):
    """The config.json of one of CONFIGS as transformers has it."""
    config = CONFIGS[name]
    file = folder / "config.json"
    file.write_text(json.dumps(architecture_for(config).write_config(config)))
    return file


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(source, message, tmp_path):
    """Who writes it elsewhere is told so, and nothing is left behind."""
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UserError, match=message):
        write_model(source, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("mamba1", {"hidden_act": "gelu"}, "hidden_act is 'gelu', another activation; only 'silu'"),
        ("mamba1", {"conv_kernel": 8}, "conv_kernel is 8, but must be at most 4"),
        ("mamba2", {"time_step_limit": [0.01, 0.1]}, r"time_step_limit is \[0.01, 0.1\]; only \[0"),
        ("mamba2", {"head_dim": 0}, "head_dim is 0, but must be at least 1"),
        (
            "llama",
            {"num_hidden_layers": 10**8},
            "num_hidden_layers is 100000000, but must be at most",
        ),
        ("llama", {"hidden_size": 10**400}, "hidden_size is 10*, but must be at most"),
        ("llama", {"rope_parameters": None, "rope_theta": 10**400}, "rope_theta is 10*, not float"),
        ("hybrid", {"attn_layer_indices": ["x"]}, r"attn_layer_indices names layers \['x'\] of"),
        ("mamba2", {"n_groups": 3}, "ngroups 3 does not divide"),
        ("mamba2", {"hidden_size": None}, "hidden_size is missing"),
        ("mamba2", {"quantization_config": {"bits": 4}}, "a field that this program does not know"),
        ("hybrid", {"mamba_d_head": 5}, "SSM heads are 4, with 5 channels each, but"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3"}, "rope_parameters": None},
            "rope_scaling=llama3: its kind or a number is unknown or missing",
        ),
        ("llama", {"rope_theta": 5.0}, "rope_theta is given twice, as 5.0 and 10000.0"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small', not float"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequence"),
    ],
)
def test_fields_of_their_config_that_the_model_can_not_represent(name, changes, message, tmp_path):
    file = their_config(tmp_path, name)
    change_config(tmp_path, **changes)
    with pytest.raises(UserError, match=f"config.json: .*{message}"):
        read_description(file)


OTHER = {
    bool: lambda v: not v,
    int: lambda v: v + 1,
    float: lambda v: v * 2 + 1,
    str: lambda v: v + "x",
    list: lambda v: [*v, 0],
    dict: lambda v: {**v, "rope_theta": 7.0},
}
MEANINGLESS = {"architectures", "residual_in_fp32"}


@pytest.mark.parametrize("name", ["mamba1-untied-rank", "mamba2-untied-wide", "hybrid", "llama"])
def test_every_field_of_a_config_counts(name, tmp_path):
    """Each field that an export writes, set to something else, is refused or gives another model, unless it is known to
    mean nothing."""
    file = their_config(tmp_path, name)
    before = read_description(file).config
    original = json.loads(file.read_text())
    for field in original.keys() - MEANINGLESS:
        value = original[field]
        change_config(tmp_path, **original | {field: OTHER[type(value)](value)})
        try:
            assert read_description(file).config != before, field
        except UserError as error:
            assert str(error), field


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda tensors: tensors.pop("backbone.layers.1.mixer.D"),
            "it lacks backbone.layers.1.mixer.D",
        ),
        (lambda tensors: tensors.update(surprise=torch.ones(2)), "the model has no surprise"),
        (
            lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(2)}),
            r"model.safetensors holds layers that predict further tokens \(MTP\), .* transformers",
        ),
        (
            lambda tensors: tensors.update({"backbone.norm_f.weight": torch.ones(7)}),
            r"backbone.norm_f.weight is \(7,\), not \(32,\)",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(64, 32)}),
            "lm_head.weight differs from backbone.embeddings.weight",
        ),
    ],
)
def test_tensors_that_are_not_the_models(change, message, tmp_path):
    source = exported(tmp_path)
    change_tensors(source, change)
    refused(source, message, tmp_path)


def test_damaged_safetensors(tmp_path):
    file = exported(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    for damaged in (data[:-10], b"", data[:8] + b"?" + data[9:]):
        file.write_bytes(damaged)
        message = (
            r"model.safetensors \(.* bytes\) is cut short or damaged .*; copy or download it again$"
        )
        refused(file.parent, message, tmp_path)


def test_sharded_safetensors_with_something_wrong(tmp_path):
    source = exported(tmp_path)
    tensors = load_file(source / "model.safetensors")
    first, *others = tensors
    names = ["a.safetensors", "b.safetensors"]
    save_file({first: tensors.pop(first)}, source / names[0])
    save_file(tensors, source / names[1])
    (source / "model.safetensors").unlink()
    index = {"weight_map": {first: names[0], **dict.fromkeys(others, names[1])}}

    def with_index(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (source / "model.safetensors.index.json").write_text(text)

    with_index({"weight_map": {**index["weight_map"], first: names[1]}})
    refused(source, f"{names[1]} lacks {first}", tmp_path)
    for place in ("../ours/consolidated.00.pth", f"{tmp_path}/ours/consolidated.00.pth"):
        with_index({"weight_map": {**index["weight_map"], first: place}})
        refused(source, f"'{place[:9]}.*', not the name of a file in this folder", tmp_path)
    for content in ("{", "[]", '{"weight_map": 3}'):
        with_index(content)
        refused(source, "index.json: can't be read", tmp_path)
    with_index(index)
    (source / names[1]).unlink()
    (source / names[1]).mkdir()
    refused(source, f"can't read .*{names[1]}: Is a directory", tmp_path)
    (source / names[1]).rmdir()
    refused(source, f"{names[1]} is missing, but model.safetensors.index.json names it", tmp_path)


class Trap:
    """Unpickled without care, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["hf", "ours"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_execute_code(form, zipped, tmp_path):
    ours = write_ours(tmp_path / "ours", CONFIGS["mamba1"])
    source = ours if form == "ours" else write_model(ours, tmp_path / "source", format=form)
    if form == "hf":
        (source / "model.safetensors").unlink()
    path = source / ("consolidated.00.pth" if form == "ours" else "pytorch_model.bin")
    content = {"backbone.norm_f.weight": Trap(tmp_path / "executed")}
    torch.save(content, path) if zipped else path.write_bytes(pickle.dumps(content))
    refused(source, f"{path.name} is damaged or holds more than tensors", tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_pth(zipped, tmp_path):
    ours = write_ours(tmp_path / "ours", CONFIGS["mamba1"])
    path = ours / "consolidated.00.pth"
    if not zipped:
        torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for share in (0, 0.01, 0.5, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        refused(ours, r"consolidated.00.pth( \(.* bytes\))? is (cut short or )?damaged", tmp_path)


def test_sources_that_are_none(tmp_path):
    refused(
        "state-spaces/mamba-130m-hf",
        "no such file or folder; a model of the Hugging Face hub .* hf download NAME",
        tmp_path,
    )
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty holds no model", tmp_path)
    (tmp_path / "checkpoints").mkdir()
    refused(tmp_path, "neither a committed checkpoint nor a run folder with one", tmp_path)
    (tmp_path / "empty" / "config.json").write_text("{")
    refused(tmp_path / "empty", "config.json: can't be read", tmp_path)
    theirs = {"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    (tmp_path / "empty" / "config.json").write_text(json.dumps(theirs))
    refused(tmp_path / "empty", "no weights next to it", tmp_path)
    (tmp_path / "empty" / "config.json").write_text('{"d_model": 8, "n_layer": 1, "vocab_size": 9}')
    refused(tmp_path / "empty", "no weights next to it", tmp_path)
    (tmp_path / "notes.txt").write_text("some text\n")
    refused(tmp_path / "notes.txt", "notes.txt holds no weights: .*[^)]$", tmp_path)
    torch.save({"x": torch.ones(2)}, tmp_path / "lonely.pth")
    refused(tmp_path / "lonely.pth", "there is no config.json next to it", tmp_path)


def test_a_config_of_ours_that_was_edited_wrongly(tmp_path):
    ours = write_ours(tmp_path / "ours", CONFIGS["mamba1"])
    change_config(ours, d_model="64")
    refused(ours, "d_model is '64', but this program's models need: whole number, at l", tmp_path)
    change_config(ours, d_model=64, width=3)
    refused(ours, "width is not a setting of this program's models", tmp_path)


@pytest.mark.parametrize(
    "field, here, there",
    [
        ("norm_eps", "1e-05", 1e-6),
        ("tie_embeddings", "false", True),
    ],
)
def test_a_pth_to_go_on_from_that_is_of_another_model_in_what_no_shape_shows(
    field, here, there, tmp_path
):
    config = ModelConfig(
        layers="mamba2,attention",
        d_model=32,
        n_layer=2,
        headdim=16,
        n_head=4,
        n_kv_head=4,
        vocab_size=64,
        tie_embeddings=False,
    )
    settings = {name: shown(value) for name, value in vars(config).items()}

    def starts_from(folder):
        resolved = resolve_settings(
            {**settings, "load_ckpt_path": str(folder / "consolidated.00.pth")}
        )
        _, weights = adopt_weights(resolved, find_origin(resolved.checkpoint))
        return weights

    same = starts_from(write_ours(tmp_path / "same", config))
    assert_same(same.open(World.alone()), config, random_state(config))
    other = ModelConfig(**vars(config) | {field: there})
    folder = write_ours(tmp_path / "other", other)
    message = rf"load_ckpt_path .*/other/.*: {field}={here} \(there {shown(there)}\)$"
    with pytest.raises(UserError, match=message):
        starts_from(folder)
    (folder / "config.json").unlink()
    assert starts_from(folder).config.structure() == config.structure()


def test_layers_that_transformers_has_no_model_for(tmp_path):
    config = ModelConfig(layers="mamba1,mamba2", d_model=32, n_layer=2, vocab_size=40)
    ours = write_ours(tmp_path / "ours", config)
    with pytest.raises(
        UserError,
        match="no model with layers=mamba1,mamba2; it has MambaForCausalLM .layers mamba1 without MLP",
    ):
        write_model(ours, tmp_path / "out")
    assert os.listdir(tmp_path) == ["ours"]


def test_nothing_is_overwritten(tmp_path):
    source = exported(tmp_path)
    with pytest.raises(UserError, match="hf exists already; name a new folder"):
        write_model(tmp_path / "ours", source)


@pytest.mark.parametrize("step", ["write_safetensors", "safe_open"])
def test_a_disk_that_fills_up(step, tmp_path, monkeypatch):
    """While the tensors are put aside, and after that, while torch writes, which covers what the disk says."""
    source = exported(tmp_path)
    before = sorted(os.listdir(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    work = getattr(pth_files, step)

    def work_on_a_full_disk(*inputs, **how):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        return work(*inputs, **how)

    monkeypatch.setattr(pth_files, step, work_on_a_full_disk)
    try:
        with pytest.raises(UserError, match="can't write .*out: File too large"):
            write_model(source, tmp_path / "out", format="pth")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert sorted(os.listdir(tmp_path)) == before
