"""Small files that are either the old one or the new one, and new folders that are there whole, whatever happens in
between."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import patiently


def sync_folder(folder: str | Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut, where the file system can do that."""
    with contextlib.suppress(OSError):  # some network file systems refuse fsync on a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def hidden_beside(path: Path) -> Path:
    """A new name beside `path`, for what is not yet whole or no longer: .<name>.<unique>.partial."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write in, which is `out` once the block has ended and all is on the disk, and is removed where it
    fails. Raises UserError where `out` exists or the disk refuses."""
    if out.exists():
        raise UserError(f"{out} exists already; name a new folder, or remove it first")
    unfinished = hidden_beside(out)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            else:
                sync_folder(path)
        unfinished.rename(out)
    except OSError as error:
        raise UserError(f"can't write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    sync_folder(out.parent)


def write_atomically(path: str | Path, data: str) -> None:
    """Write `data` to `path`: readers see the old content or all of the new. Raises StorageError after patient trying,
    and OSError as the disk does."""
    patiently(lambda: _write(Path(path), data), path)


def move(old: Path, new: Path) -> None:
    """Rename patiently to a name that is free. Raises as write_atomically does."""
    # An attempt that was told to have failed may have been made.
    patiently(lambda: None if new.exists() and not old.exists() else old.rename(new), new)


def _write(path, data):
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)
