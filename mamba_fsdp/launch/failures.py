"""Records each node's first failure, and finds the earliest failure over all nodes."""

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mamba_fsdp.launch.decision import EXIT_NODE_FAULT
from mamba_fsdp.launch.machine import node_name

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# Advice for signals that end a process without an error message.
LIKELY_CAUSES = {
    "SIGKILL": " The most likely cause is that the node ran out of memory: lower batch_size.",
    "SIGBUS": " The most likely cause is a file of the token store that was truncated, or whose disk failed, "
    "while it was read (check it with python -m mamba_fsdp inspect STORE --verify), or a full /dev/shm.",
}


@dataclass
class Failure:
    """The failure of a rank, or of a node that has not started its ranks."""

    node: str
    rank: int | None  # None for a node without ranks
    exit_code: int  # for a rank that a signal ended, 128 plus the signal number, as in a shell
    # Whether a signal other than SIGTERM and SIGABRT ended the rank before it could write an error file.
    was_killed: bool
    time: float  # seconds since the epoch
    reason: str  # the error of the rank, or a description of its exit code
    exception: str = ""  # the first line of the exception's message, if the rank could write it

    @classmethod
    def from_rank(cls, rank: int, process: "ProcessFailure") -> "Failure":
        """Builds the failure of a rank from torchrun's record of the process and the rank's error
        file.

        A rank that has written an error file failed by itself, even if a signal killed it
        afterwards.
        """
        code = process.exitcode
        exit_code = code if code > 0 else 128 - code
        if isinstance(process.message, dict):
            error = process.message["extraInfo"]
            if code < 0:
                # The rank adds its own exit code to the error file, because torch does not record it.
                exit_code = int(error.get("exit_code", 1))
            moment = os.stat(process.error_file).st_mtime
            reason = error["py_callstack"].rstrip()
            exception = process.message["message"].partition("\n")[0]
            return cls(node_name(), rank, exit_code, False, moment, reason, exception)
        was_killed = code < 0 and -code not in (signal.SIGTERM, signal.SIGABRT)
        return cls(node_name(), rank, exit_code, was_killed, time.time(), _describe_exit_code(code))

    @classmethod
    def from_node(cls, reason: str) -> "Failure":
        """Builds the failure of a node without ranks."""
        return cls(node_name(), None, 1, False, time.time(), reason)

    def text(self) -> str:
        """Returns the lines with which the log ends: the rank, its node and the error."""
        if self.rank is None:
            return f"{self.reason}\n"
        return f"rank {self.rank} on {self.node} failed first.\n{self.reason}\n"

    def summary(self) -> str:
        """Returns one line with the rank, or the node if it has no ranks, and the reason.

        A traceback is replaced with the exit code and the first line of the exception.
        """
        reason = self.reason
        if "\n" in reason:
            reason = f"It exited with code {self.exit_code}: {self.exception}"
        if self.rank is None:
            return f"{self.node}: {reason}"
        return f"rank {self.rank} on {self.node}: {reason}"


def first_failure(folder: Path) -> Failure | None:
    """Returns the first of the failures that nodes have written to the folder; None if there are none."""
    failures = []
    for path in folder.glob("*.json"):
        # The file can disappear while it is read, come from another version, or not contain a failure.
        with contextlib.suppress(OSError, ValueError, TypeError):
            failures.append(Failure(**json.loads(path.read_text())))
    return min(failures, key=sort_key, default=None)


def sort_key(failure: Failure) -> tuple[bool, bool, bool, float]:
    """Returns the sort key of failures: the cause of the others comes first.

    A rank on a faulty node comes first, because the other ranks fail as a consequence. Next are
    ranks that were killed: they can't record when they died, and other ranks report the lost
    connection before the launcher notices the death. A node without ranks comes last, because it
    failed while it waited for a node with failed ranks.
    """
    is_node_fault = failure.exit_code == EXIT_NODE_FAULT
    return (not is_node_fault, not failure.was_killed, failure.rank is None, failure.time)


def _describe_exit_code(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"It was killed by {name}.{LIKELY_CAUSES.get(name, '')}"
    return f"It exited with code {code}; its output is above."
