"""Makes data/builtin, the data of a first try, if a run reads it and it is missing."""

import os
from pathlib import Path

from mamba_fsdp.importing.kinds import INDEX, PROGRESS
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.settings.train_config import DataConfig
from mamba_fsdp.storage.retry import exists

BUILTIN = "data/builtin"


def builtin_folder(data: DataConfig) -> Path | None:
    """Returns the absolute path of the built-in data if these settings read it, else None."""
    builtin = os.path.abspath(BUILTIN)
    if data.use_dummy_dataset or os.path.abspath(data.dataset_path) != builtin:
        return None
    return Path(builtin)


def missing_builtin(data: DataConfig) -> Path | None:
    """Returns the path of the built-in data if these settings read it and it is missing or unfinished, else None."""
    folder = builtin_folder(data)
    if folder is None or exists(folder / PROGRESS):
        return folder
    is_made = exists(folder / INDEX) or exists(folder / "train" / INDEX)
    return None if is_made else folder


def make_missing_builtin(data: DataConfig) -> None:
    """Makes the built-in data if these settings read it and it is missing. Raises UserError as get_dataset.py does."""
    if not missing_builtin(data):
        return
    from mamba_fsdp.importing.make_dataset import make_dataset  # late: most runs don't need it

    make_dataset("builtin", BUILTIN, DatasetConfig())
