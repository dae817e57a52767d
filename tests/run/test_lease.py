"""One run at a time in a run folder, and no dead one in anybody's way."""

import json
import os
import resource
import subprocess
import time
from dataclasses import asdict

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.run import lease as module
from mamba_fsdp.run.lease import Holder, Lease
from mamba_fsdp.run.names import LEASE
from mamba_fsdp.run.records import correct_status, read_events, read_status, write_status
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.verbs import inspect
from tests.support.checkpoints import commit_empty

pytestmark = pytest.mark.torch22


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


def test_a_living_holder_is_named_to_the_second(take, tmp_path):
    first = take()
    with pytest.raises(UserError) as refused:
        take()
    holder = f"process {os.getpid()} on {module.socket.gethostname()}, begun 20"
    assert f"{tmp_path} is in use by {holder}" in str(refused.value)
    first.check()
    first.close()
    assert not list(tmp_path.iterdir())
    take()


def test_a_holder_of_this_machine_that_has_ended_stops_nobody(take, tmp_path, unwatched):
    """Whether nobody has its process id by now, or another process."""
    here = Holder.this_process()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for pid in (ended.pid, os.getpid()):
        left_by(tmp_path, machine=here.machine, pid=pid, started=here.started - 1)
        lease = take()
        lease.check()
        lease.close()


@pytest.mark.parametrize("content", [None, b'{"token": "x", "ho'], ids=["lost node", "cut short"])
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


def test_a_full_disk_is_told_and_no_half_lease_is_left(tmp_path):
    """Which would count as another's."""
    folder = RunFolder(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(UserError, match="can't write lease.json .File too large"):
            folder.acquire()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        folder.lease.close()
    assert os.listdir(tmp_path) == ["checkpoints"]


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
    "started, status, step", [({"started": 1}, "failed", 7), ({}, "running", 3)]
)
def test_a_run_that_could_not_write_its_end_is_not_called_running(
    tmp_path, capsys, started, status, step
):
    """Unless its process is there."""
    commit_empty(tmp_path, 7)
    write_status(tmp_path, "running", 3)
    left_by(tmp_path, **{**asdict(Holder.this_process()), **started})
    inspect.main(str(tmp_path), inspect.Options())
    told = read_status(tmp_path)
    assert (told["status"], told["step"]) == (status, step)
    why = "exited without a status: killed, or its disk was full"
    assert (why in capsys.readouterr().out) == (status == "failed")


@pytest.mark.parametrize("nth", [1, 2])
def test_a_run_that_starts_while_its_status_is_read_stays_running(tmp_path, monkeypatch, nth):
    """Whichever of the two looks at the lease it comes after."""
    looks = []

    def look(self, real=Lease.look):
        seen = real(self)
        looks.append(seen)
        if len(looks) == nth:
            left_by(tmp_path, **asdict(Holder.this_process()))
            write_status(tmp_path, "running", 3, "starting")
        return seen

    write_status(tmp_path, "running", 2)
    monkeypatch.setattr(Lease, "look", look)
    correct_status(tmp_path)
    assert read_status(tmp_path)["reason"] == "starting"
    assert "failed" not in [event["event"] for event in read_events(tmp_path)]
