"""Tests mamba_fsdp.storage.retry, which retries transient errors of the storage and replaces small files atomically."""

import errno
import os
import time

import pytest

from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.storage import retry
from tests.support.corpora import write_files
from tests.support.disk import Disk

pytestmark = pytest.mark.torch22


@pytest.fixture
def slept(monkeypatch):
    """Replaces time.sleep and time.monotonic, so that pauses take no time. Returns the list of the pauses in
    seconds."""
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "monotonic", lambda: 100 + sum(pauses))
    return pauses


def failing(times, number=errno.EIO):
    """Returns a function that raises an OSError with this errno the first `times` times, and then returns "done"."""
    errors = [OSError(number, os.strerror(number))] * times

    def action():
        if errors:
            raise errors.pop()
        return "done"

    return action


@pytest.mark.parametrize("rank", ["", "3"])
def test_a_transient_error_is_retried_after_growing_pauses(slept, capsys, monkeypatch, rank):
    """Pauses between retries double. The first retry and the success after it are each reported once, with the rank if
    RANK is set."""
    if rank:
        monkeypatch.setenv("RANK", rank)
    assert retry.retry_io(failing(4), "file") == "done"
    assert slept == [0.1, 0.2, 0.4, 0.8]
    start = f"rank 3 on {os.uname().nodename}: " if rank else ""
    assert capsys.readouterr().err.splitlines() == [
        f"{start}warning: file: Input/output error; trying again for a minute",
        f"{start}file: works again after 1.5 s",
    ]


def test_an_error_that_lasts_a_minute_is_a_storage_error(slept):
    with pytest.raises(StorageError, match="^file: Stale file handle, even after a minute of"):
        retry.retry_io(failing(10**6, errno.ESTALE), "file")
    assert max(slept) == 5 and 60 <= sum(slept) < 65


def test_a_permanent_error_is_raised_at_once(slept, capsys):
    with pytest.raises(OSError, match="No space left"):
        retry.retry_io(failing(1, errno.ENOSPC), "file")
    assert slept == [] and capsys.readouterr().err == ""
    assert type(retry.storage_error(OSError(errno.ENOSPC, ""), "text")) is UserError
    assert type(retry.storage_error(OSError(errno.EIO, ""), "text")) is StorageError


def test_a_missing_file_is_not_confused_with_a_storage_error(tmp_path, monkeypatch):
    """exists, is_file, is_folder and list_names follow symbolic links and accept missing paths. If the storage does not
    answer, they raise an error instead of treating the path as missing."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("1234")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for path in (folder, tmp_path / "link"):
        assert retry.exists(path) and retry.is_folder(path) and not retry.is_file(path)
        assert retry.list_names(path) == ["file"]
    assert retry.is_file(folder / "file") and not retry.is_folder(folder / "file")
    for name in ("nowhere", "circle", "folder/file/below"):
        path = tmp_path / name
        assert not retry.exists(path)
        assert not retry.is_file(path) and not retry.is_folder(path)
    assert retry.list_names(tmp_path / "nowhere") == []
    assert retry.size_of(tmp_path / "nowhere") == 0
    Disk(monkeypatch, tmp_path).lose("folder")
    for look in (retry.exists, retry.list_names, retry.size_of):
        with pytest.raises(StorageError, match="folder: Input/output error"):
            look(folder)
    with pytest.raises(OSError, match="File name too long"):
        retry.exists(tmp_path / ("a" * 300))


def test_links_are_not_followed_when_a_folder_is_measured_or_removed(tmp_path):
    names = ("other/file", "folder/inner/file", "folder/file")
    write_files(tmp_path, dict.fromkeys(names, "1234"))
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "other")
    link_size = os.stat(tmp_path / "other").st_size
    assert retry.size_of(tmp_path / "folder") == 8 + link_size
    retry.delete(tmp_path / "folder")
    retry.delete(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["other"] and os.listdir(tmp_path / "other") == ["file"]


def test_a_file_is_replaced_atomically_after_its_data_is_durable(tmp_path, monkeypatch):
    """write_for_user replaces a file only after the new content has been flushed to the disk. Until then, the content
    is in a temporary file in the folder `own`."""
    path = tmp_path / "file"
    path.write_text("old")
    own = tmp_path / "own"
    own.mkdir()
    flushes = []

    def flush(_):
        flushes.append((path.read_text(), os.listdir(own) != []))

    monkeypatch.setattr(os, "fsync", flush)
    retry.write_for_user(path, "new", own)
    assert flushes == [("old", True), ("new", False)]


def test_an_error_of_a_rename_that_succeeded_is_ignored(tmp_path, monkeypatch, slept):
    def rename(old, new, real=os.rename):
        real(old, new)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    (tmp_path / "old").touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        retry.move(tmp_path / "old", tmp_path / "new")
    assert os.listdir(tmp_path) == ["new"]
    with pytest.raises(FileNotFoundError):
        retry.move(tmp_path / "old", tmp_path / "other")


def test_temporary_paths_are_unique_and_found_again(tmp_path):
    """temporary_path returns a new path at each call. list_temporary_paths finds these paths, but not files of other
    programs or temporary files for other names."""
    hidden = {retry.temporary_path(tmp_path / "a+b") for _ in range(2)}
    others = [retry.temporary_path(tmp_path / other) for other in ("aab", "a+b.c")]
    for path in (*hidden, *others, tmp_path / ".a+b.snapshot"):
        path.touch()
    assert len(hidden) == 2 and set(retry.list_temporary_paths(tmp_path / "a+b")) == hidden


def test_pipes_and_huge_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(bytes(11))
    for read in (retry.open_to_read, retry.read_bytes):
        with pytest.raises(OSError, match="pipe is not a regular file"):
            read(tmp_path / "pipe")
    assert retry.read_once(tmp_path / "file", max_size=11)[0] == bytes(11)
    with pytest.raises(OSError, match="file has more than 10 B"):
        retry.read_once(tmp_path / "file", max_size=10)


def test_a_file_whose_flush_failed_is_written_again(tmp_path, monkeypatch, slept):
    """If a flush fails, the whole file is written again: a failed flush can lose data even if a second flush
    succeeds."""
    flush = failing(2)
    monkeypatch.setattr(os, "fsync", lambda _: flush())
    written = []

    def write(file):
        written.append(file.tell())
        file.write(b"data")

    retry.write_durably(tmp_path / "file", write)
    assert written == [0, 0, 0] and (tmp_path / "file").read_bytes() == b"data"


def test_os_errors_are_recognized_in_errors_of_torch(slept):
    error = retry.parse_os_error(
        RuntimeError("unable to mmap 8 bytes: Interrupted system call (4)")
    )
    assert (error.errno, error.strerror) == (errno.EINTR, "Interrupted system call")
    assert retry.parse_os_error(RuntimeError("a tensor (4) is wrong")) is None
