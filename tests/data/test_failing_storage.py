"""Tests that an import on storage with transient errors takes longer, but writes the same bytes."""

import errno
import gzip
import os
import shutil

import datasets
import numpy as np
import pytest

from mamba_fsdp.errors import StorageError
from mamba_fsdp.importing import make_dataset, token_files
from mamba_fsdp.importing.inputs import InputFile
from mamba_fsdp.importing.kinds import LeftOut, content_kind, files_below, reader_of
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage import retry
from tests.support.corpora import content, make_texts, write_records
from tests.support.disk import Disk
from tests.support.foreign_tokens import write_layout

pytestmark = pytest.mark.torch22


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "MAX_PAUSE", 0.0)
    monkeypatch.setattr(make_dataset, "SAVE_SECONDS", 0.0)
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Returns {name: a folder of inputs}: "words" contains text in each format, "ids" contains token ids."""
    root = tmp_path_factory.mktemp("sources")
    texts = make_texts(40)
    rows = datasets.Dataset.from_dict({"text": texts})
    words = root / "words"
    (words / "deeper").mkdir(parents=True)
    (words / "a.txt").write_text("\n".join(texts))
    (words / "b.txt.gz").write_bytes(gzip.compress("\n".join(texts).encode()))
    write_records(words / "deeper/c.jsonl", texts)
    rows.to_csv(words / "d.csv")
    rows.to_parquet(words / "e.parquet")
    rows.save_to_disk(words / "f")
    ids = np.array([1, 2, 0, 3, 0] * 50, np.uint16)
    (root / "ids").mkdir()
    np.save(root / "ids/a.npy", ids)
    (root / "ids/b.bin").write_bytes(ids.tobytes())
    return {"words": root / "words", "ids": root / "ids"}


OPTIONS = {
    "words": {"validation_fraction": 0.2, "shard_tokens": 8000},
    "ids": {"tokenizer": "none", "eos_token": "0", "vocab_size": 4, "dtype": "uint16"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_single_storage_error_does_not_end_an_import(folder, sources, prepare, monkeypatch, name):
    """If any single call of the storage fails, the import succeeds, leaves out no document, and writes the same
    bytes."""

    def copy_input():
        shutil.rmtree(folder)
        shutil.copytree(sources[name], folder / "in")

    def run_import(_):
        assert prepare(folder / "in", folder / "out", **OPTIONS[name])

    disk = Disk(monkeypatch, folder)
    disk.check_single_failures(copy_input, run_import, lambda: content(folder / "out"))
    assert len(disk.calls) > 50


def test_reads_and_flushes_that_fail_are_repeated(folder, sources, prepare, monkeypatch):
    """An import writes the same bytes if every second read of an input fails, and every second flush fails and loses
    the data that was written since the previous flush."""
    assert prepare(sources["words"], folder / "well", **OPTIONS["words"])
    (folder / "empty").touch()
    calls = {"readv": 0, "fsync": 0}
    readv = os.readv

    def fails(call):
        calls[call] += 1
        return calls[call] % 2

    def failing_readv(descriptor, buffers):
        if fails("readv"):
            number = (errno.EIO, errno.ESTALE)[calls["readv"] % 4 // 2]
            # All further calls with a stale descriptor fail.
            with open(folder / "empty") as empty:
                empty.seek(os.lseek(descriptor, 0, os.SEEK_CUR))
                os.dup2(empty.fileno(), descriptor)
            raise OSError(number, os.strerror(number))
        return readv(descriptor, buffers)

    written = {}

    def failing_fsync(descriptor):
        before = written.get(os.fstat(descriptor).st_ino, 0)
        if fails("fsync"):
            os.ftruncate(descriptor, before)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        written[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "readv", failing_readv)
    monkeypatch.setattr(os, "fsync", failing_fsync)
    assert prepare(sources["words"], folder / "out", **OPTIONS["words"])
    assert content(folder / "out") == content(folder / "well")
    assert min(calls.values()) > 5


@pytest.mark.parametrize("name", ["a.npy", "b.bin", "layout/c.npy"])
def test_token_files_that_become_shorter_are_refused(folder, prepare, monkeypatch, name):
    """A token file that is truncated while it is read is an error. Token files are not mapped into memory, because
    accessing a page that can't be read would end the process with SIGBUS."""
    monkeypatch.setattr(token_files, "WINDOW", 100)
    ids = np.arange(1, 20_000, dtype=np.uint16)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if name == "a.npy":
        np.save(path, ids)
    elif name == "b.bin":
        ids.tofile(path)
    else:
        write_layout(path, [ids])
    kinds = {"layout/c.npy": "datalayout"}
    file = InputFile(str(path), kinds.get(name, "ids"))
    options = DatasetConfig(**OPTIONS["ids"])
    documents = reader_of(file.kind)(file, options)
    assert next(documents).content.tolist() == ids[:100].tolist()
    os.truncate(path, 20_000)
    with pytest.raises(ValueError, match="the file became shorter while it was read"):
        list(documents)


def test_a_file_that_storage_fails_to_read_is_not_left_out(folder, monkeypatch, prepare):
    """A storage error ends an import even with --skip_unreadable, which is for damaged files.

    The same is true while the kind of a file is determined: without an extension, it depends on the first bytes of
    the file.
    """
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.0)
    (folder / "in").mkdir()
    write_records(folder / "in/a.jsonl", make_texts(3))
    (folder / "in/b").write_text("text")

    def lost(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "readv", lost)
    with pytest.raises(StorageError, match="b: Input/output error, even after"):
        content_kind(folder / "in/b")
    with pytest.raises(StorageError, match="a.jsonl: Input/output error, even after"):
        prepare(folder / "in/a.jsonl", folder / "out", skip_unreadable=True)
    monkeypatch.setattr(os, "scandir", lost)
    with pytest.raises(StorageError, match="in: Input/output error, even after"):
        list(files_below(folder / "in", LeftOut()))
