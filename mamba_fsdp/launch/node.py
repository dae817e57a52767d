"""One node's share of a run: torchrun's agent, and a rank for each GPU, which it starts.

    python -m mamba_fsdp.launch.node RUN_FOLDER [torchrun options] training.py [--SETTING=VALUE ...]

When a rank fails, the others fail because of it soon after, and the log is full of their errors. So each node
leaves its first failure, as NODE.json, in the folder of this start, RUN_FOLDER/starts/ID (ID is torchrun's --rdzv-id;
job.py makes the folder). How the training ended, with the first failure of all nodes, is in the file outcome.json
there, an `Outcome` of decision.py; job.py reads it and decides whether ranks start again.

Elsewhere, in Kubernetes for one (kubernetes/README.md), there is no --rdzv-id. Then the nodes share
RUN_FOLDER/starts/none, and each prints the first failure of all.
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
from functools import partial
from pathlib import Path

from mamba_fsdp.errors import StorageError, UserError, first_line
from mamba_fsdp.launch.decision import Outcome
from mamba_fsdp.launch.failures import Failure, first_failure
from mamba_fsdp.launch.machine import (
    end_with_launcher,
    is_first_node,
    node_name,
    processes_per_node,
    say_loading,
    set_environment,
)
from mamba_fsdp.launch.watcher import WATCHED, Watcher
from mamba_fsdp.run.names import (
    OLD_STOP_VARIABLE,
    OUTCOME,
    RESOLVED,
    START_VARIABLE,
    STARTS,
    STATUS,
    STOP,
    stop_file_id,
)
from mamba_fsdp.run.records import OTHER_RANK_REASON, repair_status
from mamba_fsdp.storage.patience import retry_io, sync_folder, write_atomically

# Slurm ends the job with the first node that exits: it waits, so that the other nodes can write their failures.
SECONDS_FOR_OTHERS = 3
NO_ID = "none"  # torchrun's --rdzv-id where nobody gave one


def main(run: Path, words: list[str]) -> int:
    """Runs this node's ranks to their end. Returns the exit code of the rank that failed first."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    end_with_launcher(signal.SIGQUIT)
    if is_first_node():
        say_loading()
    # torch would say many times that an address has no name; it reads this once, when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Late, since it imports torch: libraries start threads, and these inherit which signals are blocked.
    from mamba_fsdp.launch import agent

    ranks = processes_per_node()
    options = agent.read_options([f"--nproc-per-node={ranks}", *words])
    folder = Path(run, STARTS, options.rdzv_id)
    forget_earlier_start(folder)
    os.environ[START_VARIABLE] = str(folder)
    os.environ.setdefault(OLD_STOP_VARIABLE, retry_io(partial(stop_file_id, str(run)), run))
    # job.py removes a folder of this name when this process was killed.
    with tempfile.TemporaryDirectory(prefix=f"mamba-train-{os.getpid()}-") as scratch:
        first_node = options.rdzv_endpoint.rpartition(":")[0] or options.master_addr
        set_environment(run, Path(scratch), first_node)
        options.log_dir = scratch
        watcher = Watcher(scratch)
        watcher.start()
        failure = agent.run_ranks(options, watcher)
    if watcher.request:
        repair_status(run)  # that of ranks which the signal has ended at once
        return 128 + watcher.request
    if failure:
        leave(folder / f"{failure.node}.json", asdict(failure))
        if not options.standalone:
            time.sleep(SECONDS_FOR_OTHERS)
        failure = first_failure(folder) or failure
    has_own_words = options.standalone and ranks == 1  # right above
    outcome = outcome_of(run, folder, failure, has_own_words)
    if folder.name == NO_ID:
        return print_outcome(outcome)
    return publish_outcome(folder, outcome, failure)


def forget_earlier_start(folder: Path) -> None:
    """Removes how an earlier start of this name ended. With an ID that was a start of this step: HyperPod has replaced a
    node, because of which others failed."""
    if not is_first_node():
        return
    if folder.name == NO_ID:
        shutil.rmtree(folder, ignore_errors=True)
    left = [path for path in folder.glob("*.json") if path.name != RESOLVED]
    for path in left:
        path.unlink()
    if left:
        print("restarts   the ranks after the loss of a node")


def outcome_of(run: Path, folder: Path, failure: Failure | None, has_own_words: bool) -> Outcome:
    """Returns how the training ended. has_own_words: whether the rank's error is right above."""
    # A rank that was killed has left the status `running`.
    found = repair_status(run)
    status = found.get("status", "unknown")
    signals = {OTHER_RANK_REASON, *signal.Signals.__members__}
    asked_by_file = status == "stopped" and found.get("reason") not in signals
    if not failure or (status == "finished" and was_written_by(folder, run / STATUS)):
        return Outcome(status, 0, stop_file=asked_by_file)
    stop_file = (run / STOP).exists()
    if stop_file or (folder / STOP).exists():
        status = "stopped"
    text = ""
    if failure.was_killed or not has_own_words:
        text = failure.text()
    node = "" if failure.rank is None else failure.node
    return Outcome(status, failure.exit_code, failure.summary(), stop_file, text, node)


def was_written_by(folder: Path, status: Path) -> bool:
    """Returns whether the start of this folder has written the run's status: one that is finished stays so, even if a rank
    fails while it exits."""
    with contextlib.suppress(OSError):
        return status.stat().st_mtime > (folder / RESOLVED).stat().st_mtime
    return False


def print_outcome(outcome: Outcome) -> int:
    """Prints the first failure of all nodes, since nobody would read it in a file. Returns the exit code."""
    if outcome.code == 0:
        ended_elsewhere = outcome.status == "stopped" and not outcome.stop_file
        # By a signal, which this node or another one got: the job is not over.
        return 128 + signal.SIGTERM if ended_elsewhere else 0
    text = outcome.error
    code = outcome.code
    if outcome.status == "stopped":
        code = UserError.exit_code  # the next start would remove STOP and train on
        text += "error: not started again, since the file STOP asked the run to end, and a rank failed meanwhile\n"
    print(text, end="", file=sys.stderr, flush=True)
    return code


def publish_outcome(folder: Path, outcome: Outcome, failure: Failure | None) -> int:
    """Writes the outcome for job.py, or waits until the first node has written it. Returns the exit code."""
    if not failure and not is_first_node():
        await_outcome(folder)
        return 0
    file = folder / OUTCOME
    if leave(file, outcome._asdict()):
        return outcome.code
    print(f"error: {file} can't be written\n{outcome.error}", end="", file=sys.stderr, flush=True)
    return outcome.code or StorageError.exit_code  # with 0, the others would wait for it


def await_outcome(folder: Path) -> None:
    """Returns when the first node has written the outcome.

    A minute after the first end of a launcher srun kills the others (--wait, see slurm_training.py), and rank 0 may write
    the model for longer than the 300 s for which torch's agents wait for each other."""
    while not os.path.exists(folder / OUTCOME):
        time.sleep(1)
        # It opens the folder: else NFS may say for a minute that there is no such file.
        sync_folder(folder)


def start(words: list[str]) -> int:
    """Calls main with the command line's words. Returns its exit code, or 1 after an accident of this launcher.

    RESTART_EXIT_CODE, if it is set, takes the place of a failure's code below 128 that another start may fix:
    PyTorchJob starts a node again whose exit code is 128 or more; smaller ones end the job."""
    restart = os.environ.get("RESTART_EXIT_CODE")
    if restart not in (None, *map(str, range(1, 256))):
        print(f"error: RESTART_EXIT_CODE={restart}: expected 1 to 255", file=sys.stderr)
        return UserError.exit_code
    try:
        code = main(Path(os.path.abspath(words[0])), words[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        print(f"error: the launcher on {node_name()} failed: {reason}", file=sys.stderr, flush=True)
        code = 1
    if restart and 0 < code < 128 and code != UserError.exit_code:
        return int(restart)
    return code


def leave(file: Path, content: dict[str, object]) -> bool:
    """Writes a JSON file for all nodes to see. Returns False if it can't be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(content))
    except (OSError, UserError):
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(start(sys.argv[1:]))
