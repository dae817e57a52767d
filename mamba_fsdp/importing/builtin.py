"""Makes data/builtin, the data for a first try of this program, if a run reads it and it is missing."""

import os
from pathlib import Path

from mamba_fsdp.importing.kinds import INDEX, PROGRESS
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.settings.train_config import DataConfig
from mamba_fsdp.storage.retry import exists

BUILTIN = "data/builtin"


def builtin_folder(data: DataConfig) -> Path | None:
    """Returns the absolute path of the built-in data if a run with these settings reads it, else None."""
    builtin = os.path.abspath(BUILTIN)
    if data.use_dummy_dataset or os.path.abspath(data.dataset_path) != builtin:
        return None
    return Path(builtin)


def missing_builtin(data: DataConfig) -> Path | None:
    """Returns the path of the built-in data if a run with these settings reads it, and it is missing or unfinished. Otherwise
    returns None."""
    folder = builtin_folder(data)
    if folder is None or exists(folder / PROGRESS):
        return folder
    is_made = exists(folder / INDEX) or exists(folder / "train" / INDEX)
    return None if is_made else folder


def make_missing_builtin(data: DataConfig) -> None:
    """Makes the built-in data if a run with these settings reads it, and it is missing. Raises UserError if it can't be made."""
    if not missing_builtin(data):
        return
    # Most runs do not need this import, and it is slow.
    from mamba_fsdp.importing.make_dataset import make_dataset

    make_dataset("builtin", BUILTIN, DatasetConfig())
