"""Tests that only rank 0 opens all files of the token stores when a run starts on several ranks."""

import os
import sys

import pytest

from mamba_fsdp.trainer.run import acquire_and_find_start
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.setup import RunSetup
from tests.support.checkpoints import quiet
from tests.support.corpora import write_store
from tests.support.ranks import run_ranks
from tests.support.tiny import TINY, resolved

pytestmark = [pytest.mark.slow, pytest.mark.torch22]


def files_opened_at_start(world, settings):
    """Prepares a run, and returns the names of the store's files that this rank has opened."""
    opened = []

    def notice(event, arguments):
        if (
            event == "open"
            and arguments[1]
            and str(arguments[0]).endswith((".bin", ".doc", "index.json"))
        ):
            opened.append(os.path.basename(arguments[0]))

    sys.addaudithook(notice)
    folder = RunFolder(settings.checkpoint.save_ckpt_path)
    start = world.on_rank0(acquire_and_find_start, settings, folder, world, quiet)
    RunSetup(start, world, folder, quiet).make_context()
    return sorted(opened)


def test_only_rank0_opens_the_files_of_a_store_at_the_start(tmp_path):
    """At the start of a run, rank 0 opens every file of the store, and other ranks open none: they open a file when
    they first read from it."""
    how = dict(vocab_size=64, eos=0, tokenizer="none", shard_tokens=100)
    store = write_store(tmp_path / "store", [range(1, 10)] * 40, **how)
    places = {"dataset_path": store.path, "save_ckpt_path": tmp_path / "run"}
    unvalidated = {"validation_path": "none", "eval_interval": 0, "eval_batches": -1}
    settings = resolved(**TINY | places | unvalidated)
    files = [f"{number:05d}.{suffix}" for number in range(4) for suffix in ("bin", "doc")]
    first, second = run_ranks(2, files_opened_at_start, settings)
    index = first.count("index.json")  # how often it was opened
    assert first == [*sorted(files), *["index.json"] * index] and second == []
