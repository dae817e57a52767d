"""Freezes a run before one of its writes, until another run has taken over the run folder. When the first run
continues, it must not change, add or remove a file.

    python -m tests.storm.frozen [--all]

The first run has one rank and small checkpoints. It acquires its folder, writes settings, events and metrics, saves step
6, commits, prunes, publishes, and releases the folder. This is repeated, and the run is frozen at another moment each
time: before a rename, before a file is opened for writing, or after a check of the lease. With --all, the moments also
include every other call that touches files of the run.

In half of the cases the other run has finished when the first one continues. The moments then start after the first run
has acquired the folder.
"""

import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.errors import UserError
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.run import lease
from mamba_fsdp.run.names import METRICS
from mamba_fsdp.run.records import Log
from mamba_fsdp.trainer.run import publish_model
from mamba_fsdp.trainer.run_folder import RunFolder
from tests.support.checkpoints import WORLD, make_checkpoints, problems, quiet, shards_of

WRITES = ("os.rename", "open for writing")
EVENTS = (
    "open",
    "open for writing",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
)
# {name: steps of the checkpoints in the folder when the first run begins}. The checkpoint of step 6 is damaged.
BEGINNINGS = {"new": [4, 5], "broken": [4, 5, 6]}
FORKED = multiprocessing.get_context("fork")


def main(arguments):
    calls = EVENTS if "--all" in arguments else WRITES
    lease.RENEWAL_SECONDS = 0.02
    lease.POLL_SECONDS = 0.02
    for beginning in BEGINNINGS:
        for finishes in (True, False):
            with tempfile.TemporaryDirectory(prefix="frozen-") as place:
                freezes = storm(Path(place), beginning, finishes, calls)
            print(f"{beginning}, the other finishes: {finishes}: {freezes} freezes", flush=True)


def storm(place, beginning, finishes, calls):
    """Freezes runs at one moment after another. Returns the number of runs that were frozen.

    finishes: whether the other run has ended when the frozen run continues. calls: names of the audit events to
    freeze at.
    """
    begun = place / "begun"
    make_checkpoints(begun, BEGINNINGS[beginning]).lease.close()
    if 6 in BEGINNINGS[beginning]:
        (begun / "checkpoints/step_00000006/state.json").write_text("{}")
    for number in itertools.count(1):
        run = place / str(number)
        shutil.copytree(begun, run)
        try:
            if not freeze(run, calls, number, finishes):
                return number - 1
        except (AssertionError, UserError) as error:
            stack = (run / "frozen").read_text()
            raise AssertionError(f"{beginning}, frozen before call {number}: {stack}") from error


def freeze(run, calls, number, finishes):
    """Freezes a run, lets another run take over its folder, and continues the frozen run. Asserts that the frozen run
    then changes no file. Returns False if the run ended before it was frozen, because it made fewer than `number`
    calls.

    run: the run folder.
    calls: names of the audit events that count. Checks of the lease count, too.
    number: the run is frozen before this call, counted from 1.
    finishes: see `storm`.
    """
    process = FORKED.Process(target=be_frozen, args=(run, calls, number, finishes))
    process.start()
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        assert os.waitstatus_to_exitcode(status) == 0
        return False
    folder = acquire(run, patience=0.0)  # the lease of the frozen run counts as expired
    other = train(folder, 4, 100, 7)
    if finishes:
        publish(folder, other)
        folder.lease.close()
    before = files_of(run)
    os.kill(process.pid, signal.SIGCONT)
    os.waitpid(process.pid, 0)
    found = files_of(run)
    names = before.keys() | found.keys()
    changed = [name for name in names if found.get(name) != before.get(name)]
    assert not changed, f"changed: {changed}"
    if not finishes:
        save(other, 8, 108)
        folder.lease.close()
    again = checkpointer_of(folder, keep=4).resume(shards_of(0)).path
    last = "step_00000007" if finishes else "step_00000008"
    assert again.name == last and not problems(again)
    hidden = [path.name for path in run.rglob(".*")]
    assert not hidden, f"left: {hidden}"
    return True


def acquire(run, patience):
    """Acquires the run folder and returns it. patience: seconds after which a lease that is not renewed has
    expired."""
    lease.EXPIRY_SECONDS = patience
    folder = RunFolder(run)
    folder.acquire()
    return folder


def checkpointer_of(folder, keep):
    return Checkpointer(folder.path, WORLD, folder.lease, keep=keep, report=quiet)


def train(folder, keep, value, last):
    """Trains up to the step `last` and returns the checkpointer. value: a number that determines the content of
    tensors."""
    checkpointer = checkpointer_of(folder, keep)
    start = int(checkpointer.resume(shards_of(0)).path.name[-1])
    folder.write_settings(f"seed: {value}\n")
    folder.add_event("started", start, seed=value)
    log = Log(folder.path / METRICS, start, folder.lease)
    for step in range(start + 1, last + 1):
        log.write({"step": step, "loss": value})
        log.sync()
        save(checkpointer, step, value + step)
    return checkpointer


def publish(folder, checkpointer):
    """Publishes the model and ends the run in the same way as a training."""

    def write_model(_, out):
        out.mkdir()
        (out / "model").write_text(checkpointer.last.name)

    publish_model(folder, checkpointer.last, write_model, lambda: None, Console(enabled=False))


def save(checkpointer, step, value):
    checkpointer.save(step, shards_of(value), {"step": step})
    checkpointer.wait()


def files_of(run):
    """Returns {name: content} of all files in the run folder, including hidden ones."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "frozen"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def be_frozen(run, calls, number, finishes):
    """Runs in the process of the run that is frozen. Trains up to step 6, freezes this process once, and ends the run
    in the same way as run_training. The arguments are those of `freeze`."""
    if not finishes:
        stop_before(calls, number, str(run))
    try:
        folder = acquire(run, patience=60.0)
    except UserError:  # the other run has acquired the folder
        return
    if finishes:
        stop_before(calls, number, str(run))
    try:
        publish(folder, train(folder, 1, 0, 6))
    except UserError as error:
        folder.write_failure(6, error)
    finally:
        folder.lease.close()


def stop_before(calls, number, run):
    remaining = [number]

    def count(path):
        """Counts a call that concerns a file of the run. A relative path belongs to a folder that is being removed."""
        if not isinstance(path, (str, os.PathLike)) or threading.current_thread().name == "lease":
            return
        path = os.fspath(path)
        if path.startswith(run) or not os.path.isabs(path):
            remaining[0] -= 1
            if remaining[0] == 0:
                Path(run, "frozen").write_text("".join(traceback.format_stack(limit=12)))
                os.kill(os.getpid(), signal.SIGSTOP)

    def stat(what, *rest, _stat=os.stat, **named):
        count(what)
        return _stat(what, *rest, **named)

    def check(held, *rest, _check=lease.Lease.check):
        _check(held, *rest)
        count(run)

    def notice(event, arguments):
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            event = "open for writing"
        if event in calls:
            count(arguments[0])

    if calls == EVENTS:
        os.stat = stat  # os.stat does not raise an audit event
    lease.Lease.check = check
    sys.addaudithook(notice)


if __name__ == "__main__":
    main(sys.argv[1:])
