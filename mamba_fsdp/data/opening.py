"""What lies at a path: a token store to read, or other data and the command that makes a store of it."""

import shlex
from pathlib import Path

from config.train_config import DataConfig
from mamba_fsdp.data.corpus import what_lies_at
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import exists


def open_source(path: str | Path, data: DataConfig | None = None) -> TokenStore:
    """Opens the token store at `path`. Raises UserError for other data (with the command that makes a store of it),
    and where something is wrong with the store or it lacks what the settings `data` ask for."""
    path = Path(path)
    if not is_store(path):
        check_no_other_data(path)
    store = TokenStore(path)
    if data and data.reset_at_documents and store.eos < 0:
        raise UserError(
            f"{path}: reset_at_documents needs to know which token ends its documents; make the store "
            "again with --eos_token=ID"
        )
    return store


def is_store(path: Path) -> bool:
    """Whether a token store lies at `path`."""
    return exists(path / "index.json")


def split_in(path: Path, split: str = "train") -> Path:
    """The store `path` itself, or its subfolder for `split` (train or validation) if that is a store."""
    if not is_store(path) and is_store(path / split):
        return path / split
    return path


def check_no_other_data(path: Path) -> None:
    """Raises UserError if text or tokens of another format lie at `path`; its message holds the command that makes a
    token store of them."""
    if not path.exists():
        return
    found = what_lies_at(path)
    if found is None:
        return
    title, holds_tokens = found
    out = Path("data", path.name.partition(".")[0])
    options = ""
    if holds_tokens:
        options = " --tokenizer=THE_ONE_THAT_MADE_THEM"
    raise UserError(
        f"{path}: {title}; training reads token stores. Make one with: .venv/bin/python get_dataset.py "
        f"{shlex.quote(str(path))} {out}{options}, then give --dataset_path={out}"
    )
