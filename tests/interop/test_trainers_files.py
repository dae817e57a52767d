"""Tests that checkpoints of fms-fsdp and Composer are read with the same weights as ours."""

import re
from functools import partial

import pytest
import torch

from mamba_fsdp.interop.weights import find_weights
from mamba_fsdp.ops.attention import rotary
from mamba_fsdp.parallel.world import World
from tests.support.small_models import (
    CONFIGS,
    assert_same,
    random_state,
)

pytestmark = pytest.mark.torch22
CONFIG = CONFIGS["hybrid"]
LLAMA = CONFIGS["llama-grouped"]


def opened(path, config=CONFIG):
    return find_weights(path, config).open(World.alone())


def under(prefix, state):
    return {prefix + name: tensor for name, tensor in state.items()}


def checkpointed(state):
    wrapped = r"\1._checkpoint_wrapped_module"
    return {re.sub(r"(layers\.\d+)", wrapped, name): tensor for name, tensor in state.items()}


def test_the_model_is_found_in_the_checkpoint_of_another_trainer(tmp_path):
    """The weights are found in checkpoints of fms-fsdp, whether the model was plain, compiled, recomputing or wrapped
    by DDP, and in checkpoints of Composer."""
    state = random_state(CONFIG)
    for content in (
        {"step": 3, "tokens_seen": 99, "model_state": state},
        {"model_state": under("_orig_mod.", state)},
        {"model": checkpointed(state), "epoch": 2},
        under("module.", state),
        {"state": {"model": under("model.", state)}},
    ):
        torch.save(content, tmp_path / "ep0-ba3-rank0.pt")
        assert_same(opened(tmp_path / "ep0-ba3-rank0.pt"), CONFIG, state)


def as_neighbours(rows, size):
    """Returns the rows of each head in the order of fms: rows that are rotated together are adjacent, instead of half
    a head apart."""
    return rows.view(-1, 2, size // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def test_rotary_positions_of_fms_are_converted_to_ours():
    """If the channels of a head are reordered, our rotary positions equal those of fms, which rotates adjacent
    channels as complex numbers."""
    size, length = 12, 21
    rows = torch.randn(size, length)
    ours = rotary(rows.T[None, :, None], torch.arange(length), size, 1e4)[0, :, 0].T
    angles = torch.outer(torch.arange(length), 1e4 ** -(torch.arange(0, size, 2) / size))
    pairs = as_neighbours(rows, size).T.unflatten(-1, (-1, 2)).contiguous()
    turned = torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angles), angles)
    theirs = torch.view_as_real(turned).flatten(-2).T
    torch.testing.assert_close(as_neighbours(ours, size), theirs)


def as_fms(state, config, fused, top):
    """Returns the weights of our Llama with the names and the order of rows that fms uses. fused: whether fms stores
    the projections of a layer in fused matrices. top: (name of the embedding, name of the head, prefix of all other
    names)."""
    neighbours = partial(as_neighbours, size=config.resolved_head_dim)
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


NEW = "base_model.embedding.weight", "head.weight", "base_model."
OLD = "shared.emb.weight", "shared.head.weight", ""


@pytest.mark.parametrize("top", [NEW, OLD], ids=["new", "old"])
@pytest.mark.parametrize("fused", [True, False])
def test_fms_llama(fused, top, tmp_path):
    config, state = LLAMA, random_state(LLAMA)
    theirs = as_fms(state, config, fused, top)
    torch.save({"model_state": theirs}, tmp_path / "consolidated.00.pth")
    weights = opened(tmp_path / "consolidated.00.pth", config)
    assert_same(weights, config, state)
    assert torch.equal(
        weights.slice("backbone.layers.1.mixer.in_proj.weight", 7, 95),
        state["backbone.layers.1.mixer.in_proj.weight"].flatten()[7:95],
    )
