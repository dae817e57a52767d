"""Decides which checkpoints of a run stay: moves a new one to its place, and removes old ones.

Checkpoints are made, and removed, in the own folder of the run's lease (run/lease.py): half a checkpoint never has a name
that could be chosen. A process that reads a checkpoint while it is removed gets an error that says so.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mamba_fsdp.errors import LeaseLostError, UserError
from mamba_fsdp.run.layout import committed, step_of
from mamba_fsdp.run.lease import Lease
from mamba_fsdp.run.names import KEPT
from mamba_fsdp.storage.patience import exists, retry_io, size_of, sync_folder
from mamba_fsdp.text import format_quantity

CHECKPOINTS_TO_COME = "the checkpoints to come"


def removable(whole: Sequence[Path], keep: int) -> list[Path]:
    """Returns which of these checkpoints, oldest first, may be removed: all but the newest `keep` and the ones that are
    never removed."""
    return [path for path in whole[:-keep] if not exists(path / KEPT)]


def check_room(
    folder: Path,
    whole: Sequence[Path],
    needed: int,
    count: int = 1,
    what: str = CHECKPOINTS_TO_COME,
) -> None:
    """Raises UserError if the disk of `folder` has no room for `what`: `count` times `needed` bytes, even after old ones
    of the `whole` checkpoints are removed."""
    usage = retry_io(partial(shutil.disk_usage, folder), folder)
    free = usage.free
    if free < count * needed:
        free += sum(map(size_of, removable(whole, 1)))
    if free < count * needed and usage.total:  # 0: the file system does not say
        fewer = " lower keep_checkpoints," if count > 1 else ""
        raise UserError(
            f"{folder} has only {format_quantity(free, 'B')} free, but {what} need {count} x {format_quantity(needed, 'B')}; "
            f"make room,{fewer} or choose another folder"
        )


@dataclass
class Retention:
    """The committed checkpoints in `folder`, which this process may change as long as it holds `lease`.

    keep: how many of the newest stay. every: the first checkpoint at or after each multiple of so many steps is never
    removed; 0: no checkpoint is exempt.
    """

    folder: Path
    lease: Lease
    keep: int
    every: int
    report: Callable[[str], None]
    broken: set[str] = field(default_factory=set)  # names of checkpoints that were found broken

    def place(self, whole: Path) -> Path:
        """Moves a durable checkpoint from the own folder to where it counts, removes old ones, and returns its path.
        Raises LeaseLostError, and OSError."""
        final = self.folder / whole.name
        if self._is_to_stay(final):
            retry_io((whole / KEPT).touch, whole / KEPT)
        if exists(final):  # it is broken, or the run would have resumed from it
            self.lease.remove(final)
        self.lease.move(whole, final)
        sync_folder(self.folder)
        self.broken.discard(final.name)
        self.prune(self.keep)
        return final

    def _is_to_stay(self, new: Path) -> bool:
        """Returns whether a checkpoint is the first at or after a multiple of `every`."""
        if not self.every:
            return False
        multiples = {0}
        for path in self._whole():
            if exists(path / KEPT):  # it stays even if the setting has changed since
                multiples.add(self._multiple(path))
        return self._multiple(new) not in multiples

    def _multiple(self, path: Path) -> int:
        return (step_of(path.name) or 0) // self.every

    def _whole(self) -> list[Path]:
        return [path for path in committed(self.folder) if path.name not in self.broken]

    def make_room(self, needed: int, what: str = CHECKPOINTS_TO_COME) -> None:
        """Removes old checkpoints until the disk has room for the `needed` bytes of `what`. Raises UserError, and removes
        none, if that is not enough."""
        whole = self._whole()
        check_room(self.folder, whole, needed, what=what)
        for keep in range(min(self.keep, len(whole)), 0, -1):
            usage = retry_io(partial(shutil.disk_usage, self.folder), self.folder)
            if usage.free < needed:
                self.prune(keep, what)

    def prune(self, keep: int, what: str = "") -> None:
        """Removes all whole checkpoints but the newest `keep` and the ones that are never removed, to make room for
        `what`. Warns if the disk refuses; raises LeaseLostError."""
        try:
            for path in removable(self._whole(), keep):
                if what:
                    self.report(f"checkpoint {path.name} is removed to make room for {what}")
                self.lease.remove(path)
        except LeaseLostError:
            raise
        except (OSError, UserError) as error:
            reason = getattr(error, "strerror", error)
            self.report(f"warning: can't remove old checkpoints in {self.folder}: {reason}")
