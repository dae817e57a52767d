"""python -m mamba_fsdp checkpoints RUN [--verify]

List the checkpoints of a run, or describe one checkpoint: step, tokens, size,
time of commit, and whether it is intact. `kept` marks a checkpoint that is
never removed (keep_every). An unfinished checkpoint is still being written, or
a killed process left it; the next start of the run removes it.

Exit codes: 0 all are intact, 1 at least one is broken, 2 there are none.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mamba_fsdp.checkpoint.contents import verify_sizes
from mamba_fsdp.checkpoint.saved_run import read_saved_run
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import setting
from mamba_fsdp.importing.kinds import unexpected_path_error
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.run.layout import list_committed, list_unfinished, step_of
from mamba_fsdp.run.names import CHECKPOINTS, COMMIT, KEEP_MARKER
from mamba_fsdp.storage.retry import exists, is_file, is_folder, size_of, stat_of
from mamba_fsdp.text import format_quantity


@dataclass
class Options:
    verify: bool = setting(False)
    """Read every byte and compare it with the checksums. Without it, only the sizes of the files are checked."""


@dataclass
class Row:
    """One checkpoint, a line of the list."""

    step: int
    bytes: int
    verdict: str
    committed: str = ""
    kept: bool = False
    tokens: float | None = None


def main(run: str, options: Options) -> int:
    place = Path(run)
    console = Console()
    finished = [place]
    unfinished_paths = []
    if not is_file(place / COMMIT):
        folder = place / CHECKPOINTS if is_folder(place / CHECKPOINTS) else place
        finished = list_committed(folder)
        unfinished_paths = list_unfinished(folder.parent)
    if not finished and not unfinished_paths:
        raise unexpected_path_error(place, "a run with a checkpoint")
    rows = []
    for number, path in enumerate(finished, 1):
        console.show_progress(f"reading {path.name}, {number} of {len(finished)}")
        row = describe(path, options.verify)
        if exists(path):  # the run can have removed it in the meantime
            rows.append(row)
    for path in unfinished_paths:
        rows.append(Row(step_of(path.name) or 0, size_of(path), "unfinished"))
    console.print_line(f"{'step':>10} {'tokens':>8} {'size':>9}  {'committed':<16}  verdict")
    for row in rows:
        tokens = format_quantity(row.tokens, "") if row.tokens else ""
        verdict = f"kept; {row.verdict}" if row.kept else row.verdict
        console.print_line(
            f"{row.step:>10} {tokens:>8} {format_quantity(row.bytes, 'B'):>9}  {row.committed:<16}  {verdict}"
        )
    return int(any(row.verdict.startswith("broken") for row in rows))


def describe(path: Path, verify: bool) -> Row:
    """Reads a committed checkpoint and returns its Row. If the checkpoint can't be read, the verdict contains the reason.

    verify: whether to compare every byte with the checksums. Otherwise only the sizes of the files are checked."""
    verdict = "whole" if verify else "not verified"
    row = Row(step_of(path.name) or 0, size_of(path), verdict, kept=exists(path / KEEP_MARKER))
    with suppress(OSError):
        moment = datetime.fromtimestamp(stat_of(path / COMMIT).st_mtime)
        row.committed = f"{moment:%Y-%m-%d %H:%M}"
    try:
        problems = read_all(path) if verify else verify_sizes(path)
        if problems:
            row.verdict = f"broken: {'; '.join(problems)}"
        row.tokens = read_saved_run(path).progress.tokens
    except UserError as error:  # for example, a checkpoint of another version
        if not row.verdict.startswith("broken"):
            row.verdict = f"broken: {error}"
    return row


def read_all(path: Path) -> list[str]:
    """Reads every byte of a checkpoint, and returns a sentence about each problem found."""
    from mamba_fsdp.checkpoint import restore  # imports torch
    from mamba_fsdp.parallel.world import World

    return restore.verify(path, World.alone())
