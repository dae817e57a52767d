"""One run at a time in a run folder, and no dead one in anybody's way."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict

import pytest

from mamba_fsdp import lease as module
from mamba_fsdp.errors import UserError
from mamba_fsdp.lease import Holder, Lease
from mamba_fsdp.report.records import read_status, write_status
from mamba_fsdp.run_layout import LEASE
from tests.support.checkpoints import commit_empty

pytestmark = pytest.mark.torch22
PROCESSES = multiprocessing.get_context("spawn")


@pytest.fixture
def take(tmp_path, monkeypatch):
    """take(said=None) -> a Lease on the folder. Leases are renewed often here, and given back at the end."""
    monkeypatch.setattr(module, "SECONDS_BETWEEN_RENEWALS", 0.02)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LOOKS", 0.02)
    taken = []

    def take_one(said=None):
        lease = Lease(tmp_path / LEASE)
        lease.take((said if said is not None else []).append, "stop that run first")
        taken.append(lease)
        return lease

    yield take_one
    for lease in taken:
        lease.close()


@pytest.fixture
def unwatched(monkeypatch):
    """A holder must be told dead without watching it."""
    monkeypatch.setattr(Lease, "shows_life", lambda _: pytest.fail("it was watched"))


def left_by(folder, **changed):
    """The lease of a process that is not ours to ask, with some fields changed."""
    owner = {
        **asdict(Holder.this_process()),
        "host": "node-7",
        "pid": 7,
        "machine": "another",
        **changed,
    }
    (folder / LEASE).write_text(json.dumps(owner))


def hold(folder, connection):
    try:
        lease = Lease(folder / LEASE)
        lease.take(lambda text: None, "stop that run first")
    except UserError as error:
        connection.send(str(error))
        return
    connection.send("taken")
    connection.recv()  # for ever
    lease.close()


def start_holder(folder):
    """(process, its answer) of another process that takes the folder."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=hold, args=(folder, theirs), daemon=True)
    process.start()
    process.pipe = ours
    return process


def test_a_living_holder_is_named_to_the_second(take, tmp_path):
    first = take()
    with pytest.raises(UserError) as refused:
        take()
    assert (
        f"{tmp_path} is in use by process {os.getpid()} on {module.socket.gethostname()}, begun 20"
        in str(refused.value)
    )
    first.check()
    first.close()
    assert not list(tmp_path.iterdir())
    take()


def test_a_killed_holder_of_this_machine_stops_nobody(take, tmp_path, unwatched):
    process = start_holder(tmp_path)
    assert process.pipe.recv() == "taken"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    take().check()


def test_neither_does_one_whose_process_id_another_has_by_now(take, tmp_path, unwatched):
    here = Holder.this_process()
    left_by(tmp_path, machine=here.machine, pid=os.getpid(), started=here.started - 1)
    take().check()


@pytest.mark.parametrize(
    "content", [None, b"", b'{"token": "x", "ho'], ids=["lost node", "cut short", "half"]
)
def test_a_silent_holder_elsewhere_is_waited_for_and_then_dead(
    take, tmp_path, monkeypatch, content
):
    monkeypatch.setattr(module, "SECONDS_OF_SILENCE", 0.1)
    left_by(tmp_path)
    if content is not None:
        (tmp_path / LEASE).write_bytes(content)
    said = []
    take(said).check()
    assert len(said) == 1 and "waiting" in said[0] and ("node-7" in said[0] or content is not None)


def test_a_holder_elsewhere_that_renews_is_alive(take, tmp_path, monkeypatch):
    """Whatever the clocks say, its renewals may lie far in the past; also in the same Slurm job."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    left_by(tmp_path)
    long_ago = iter(range(10**6))
    monkeypatch.setattr(
        module.time, "sleep", lambda _: os.utime(tmp_path / LEASE, (next(long_ago), next(long_ago)))
    )
    with pytest.raises(UserError, match=r"process 7 on node-7 \(Slurm job 17\)"):
        take()


def test_one_that_lost_its_lease_finds_out_and_leaves_the_other_in_peace(take, tmp_path):
    lease = take()
    left_by(tmp_path)
    other = (tmp_path / LEASE).stat().st_mtime_ns
    with pytest.raises(UserError, match="in use by process 7 on node-7.*writes nothing more"):
        lease.check()
    time.sleep(0.2)
    lease.close()
    assert (tmp_path / LEASE).stat().st_mtime_ns == other
    (tmp_path / LEASE).unlink()
    with pytest.raises(UserError, match="has lost its lease.json"):
        lease.check()


@pytest.mark.parametrize(
    "holder, status",
    [
        ({"started": 1}, "failed"),  # of this machine, and not there any more
        ({}, "running"),  # it lives
        ({"machine": "another"}, "running"),
    ],
)  # nobody here can tell
def test_a_run_that_could_not_write_its_end_is_not_called_running(tmp_path, capsys, holder, status):
    from mamba_fsdp.verbs import inspect

    commit_empty(tmp_path, 7)
    write_status(tmp_path, "running", 3)
    left_by(tmp_path, **{**asdict(Holder.this_process()), **holder})
    inspect.main(str(tmp_path), inspect.Options())
    told = read_status(tmp_path)
    assert (told["status"], told["step"]) == (status, 3 if status == "running" else 7)
    killed = f"{Holder.this_process()} exited without a status: killed, or its disk was full"
    expected = f"failed: {killed}" if status == "failed" else status
    assert f"status         {expected}\n" in capsys.readouterr().out
