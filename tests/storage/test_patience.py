"""Files on unreliable storage: transient errors are retried, and a small file is replaced whole or not at all."""

import errno
import os
import time

import pytest

from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.storage import patience
from tests.support.disk import Disk

pytestmark = pytest.mark.torch22


@pytest.fixture
def slept(monkeypatch):
    """The pauses so far; no other time passes."""
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "monotonic", lambda: 100 + sum(pauses))
    return pauses


def failing(times, number=errno.EIO):
    """An action that fails so many times, and then works."""
    left = [OSError(number, os.strerror(number))] * times

    def action():
        if left:
            raise left.pop()
        return "done"

    return action


@pytest.mark.parametrize("rank", ["", "3"])
def test_a_transient_error_is_retried_after_growing_pauses(slept, capsys, monkeypatch, rank):
    """The log says so once, and on many ranks, of which rank."""
    if rank:
        monkeypatch.setenv("RANK", rank)
    assert patience.retry_io(failing(4), "file") == "done"
    assert slept == [0.1, 0.2, 0.4, 0.8]
    start = f"rank 3 on {os.uname().nodename}: " if rank else ""
    assert capsys.readouterr().err.splitlines() == [
        f"{start}warning: file: Input/output error; trying again for a minute",
        f"{start}file: works again after 1.5 s",
    ]


def test_a_process_without_a_launcher_is_rank_0():
    assert patience.this_rank().startswith("rank 0 on ")


def test_storage_that_stays_away_for_a_minute_is_an_error_after_which_a_start_may_succeed(slept):
    with pytest.raises(StorageError, match="^file: Stale file handle, even after a minute of"):
        patience.retry_io(failing(10**6, errno.ESTALE), "file")
    assert max(slept) == 5 and 60 <= sum(slept) < 65


def test_what_does_not_pass_is_raised_at_once(slept, capsys):
    with pytest.raises(OSError, match="No space left"):
        patience.retry_io(failing(1, errno.ENOSPC), "file")
    assert slept == [] and capsys.readouterr().err == ""
    assert type(patience.storage_error(OSError(errno.ENOSPC, ""), "text")) is UserError
    assert type(patience.storage_error(OSError(errno.EIO, ""), "text")) is StorageError


def test_what_is_there_is_told_from_what_the_storage_does_not_say(tmp_path, monkeypatch):
    """Links are followed. A folder that can't be listed is not an empty one."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("1234")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    places = {"folder": True, "link": True, "folder/file": False}
    for name, is_folder in places.items():
        path = tmp_path / name
        assert patience.exists(path)
        assert patience.is_folder(path) is is_folder and patience.is_file(path) is not is_folder
        assert patience.names_in(path) == (["file"] if is_folder else [])
    for name in ("nowhere", "circle", "folder/file/below"):
        path = tmp_path / name
        assert not patience.exists(path)
        assert not patience.is_file(path) and not patience.is_folder(path)
    assert patience.names_in(tmp_path / "nowhere") == []
    assert patience.size_of(tmp_path / "nowhere") == 0
    Disk(monkeypatch, tmp_path).lose("folder")
    monkeypatch.setattr(patience, "SECONDS_OF_TRYING", 0.0)
    for look in (patience.exists, patience.names_in, patience.size_of):
        with pytest.raises(StorageError, match="folder: Input/output error"):
            look(folder)
    with pytest.raises(OSError, match="File name too long"):
        patience.exists(tmp_path / ("a" * 300))


def test_a_folder_is_measured_and_removed_without_what_its_links_lead_to(tmp_path):
    for name in ("other/file", "folder/inner/file", "folder/file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1234")
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "other")
    link_size = os.stat(tmp_path / "other").st_size
    assert patience.size_of(tmp_path / "folder") == 8 + link_size
    patience.delete(tmp_path / "folder")
    patience.delete(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["other"] and os.listdir(tmp_path / "other") == ["file"]


def test_what_can_t_be_removed_stays_and_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "SECONDS_OF_TRYING", 0.0)
    (tmp_path / "file").touch()
    Disk(monkeypatch, tmp_path).lose("file")
    patience.delete(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("own", [False, True])
def test_a_file_is_replaced_whole_once_its_data_is_durable(tmp_path, monkeypatch, own):
    """Until then it lies under another name, in a folder of one's own if there is one."""
    path = tmp_path / "file"
    path.write_text("old")
    place = tmp_path
    if own:
        place = tmp_path / "own"
        place.mkdir()
    done = []

    def replace(old, new, real=os.replace):
        assert old.parent == place and path.read_text() == "old" and old.read_text() == "new"
        done.append("replace")
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("flush"))
    patience.write_for_user(path, "new", place if own else None)
    assert done == ["flush", "replace", "flush"] and path.read_text() == "new"
    assert set(os.listdir(tmp_path)) <= {"file", "own"} and patience.names_in(place) in (
        [],
        ["file"],
    )


def test_a_file_that_can_t_be_replaced_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match=f"^{path}: can't be written .No space left on device.$"):
        patience.write_for_user(path, "new")
    assert os.listdir(tmp_path) == ["file"] and path.read_text() == "old"


def test_a_rename_that_reports_an_error_though_it_succeeded_is_none(tmp_path, monkeypatch, slept):
    def rename(old, new, real=os.rename):
        real(old, new)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    (tmp_path / "old").touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        patience.move(tmp_path / "old", tmp_path / "new")
    assert os.listdir(tmp_path) == ["new"]
    with pytest.raises(FileNotFoundError):
        patience.move(tmp_path / "old", tmp_path / "other")


def test_a_hidden_name_is_new_and_found_again(tmp_path):
    """And nothing else is taken for one: another's file, or one of another name."""
    path = tmp_path / "a+b"
    hidden = [patience.hidden_beside(path) for _ in range(2)]
    for made in hidden:
        made.touch()
    for other in ("aab", "a+b.c"):
        patience.hidden_beside(tmp_path / other).touch()
    (tmp_path / ".a+b.snapshot").touch()
    assert sorted(patience.list_hidden_beside(path)) == sorted(hidden)
    assert hidden[0] != hidden[1] and hidden[0].name.startswith(".a+b.")
