"""Tests mamba_fsdp.checkpoint.files: it reports progress after each block, so that a slow disk does not look like a
hang, fills shards while it verifies a file, and flushes a file in parts."""

import os

import pytest
import torch

from mamba_fsdp.checkpoint import files
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.this_process import progress

pytestmark = pytest.mark.torch22


def test_every_written_verified_or_read_block_counts_as_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WRITE_BLOCK_BYTES", 100)
    monkeypatch.setattr(files, "READ_BLOCK_BYTES", 100)

    def count_progress(action, *given):
        before = progress.count
        action(*given)
        return progress.count - before

    path = tmp_path / "file"
    tensor = torch.arange(1000.0)
    # The file is written, then read back.
    assert count_progress(files.write_pieces, path, [("a", 0, tensor)]) >= 2 * 40
    assert count_progress(files.compute_checksum, path) >= 40
    shard = Shard("a", (1000,), 0, torch.zeros(1000))
    assert count_progress(files.hash_file, path, path.stat().st_size, {"a": shard}) >= 40


@pytest.mark.parametrize("start, stop", [(0, 1000), (250, 260), (250, 800), (650, 1000)])
def test_hash_file_fills_a_shard_with_the_elements_in_a_file(tmp_path, start, stop):
    """hash_file fills a shard with the elements that the verified file, or its verified first part, contains.

    The tensor's last 100 elements are not in this file.
    """
    path = tmp_path / "file"
    tensor = torch.arange(1000.0)
    pieces = [("a", at, tensor[at : at + 300]) for at in (0, 300, 600)]
    written = files.write_pieces(path, pieces, model_pieces=2)
    for part, held in ((written, 900), (written.model, 600)):
        shard = Shard("a", (1000,), start, torch.full((stop - start,), -1.0))
        read = files.hash_file(path, part.bytes, {"a": shard})
        assert read.xxh3 == part.xxh3
        filled = sum(last - first for first, last in read.filled.get("a", []))
        assert filled == max(0, min(stop, held) - start)
        expected = torch.where(tensor < held, tensor, -1)
        assert torch.equal(shard.data, expected[start:stop])


@pytest.mark.parametrize("from_disk", [True, False])
def test_a_file_is_flushed_in_parts(tmp_path, monkeypatch, from_disk):
    """A file is flushed after every FLUSH_BYTES. A single flush at the end of a large file could take longer than the
    timeout of the watchdog."""
    flushed = []
    sync = os.fsync
    monkeypatch.setattr(files, "WRITE_BLOCK_BYTES", 100)
    monkeypatch.setattr(files, "FLUSH_BYTES", 1000)

    def note(file):
        flushed.append(os.fstat(file).st_size)
        sync(file)

    monkeypatch.setattr(os, "fsync", note)
    zeros = torch.zeros(500)
    pieces = [("a", 0, zeros), ("b", 0, zeros)]
    files.write_pieces(tmp_path / "file", pieces, from_disk=from_disk)
    assert 4 <= len(flushed) <= 6 and flushed[-1] == (tmp_path / "file").stat().st_size
    assert all(after - before <= 2200 for before, after in zip([0, *flushed], flushed))
