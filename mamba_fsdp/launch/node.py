"""One node's share of a run: torchrun's agent, and a rank for each GPU, which it starts.

    python -m mamba_fsdp.launch.node RUN_FOLDER [torchrun options] training.py [--SETTING=VALUE ...]

When a rank fails, the others fail for its sake soon after, and the log is full of their errors. So
each node leaves its first failure in RUN_FOLDER/failures/ID, a folder that 1.train.sbatch makes (ID
is torchrun's --rdzv-id). The file `outcome` beside them is what 1.train.sbatch reads: a line
`STATUS EXIT_CODE LOST_RANK`, and then the first failure of all nodes. Whether ranks start again is
up to 1.train.sbatch.

Elsewhere, in Kubernetes for one (kubernetes/README.md), there is no --rdzv-id. Then the nodes share
RUN_FOLDER/failures/none, and each prints the first failure of all.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from mamba_fsdp.errors import StorageError, UserError, first_line
from mamba_fsdp.launch.failures import Failure, first_failure
from mamba_fsdp.launch.machine import (
    end_with_launcher,
    node_name,
    processes_per_node,
    set_environment,
)
from mamba_fsdp.launch.watcher import WATCHED, Watcher
from mamba_fsdp.run.names import FAILURES, STOP
from mamba_fsdp.run.records import ELSEWHERE, correct_status
from mamba_fsdp.storage.patience import sync_folder, write_atomically

# Slurm ends the job with the first node that exits: the others shall leave their failures before.
SECONDS_FOR_OTHERS = 3
OUTCOME = "outcome"
NO_ID = "none"  # torchrun's --rdzv-id where nobody gave one


def main(run: Path, words: list[str]) -> int:
    """Runs this node's ranks to their end. Returns the exit code of the rank that failed first."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    end_with_launcher(signal.SIGQUIT)
    # Late, since it imports torch: libraries start threads, and these inherit which signals are blocked.
    from mamba_fsdp.launch import agent

    ranks = processes_per_node()
    options = agent.read_options([f"--nproc-per-node={ranks}", *words])
    failures = Path(run, FAILURES, options.rdzv_id)
    forget_earlier_start(run, failures)
    # 1.train.sbatch removes a folder of this name when this process was killed.
    with tempfile.TemporaryDirectory(prefix=f"mamba-train-{os.getpid()}-") as scratch:
        first_node = options.rdzv_endpoint.rpartition(":")[0] or options.master_addr
        set_environment(run, Path(scratch), first_node)
        options.log_dir = scratch
        watcher = Watcher(scratch)
        watcher.start()
        failure = agent.run_ranks(options, watcher)
    if watcher.request:
        correct_status(run)  # that of ranks which the signal has ended at once
        return 128 + watcher.request
    if failure:
        leave(failures / f"{failure.node}.json", json.dumps(asdict(failure)))
        if not options.standalone:
            time.sleep(SECONDS_FOR_OTHERS)
        failure = first_failure(failures) or failure
    has_own_words = options.standalone and ranks == 1  # right above
    return conclude(run, failures, failure, has_own_words)


def is_first_node() -> bool:
    number = os.environ.get("SLURM_NODEID") or os.environ.get("PET_NODE_RANK")
    return (number or "0") == "0"


def forget_earlier_start(run: Path, failures: Path) -> None:
    """Removes what an earlier start has left. With an ID that was a start of this step: HyperPod has replaced a node, for
    whose sake others failed. Without one, a file STOP was meant for that start."""
    if not is_first_node():
        return
    if failures.name == NO_ID:
        with contextlib.suppress(OSError):
            (run / STOP).unlink()
        shutil.rmtree(failures, ignore_errors=True)
    left = list(failures.glob("[!.]*"))  # 1.train.sbatch's file with settings stays
    for path in left:
        path.unlink()
    if left:
        print("restarts   the ranks after the loss of a node")


def conclude(run: Path, failures: Path, failure: Failure | None, has_own_words: bool) -> int:
    """Writes `outcome`, see above, or waits for it, or prints the failure where nobody would read it. Returns the exit
    code."""
    # A rank that was killed has left the status `running`.
    found = correct_status(run)
    status = found.get("status", "unknown")
    code = 0
    lost_rank = ""
    text = ""
    if failure:
        if os.path.exists(run / STOP):
            status = "stopped"
        code = failure.exit_code
        lost_rank = failure.summary()
        if failure.was_killed or not has_own_words:
            text = failure.text()
    if failures.name == NO_ID:
        if failure and status == "stopped":
            code = UserError.exit_code  # the next start would remove STOP and train on
            text += "error: not started again, since the file STOP asked the run to end, and a rank failed meanwhile\n"
        print(text, end="", file=sys.stderr, flush=True)
        signals = {ELSEWHERE, *signal.Signals.__members__}
        if not failure and status == "stopped" and found.get("reason") in signals:
            code = 128 + signal.SIGTERM  # which another node got: the job is not over
    elif failure or is_first_node():
        outcome = failures / OUTCOME
        if not leave(outcome, f"{status} {code} {lost_rank}\n{text}"):
            print(f"error: {outcome} can't be written\n{text}", end="", file=sys.stderr, flush=True)
            code = code or StorageError.exit_code  # with 0, the others would wait for it
    else:
        await_outcome(failures)
    return code


def await_outcome(failures: Path) -> None:
    """Returns when the first node has written `outcome`.

    A minute after the first end of a launcher srun kills the others (--wait in 1.train.sbatch), and rank 0 may write the
    model for longer than the 300 s for which torch's agents wait for each other."""
    while not os.path.exists(failures / OUTCOME):
        time.sleep(1)
        # It opens the folder: else NFS may say for a minute that there is no such file.
        sync_folder(failures)


def start(words: list[str]) -> int:
    """Calls main with the command line's words. Returns its exit code, or 1 after an accident of this launcher.

    RESTART_EXIT_CODE, where it is set, takes the place of a failure's code below 128 which another start may mend:
    PyTorchJob starts a node again whose exit code is 128 or more; smaller ones end the job."""
    restart = os.environ.get("RESTART_EXIT_CODE")
    if restart not in (None, *map(str, range(1, 256))):
        print(f"error: RESTART_EXIT_CODE={restart}: expected 1 to 255", file=sys.stderr)
        return UserError.exit_code
    try:
        code = main(Path(os.path.abspath(words[0])), words[1:])
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        print(f"error: the launcher on {node_name()} failed: {reason}", file=sys.stderr, flush=True)
        code = 1
    if restart and 0 < code < 128 and code != UserError.exit_code:
        return int(restart)
    return code


def leave(file: Path, text: str) -> bool:
    """Writes a file for all nodes to see. Returns False where that can't be."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    except (OSError, UserError):
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(start(sys.argv[1:]))
