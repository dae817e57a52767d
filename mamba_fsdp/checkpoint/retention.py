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
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mamba_fsdp.errors import LostError, UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.lease import Lease
from mamba_fsdp.run_layout import KEPT, MODELS, READING, committed, step_name, step_of
from mamba_fsdp.storage import exists, hidden_beside, move, nothing, sync_folder

STEPS = r"step_\d+"
REMOVED = "removed"  # what is being removed lies in a hidden folder of this name


def is_in_use(folder: Path) -> bool:
    """Whether a process that lives reads, or writes, what lies below this folder. It may take a while to know."""
    return any(Lease(file).shows_life() for file in folder.rglob(f"{READING}*"))


@dataclass
class Retention:
    """The folder of a run's checkpoints.

    keep: how many committed ones stay. every: of those that it divides the steps into, the first of each part after the
    first stays for ever (0: none). check_ours: raises LostError when another run has the folder by now.

    A check can't hold for longer than the moment it is made: the process may stand still after it. So what is committed
    moves only into and out of an own folder of this run, see `own_folder`.
    """

    folder: Path
    keep: int
    every: int
    report: Callable[[str], None]
    check_ours: Callable[[], None]
    broken: set[str] = field(default_factory=set)  # names of checkpoints that were found broken

    def clean(self) -> None:
        """Makes the folder, and removes what killed saves left there and among the run's models."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.folder.parent / MODELS):
            remove_left_over(folder, STEPS, self.report, self.check_ours)

    def own_folder(self, step: int) -> Path:
        """Makes a hidden folder to save this step in. A run that takes over moves it away before anything else, and
        then no rename into it or out of it succeeds."""
        own = hidden_beside(self.folder / step_name(step))
        own.mkdir()
        self.check_ours()  # now, not before: who takes over from here on finds the folder
        return own

    def place(self, whole: Path) -> Path:
        """Moves a durable checkpoint from this run's own folder to where it counts, and prunes. Returns its path. What
        has its name is broken, or the run would have started from it."""
        own = whole.parent
        final = self.folder / whole.name
        self.check_ours()
        if exists(final):
            self._move(final, own / "replaced")
        self._move(whole, final)
        sync_folder(self.folder)
        self.broken.discard(final.name)
        self.prune(final, own, self.keep)
        return final

    def _move(self, old, new):
        try:
            move(old, new)
        except FileNotFoundError:
            self.check_ours()
            raise

    def prune(self, newest: Path, own: Path, keep: int) -> None:
        """Removes all but the newest `keep` committed checkpoints and those kept for ever; those known to be broken
        don't count among them. own: this run's own folder."""
        try:
            whole = [path for path in committed(self.folder) if path.name not in self.broken]
            self._keep_for_ever(whole, newest)
            for path in whole[:-keep]:
                if path != newest and not exists(path / KEPT) and not is_in_use(path):
                    if keep < self.keep:
                        self.report(
                            f"checkpoint {path.name} is removed to make room for a newer one"
                        )
                    self._remove(path, own / path.name)
        except LostError:
            raise
        except (OSError, UserError) as error:
            reason = getattr(error, "strerror", error)
            self.report(f"warning: can't remove old checkpoints in {self.folder}: {reason}")

    def _remove(self, path, hidden):
        """Removes a checkpoint so that half a removal never looks like one."""
        self._move(path, hidden)
        if any(hidden.glob(f"{READING}*")):  # of one that came between the look and the move
            self._move(hidden, path)
        else:
            delete(hidden)

    def _keep_for_ever(self, whole, newest):
        """Marks the newest one if it is the first at or after a multiple of `every`; a mark stays when the setting
        changes."""
        if self.every:
            kept = {self._part(path) for path in whole if exists(path / KEPT)}
            if self._part(newest) not in {0, *kept}:
                (newest / KEPT).touch()

    def _part(self, path):
        return (step_of(path.name) or 0) // self.every


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, no run prunes the checkpoint `folder`, nor takes it for a killed process's; where it can be written to.
    Of ranks, the first does this for all."""
    lease = Lease(folder / f"{READING}{uuid.uuid4().hex[:12]}")
    with contextlib.suppress(OSError, UserError):
        if os.environ.get("RANK", "0") == "0":
            lease.try_take()
    with contextlib.closing(lease):
        yield


until_the_end = contextlib.ExitStack()  # what this process holds as long as it reads from elsewhere
atexit.register(until_the_end.close)


def hold_until_the_end(folder: Path) -> None:
    """Holds a checkpoint, see `held`, until `until_the_end` is closed or this process ends."""
    until_the_end.enter_context(held(folder))


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write in, which is held and is not whole; it is `out` once the block has ended and all is on the
    disk, and is removed where it fails. What killed processes left of an earlier attempt is removed first. Raises
    UserError where `out` is not free or the disk refuses."""
    remove_left_over(out.parent, re.escape(out.name), partial(print, file=sys.stderr))
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


def left_over(folder: Path, name: str = STEPS) -> list[Path]:
    """The hidden folders in `folder` in which something of this name was, or is, being written or removed."""
    wanted = re.compile(rf"\.({name}|{REMOVED})\.[0-9a-f]+\.partial")
    return sorted(path for path in folder.glob(".*.partial") if wanted.fullmatch(path.name))


def remove_left_over(
    folder: Path,
    name: str,
    report: Callable[[str], None],
    check_ours: Callable[[], None] = nothing,
) -> None:
    """Removes what killed processes left, see left_over, and says so. check_ours: as that of Retention."""
    dead = [path for path in left_over(folder, name) if not is_in_use(path)]
    check_ours()  # now, not before: what a later holder writes has another name
    if not dead:
        return
    own = hidden_beside(folder / REMOVED)
    own.mkdir()
    for path in dead:  # whole, so that a process that still uses one finds nothing there at all
        with contextlib.suppress(FileNotFoundError):
            path.rename(own / path.name)
    size = size_of(own)
    report(
        f"cleaned    {len(dead)} unfinished, left by killed processes, removed from {folder}: {size / 1e9:.3f} GB"
    )
    delete(own)


def size_of(folder: Path) -> int:
    """Bytes of a file, or of the files in a folder, that may be vanishing."""
    total = 0
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file():
                total += path.stat().st_size
    return total


def delete(folder: Path) -> None:
    """Removes a folder, but of links only the link, as far as the disk allows; the next run tries again."""
    if folder.is_symlink():
        folder.unlink()
        return
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            path.unlink()
        heart.beat()
    shutil.rmtree(folder, ignore_errors=True)
