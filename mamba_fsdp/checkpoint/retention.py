"""Moves new checkpoints of a run to their final path, and removes old ones.

Checkpoints are created and removed in the staging folder of the run's lease (run/lease.py), so that an incomplete
checkpoint never has a name under which a run would load it. A process that reads a checkpoint while it is being removed
gets an error which says that the checkpoint was removed.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mamba_fsdp.errors import LeaseLostError, UserError
from mamba_fsdp.run.layout import list_committed, step_of
from mamba_fsdp.run.lease import Lease, Report
from mamba_fsdp.run.names import KEEP_MARKER
from mamba_fsdp.storage.retry import exists, retry_io, size_of, sync_folder
from mamba_fsdp.text import format_quantity

FUTURE_CHECKPOINTS = "the next checkpoints"


def list_removable(checkpoints: Sequence[Path], keep: int) -> list[Path]:
    """Returns the checkpoints that can be removed: all except the newest `keep` and those with a KEEP marker.

    checkpoints: undamaged checkpoints, oldest first.
    """
    return [path for path in checkpoints[:-keep] if not exists(path / KEEP_MARKER)]


def check_disk_space(
    folder: Path,
    checkpoints: Sequence[Path],
    needed: int,
    count: int = 1,
    what: str = FUTURE_CHECKPOINTS,
) -> None:
    """Raises UserError if the disk of `folder` can't store `count` times `needed` bytes.

    The space of old checkpoints among `checkpoints` that can be removed is counted as free. what: describes the data in the
    message.
    """
    usage = retry_io(shutil.disk_usage, folder, folder)
    free = usage.free
    if free < count * needed:
        free += sum(map(size_of, list_removable(checkpoints, 1)))
    if free < count * needed and usage.total:  # some file systems do not report sizes, and return 0
        fewer = " lower keep_checkpoints," if count > 1 else ""
        raise UserError(
            f"{folder} has only {format_quantity(free, 'B')} free, but {what} need {count} x {format_quantity(needed, 'B')}; "
            f"make room,{fewer} or choose another folder"
        )


@dataclass
class Retention:
    """The committed checkpoints of a run. This process can change them while it owns the run's lease.

    folder: the folder of the checkpoints. keep: how many of the newest checkpoints to keep. keep_every: the first
    checkpoint at or after each multiple of this number of steps is never removed; 0 disables this rule.
    """

    folder: Path
    lease: Lease
    keep: int
    keep_every: int
    report: Report
    broken: set[str] = field(default_factory=set)  # names of damaged checkpoints

    def move_into_place(self, staged: Path) -> Path:
        """Moves a new checkpoint from the staging folder to its final path, then removes old checkpoints.

        Returns the final path. Raises LeaseLostError if this process has lost the lease, and OSError if the disk fails.
        """
        final = self.folder / staged.name
        if self._must_keep(final):
            retry_io((staged / KEEP_MARKER).touch, staged / KEEP_MARKER)
        if exists(final):  # this one is damaged, or the run would have resumed from it
            self.lease.remove(final)
        self.lease.move(staged, final)
        sync_folder(self.folder)
        self.broken.discard(final.name)
        self.prune(self.keep)
        return final

    def _must_keep(self, new: Path) -> bool:
        """Returns whether a checkpoint is the first at or after a multiple of `keep_every`."""
        if not self.keep_every:
            return False
        multiples = {0}
        for path in self._list_usable():
            # A checkpoint with this marker is kept even if keep_every has changed since.
            if exists(path / KEEP_MARKER):
                multiples.add(self._multiple_of(path))
        return self._multiple_of(new) not in multiples

    def _multiple_of(self, path: Path) -> int:
        return (step_of(path.name) or 0) // self.keep_every

    def _list_usable(self) -> list[Path]:
        return [path for path in list_committed(self.folder) if path.name not in self.broken]

    def free_space(self, needed: int, what: str = FUTURE_CHECKPOINTS) -> None:
        """Removes old checkpoints until the disk has `needed` bytes free for `what`.

        If removing all that can be removed is not enough, removes none and raises UserError.
        """
        checkpoints = self._list_usable()
        check_disk_space(self.folder, checkpoints, needed, what=what)
        for keep in range(min(self.keep, len(checkpoints)), 0, -1):
            usage = retry_io(shutil.disk_usage, self.folder, self.folder)
            if usage.free < needed:
                self.prune(keep, what)

    def prune(self, keep: int, what: str = "") -> None:
        """Removes all undamaged checkpoints except the newest `keep` and those with a KEEP marker.

        what: the data that needs the space; if given, each removal is reported. If a checkpoint can't be removed,
        reports a warning. Raises LeaseLostError if this process has lost the lease.
        """
        try:
            for path in list_removable(self._list_usable(), keep):
                if what:
                    self.report(f"checkpoint {path.name} is removed to make room for {what}")
                self.lease.remove(path)
        except LeaseLostError:
            raise
        except (OSError, UserError) as error:
            reason = getattr(error, "strerror", error)
            self.report(f"warning: can't remove old checkpoints in {self.folder}: {reason}")
