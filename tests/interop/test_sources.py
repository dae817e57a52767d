"""Whatever names a model gives its weights: a run, a checkpoint, a file, a folder; on any number of ranks, a parameter
at a time."""

import pytest
import torch
import transformers

from config.resolve import resolve_settings
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.interop.convert import write_model, write_pth_folder
from mamba_fsdp.interop.weights import read_weights
from mamba_fsdp.parallel.model import Shard, fill_parts
from mamba_fsdp.parallel.world import World
from mamba_fsdp.train.state import TrainState
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
    """A run folder with checkpoints of steps 1 and 2, and the tokenizer that a run keeps."""
    write_tokenizer(tmp_path / "run" / "tokenizer")
    settings, _ = resolve_settings({"seq_length": "24"})
    settings.model = CONFIG
    world = World.alone()
    checkpointer = Checkpointer(tmp_path / "run", world, asynchronous=False)
    for step in (1, 2):
        shards = [
            Shard(name, tuple(tensor.shape), 0, tensor.flatten())
            for name, tensor in random_state(CONFIG, seed=step).items()
        ]
        optimizer = [
            Shard(f"optimizer/{shard.name}/exp_avg", shard.shape, 0, torch.zeros_like(shard.data))
            for shard in shards
        ]
        checkpointer.save(
            step, shards + optimizer, TrainState(step=step, tokens=64 * step).saved(settings, 1)
        )
    return tmp_path / "run"


def test_a_broken_checkpoint_is_passed_over_and_said(run, capsys):
    (run / "checkpoints" / "step_00000002" / "rank_00000.safetensors").write_bytes(b"")
    assert_same(read_weights(run), CONFIG, random_state(CONFIG, seed=1))
    assert "step_00000002 is broken" in capsys.readouterr().out


@pytest.mark.parametrize("source", [".", "checkpoints/step_00000002"])
def test_a_run_is_published_and_exported_with_its_tokenizer(run, source):
    """What a run publishes at its end can itself be exported, by any of its names."""
    published = write_pth_folder(run / source, run / "pth" / "step_00000002")
    assert_same(read_weights(published), CONFIG, random_state(CONFIG, seed=2))
    for name in (run / source, published, published / "consolidated.00.pth"):
        out = write_model(name, run / f"out-{len(list(run.iterdir()))}")
        config = transformers.AutoConfig.from_pretrained(out)
        assert (config.eos_token_id, config.max_position_embeddings) == (0, 24)
        assert transformers.AutoTokenizer.from_pretrained(out).eos_token_id == 0
        assert_same(read_weights(out), CONFIG, random_state(CONFIG, seed=2))


@pytest.mark.parametrize("ranks", [1, 3])
def test_shards_of_any_number_of_ranks_are_filled(ranks, tmp_path):
    """From files whose rows lie elsewhere (q, k, v; up, gate), each rank gets its own part of each of our
    parameters."""
    state = random_state(CONFIG)
    weights = read_weights(
        write_model(write_ours(tmp_path / "ours", CONFIG, state), tmp_path / "hf")
    )
    filled = {name: torch.empty(tensor.numel()) for name, tensor in state.items()}
    for rank in range(ranks):
        shards = []
        for name, tensor in state.items():
            start, stop = (tensor.numel() * edge // ranks for edge in (rank, rank + 1))
            shards.append(Shard(name, tuple(tensor.shape), start, filled[name][start:stop]))
        fill_parts(shards, weights.slice)
    for name, tensor in state.items():
        assert torch.equal(filled[name].view(tensor.shape), tensor)


def test_one_parameter_is_read_at_a_time(tmp_path):
    """Opening reads no tensor, and a `get` reads only its own, whatever the form."""
    state = random_state(CONFIG)
    ours = write_ours(tmp_path / "ours", CONFIG, state)
    foreign = [write_model(ours, tmp_path / form, format=form) for form in ("hf", "state-spaces")]
    for source in (ours, *foreign):
        weights = read_weights(source)
        read = []

        def record(name, *part, read=read, original=weights.tensors.slice):
            read.append(name)
            return original(name, *part)

        weights.tensors.slice = record
        weights.get("backbone.layers.2.mixer.in_proj.weight")
        assert len(read) == (3 if source.name == "hf" else 1)
