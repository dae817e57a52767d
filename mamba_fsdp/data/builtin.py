"""The data of a first try, data/builtin: a run that names no other makes it where it is missing."""

import os
from pathlib import Path

from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.settings.train_config import DataConfig
from mamba_fsdp.storage import exists

BUILTIN = "data/builtin"


def builtin_folder(data: DataConfig) -> Path | None:
    """The folder of the built-in data, absolute, if that is what these settings read; else None."""
    builtin = os.path.abspath(BUILTIN)
    if data.use_dummy_dataset or os.path.abspath(data.dataset_path) != builtin:
        return None
    return Path(builtin)


def missing_builtin(data: DataConfig) -> Path | None:
    """The folder of the built-in data if these settings read it and nothing or only a part of it is there."""
    folder = builtin_folder(data)
    if folder is None or any(folder.glob(".progress*")):
        return folder
    is_there = any(exists(folder / part / "index.json") for part in (".", "train"))
    return None if is_there else folder


def make_missing_builtin(data: DataConfig) -> None:
    """Makes it in full where it is missing. Raises UserError as get_dataset.py does."""
    if not missing_builtin(data):
        return
    from mamba_fsdp.data.tokenize import make_dataset  # late: most runs don't need it

    print(f"making {BUILTIN} from the source of a Python library, for a first try", flush=True)
    make_dataset("builtin", BUILTIN, DatasetConfig())
