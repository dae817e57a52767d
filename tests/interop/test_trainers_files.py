"""Checkpoints of other trainers, as fms-fsdp, Composer and torch.distributed.checkpoint write them: the same model, and
nothing executed."""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.convert import write_model, write_pth_folder
from mamba_fsdp.interop.weights import find_weights, read_weights
from mamba_fsdp.parallel.world import World
from mamba_fsdp.verbs import inspect
from tests.support.small_models import (
    CONFIGS,
    assert_same,
    model_of,
    random_state,
    write_ours,
    write_tokenizer,
)

pytestmark = pytest.mark.torch22
CONFIG = CONFIGS["hybrid"]
LLAMA = CONFIGS["llama-grouped"]


def opened(path, config=CONFIG):
    return find_weights(path, config).open(World.alone())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"step": 3, "tokens_seen": 99, "model_state": state},
        lambda state: {
            "model_state": {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
        },
        lambda state: {
            "model": {
                re.sub(r"(layers\.\d+)", r"\1._checkpoint_wrapped_module", name): tensor
                for name, tensor in state.items()
            },
            "epoch": 2,
        },
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        lambda state: {
            "state": {"model": {f"model.{name}": tensor for name, tensor in state.items()}}
        },
    ],
    ids=["fms", "compiled", "checkpointed", "ddp", "composer"],
)
@pytest.mark.parametrize("name", ["hybrid", "mamba1"])
def test_the_model_is_found_among_what_a_trainer_saves(wrap, name, tmp_path):
    state = random_state(CONFIGS[name])
    torch.save(wrap(state), tmp_path / "ep0-ba3-rank0.pt")
    assert_same(opened(tmp_path / "ep0-ba3-rank0.pt", CONFIGS[name]), CONFIGS[name], state)


def test_two_models_in_one_file_are_not_chosen_from(tmp_path):
    state = random_state(CONFIG)
    torch.save({"model": state, "ema": random_state(CONFIG, seed=2)}, tmp_path / "two.pt")
    with pytest.raises(
        UserError, match="two.pt holds 2 models, under ema. and model.; save one of them alone"
    ):
        opened(tmp_path / "two.pt")


def as_fms(state, config, fused, top):
    """Our Llama under fms' names, its heads rotated in neighbouring rows."""

    def neighbours(rows):
        return (
            rows.view(-1, 2, config.resolved_head_dim // 2, rows.shape[1])
            .transpose(1, 2)
            .reshape(rows.shape)
        )

    embedding, head, prefix = top
    found = {
        embedding: state["backbone.embedding.weight"],
        f"{prefix}dec_norm.weight": state["backbone.norm_f.weight"],
        head: state.get("lm_head.weight", state["backbone.embedding.weight"]),
    }
    for index in range(config.n_layer):
        ours, theirs = f"backbone.layers.{index}.", f"{prefix}layers.{index}."
        heads = [
            config.resolved_head_dim * count
            for count in (config.n_head, config.n_kv_head, config.n_kv_head)
        ]
        query, key, value = state[ours + "mixer.in_proj.weight"].split(heads)
        up, gate = state[ours + "mlp.fc1.weight"].chunk(2)
        attention = {"query": neighbours(query), "key": neighbours(key), "value": value}
        if fused:
            parts = {
                "attn.in_proj.qkv_fused": torch.cat([*attention.values()]),
                "ff_sub_layer.wg1_fused": torch.cat([gate, up]),
            }
        else:
            place = "attn.in_proj." if prefix else "attn."
            parts = {
                "ff_sub_layer.wg": gate,
                "ff_sub_layer.w1": up,
                **{place + name: rows for name, rows in attention.items()},
            }
        parts |= {
            "attn.dense": state[ours + "mixer.out_proj.weight"],
            "ln": state[ours + "norm.weight"],
            "ff_sub_layer.w2": state[ours + "mlp.fc2.weight"],
            "ff_ln": state[ours + "norm2.weight"],
        }
        found |= {f"{theirs}{name}.weight": tensor.clone() for name, tensor in parts.items()}
    return found


def fms_logits(state, tokens, config):
    """fms' Llama (fused names of today) as its papers say it: neighbours of a head are turned together."""

    def norm(x, name):
        return (
            F.rms_norm(x, x.shape[-1:], state[f"base_model.{name}.weight"], config.norm_eps)
            if hasattr(F, "rms_norm")
            else x
            * x.pow(2).mean(-1, True).add(config.norm_eps).rsqrt()
            * state[f"base_model.{name}.weight"]
        )

    size, length = config.resolved_head_dim, tokens.shape[1]
    angles = torch.outer(
        torch.arange(length), config.rope_theta ** -(torch.arange(0, size, 2) / size)
    )
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    x = F.embedding(tokens, state["base_model.embedding.weight"])
    for index in range(config.n_layer):
        layer = f"layers.{index}."
        weights = {
            name: state[f"base_model.{layer}{name}.weight"]
            for name in (
                "attn.in_proj.qkv_fused",
                "attn.dense",
                "ff_sub_layer.wg1_fused",
                "ff_sub_layer.w2",
            )
        }
        heads = F.linear(norm(x, layer + "ln"), weights["attn.in_proj.qkv_fused"]).unflatten(
            -1, (-1, size)
        )
        query, key, value = heads.split([config.n_head, config.n_kv_head, config.n_kv_head], dim=2)
        query, key = (
            torch.view_as_real(
                torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn
            ).flatten(-2)
            for part in (query, key)
        )
        key, value = (
            part.repeat_interleave(config.n_head // config.n_kv_head, dim=2)
            for part in (key, value)
        )
        scores = torch.einsum("blhd,bmhd->bhlm", query, key) / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf).softmax(
            -1
        )
        x = x + F.linear(
            torch.einsum("bhlm,bmhd->blhd", scores, value).flatten(-2), weights["attn.dense"]
        )
        gate, up = F.linear(norm(x, layer + "ff_ln"), weights["ff_sub_layer.wg1_fused"]).chunk(
            2, dim=-1
        )
        x = x + F.linear(F.silu(gate) * up, weights["ff_sub_layer.w2"])
    return F.linear(norm(x, "dec_norm"), state["head.weight"])


NEW = "base_model.embedding.weight", "head.weight", "base_model."
OLD = "shared.emb.weight", "shared.head.weight", ""


@pytest.mark.parametrize("top", [NEW, OLD], ids=["new", "old"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["llama", "llama-grouped"])
def test_fms_llama(name, fused, top, tmp_path):
    config, state = CONFIGS[name], random_state(CONFIGS[name])
    theirs = as_fms(state, config, fused, top)
    torch.save({"model_state": theirs}, tmp_path / "consolidated.00.pth")
    weights = opened(tmp_path / "consolidated.00.pth", config)
    assert_same(weights, config, state)
    assert torch.equal(
        weights.slice("backbone.layers.1.mixer.in_proj.weight", 7, 95),
        state["backbone.layers.1.mixer.in_proj.weight"].flatten()[7:95],
    )
    if fused and top is NEW:
        tokens = torch.randint(0, config.vocab_size, (2, 21))
        with torch.no_grad():
            torch.testing.assert_close(
                model_of(config, weights.get)(tokens),
                fms_logits(theirs, tokens, config),
                rtol=2e-4,
                atol=2e-5,
            )


def test_a_folder_of_torch_distributed_checkpoint(tmp_path):
    """Its index is a pickle of classes: refused, as are the folder around it and its parts, with the line that converts
    it."""
    folder = tmp_path / "step_3_ckp"
    folder.mkdir()
    (folder / ".metadata").touch()
    (folder / "__0_0.distcp").touch()
    line = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} {folder}.pth"
    for place in (folder, folder.parent, folder / "__0_0.distcp"):
        with pytest.raises(
            UserError, match=f"{folder} is a folder of torch.distributed.*: {line}$"
        ):
            opened(place, LLAMA)


def test_a_file_without_config_json(tmp_path, capsys):
    """Its preset is named, and every tensor is checked; the message and inspect say which one it may be."""
    from config.model_config import ModelConfig
    from config.presets import preset

    demo = ModelConfig(**preset("demo"))
    state = random_state(demo)
    torch.save(state, tmp_path / "lonely.pth")
    with pytest.raises(UserError, match="no config.json beside it, .* name its preset"):
        read_weights(tmp_path / "lonely.pth")
    with pytest.raises(UserError, match="does not fit the model"):
        read_weights(tmp_path / "lonely.pth", model_name="mamba-130m")
    assert_same(read_weights(tmp_path / "lonely.pth", model_name="demo"), demo, state)
    write_pth_folder(tmp_path / "lonely.pth", tmp_path / "ours", model_name="demo")
    assert_same(read_weights(tmp_path / "ours"), demo, state)
    torch.save({"model_state": random_state(CONFIG)}, tmp_path / "other.pth")
    inspect.main(str(tmp_path / "other.pth"), inspect.Options())
    said = capsys.readouterr().out
    assert "name its preset, as in --model_name" in said and re.search(
        r"  backbone.layers.0.mixer.A_log +\(", said
    )


def test_export_takes_a_tokenizer(tmp_path):
    config, state = CONFIGS["mamba2"], random_state(CONFIGS["mamba2"])
    ours = write_ours(tmp_path / "ours", config, state)
    tokenizer = write_tokenizer(tmp_path / "letters")
    with pytest.raises(UserError, match="tokenizer=.*/ours holds no tokenizer"):
        write_model(ours, tmp_path / "hf", tokenizer=str(ours))
    write_model(ours, tmp_path / "hf", tokenizer=str(tokenizer))
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 0
