"""Records each node's first failure, and finds the earliest over all nodes."""

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mamba_fsdp.launch.decision import NODE_FAULT
from mamba_fsdp.launch.machine import node_name

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# A process that is killed can't say why.
USUAL_REASONS = {
    "SIGKILL": " The usual reason is that the node ran out of memory: lower batch_size.",
    "SIGBUS": " The usual reason is a file of the token store that was cut short, or whose disk failed, "
    "while it was read: python -m mamba_fsdp inspect STORE --verify; or a full /dev/shm.",
}


@dataclass
class Failure:
    """The failure of one rank, or of a node that has no ranks yet; `reason` is its error, or what its exit code says."""

    node: str
    rank: int | None  # None for a node without ranks
    exit_code: int  # as a shell has it: 128 and the signal's number for a rank that was killed
    was_killed: bool
    time: float  # in seconds since the epoch
    reason: str
    exception: str = ""  # the first line of the exception's text, if the rank could write it

    @classmethod
    def of_rank(cls, rank: int, process: "ProcessFailure") -> "Failure":
        """Reads what torch knows of the rank that failed, and what it has left in its error file: with one, it had failed
        before anything killed it."""
        code = process.exitcode
        exit_code = code if code > 0 else 128 - code
        if isinstance(process.message, dict):
            error = process.message["extraInfo"]
            if code < 0:
                exit_code = int(error.get("exit_code", 1))  # torch's own lacks it
            moment = os.stat(process.error_file).st_mtime
            reason = error["py_callstack"].rstrip()
            exception = process.message["message"].partition("\n")[0]
            return cls(node_name(), rank, exit_code, False, moment, reason, exception)
        was_killed = code < 0 and -code not in (signal.SIGTERM, signal.SIGABRT)
        return cls(node_name(), rank, exit_code, was_killed, time.time(), _reason_of(code))

    @classmethod
    def of_node(cls, reason: str) -> "Failure":
        return cls(node_name(), None, 1, False, time.time(), reason)

    def text(self) -> str:
        """Returns the lines that end the log."""
        if self.rank is None:
            return f"{self.reason}\n"
        return f"rank {self.rank} on {self.node} failed first.\n{self.reason}\n"

    def summary(self) -> str:
        """Returns one line: the rank, or the node if it has no ranks, and the reason if that is a single line."""
        reason = self.reason
        if "\n" in reason:
            reason = f"It exited with code {self.exit_code}: {self.exception}"
        if self.rank is None:
            return f"{self.node}: {reason}"
        return f"rank {self.rank} on {self.node}: {reason}"


def first_failure(folder: Path) -> Failure | None:
    """Returns the first of the failures that nodes have left in the folder; None if there is none."""
    failures = []
    for path in folder.glob("*.json"):
        # It may have been removed meanwhile, be of another version, or not be a failure at all.
        with contextlib.suppress(OSError, ValueError, TypeError):
            failures.append(Failure(**json.loads(path.read_text())))
    return min(failures, key=order, default=None)


def order(failure: Failure) -> tuple[bool, bool, bool, float]:
    """Returns the key by which failures sort. A rank whose node is at fault comes first: the others end because of it. Then
    comes a rank that was killed: it can't say when it died, and others report its end before the launcher looks at it. A
    node without ranks comes last, whatever its clock says: it failed because it misses a node with failed ranks."""
    is_node_fault = failure.exit_code == NODE_FAULT
    return (not is_node_fault, not failure.was_killed, failure.rank is None, failure.time)


def _reason_of(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"It was killed by {name}.{USUAL_REASONS.get(name, '')}"
    return f"It exited with code {code}; its output is above."
