"""Names the splits of a dataset, and tells which folder is a token store, from names alone."""

from pathlib import Path

from mamba_fsdp.storage.patience import exists

# {the name of a store that get_dataset.py makes: the words by which folders and files are named after this split}
SPLITS = {
    "train": ["train"],
    "validation": ["validation", "valid", "val", "dev"],
    "test": ["test"],
}


def is_store(path: Path) -> bool:
    """Returns whether `path` is a token store."""
    return exists(path / "index.json")


def split_in(path: Path, split: str = "train") -> Path:
    """Returns the path of the store for `split`: a subfolder named after it (see SPLITS), or `path` itself if that is a
    store or has no such subfolder."""
    if not is_store(path):
        for name in SPLITS[split]:
            if is_store(path / name):
                return path / name
    return path
