"""Which checkpoints of a run stay: a new one takes its place, and old ones are removed.

Checkpoints are made, and removed, in the own folder of the run's lease (lease.py): half a checkpoint never has a name
that could be chosen. A process that reads one gets an error that says so if the checkpoint is removed meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mamba_fsdp.errors import LostError, UserError
from mamba_fsdp.lease import Lease
from mamba_fsdp.run_layout import KEPT, committed, step_of
from mamba_fsdp.storage import exists, sync_folder


@dataclass
class Retention:
    """The committed checkpoints in `folder`, which this process may change as long as it holds `lease`.

    keep: how many of the newest stay. every: the first checkpoint at or after each multiple of so many steps stays for
    ever; 0: none does.
    """

    folder: Path
    lease: Lease
    keep: int
    every: int
    report: Callable[[str], None]
    broken: set[str] = field(default_factory=set)  # names of checkpoints that were found broken

    def place(self, whole: Path) -> Path:
        """Moves a durable checkpoint from the own folder to where it counts, removes old ones, and returns its path.
        Raises LostError, and OSError."""
        final = self.folder / whole.name
        if self._is_to_stay(final):
            (whole / KEPT).touch()
        if exists(final):  # a broken one: the run would have started from another
            self.lease.remove(final)
        self.lease.move(whole, final)
        sync_folder(self.folder)
        self.broken.discard(final.name)
        self.prune(final, self.keep)
        return final

    def _is_to_stay(self, new: Path) -> bool:
        """Returns whether a checkpoint is the first at or after a multiple of `every`."""
        if not self.every:
            return False
        multiples = {0}
        for path in self._whole():
            if exists(path / KEPT):  # it stays also where the setting has changed since
                multiples.add(self._multiple(path))
        return self._multiple(new) not in multiples

    def _multiple(self, path: Path) -> int:
        return (step_of(path.name) or 0) // self.every

    def _whole(self) -> list[Path]:
        return [path for path in committed(self.folder) if path.name not in self.broken]

    def prune(self, newest: Path, keep: int) -> None:
        """Removes all but the newest `keep` whole checkpoints, those that stay for ever, and `newest`. Warns where the
        disk refuses; raises LostError."""
        try:
            for path in self._whole()[:-keep]:
                if path != newest and not exists(path / KEPT):
                    if keep < self.keep:
                        self.report(
                            f"checkpoint {path.name} is removed to make room for a newer one"
                        )
                    self.lease.remove(path)
        except LostError:
            raise
        except (OSError, UserError) as error:
            reason = getattr(error, "strerror", error)
            self.report(f"warning: can't remove old checkpoints in {self.folder}: {reason}")
