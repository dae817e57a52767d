"""Runs the ranks of one node. torchrun's agent starts a rank for each GPU.

    python -m mamba_fsdp.launch.node RUN_FOLDER [torchrun options] training.py [--SETTING=VALUE ...]

When a rank fails, the other ranks fail soon after because of it, and the log is full of their
errors. Therefore each node writes its first failure to NODE.json in the folder of this start,
RUN_FOLDER/starts/ID (ID is torchrun's --rdzv-id; job.py makes the folder). The file outcome.json in
the same folder contains how the training ended, with the first failure of all nodes, as a
TrainingOutcome of decision.py. job.py reads it and decides whether to restart the ranks.

Under other launchers, such as Kubernetes (kubernetes/README.md), there is no --rdzv-id. The nodes
then share RUN_FOLDER/starts/none, and each prints the first failure of all nodes.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from mamba_fsdp.errors import StorageError, UserError, first_line
from mamba_fsdp.launch.decision import TrainingOutcome
from mamba_fsdp.launch.failures import Failure, first_failure
from mamba_fsdp.launch.machine import (
    end_with_launcher,
    is_first_node,
    node_name,
    print_loading,
    processes_per_node,
    set_environment,
)
from mamba_fsdp.launch.watcher import HANDLED_SIGNALS, Watcher
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
from mamba_fsdp.storage.retry import retry_io, sync_folder, write_atomically

# Slurm ends the step when the launcher of one node exits. Therefore each launcher waits this long, so that the other
# nodes can write their failures.
FAILURE_WAIT_SECONDS = 3
DEFAULT_RUN_ID = "none"  # torchrun's default --rdzv-id


def main(run: Path, args: list[str]) -> int:
    """Runs the ranks of this node until they exit.

    Returns 0 if no rank failed, the exit code of the rank that failed first, or 128 plus the number
    of a signal that asked this node to stop.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    end_with_launcher(signal.SIGQUIT)
    if is_first_node():
        print_loading()
    # Hides many warnings about addresses without a name. torch reads the variable when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported after the signals are blocked: the threads of torch's libraries inherit the mask.
    from mamba_fsdp.launch import agent

    ranks = processes_per_node()
    options = agent.read_options([f"--nproc-per-node={ranks}", *args])
    folder = Path(run, STARTS, options.rdzv_id)
    remove_earlier_outcome(folder)
    os.environ[START_VARIABLE] = str(folder)
    os.environ.setdefault(OLD_STOP_VARIABLE, retry_io(stop_file_id, run, str(run)))
    # If this process is killed, job.py or the guard of this node removes the folder by its name.
    with tempfile.TemporaryDirectory(prefix=f"mamba-train-{os.getpid()}-") as scratch:
        first_node = options.rdzv_endpoint.rpartition(":")[0] or options.master_addr
        set_environment(run, Path(scratch), first_node)
        options.log_dir = scratch
        watcher = Watcher(scratch)
        watcher.start()
        failure = agent.run_ranks(options, watcher)
    if watcher.request:
        # Ranks that the signal killed could not write their status.
        repair_status(run, "ended at once, on request")
        return 128 + watcher.request
    if failure:
        write_shared_json(folder / f"{failure.node}.json", asdict(failure))
        if not options.standalone:
            time.sleep(FAILURE_WAIT_SECONDS)
        failure = first_failure(folder) or failure
    # The output of a single rank ends with its error.
    error_is_printed = options.standalone and ranks == 1
    outcome = build_outcome(run, folder, failure, error_is_printed)
    if folder.name == DEFAULT_RUN_ID:
        return print_outcome(outcome)
    return publish_outcome(folder, outcome, failure)


def remove_earlier_outcome(folder: Path) -> None:
    """Removes the failures and the outcome of an earlier start from the folder, on the first node
    only.

    If --rdzv-id is given, the earlier start belongs to the same Slurm step: HyperPod has replaced a
    node and started the step again.
    """
    if not is_first_node():
        return
    if folder.name == DEFAULT_RUN_ID:
        shutil.rmtree(folder, ignore_errors=True)
    files = [path for path in folder.glob("*.json") if path.name != RESOLVED]
    for path in files:
        path.unlink()
    if files:
        print("restarts   the ranks after the loss of a node")


def build_outcome(
    run: Path, folder: Path, failure: Failure | None, error_is_printed: bool
) -> TrainingOutcome:
    """Returns how the training ended. error_is_printed: whether the log already ends with the
    rank's error.
    """
    # A rank that was killed leaves the status `running`.
    found = repair_status(run)
    status = found.get("status", "unknown")
    signals = {OTHER_RANK_REASON, *signal.Signals.__members__}
    asked_by_file = status == "stopped" and found.get("reason") not in signals
    if not failure or (status == "finished" and was_written_by_start(folder, run / STATUS)):
        return TrainingOutcome(status, 0, stop_file=asked_by_file)
    stop_file = (run / STOP).exists()
    if stop_file or (folder / STOP).exists():
        status = "stopped"
    text = ""
    if failure.was_killed or not error_is_printed:
        text = failure.text()
    node = "" if failure.rank is None else failure.node
    return TrainingOutcome(status, failure.exit_code, failure.summary(), stop_file, text, node)


def was_written_by_start(folder: Path, status: Path) -> bool:
    """Returns whether this start, rather than an earlier one, has written the run's status.

    A status `finished` of this start remains valid even if a rank fails while it exits.
    """
    with contextlib.suppress(OSError):
        return status.stat().st_mtime > (folder / RESOLVED).stat().st_mtime
    return False


def print_outcome(outcome: TrainingOutcome) -> int:
    """Prints the first failure of all nodes, for launchers that do not read outcome.json. Returns
    the exit code.
    """
    if outcome.code == 0:
        ended_elsewhere = outcome.status == "stopped" and not outcome.stop_file
        # A signal to this node or another one stopped the run: the job has to start again.
        return 128 + signal.SIGTERM if ended_elsewhere else 0
    text = outcome.error
    code = outcome.code
    if outcome.status == "stopped":
        code = UserError.exit_code  # because the next start would remove STOP and continue
        text += "error: not restarted: the file STOP requested the end of the run, but a rank failed before it had stopped\n"
    print(text, end="", file=sys.stderr, flush=True)
    return code


def publish_outcome(folder: Path, outcome: TrainingOutcome, failure: Failure | None) -> int:
    """Writes outcome.json for job.py. A node without a failure, except the first one, waits for the
    file instead. Returns the exit code.
    """
    if not failure and not is_first_node():
        wait_for_outcome(folder)
        return 0
    file = folder / OUTCOME
    problem = write_shared_json(file, outcome._asdict())
    if not problem:
        return outcome.code
    message = f"error: can't write {file}: {problem}; check the space and the permissions of the run folder\n"
    if outcome.error:
        message += f"The training failed with:\n{outcome.error}"
    print(message, end="", file=sys.stderr, flush=True)
    # The exit code must not be 0, or the other nodes would wait for the file.
    return outcome.code or StorageError.exit_code


def wait_for_outcome(folder: Path) -> None:
    """Waits until the first node has written outcome.json.

    If this launcher exited earlier, srun would kill the other launchers one minute later (--wait,
    see slurm_training.py). Torch's agents wait for each other for only 300 s, and rank 0 can need
    more time than that to write the model.
    """
    while not os.path.exists(folder / OUTCOME):
        time.sleep(1)
        # Opening the folder refreshes the cache of NFS. Otherwise it can hide a new file for a minute.
        sync_folder(folder)


def start(args: list[str]) -> int:
    """Runs `main` with the command-line arguments. Returns its exit code, or 1 after an internal
    error of this launcher.

    If RESTART_EXIT_CODE is set, it replaces the exit code of failures that another start can fix.
    PyTorchJob restarts a node only if its exit code is 128 or more, and fails the job otherwise.
    """
    restart = os.environ.get("RESTART_EXIT_CODE")
    if restart not in (None, *map(str, range(1, 256))):
        print(
            f"error: RESTART_EXIT_CODE={restart}: expected an integer from 1 to 255",
            file=sys.stderr,
        )
        return UserError.exit_code
    try:
        code = main(Path(os.path.abspath(args[0])), args[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {first_line(error)}"
        print(
            f"error: internal error of the launcher on {node_name()}: {reason}; please report it with the lines above",
            file=sys.stderr,
            flush=True,
        )
        code = 1
    if restart and 0 < code < 128 and code != UserError.exit_code:
        return int(restart)
    return code


def write_shared_json(file: Path, content: dict[str, object]) -> str:
    """Writes a JSON file for all nodes. Returns why it can't be written, or ""."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(content))
    except (OSError, UserError) as error:
        return first_line(error)
    return ""


if __name__ == "__main__":
    raise SystemExit(start(sys.argv[1:]))
