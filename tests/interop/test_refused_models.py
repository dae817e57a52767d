"""Tests that a model that can't be converted exactly is refused with the name of the field, and that no incomplete
output remains."""

import dataclasses
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.architectures import architecture_for
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.weights import find_weights, read_description
from mamba_fsdp.parallel.world import World
from tests.support.small_models import BAMBA, CONFIGS, random_state, write_ours
from tests.support.tiny import model_config

MAMBA1 = CONFIGS["mamba1"]
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
# {name: fields of a config.json} in the formats of transformers, of published models, of state-spaces and of this
# program.
BASES = {name: architecture_for(config).write_config(config) for name, config in CONFIGS.items()}
BASES |= {name: published["config"] for name, published in PUBLISHED.items()}
BASES |= {"bamba": BAMBA, "ours": dataclasses.asdict(MAMBA1)}
MAMBA2 = {"layer": "Mamba2"}
FIELDS = [  # (base, changed fields, part of the message)
    ("mamba1", {"hidden_act": "gelu"}, "hidden_act is 'gelu', another activation; only 'silu'"),
    ("mamba1", {"model_type": "gpt2"}, "models of type 'gpt2' with architectures .*reads Mamba"),
    (
        "mamba2",
        {"time_step_limit": [0.01, float("inf")]},
        r"time_step_limit is \[0.01, inf\]; only",
    ),
    ("mamba2", {"head_dim": 0}, "head_dim is 0, but must be at least 1"),
    ("mamba2", {"hidden_size": None}, "hidden_size is missing"),
    ("mamba2", {"quantization_config": {"bits": 4}}, "a field that this program does not know"),
    ("llama", {"hidden_size": 10**400}, "hidden_size is 10*, but must be at most"),
    ("llama", {"rope_theta": 5.0}, "rope_theta is given twice, as 5.0 and 10000.0"),
    ("llama", {"rope_scaling": {"type": "su"}, "rope_parameters": None}, "is 'su'; this program"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear"}},
        "rope_scaling=linear: the kind is unknown, or",
    ),
    ("hybrid", {"attn_layer_indices": ["x"]}, r"attn_layer_indices lists layers \['x'\], but"),
    ("hybrid", {"mamba_d_head": 5}, "SSM heads .4 with 5 channels each. do not match the"),
    ("hybrid", {"partial_rotary_factor": 0.4, "rope_parameters": None}, "0.4 rotates 3 of 8 ch"),
    (
        "granite-4.0-h-micro",
        {"layer_types": ["mamba"]},
        "num_hidden_layers is 40, but the config lists 1 layer",
    ),
    ("falcon-h1-7b", {"mlp_multipliers": [1.0]}, "mlp_multipliers has 1 numbers, not 2"),
    ("nemotron-h-8b", {"hybrid_override_pattern": "MX"}, "has 'X', not a layer that this"),
    ("nemotron-h-8b", {"hybrid_override_pattern": "ME*E"}, "has 'E', a mixture of experts,"),
    ("bamba", {"ssm_cfg": {"layer": "Mamba4"}}, "ssm_cfg.layer is 'mamba4'"),
    (
        "bamba",
        {"ssm_cfg": MAMBA2 | {"dt_limit": [0.0, 0.5]}},
        r"ssm_cfg.dt_limit is \[0.0, 0.5\]; only",
    ),
    ("bamba", {"ssm_cfg": [3]}, "ssm_cfg. is not a JSON object"),
    ("bamba", {"attn_cfg": {"num_heads": 32}}, "attn_cfg.causal is None|is None, .* only False"),
    ("ours", {"width": 3}, "width is not a model setting of mamba_fsdp"),
]
NO_LIMITS = [float("inf"), "inf", "Infinity", {"__float__": "Infinity"}, 3.4e38, 1e39]


@pytest.fixture
def config_file(tmp_path):
    """Returns a function config_file(base, **changes), which writes a config.json and returns its path."""

    def write(base, **changes):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(BASES[base] | changes))
        return file

    return write


@pytest.mark.parametrize("no_limit", [None, *([0.0, high] for high in NO_LIMITS)])
def test_limits_of_dt_without_effect_are_ignored(no_limit, config_file):
    file = config_file("mamba2", time_step_limit=no_limit)
    assert read_description(file).config == read_description(config_file("mamba2")).config


@pytest.mark.parametrize(("base", "changes", "words"), FIELDS)
def test_a_field_that_the_model_can_t_represent_is_refused_by_name(
    config_file, base, changes, words
):
    with pytest.raises(UserError, match=f"config.json: .*({words})"):
        read_description(config_file(base, **changes))


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
def test_every_field_of_a_config_counts(name, config_file):
    """If any field of an exported config.json is changed, the model is refused or differs. The exceptions, in
    MEANINGLESS, have no effect."""
    before = read_description(config_file(name)).config
    for field in BASES[name].keys() - MEANINGLESS:
        value = BASES[name][field]
        other = config_file(name, **{field: OTHER[type(value)](value)})
        try:
            assert read_description(other).config != before, field
        except UserError as error:
            assert str(error), field


TO_STATE_SPACES = [
    ("layers=mamba1,mamba2", "can't have layers=mamba1,mamba2"),
    ("layers=mamba1+mlp,mamba1", "can't have layers=mamba1.mlp,mamba1"),
    ("norm_eps=1e-6", "can't have norm_eps=1e-06"),
    ("layers=mamba1+mlp d_intermediate=130", "can't have d_intermediate=130"),
]


@pytest.mark.parametrize(("settings", "words"), TO_STATE_SPACES)
def test_a_model_that_mamba_ssm_can_t_build_is_not_exported(tmp_path, settings, words):
    ours = write_ours(tmp_path / "ours", model_config(f"n_layer=2 {settings}"))
    refused(ours, words, tmp_path, format="state-spaces")


def refused(source, words, folder, **how):
    """Asserts that an export fails with this message, and that no files remain."""
    before = sorted(os.listdir(folder))
    with pytest.raises(UserError, match=words):
        write_model(source, folder / "out", **how)
    assert sorted(os.listdir(folder)) == before


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Returns a folder with a Mamba-2 model in our format (`ours`) and in the format of transformers (`hf`)."""
    folder = tmp_path_factory.mktemp("exports")
    write_model(write_ours(folder / "ours", CONFIGS["mamba2"]), folder / "hf")
    return folder


@pytest.fixture
def exported(exports, tmp_path):
    """Returns a copy of the model `hf` that a test can change."""
    return shutil.copytree(exports / "hf", tmp_path / "hf")


ONES = torch.ones(7)
D = "backbone.layers.1.mixer.D"
TIED = "backbone.embeddings.weight"
MTP = r"model.safetensors contains layers for multi-token prediction \(MTP\), .* transformers"


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (D, None, f"{D} is missing"),
        ("surprise", ONES, "the model has no surprise"),
        ("mtp.fc.weight", ONES, MTP),
        (
            "backbone.norm_f.weight",
            ONES,
            r"backbone.norm_f.weight has the shape \(7,\), not \(32,\)",
        ),
        ("lm_head.weight", torch.ones(64, 32), f"lm_head.weight differs from {TIED}"),
    ],
)
def test_tensors_of_another_model_are_refused(exported, tmp_path, name, tensor, words):
    """A file with missing, additional or differently shaped tensors is refused. Some buffers of older Llamas, and a
    tied layer that is stored twice, are accepted."""
    file = exported / "model.safetensors"
    tensors = load_file(file)
    for harmless in ("lm_head.weight", "model.layers.0.rotary_emb.inv_freq"):
        save_file({**tensors, harmless: tensors[TIED].clone()}, file, {"format": "pt"})
        find_weights(exported).open(World.alone())
    tensors[name] = tensor
    if tensor is None:
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    refused(exported, words, tmp_path)


def test_damaged_sharded_safetensors_are_refused(exported, tmp_path):
    """Sharded safetensors are refused if the index contains a path outside of the folder or a wrong file for a
    tensor, or if a file is damaged or missing."""
    tensors = load_file(exported / "model.safetensors")
    (exported / "model.safetensors").unlink()
    first, *others = tensors
    save_file({first: tensors.pop(first)}, exported / "a.safetensors")
    save_file(tensors, exported / "b.safetensors")
    weight_map = {first: "a.safetensors", **dict.fromkeys(others, "b.safetensors")}
    outside = {**weight_map, first: "../ours/consolidated.00.pth"}

    def with_index(content):
        (exported / "model.safetensors.index.json").write_text(content)

    for content, words in (
        ({"weight_map": {**weight_map, first: "b.safetensors"}}, f"b.safetensors lacks {first}"),
        ({"weight_map": outside}, "'../ours.*', not the name of a file in this folder"),
    ):
        with_index(json.dumps(content))
        refused(exported, words, tmp_path)
    with_index(json.dumps({"metadata": {}, "weight_map": weight_map}))
    find_weights(exported).open(World.alone())
    (exported / "b.safetensors").write_bytes(b"?" * 20)
    words = r"b.safetensors \(20 bytes\) is incomplete or damaged .*; copy or download it again$"
    refused(exported, words, tmp_path)
    (exported / "b.safetensors").unlink()
    refused(
        exported, "b.safetensors is missing, but listed in model.safetensors.index.json", tmp_path
    )


HF_CONFIG = '{"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9}'
OUR_CONFIG = '{"d_model": 8, "n_layer": 1, "vocab_size": 9}'
NO_MODELS = {  # {"existing file and its content": (path given by the user, part of the message)}
    "folder/x": (
        "folder",
        "a folder that no command accepts .x., not a model; name a run, a checkpoint",
    ),
    "folder/config.json {": ("folder", "config.json: can't be read"),
    f"folder/config.json {HF_CONFIG}": (
        "folder",
        "no weights next to it; add model.safetensors or",
    ),
    f"folder/config.json {OUR_CONFIG}": (
        "folder",
        "no weights next to it; add consolidated.00.pth or",
    ),
    "notes.txt text": ("notes.txt", "notes.txt: text, not a model"),
    "folder/COMMIT": (
        "folder/COMMIT",
        "a file of the checkpoint in .*, not a model; name .*folder$",
    ),
}


@pytest.mark.parametrize("file", NO_MODELS)
def test_a_path_without_a_model_is_refused(tmp_path, file):
    name, _, content = file.partition(" ")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    place, words = NO_MODELS[file]
    refused(tmp_path / place, words, tmp_path)


def test_two_models_in_one_file_are_refused(tmp_path):
    state = random_state(MAMBA1)
    torch.save({"model": state, "ema": dict(state)}, tmp_path / "two.pt")
    with pytest.raises(
        UserError, match="two.pt contains 2 models, under ema. and model.; save only one"
    ):
        find_weights(tmp_path / "two.pt", MAMBA1).open(World.alone())


def test_a_folder_of_torch_distributed_checkpoint(tmp_path):
    """A checkpoint of torch.distributed, its parent folder and its files are refused with a command that converts it,
    because the index of such a checkpoint is a pickle of classes."""
    folder = tmp_path / "step_3_ckp"
    folder.mkdir()
    (folder / ".metadata").touch()
    (folder / "__0_0.distcp").touch()
    line = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} {folder}.pth"
    words = f"{folder} is a folder of torch.distributed.*: .*{line}$"
    for place in (folder, folder.parent, folder / "__0_0.distcp"):
        with pytest.raises(UserError, match=words):
            find_weights(place, MAMBA1).open(World.alone())


@pytest.mark.parametrize("share", [0.5, 0.999])
def test_a_full_disk_ends_an_export_with_an_error(exports, tmp_path, share):
    """An export to a full disk is an error of one line, whether the disk fills up while tensors are stored
    temporarily, or while torch writes the file, which hides the error of the disk."""
    whole = write_model(exports / "hf", tmp_path / "whole", format="pth") / "consolidated.00.pth"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(whole.stat().st_size * share), limits[1]))
    try:
        words = "can't write .*out: File too large"
        refused(exports / "hf", words, tmp_path, format="pth")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
