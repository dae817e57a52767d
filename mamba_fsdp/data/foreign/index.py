"""The index of a source's pieces: made in parallel, by many processes where the data is large, and then kept.

documents-1a2b3c4d/       beside the data, or in index_dir; the name tells the settings that it depends on
  index.json              of each file its size, time and contents
  starts.i64 offsets.i64  see Pieces, little endian
"""

import hashlib
import io
import itertools
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.data.foreign.indexed import DataFile, Pieces, Plan
from mamba_fsdp.data.workers import deaf_to_ctrl_c, end_with_parent
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.formats import DOCUMENT_INDEX
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.storage import hidden_beside, retry_io, sync_folder, write_atomically
from mamba_fsdp.untrusted import parse_object

KEPT_FROM = 1 << 26  # bytes of data: the index of less is made at each start, in a moment
PROCESSES_FROM = 1 << 27  # bytes of data: starting processes takes seconds
ABANDONED = 86_400  # seconds since an index in the making was begun
SAMPLES, SAMPLE_BYTES = 16, 1 << 12  # of each file, that its digest covers


def open_index(
    plan: Plan, index_dir: str, say: Callable[[str], None]
) -> tuple[list[DataFile], Pieces | Path]:
    """(the files, their pieces or the folder that holds them), as kept or made now. Raises UserError for files that
    can't be read, and where there is no place to keep it."""
    root, names = plan.root, plan.names
    with ThreadPoolExecutor(16) as pool:  # each is a round trip on a network file system
        stats = list(
            pool.map(lambda name: retry_io(partial(os.stat, root / name), root / name), names)
        )
    now = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in zip(names, stats)]
    if not index_dir and sum(stat.st_size for stat in stats) < KEPT_FROM:
        kept: list[Any] = [io.BytesIO() for _ in Pieces._fields]
        files = _make(plan, now, kept)
        return files, Pieces(*(np.frombuffer(file.getbuffer(), "<i8") for file in kept))
    name = f"documents-{_short(plan.key + repr(names))}"
    folder = (
        Path(index_dir, f"{root.name}-{_short(str(root.resolve()))}-{name}")
        if index_dir
        else root / name
    )
    files = _kept(folder)
    if [file[:3] for file in files] == now:
        return files, folder
    say(f"index      of {root} in {folder}: made once, from {len(names)} files")
    try:
        return _keep(plan, now, folder), folder
    except OSError as error:
        raise UserError(
            f"{folder}: the index of {root} can't be written there ({error.strerror}); give a folder for "
            "it: --index_dir=FOLDER"
        ) from error


def _short(text):
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _kept(folder):
    """The files of the index that lies in a folder, [] where there is none that can be used."""
    try:
        content = parse_object((folder / "index.json").read_bytes())
        DOCUMENT_INDEX.check(folder, content)
        return [DataFile(*file) for file in content["files"]]
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return []


def _keep(plan, now, folder):
    """Makes the index in a folder that has another name until it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial_ = hidden_beside(folder)
    partial_.mkdir()
    try:
        with ExitStack() as stack:
            kept = [
                stack.enter_context(open(partial_ / f"{name}.i64", "wb")) for name in Pieces._fields
            ]
            files = _make(plan, now, kept)
            for file in kept:
                file.flush()
                os.fsync(file.fileno())
        write_atomically(
            partial_ / "index.json", json.dumps({**DOCUMENT_INDEX.header(), "files": files}) + "\n"
        )
        if _kept(folder) != files:  # else another run was faster
            shutil.rmtree(folder, ignore_errors=True)  # of data that has changed since
            partial_.rename(folder)
            sync_folder(folder.parent)
        for left in folder.parent.glob(f".{folder.name}.*.partial"):  # by a run that was killed
            if time.time() - left.stat().st_mtime > ABANDONED:
                shutil.rmtree(left, ignore_errors=True)
        return files
    finally:
        shutil.rmtree(partial_, ignore_errors=True)


def _make(plan, now, kept):
    """Writes the Pieces of all files to the two files `kept`; returns the DataFiles."""
    files: list[DataFile] = []
    total = 0
    kept[0].write(np.zeros(1, "<i8").tobytes())
    for found, lengths, offsets in _of_each_file(plan, now):
        kept[0].write((lengths.cumsum() + total).astype("<i8").tobytes())
        kept[1].write(offsets.astype("<i8").tobytes())
        files.append(found)
        total += found.length
        heart.beat()
    return files


def _of_each_file(plan, now):
    """Yields what _list_file finds, in the files' order."""
    large = sum(size for _, size, _ in now) >= PROCESSES_FROM and len(now) > 1
    workers = min(
        len(now),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )
    pool: Executor = (
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent)
        if large
        else ThreadPoolExecutor(workers)
    )
    try:
        yield from deaf_to_ctrl_c(pool.map, _list_file, itertools.repeat(plan.sent()), now)
    finally:
        pool.shutdown(cancel_futures=True)


def _list_file(plan, now):
    """(DataFile, lengths of the pieces with what is added, their offsets) of one file."""
    path = plan.root / now[0]
    try:
        rows = retry_io(lambda: plan.find_rows(path), path)
        content = np.memmap(path, np.uint8, "r") if now[1] else np.zeros(0, np.uint8)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or first_line(error)})") from error
    size = np.dtype(rows.dtype).itemsize
    if len(rows.lengths) and (rows.offsets + rows.lengths * size).max() > len(content):
        raise UserError(f"{path}: it ends before its last token; it is truncated: copy it again")
    if (
        plan.block
        and len(rows.lengths)
        and ((rows.lengths[:-1] != plan.block).any() or rows.lengths[-1] > plan.block)
    ):
        raise UserError(
            f"{path}: its rows have not the one length {plan.block} of the files before; say what rows "
            "are: --pack=document or --pack=none"
        )
    pieces = _stripped(rows, content, plan.strip) if plan.documents else _joined(rows)
    digest = hashlib.sha256(pieces.lengths.tobytes() + pieces.offsets.tobytes())
    for at in np.linspace(0, max(0, len(content) - SAMPLE_BYTES), SAMPLES, dtype=np.int64).tolist():
        digest.update(content[at : at + SAMPLE_BYTES])
    lengths = pieces.lengths + plan.added
    return (
        DataFile(
            *now,
            rows.dtype,
            len(rows.lengths),
            int(rows.lengths.sum()),
            len(lengths),
            int(lengths.sum()),
            digest.hexdigest(),
        ),
        lengths,
        pieces.offsets,
    )


def _stripped(rows, content, strip):
    """The rows without the tokens `strip` at their ends; those that are empty then are left out."""
    size = np.dtype(rows.dtype).itemsize
    tokens, start = content[: len(content) // size * size].view(rows.dtype), rows.offsets // size
    first, end, strip = start.copy(), start + rows.lengths, np.array(strip, np.int64)
    for move, look, step in ((first, 0, 1), (end, -1, -1)):
        some = np.flatnonzero(first < end)
        while len(some):
            some = some[np.isin(tokens[move[some] + look], strip)]
            move[some] += step
            some = some[first[some] < end[some]]
    left = first < end
    return rows._replace(offsets=first[left] * size, lengths=(end - first)[left])


def _joined(rows):
    """The rows as few pieces: those that lie one behind the other are one."""
    some = rows.lengths > 0
    offsets, lengths = rows.offsets[some], rows.lengths[some]
    begins = np.ones(len(offsets), bool)
    begins[1:] = offsets[1:] != offsets[:-1] + lengths[:-1] * np.dtype(rows.dtype).itemsize
    at = np.flatnonzero(begins)
    return rows._replace(
        offsets=offsets[at], lengths=np.add.reduceat(lengths, at) if len(at) else lengths
    )
