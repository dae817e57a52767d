"""What a checkpoint says of itself: COMMIT and state.json, and whether its files are there. Without torch."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamba_fsdp.checkpoint.ranges import Layout, is_cut
from mamba_fsdp.errors import UserError
from mamba_fsdp.run_layout import COMMIT, STATE, removed, step_of
from mamba_fsdp.storage import CHECKPOINT, exists, like, parse_object, retry_io

DTYPES = {"F64", "F32", "F16", "BF16"}  # of conventions.SAFETENSORS_DTYPES
# What the loop's state holds at least, of a run of ours.
LOOP_STATE = {
    "progress": {"step": 0, "tokens": 0, "skipped_steps": 0, "data": {}},
    "world_size": 1,
    "torch": "",
    "settings": {"model": {}, "data": {"dataset_path": "", "seq_length": 1}},
}
# What content that is not as it was written leads to.
BAD_CONTENT = (EOFError, ValueError, LookupError, TypeError, AttributeError, OverflowError)


class BrokenError(UserError):
    """A checkpoint is not what was written."""


@contextlib.contextmanager
def _broken_where_odd(name: str) -> Iterator[None]:
    """Raises BrokenError for what reading the file `name` comes to, where it is not as it was written."""
    try:
        yield
    except OSError as error:
        raise BrokenError(f"{name}: {error.strerror}") from None
    except BAD_CONTENT:
        raise BrokenError(f"{name} is not what was written") from None


def _read(path):
    return parse_object(retry_io(path.read_bytes, path))


def read_commit(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """{file: its size and checksums} as COMMIT has it.

    Raises BrokenError if that is not what was written, or is another step's; UserError if another version of this
    program wrote it: then it is not broken, and an older one is no substitute.
    """
    with _broken_where_odd(COMMIT):
        content = _read(checkpoint / COMMIT)
        if not CHECKPOINT.reads(content):
            # COMMIT has no checksum of its own, and a flipped bit there is no other version.
            if CHECKPOINT.reads(_read(checkpoint / STATE)):
                raise BrokenError(
                    f"{COMMIT} is damaged: its format or version is not that of {STATE}"
                )
            CHECKPOINT.check(checkpoint / COMMIT, content)
        files = content["files"]
        like(list(files), [...])
        if STATE not in files:
            raise ValueError
        for entry in files.values():
            for part in (entry, entry.get("model", entry)):
                like(part, {"bytes": 0, "xxh3": ""})
        _check_step(checkpoint, COMMIT, content)
    return files


def _check_step(checkpoint, name, content):
    """Raises BrokenError for a file of another step than the folder's name says; folders may have names of their own."""
    step = step_of(checkpoint.name)
    if step is not None and content["step"] != step:
        raise BrokenError(
            f"{name} is of step {content['step']}, but the folder's name says another"
        )


@dataclass
class Contents:
    """What state.json says."""

    state: dict[str, Any]  # what the loop saved
    files: list[str]
    layouts: list[Layout]
    tensors: dict[str, dict[str, Any]]  # stored name -> {shape, dtype, layout: its number}


def read_state(checkpoint: Path) -> Contents:
    """What state.json of a checkpoint says. Raises BrokenError, and UserError for another version."""
    try:
        with _broken_where_odd(STATE):
            content = _read(checkpoint / STATE)
            CHECKPOINT.check(checkpoint / STATE, content)
            _check_step(checkpoint, STATE, content)
            contents = Contents(
                content["state"], content["files"], content["layouts"], content["tensors"]
            )
            _check_contents(contents)
    except BrokenError as error:
        if not exists(checkpoint):
            raise removed(checkpoint) from None
        raise BrokenError(f"checkpoint {checkpoint} is broken: {error}") from None
    return contents


def _check_contents(contents):
    """Raises one of BAD_CONTENT, or BrokenError, for what would be used without a look."""
    if contents.state.keys() >= {"progress", "settings"}:
        like(contents.state, LOOP_STATE)
    like(contents.state, {})
    like(list(contents.files), [...])
    for layout in contents.layouts:
        if len(layout["starts"]) != len(layout["files"]):
            raise ValueError
        for number in layout["files"]:
            contents.files[number]
    seen = set()
    for name, entry in contents.tensors.items():
        like(entry, {"shape": [0], "layout": 0})
        if entry["dtype"] not in DTYPES:
            raise ValueError
        cut = entry["layout"], math.prod(entry["shape"])
        if cut not in seen and not is_cut(contents.layouts[cut[0]]["starts"], cut[1]):
            raise BrokenError(f"the pieces of {name} do not cover the whole tensor")
        seen.add(cut)


def commit_or_problem(checkpoint: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """(what COMMIT says, []), or ({}, what is wrong with it). Raises UserError for another version."""
    try:
        return read_commit(checkpoint), []
    except BrokenError as error:
        return {}, [str(error)]


def verify_sizes(checkpoint: Path) -> list[str]:
    """What is wrong with a committed checkpoint, in sentences, as far as the sizes of its files tell. Raises UserError
    for another version."""
    files, problems = commit_or_problem(checkpoint)
    for name, entry in sorted(files.items()):
        problem = check_size(checkpoint / name, entry)
        if problem:
            problems.append(problem)
    return problems


def check_size(path: Path, entry: dict[str, Any]) -> str:
    """What is wrong with the size of a file of which COMMIT has `entry`; "" for nothing."""
    try:
        size = retry_io(path.stat, path).st_size
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if size != entry["bytes"]:
        return f"{path.name} has {size} bytes, not {entry['bytes']}"
    return ""
