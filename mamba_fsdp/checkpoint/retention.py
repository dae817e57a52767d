"""Which checkpoints of a run stay: rank 0 prunes old ones and removes what killed saves left."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from mamba_fsdp.errors import StorageError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.run_layout import MODELS, committed
from mamba_fsdp.storage import hidden_beside, move


class Retention:
    """The folder of a run's checkpoints. keep: how many committed ones stay. broken: names of those found broken."""

    def __init__(self, folder: Path, keep: int, report: Callable[[str], None] = print):
        assert keep >= 1
        self.folder, self.keep, self.report = folder, keep, report
        self.broken: set[str] = set()

    def clean(self) -> None:
        """Make the folder, and remove what killed saves left there and among the run's models."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.folder.parent / MODELS):
            for left_over in folder.glob(".step_*.partial"):
                delete(left_over)

    def prune(self, newest: Path) -> None:
        """Remove all but the newest `keep` committed checkpoints; those known to be broken don't count among them."""
        whole = [path for path in committed(self.folder) if path.name not in self.broken or path == newest]
        for path in whole[:-self.keep]:
            if path != newest:
                try:
                    self.remove(path)
                except (OSError, StorageError) as error:
                    self.report(f"warning: can't remove the old checkpoint {path}: {getattr(error, 'strerror', error)}")

    def remove(self, path: Path) -> None:
        """Remove a checkpoint so that half a removal never looks like one."""
        hidden = hidden_beside(path)
        move(path, hidden)
        delete(hidden)


def delete(folder: Path) -> None:
    """Remove a folder of files as far as the disk allows; the next run tries again."""
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            path.unlink()
        heart.beat()
    shutil.rmtree(folder, ignore_errors=True)
