"""Who reads what of a checkpoint: over all ranks each byte once, and no moments where only weights are wanted."""

import io
import json
import os
import re
import shutil
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from config import resolve
from mamba_fsdp.checkpoint import files
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.train.optimizer import make_optimizer
from mamba_fsdp.train.setup import build_model, choose_backends
from mamba_fsdp.train.start import start
from mamba_fsdp.train.state import TrainState
from mamba_fsdp.verbs.loading import starting_weights
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch22

MODEL = {
    "d_model": "32",
    "n_layer": "2",
    "vocab_size": "64",
    "layers": "mamba1,mamba2",
    "headdim": "16",
    "mixed_precision": "fp32",
    "kernels": "reference",
    "allow_other_tokenizer": "true",
}
READ = Counter()  # bytes that this rank has read, by (what for, part of the file)
STATES = []  # what opened state.json


class Counted(io.FileIO):
    """A file of a checkpoint that notes who reads how much of its header, its model and its moments."""

    def __init__(self, path, reader):
        super().__init__(path)
        self.reader, self.parts = reader, {"state": (0, sys.maxsize)}
        if path.suffix == ".safetensors":
            head = 8 + int.from_bytes(self.read(8), "little")
            model = json.loads((path.parent / "COMMIT").read_text())["files"][path.name]["model"][
                "bytes"
            ]
            self.parts = {
                "header": (0, head),
                "model": (head, model),
                "moments": (model, sys.maxsize),
            }
            self.seek(0)

    def readinto(self, buffer):
        before, count = self.tell(), super().readinto(buffer)
        for part, (low, high) in self.parts.items():
            READ[self.reader, part] += max(0, min(high, before + count) - max(low, before))
        return count


def count_reads():
    def counted_open(path, mode="r", **options):
        return Counted(path, "fill") if mode == "rb" else open(path, mode, **options)

    def note(event, arguments):
        if event == "open" and str(arguments[0]).endswith("state.json"):
            STATES.append(arguments[0])

    files.open, files.FileIO = counted_open, lambda path: Counted(path, "checksum")
    sys.addaudithook(note)


def parts_of(world, run, given):
    settings, explicit = resolve.resolve_settings({**MODEL, "save_ckpt_path": str(run), **given})
    source = starting_weights(settings, explicit)
    before = Counter(READ), len(STATES)
    parallel = build_model(settings, world, choose_backends(settings, world, lambda text: None))
    optimizer = make_optimizer(
        parallel.parameters(), parameters(settings.model), settings.optimizer, world.device
    )
    return (
        settings,
        SimpleNamespace(tokenizer=""),
        parallel,
        optimizer,
        Checkpointer(run, world),
        source,
    ), before


def save(world, run):
    parts, _ = parts_of(world, run, {})
    settings, _, parallel, optimizer, checkpointer, _ = parts
    start(*parts, lambda text: None)
    shards, state = parallel.shards(optimizer), TrainState(step=3)
    checkpointer.save(3, shards, state.saved(settings, world.size))
    checkpointer.wait()


def begin(world, run, given):
    """(bytes read before the ranks met, after it, how often state.json was opened then, bytes of the rank's shards), or
    the error."""
    count_reads()
    parts, (before, opened) = parts_of(world, run, given)
    _, _, parallel, optimizer, _, source = parts
    try:
        start(*parts, lambda text: None)
    except UserError as error:
        return str(error)
    shards = parallel.shards(None if source else optimizer)
    return before, READ - before, len(STATES) - opened, sum(shard.data.nbytes for shard in shards)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("saved") / "run"
    run_ranks(3, save, run)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, way", [(3, "init_from"), (4, "init_from"), (2, "resume"), (3, "resume")]
)
def test_each_byte_is_read_once_and_again_only_by_who_holds_it(saved, tmp_path, ranks, way):
    """All ranks together read each byte once, and what lies in other files than a rank has verified: for init_from
    the tensors of which some does. It reads no moments, and nothing but state.json before the ranks meet; rank 0 reads
    state.json for all."""
    given = {"init_from": str(saved)} if way == "init_from" else {}
    results = run_ranks(ranks, begin, tmp_path / "new" if given else saved, given)
    commit = json.loads((saved / "checkpoints/step_00000003/COMMIT").read_text())["files"]
    state = commit.pop("state.json")["bytes"]
    assert all(
        before == ({("checksum", "state"): state} if given else {}) for before, *_ in results
    )
    together = sum((reads for _, reads, _, _ in results), Counter())
    whole = [entry["model"] if given else entry for entry in commit.values()]
    headers = together["checksum", "header"] // 2  # says where the pieces lie, and is verified
    assert headers + together["checksum", "model"] + together["checksum", "moments"] == sum(
        entry["bytes"] for entry in whole
    )
    again, held = (
        together["fill", "model"] + together["fill", "moments"],
        sum(held for *_, held in results),
    )
    spare = (
        together["checksum", "model"] + together["checksum", "moments"]
    )  # has come while verified
    # On as many ranks only what all of them hold and others have written is read again.
    assert (
        again == held - spare
        if ranks == 3
        else held - spare <= again < (held if given else 0.4 * held)
    )
    assert (
        together["checksum", "state"] == state and sum(opened for _, _, opened, _ in results) == 2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "offset, message", [(-5, None), (5000, "none of the 1 checkpoints .* content of rank_00001")]
)
def test_init_from_demands_that_the_weights_are_whole_and_no_more(saved, tmp_path, offset, message):
    """A broken moment does not matter; a broken weight is refused in the same words on all ranks."""
    run = shutil.copytree(saved, tmp_path / "run")
    with open(run / "checkpoints/step_00000003/rank_00001.safetensors", "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    results = run_ranks(2, begin, tmp_path / "new", {"init_from": str(run)})
    if message:
        assert results[0] == results[1] and re.search(message, results[0])
    else:
        assert all(
            reads["fill", "model"] <= held and not reads["fill", "moments"]
            for _, reads, _, held in results
        )
