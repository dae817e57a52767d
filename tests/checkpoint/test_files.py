"""Reading and writing says block by block that it gets on: a slow disk is no hang."""

import os

import pytest
import torch

from mamba_fsdp.checkpoint import files
from mamba_fsdp.heartbeat import heart

pytestmark = pytest.mark.torch22


@pytest.fixture
def beats(monkeypatch):
    """beats(action) -> how often the heart beats in it; blocks are of 100 bytes."""
    monkeypatch.setattr(files, "BLOCK", 100)

    def count(action):
        before = heart.work
        action()
        return heart.work - before

    return count


def test_every_block_written_verified_or_read_is_a_sign_of_life(tmp_path, beats):
    path, tensor = tmp_path / "file", torch.arange(1000.0)
    assert (
        beats(lambda: files.write_pieces(path, [("a", 0, tensor)])) >= 2 * 40
    )  # written, then read back
    assert beats(lambda: files.checksum(path)) >= 40
    reader, target = files.PieceReader(tmp_path, ["a"]), torch.empty(250)
    reader.read("file", "a", 0, 0, target)  # the header too
    assert beats(lambda: reader.read("file", "a", 0, 500, target)) == 10
    assert torch.equal(target, tensor[500:750])


def test_what_is_written_is_flushed_as_it_goes(tmp_path, monkeypatch, beats):
    """One flush of a large file at its end could take longer than a hang may."""
    flushed = []
    sync = os.fsync
    monkeypatch.setattr(files, "FLUSH", 1000)
    monkeypatch.setattr(
        os, "fsync", lambda file: flushed.append(os.fstat(file).st_size) or sync(file)
    )
    files.write_pieces(tmp_path / "file", [("a", 0, torch.zeros(500)), ("b", 0, torch.zeros(500))])
    assert len(flushed) >= 4 and all(
        after - before <= 2200 for before, after in zip([0, *flushed], flushed)
    )
    assert flushed[-1] == (tmp_path / "file").stat().st_size
