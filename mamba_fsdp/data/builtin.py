"""The data of a first try, data/builtin: a run that names no other makes it where it is missing."""

import os
from pathlib import Path

from config.dataset_config import DatasetConfig
from config.train_config import DataConfig
from mamba_fsdp.storage import exists


def builtin_folder(data: DataConfig) -> Path | None:
    """The folder of the built-in data, absolute, where that is what these settings read; else None."""
    folder, builtin = os.path.abspath(data.dataset_path), os.path.abspath("data/builtin")
    return Path(builtin) if folder == builtin and not data.use_dummy_dataset else None


def missing_builtin(data: DataConfig) -> Path | None:
    """The same, where nothing or only a part of it is there."""
    folder = builtin_folder(data)
    if not folder or any(folder.glob(".progress*")):
        return folder
    return None if any(exists(folder / part / "index.json") for part in (".", "train")) else folder


def make_missing_builtin(data: DataConfig) -> None:
    """Makes it in full where it is missing. Raises UserError as get_dataset.py does."""
    if folder := missing_builtin(data):
        from mamba_fsdp.data.tokenize import make_dataset  # late: most runs don't need it

        print(
            f"making {data.dataset_path} from the source of a Python library, for a first try",
            flush=True,
        )
        make_dataset("builtin", folder, DatasetConfig())
