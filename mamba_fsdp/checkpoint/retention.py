"""Which checkpoints of a run stay: rank 0 prunes old ones, but none that is kept for ever or that a process reads, and
removes what killed saves left.

A process that reads a checkpoint of another's run, or writes a model, holds a lease in that folder meanwhile:
.reading.<unique>. Where it may not write, it is not protected; it then takes a newer one or says what is gone.
"""

import atexit
import contextlib
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.lease import Lease
from mamba_fsdp.run_layout import KEPT, MODELS, READING, committed, step_name, step_of
from mamba_fsdp.storage import exists, hidden_beside, move, sync_folder

SECONDS_OF_SILENCE = 600.0  # after which a reader that does not renew its lease counts as dead


class Retention:
    """The folder of a run's checkpoints. keep: how many committed ones stay; of those that `every` divides the steps
    into, the first of each part after the first stays for ever (0: none). broken: names of those found broken."""

    def __init__(
        self, folder: Path, keep: int, every: int = 0, report: Callable[[str], None] = print
    ):
        assert keep >= 1
        self.folder, self.keep, self.every, self.report = folder, keep, every, report
        self.broken: set[str] = set()
        self.signs: dict[
            tuple[str, int], float
        ] = {}  # of readers: (file, time in it) -> when it was first seen
        self.left: list[
            Path
        ] = []  # what was unfinished at the start, and whose writer may have lived

    def clean(self) -> None:
        """Make the folder, and remove what killed saves left there and among the run's models."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.folder.parent / MODELS):
            self.left += remove_left_over(left_over(folder), self.report, self.signs)

    def place(self, partial: Path, step: int) -> Path:
        """Give the checkpoint of a step, whole and durable, its name; prune. Returns its path."""
        final = self.folder / step_name(step)
        if exists(final):  # broken, or the run would have started from it
            self.remove(final)
        move(partial, final)
        sync_folder(self.folder)
        self.prune(final)
        return final

    def prune(self, newest: Path) -> None:
        """Remove all but the newest `keep` committed checkpoints and those kept for ever; those known to be broken
        don't count among them."""
        path = self.folder
        try:
            self.left = remove_left_over(self.left, self.report, self.signs)
            whole = [
                path
                for path in committed(self.folder)
                if path.name not in self.broken or path == newest
            ]
            self._keep_for_ever(whole)
            for path in whole[: -self.keep]:
                if path != newest and not exists(path / KEPT) and not is_read(path, self.signs):
                    self.remove(path, unless_read=True)
        except (OSError, StorageError) as error:
            self.report(
                f"warning: can't remove the old checkpoint {path}: {getattr(error, 'strerror', error)}"
            )

    def remove(self, path: Path, unless_read: bool = False) -> None:
        """Remove a checkpoint so that half a removal never looks like one."""
        hidden = hidden_beside(path)
        move(path, hidden)
        if unless_read and is_read(
            hidden, self.signs
        ):  # by one that came between the look and the move
            move(hidden, path)
        else:
            delete(hidden)

    def _keep_for_ever(self, whole):
        """Mark the first checkpoint at or after each multiple of `every`; a mark stays when the setting changes."""
        parts = {path: (step_of(path.name) or 0) // self.every for path in whole if self.every}
        done = {0, *(part for path, part in parts.items() if exists(path / KEPT))}
        for path, part in parts.items():
            if part not in done:
                (path / KEPT).touch()
                done.add(part)


def is_read(folder: Path, signs: dict[tuple[str, int], float]) -> bool:
    """Whether a process that may live has a lease in the folder, which it has renewed since the `signs` before this one
    or lately, by our clock. What one that is known to have ended left is removed."""
    for file in folder.glob(f"{READING}*"):
        with contextlib.suppress(OSError):  # it is gone
            seen = signs.setdefault((file.name, file.stat().st_mtime_ns), time.monotonic())
            if Lease(file).ended_holder():
                file.unlink()
            elif time.monotonic() - seen < SECONDS_OF_SILENCE:
                return True
    return False


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, no run prunes the checkpoint `folder`, nor takes it for a killed process's; where it can be written to.
    Of ranks, the first does this for all."""
    lease = Lease(folder / f"{READING}{uuid.uuid4().hex[:12]}")
    with contextlib.suppress(OSError, UserError):
        if os.environ.get("RANK", "0") == "0":
            is_read(folder, {})  # for what it removes
            lease.try_take()
    try:
        yield
    finally:
        lease.give_back()


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write in, which is held and is not whole; it is `out` once the block has ended and all is on the
    disk, and is removed where it fails. What killed processes left of an earlier attempt is removed first. Raises
    UserError where `out` exists or the disk refuses."""
    found, say = left_over(out.parent, re.escape(out.name)), partial(print, file=sys.stderr)
    time.sleep(
        bool(found)
    )  # one that has only just been made, or is just given its name, shows it by then
    for path in remove_left_over(found, say, {}):
        say(
            f"{path} is another process's, which still writes, or was killed on another machine: remove it then"
        )
    if out.exists():
        raise UserError(f"{out} exists already; name a new folder, or remove it first")
    unfinished = hidden_beside(out)
    try:
        unfinished.mkdir(parents=True)
        with held(unfinished):
            yield unfinished
            for path in (*unfinished.rglob("*"), unfinished):
                if path.is_file():
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
                else:
                    sync_folder(path)
        unfinished.rename(out)
    except OSError as error:
        raise UserError(f"can't write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sync_folder(out.parent)


until_the_end = contextlib.ExitStack()  # what this process holds as long as it reads from elsewhere
atexit.register(until_the_end.close)


def remove_left_over(
    found: Sequence[Path], report: Callable[[str], None], signs: dict[tuple[str, int], float]
) -> list[Path]:
    """Remove what killed processes left of these folders, beside each other, and say so. signs: see is_read. Returns
    those whose writer may live."""
    there = [path for path in found if exists(path)]  # else it has its name by now
    written = [path for path in there if is_read(path, signs)]
    if gone := sorted({*there} - {*written}):
        report(
            f"cleaned    {len(gone)} unfinished, of killed processes, removed from {gone[0].parent}: "
            f"{sum(map(size_of, gone)) / 1e9:.3f} GB"
        )
        list(map(delete, gone))
    return written


def left_over(folder: Path, name: str = r"step_\d+") -> list[Path]:
    """The hidden folders in `folder` in which something of this name was, or is, being written: see hidden_beside."""
    wanted = re.compile(rf"\.{name}\.[0-9a-f]+\.partial")
    return sorted(path for path in folder.glob(".*.partial") if wanted.fullmatch(path.name))


def size_of(folder: Path) -> int:
    """Bytes of a file, or of the files in a folder, that may be vanishing."""
    total = 0
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):
            total += path.is_file() and path.stat().st_size
    return total


def delete(folder: Path) -> None:
    """Remove a folder of files, or a link to one, as far as the disk allows; the next run tries again."""
    for path in [folder] if folder.is_symlink() else folder.glob("*"):
        with contextlib.suppress(OSError):
            path.unlink()
        heart.beat()
    shutil.rmtree(folder, ignore_errors=True)
