"""Tests mamba_fsdp.run.lease: only one process at a time writes to a run folder or a new folder, and a dead process
does not block others."""

import errno
import io
import json
import os
import socket
import subprocess
import threading
import time
from dataclasses import asdict

import pytest

from mamba_fsdp.errors import LeaseLostError, StorageError, UserError
from mamba_fsdp.run import lease as module
from mamba_fsdp.run.lease import Holder, Lease, new_folder
from mamba_fsdp.run.names import LEASE
from mamba_fsdp.trainer.run_folder import RunFolder
from tests.support.disk import Disk

REMEDY = "stop that run first"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Shortens the intervals, so that a test does not wait long for a renewal."""
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 0.02)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)


@pytest.fixture
def take(tmp_path):
    """Returns a function take(messages=None) that acquires the lease of the folder and returns it. The lease is
    released at the end of the test.

    messages: a list to which the messages of the lease are appended.
    """
    taken = []

    def take_one(messages=None):
        lease = Lease(tmp_path / LEASE)
        lease.acquire((messages if messages is not None else []).append, REMEDY)
        taken.append(lease)
        return lease

    yield take_one
    for lease in taken:
        lease.close()


def write_foreign_lease(folder, **changed):
    """Writes the lease of a process on another machine, with some fields changed."""
    elsewhere = {"host": "node-7", "pid": 7, "machine": "another"}
    holder = {**asdict(Holder.this_process()), **elsewhere, **changed}
    (folder / LEASE).write_text(json.dumps(holder))


def test_a_living_holder_is_named_to_the_second(take, tmp_path):
    first = take()
    with pytest.raises(UserError) as refused:
        take()
    holder = f"process {os.getpid()} on {socket.gethostname()}, begun 20"
    assert str(refused.value).startswith(f"{tmp_path} is in use by {holder}")
    assert str(refused.value).endswith(f"; {REMEDY}")
    first.check()
    first.close()
    assert not list(tmp_path.iterdir())
    take()


def test_a_dead_holder_on_this_machine_does_not_block_others(take, tmp_path, monkeypatch):
    """The lease of a process of this machine that has ended is taken over at once. Its process id can be unused, or
    belong to a zombie or to another process."""
    monkeypatch.setattr(Lease, "is_renewed", lambda _: pytest.fail("it was watched"))
    here = Holder.this_process()
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    for pid in (ended.pid, os.getpid(), dead.pid):
        write_foreign_lease(tmp_path, machine=here.machine, pid=pid, started=here.started - 1)
        lease = take()
        lease.check()
        lease.close()


@pytest.mark.parametrize("content", [None, b'{"token": "x", "ho'], ids=["lost node", "cut short"])
def test_a_silent_holder_elsewhere_is_waited_for_and_then_dead(
    take, tmp_path, monkeypatch, content
):
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 0.1)
    write_foreign_lease(tmp_path)
    if content is not None:
        (tmp_path / LEASE).write_bytes(content)
    messages = []
    take(messages).check()
    (line,) = messages
    assert line.startswith("waiting ") and ("node-7" if content is None else "unknown") in line


def test_a_holder_elsewhere_that_renews_is_alive(take, tmp_path, monkeypatch):
    """A process on another machine is alive if it renews its lease, even if it is in the same Slurm job. The clocks of
    the machines can differ, so the renewals are far in the past."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    write_foreign_lease(tmp_path)
    moments = iter(range(10**6))

    def renew(_):
        moment = next(moments)
        os.utime(tmp_path / LEASE, (moment, moment))

    monkeypatch.setattr(time, "sleep", renew)
    with pytest.raises(UserError, match=r"process 7 on node-7 \(Slurm job 17\)"):
        take()


def test_a_process_that_lost_its_lease_changes_nothing(take, tmp_path):
    """A process whose lease was taken over can no longer write, move or remove anything, and does not renew the other
    lease."""
    before = threading.enumerate()
    lease = take()
    (renewing,) = [thread for thread in threading.enumerate() if thread not in before]
    lease.write(tmp_path / "file", "ours")
    write_foreign_lease(tmp_path)
    lease.staging.rename(tmp_path / "taken")
    changes = {
        lease.check: [],
        lease.write: [tmp_path / "file", "late"],
        lease.move: [lease.staging / "x", tmp_path / "new"],
        lease.remove: [tmp_path / "file"],
    }
    for change, given in changes.items():
        with pytest.raises(
            LeaseLostError, match="in use by process 7 on node-7.*writes nothing more"
        ):
            change(*given)
    other = (tmp_path / LEASE).stat().st_mtime_ns
    lease.close()
    renewing.join()
    assert (tmp_path / LEASE).stat().st_mtime_ns == other
    assert (tmp_path / "file").read_text() == "ours"
    (tmp_path / LEASE).unlink()
    with pytest.raises(LeaseLostError, match="has lost its lease.json"):
        lease.check()


def test_a_lease_that_can_t_be_looked_at_is_not_lost(take, tmp_path, monkeypatch):
    """A lease that can't be read does not count as lost, because the storage can be unavailable for a moment, or not
    mounted."""
    lease = take()
    with monkeypatch.context() as patched:
        Disk(patched, tmp_path).lose(LEASE)
        with pytest.raises(StorageError, match="lease.json: Input/output error"):
            lease.check()
    lease.check()
    lease.file = tmp_path / "nowhere" / LEASE
    with pytest.raises(UserError, match="lease.json: can't be read .No such file") as caught:
        lease.check()
    assert not isinstance(caught.value, LeaseLostError)
    lease.file = tmp_path / LEASE


def test_files_of_a_killed_process_are_removed_and_reported(take, tmp_path):
    """The next holder removes the staging folder of a killed process, and reports it. Other hidden folders are kept."""
    killed = take()
    (killed.staging / "step_00000002").mkdir()
    (killed.staging / "step_00000002" / "part").write_bytes(bytes(3_000_000))
    (tmp_path / ".snapshot").mkdir()
    (tmp_path / LEASE).unlink()
    messages = []
    lease = take(messages)
    message = "removed 3.0 MB of unfinished files of a killed process from"
    assert messages == [f"cleaned    {message} {tmp_path}"]
    assert set(os.listdir(tmp_path)) == {LEASE, ".snapshot", lease.staging.name}
    assert os.listdir(lease.staging) == []


def test_a_new_folder_is_whole_or_not_there(tmp_path, capsys):
    """A new folder appears only when it is complete. While a live process writes the folder, no other process can write
    it. If the process raises an error, the folder is removed."""
    out = tmp_path / "models" / "model"
    with new_folder(out) as unfinished:
        (unfinished / "inner").mkdir()
        (unfinished / "inner" / "part").touch()
        assert not out.exists()
        with pytest.raises(UserError, match="model is in use by process"), new_folder(out):
            pass
    assert os.listdir(out / "inner") == ["part"] and os.listdir(out.parent) == ["model"]
    with pytest.raises(UserError, match="model exists already; name a new"), new_folder(out):
        pass
    other = tmp_path / "other"
    with pytest.raises(ZeroDivisionError), new_folder(other) as unfinished:
        (unfinished / "part").touch()
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["models"]


@pytest.mark.parametrize("number, kind", [(errno.EIO, StorageError), (errno.ENOSPC, UserError)])
def test_storage_that_fails_while_a_folder_is_made_is_no_mistake(tmp_path, number, kind):
    """An I/O error is not reported as a mistake of the user, because the job would then not be queued again. A full
    disk is reported as one."""
    with (
        pytest.raises(UserError, match="^can't write .*out: ") as end,
        new_folder(tmp_path / "out"),
    ):
        raise OSError(number, os.strerror(number))
    assert end.type is kind


@pytest.mark.parametrize("kind", ["link", "pipe", "large"])
def test_an_invalid_lease_file_is_refused_at_once(take, tmp_path, kind):
    """A lease that is a link, a pipe or a large file is an error. Starts must not wait for it, or read it again and
    again."""
    if kind == "link":
        (tmp_path / LEASE).symlink_to(tmp_path / "nowhere")
    elif kind == "pipe":
        os.mkfifo(tmp_path / LEASE)
    else:
        (tmp_path / LEASE).write_bytes(bytes(1 << 17))
    with pytest.raises(OSError, match="lease.json (is a link; remove|is not a reg|has more than)"):
        take()
    with pytest.raises(UserError, match="save_ckpt_path .*lease.json"):
        RunFolder(tmp_path).acquire()


def test_a_disk_that_is_full_leaves_no_lease(tmp_path, monkeypatch):
    """If the disk is full, no lease file remains. As on a network file system, the error is raised when the file is
    closed."""

    class Full(io.BytesIO):
        def close(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_full(path, mode):
        (tmp_path / path).touch()
        return Full()

    monkeypatch.setattr(module, "open", open_full, raising=False)
    with pytest.raises(UserError, match="No space left"), new_folder(tmp_path / "out"):
        pass
    assert os.listdir(tmp_path) == []
