"""Whatever names a model gives its weights: a run, a checkpoint, a file, a folder; on any number of ranks, a parameter
at a time."""

import pytest
import torch
import transformers

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.weights import read_weights
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from tests.support.checkpoints import open_run, saved_state
from tests.support.small_models import (
    CONFIGS,
    assert_same,
    random_state,
    write_tokenizer,
)

pytestmark = pytest.mark.torch22
CONFIG = CONFIGS["hybrid"]


@pytest.fixture
def run(tmp_path):
    """A run folder with checkpoints of steps 1 and 2, and the tokenizer that a run keeps."""
    write_tokenizer(tmp_path / "run" / "tokenizer")
    world = World.alone()
    checkpointer = open_run(tmp_path / "run", world, asynchronous=False)
    for step in (1, 2):
        shards = [
            Shard(name, tuple(tensor.shape), 0, tensor.flatten())
            for name, tensor in random_state(CONFIG, seed=step).items()
        ]
        optimizer = [
            Shard(f"optimizer/{shard.name}/exp_avg", shard.shape, 0, torch.zeros_like(shard.data))
            for shard in shards
        ]
        state = saved_state(CONFIG, TrainState(step=step, tokens=64 * step), seq_length=24)
        checkpointer.save(step, shards + optimizer, state)
    return tmp_path / "run"


def test_a_broken_checkpoint_is_passed_over_and_said(run, capsys):
    (run / "checkpoints" / "step_00000002" / "rank_00000.safetensors").write_bytes(b"")
    assert_same(read_weights(run), CONFIG, random_state(CONFIG, seed=1))
    assert "step_00000002 is broken" in capsys.readouterr().out


@pytest.mark.parametrize("source", [".", "checkpoints/step_00000002"])
def test_a_run_is_published_and_exported_with_its_tokenizer(run, source):
    """What a run publishes at its end can itself be exported, by any of its names."""
    published = write_model(run / source, run / "pth" / "step_00000002", format="pth")
    assert_same(read_weights(published), CONFIG, random_state(CONFIG, seed=2))
    for name in (run / source, published, published / "consolidated.00.pth"):
        out = write_model(name, run / f"out-{len(list(run.iterdir()))}")
        config = transformers.AutoConfig.from_pretrained(out)
        assert (config.eos_token_id, config.max_position_embeddings) == (0, 24)
        assert transformers.AutoTokenizer.from_pretrained(out).eos_token_id == 0
        assert_same(read_weights(out), CONFIG, random_state(CONFIG, seed=2))
