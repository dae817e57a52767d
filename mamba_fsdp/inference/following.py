"""Evaluates the checkpoints of a run while it trains. RUN/evaluations/NAME.jsonl gets a line for each checkpoint.

The results are not written to the run's metrics.jsonl, because only the training process can append to that file.
"""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.run.layout import list_committed, step_of
from mamba_fsdp.run.lease import Lease
from mamba_fsdp.run.names import CHECKPOINTS, EVALUATIONS, KEEP_MARKER
from mamba_fsdp.run.records import MAX_INTEGER, Log, read_entries, read_status
from mamba_fsdp.storage.retry import exists, make_folder, storage_error
from mamba_fsdp.text import utc_timestamp

POLL_SECONDS = 10.0


def follow(
    run: Path,
    name: str,
    method: str,
    measure: Callable[[Path], dict[str, float]],
    console: Console,
) -> None:
    """Evaluates the checkpoints of a run, oldest first, until the run is finished. Checkpoints that are already in the
    file of results are skipped. If the run has keep_every, only the checkpoints that it keeps and the last one are
    evaluated.

    name: the name of the file of results. method: describes how checkpoints are evaluated; results of another method
    are ignored. measure: evaluates a checkpoint and returns {metric: value}.

    Raises UserError if another process writes the same file, if the file can't be written, or if `measure` raises
    UserError for a checkpoint that still exists.
    """
    file = run / EVALUATIONS / f"{name}.jsonl"
    with closing(Lease(file.with_name(f".{file.name}.lease"), file)) as lease:
        try:
            make_folder(file.parent)
            lease.acquire(console.print_line, "one process is enough")
        except OSError as error:
            raise storage_error(error, f"{file}: can't be written ({error.strerror})") from None
        log = Log(file, MAX_INTEGER, lease)
        removed: set[Path] = set()
        while True:
            status = read_status(run).get("status", "not begun")
            is_finished = status == "finished"
            done = {entry["step"] for entry in read_entries(file) if entry.get("way") == method}
            waiting = [
                path
                for path in find_checkpoints(run, is_finished)
                if step_of(path.name) not in done and path not in removed
            ]
            if waiting:
                checkpoint = waiting[0]
                step = step_of(checkpoint.name)
                console.show_progress(f"step {step}: evaluating")
                try:
                    numbers = measure(checkpoint)
                except UserError:
                    if exists(checkpoint):
                        raise
                    removed.add(checkpoint)  # the run has deleted this checkpoint in the meantime
                    continue
                log.write(
                    {"step": step, "time": utc_timestamp(), "way": method, "evaluated": numbers}
                )
                log.sync()
                listed = ", ".join(f"{key} {value:.4f}" for key, value in numbers.items())
                console.print_line(f"step {step}: {listed}")
            elif is_finished:
                console.print_line(f"complete   {run} is finished; the results are in {file}")
                return
            else:
                console.show_progress(f"waiting for a checkpoint; the run is {status}")
                time.sleep(POLL_SECONDS)


def find_checkpoints(run: Path, is_finished: bool) -> list[Path]:
    """Returns the checkpoints to evaluate, oldest first.

    If the run keeps some checkpoints permanently, they are the permanent ones and, after the run has finished, the last
    one. Otherwise they are all checkpoints."""
    checkpoints = list_committed(run / CHECKPOINTS)
    kept = [path for path in checkpoints if exists(path / KEEP_MARKER)]
    if not kept:
        return checkpoints
    if is_finished and checkpoints[-1] not in kept:
        kept.append(checkpoints[-1])
    return kept
