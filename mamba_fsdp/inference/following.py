"""Evaluates the checkpoints of a run as they come, beside its training: RUN/evaluations/NAME.jsonl has a line for each.

A file of its own, because a run's metrics.jsonl has one writer, which is the training.
"""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.run.layout import committed, step_of
from mamba_fsdp.run.lease import Lease
from mamba_fsdp.run.names import CHECKPOINTS, EVALUATIONS, KEPT
from mamba_fsdp.run.records import LARGEST, Log, read, read_status
from mamba_fsdp.run.timestamp import utc_timestamp
from mamba_fsdp.storage.patience import exists, make_folder, storage_error

SECONDS_BETWEEN_LOOKS = 10.0


def follow(
    run: Path,
    name: str,
    way: str,
    measure: Callable[[Path], dict[str, float]],
    console: Console,
) -> None:
    """Measures each checkpoint of a run that the file of `name` lacks, oldest first, until the run is finished. Of a run
    with keep_every, those that stay, and the last.

    way: how it is measured; lines of the file that were measured otherwise don't count. measure: returns the numbers
    of a checkpoint. Raises UserError if another process does the same, and as `measure` does.
    """
    file = run / EVALUATIONS / f"{name}.jsonl"
    with closing(Lease(file.with_name(f".{file.name}.lease"), file)) as lease:
        try:
            make_folder(file.parent)
            lease.take(console.line, "one process is enough")
        except OSError as error:
            raise storage_error(error, f"{file}: can't be written ({error.strerror})") from None
        log = Log(file, LARGEST, lease)
        missed: set[Path] = set()
        while True:
            status = read_status(run).get("status", "not begun")
            is_finished = status == "finished"
            done = {entry["step"] for entry in read(file) if entry.get("way") == way}
            waiting = [
                path
                for path in to_measure(run, is_finished)
                if step_of(path.name) not in done and path not in missed
            ]
            if waiting:
                checkpoint = waiting[0]
                step = step_of(checkpoint.name)
                console.passing(f"step {step}: evaluating")
                try:
                    numbers = measure(checkpoint)
                except UserError:
                    if exists(checkpoint):
                        raise
                    missed.add(checkpoint)  # the run has removed it meanwhile
                    continue
                log.write({"step": step, "time": utc_timestamp(), "way": way, "evaluated": numbers})
                log.sync()
                listed = ", ".join(f"{key} {value:.4f}" for key, value in numbers.items())
                console.line(f"step {step}: {listed}")
            elif is_finished:
                console.line(f"over       {run} is finished; the numbers are in {file}")
                return
            else:
                console.passing(f"waiting for a checkpoint; the run is {status}")
                time.sleep(SECONDS_BETWEEN_LOOKS)


def to_measure(run: Path, is_finished: bool) -> list[Path]:
    """Returns the checkpoints that are worth it, oldest first."""
    checkpoints = committed(run / CHECKPOINTS)
    kept = [path for path in checkpoints if exists(path / KEPT)]
    if not kept:
        return checkpoints
    if is_finished and checkpoints[-1] not in kept:
        kept.append(checkpoints[-1])
    return kept
