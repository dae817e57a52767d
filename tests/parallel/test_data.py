"""The token stores of a run on several ranks: who looks at their files, and when."""

import os
import sys

import pytest

from mamba_fsdp.trainer.run import begin
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.setup import SetUp
from tests.support.checkpoints import quiet
from tests.support.corpora import write_store
from tests.support.ranks import run_ranks
from tests.support.tiny import TINY, resolved

pytestmark = [pytest.mark.slow, pytest.mark.torch22]
SETTINGS = {
    **TINY,
    "seq_length": 8,
    "batch_size": 1,
    "num_workers": 1,
    "validation_path": "none",
    "eval_interval": 0,
    "eval_batches": -1,
}


@pytest.fixture
def store(tmp_path):
    """A store of four files."""
    how = dict(vocab_size=64, eos=0, tokenizer="none", shard_tokens=100)
    return write_store(tmp_path / "store", [range(1, 10)] * 40, **how)


def start_and_read(world, settings):
    """Files of the store that were opened at the start, and while everything was read."""
    opened = []

    def notice(event, arguments):
        if event == "open" and str(arguments[0]).endswith((".bin", ".doc", "index.json")):
            opened.append(os.path.basename(arguments[0]))

    sys.addaudithook(notice)
    folder = RunFolder(settings.checkpoint.save_ckpt_path)
    start = world.on_rank0(begin, settings, folder, world, quiet)
    context = SetUp(start, world, folder, quiet).context()
    at_start = sorted(opened)
    opened.clear()
    with context.loader:
        for step in range(30):
            context.loader.step(step)
    return at_start, sorted(opened)


def test_one_rank_looks_at_all_files_at_the_start_and_the_others_when_they_read(store, tmp_path):
    files = sorted(f"{number:05d}.{suffix}" for number in range(4) for suffix in ("bin", "doc"))
    settings = resolved(**SETTINGS, dataset_path=store.path, save_ckpt_path=tmp_path / "run")
    (at_start, _), (others_at_start, when_read) = run_ranks(2, start_and_read, settings)
    assert at_start == [*files, "index.json"] and others_at_start == []
    assert when_read == files, "each file once"
