"""Saves checkpoints: each rank writes its own file, and a commit turns the files into one checkpoint.

Threads write a checkpoint to the staging folder of the run's lease (run/lease.py) while training continues. Each rank
flushes its file and reads it back. Then rank 0 writes state.json and COMMIT, and moves the checkpoint to its final
path. If a process dies at any time, unfinished files remain only in the staging folder, and the next run removes them.
An incomplete checkpoint never has a name under which a run would load it.
"""

import contextlib
import enum
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.contents import Commit, Contents, FileChecksum, StoredTensor
from mamba_fsdp.checkpoint.files import DTYPE_NAMES, NamedPiece, compute_checksum, write_pieces
from mamba_fsdp.checkpoint.folder import is_model, stored_name
from mamba_fsdp.checkpoint.ranges import find_ranges, pack_ranges, range_to_write
from mamba_fsdp.checkpoint.restore import (
    CheckpointCandidate,
    VerifiedCheckpoint,
    find_checkpoint,
    load,
)
from mamba_fsdp.checkpoint.retention import Retention
from mamba_fsdp.errors import UserError, first_line, merge_errors
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World, catch_errors
from mamba_fsdp.run.layout import rank_file, step_name
from mamba_fsdp.run.lease import Lease, Report
from mamba_fsdp.run.names import CHECKPOINTS, COMMIT, STATE
from mamba_fsdp.run.records import add_event
from mamba_fsdp.storage.formats import CHECKPOINT
from mamba_fsdp.storage.retry import delete, retry_io, sync_folder, write_atomically
from mamba_fsdp.storage.typed_json import FileName, write_object
from mamba_fsdp.this_process import rank_and_host

ALIGNMENT = 64  # each tensor in the host buffer begins at a multiple of this number of bytes


class Phase(enum.Enum):
    """The phase of a save, the same on all ranks. `Checkpointer.poll` moves a save to its next phase."""

    WRITING = enum.auto()  # each rank copies its tensors to host memory and writes them to its file
    COMMITTING = enum.auto()  # all files are written, and rank 0 turns them into a checkpoint


@dataclass
class RankFile:
    """The report of a rank to rank 0 about the file that it has written."""

    pieces: bytes  # this rank's piece of each tensor, see `pack_ranges`
    name: FileName
    checksum: FileChecksum
    error: UserError | None = None  # why the file could not be written; `checksum` is then None


@dataclass
class Save:
    """A save that is in progress."""

    step: int
    folder: Path  # the temporary folder of the save, inside the staging folder of the lease
    state: dict[str, Any]  # see Contents.state
    # {stored name: tensor}. The field `ranges` of the tensors is set once all ranks have written their files.
    tensors: dict[str, StoredTensor]
    phase: Phase = Phase.WRITING
    began: float = field(default_factory=time.monotonic)
    copied: threading.Event | torch.cuda.Event = field(default_factory=threading.Event)
    # While the phase is WRITING, its result is this rank's RankFile. While it is COMMITTING, its result on rank 0 is
    # (path of the checkpoint, error), as returned by `catch_errors`.
    work: Future[Any] = field(default_factory=Future)


class Checkpointer:
    """Saves and loads the checkpoints of one run folder. All ranks call each method at the same point.

    lease: the lease of the run folder, acquired by rank 0. keep, keep_every (in steps): see Retention. asynchronous:
    whether `save` returns at once, so that the tensors are copied to host memory and written while training continues.
    The caller then calls `wait_for_copies` before it changes the tensors, and `poll` once `is_writing` is False on all
    ranks. report: prints a line for the user on rank 0.
    """

    def __init__(
        self,
        run_folder: str | Path,
        world: World,
        lease: Lease,
        *,
        keep: int = 3,
        keep_every: int = 0,
        asynchronous: bool = True,
        report: Report = print,
    ) -> None:
        self.folder = Path(run_folder) / CHECKPOINTS
        self.world = world
        self.lease = lease
        self.asynchronous = asynchronous
        self.report = report
        self.retention = Retention(self.folder, lease, keep, keep_every, report)
        self.pending: Save | None = None
        self.last: Path | None = None  # the last checkpoint that was loaded or committed
        # Host memory for the copies, reused by each save.
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.is_pinned = False  # whether the buffer is pinned
        self.stalled = 0.0  # seconds, see stall_seconds

    def resume(
        self, shards: Sequence[Shard], found: CheckpointCandidate | None = None
    ) -> VerifiedCheckpoint:
        """Loads the newest undamaged checkpoint into the shards, and returns it.

        Files are verified while they are read.

        found: the result of an earlier `find_newest_checkpoint`, on rank 0. Raises UserError on all ranks if there is
        no undamaged checkpoint, or if its tensors differ from the shards.
        """
        newest = find_checkpoint(
            self.folder.parent, self.world, self.report, shards=shards, found=found
        )
        self.retention.broken.update(newest.broken)
        self.last = newest.path
        load(newest, shards, self.world)
        return newest

    def reserve_space(self, shards: Sequence[Shard]) -> None:
        """Allocates the host memory for saves, and frees disk space for a new checkpoint by removing old ones.

        The ranks need not call it at the same time. Raises UserError if there is too little memory or disk space.
        """
        if self.world.rank == 0:
            self._free_disk_space(shards)
        self._allocate_host_memory(
            [shard.data[start:stop] for shard, start, stop in self._ranges_to_write(shards)]
        )

    def close(self) -> None:
        """Unpins the host memory. A save that is in progress is abandoned, and no other save can follow.

        If an exception is being raised on one of several ranks, this method does nothing. To unpin, it would have to
        wait for the device, and the device can be waiting for a rank that has ended. The process is about to end
        anyway.
        """
        is_failing = sys.exc_info()[0] is not None
        if self.is_pinned and not (is_failing and self.world.size > 1):
            self.is_pinned = False
            _unpin(self.buffer)

    def save(self, step: int, shards: Sequence[Shard], state: dict[str, Any]) -> None:
        """Saves a checkpoint of `step`. Does nothing if this step's checkpoint is already committed.

        shards: the tensors, with the same names on all ranks. state: a dict for state.json; only rank 0 uses it.

        Raises UserError on all ranks if an earlier save failed, if the disk has too little space, or if this save fails
        and is not asynchronous.
        """
        with self._measure_stall():
            self.wait()
            if self.last == self.folder / step_name(step):
                return
            self._start_save(step, shards, state)
            if not self.asynchronous:
                self.wait()

    def _ranges_to_write(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, int, int]]:
        """Yields (shard, start, stop) for the elements of each shard that this rank writes.

        The model's shards come first.
        """
        shards = sorted(shards, key=lambda shard: not is_model(stored_name(shard.name)))
        for turn, shard in enumerate(shards):
            count = shard.data.numel()
            yield shard, *range_to_write(count, shard.replicas, shard.replica_index, turn)

    def _start_save(self, step: int, shards: Sequence[Shard], state: dict[str, Any]) -> None:
        ranges = []  # (start, count) of the elements of each tensor that this rank writes
        pieces = []
        tensors = {}
        for shard, start, stop in self._ranges_to_write(shards):
            name = stored_name(shard.name)
            ranges.append((shard.start + start, stop - start))
            if start < stop:
                pieces.append((name, shard.start + start, shard.data[start:stop]))
            dtype = DTYPE_NAMES[shard.data.dtype]
            tensors[name] = StoredTensor(list(shard.shape), dtype, 0)

        def make_folder() -> Path:
            self._free_disk_space(shards)
            folder = self.lease.staging / step_name(step)
            with self.lease.guard():
                folder.mkdir(exist_ok=True)  # an earlier save that failed can have left the folder
            return folder

        folder = self.world.on_rank0(retry_io, make_folder, self.folder)
        state = json.loads(json.dumps(state))  # a deep copy, because training changes the original
        save = Save(step, folder, state, tensors)
        copies = self._start_copying(save, pieces)
        self.pending = save
        save.work = self.world.run_in_thread(self._write, save, copies, pack_ranges(ranges))

    def _start_copying(
        self, save: Save, pieces: Sequence[NamedPiece]
    ) -> Callable[[], list[NamedPiece]]:
        """Starts to copy the pieces to host memory. Returns a function that waits for the copies and returns them.

        The writing thread calls this function.
        """
        tensors = [tensor for _, _, tensor in pieces]
        buffers = self._allocate_host_memory(tensors)
        if self.world.device.type == "cuda":
            stream = torch.cuda.Stream()
            save.copied = torch.cuda.Event()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch._foreach_copy_(buffers, tensors, non_blocking=True)
                save.copied.record()

        def wait_for_copies() -> list[NamedPiece]:
            if isinstance(save.copied, threading.Event):
                try:
                    torch._foreach_copy_(buffers, tensors)  # a single call that releases the GIL
                finally:
                    save.copied.set()  # also after a failure, because training waits for this event
            else:
                save.copied.synchronize()
            both = zip(pieces, buffers, strict=True)
            return [(name, start, buffer) for (name, start, _), buffer in both]

        return wait_for_copies

    def _allocate_host_memory(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns uninitialized tensors in host memory, with the sizes and dtypes of the 1-D `tensors`.

        They are views of one buffer. The buffer is allocated once, because only one save is in progress at a time. On a
        GPU the buffer is pinned with cudaHostRegister: torch would round the size of pinned memory up to a power of
        two.
        """
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        if not len(self.buffer):  # all saves have the same tensors
            self.buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            if self.world.device.type == "cuda" and len(self.buffer):
                _pin(self.buffer)
                self.is_pinned = True
        places = self.buffer.split(sizes)
        return [place[: tensor.nbytes].view(tensor.dtype) for place, tensor in zip(places, tensors)]

    def wait_for_copies(self) -> None:
        """Waits until the tensors have been copied. Call it before weights and moments change.

        On a GPU the current stream waits, and the host continues.
        """
        if self.pending:
            with self._measure_stall():
                self.pending.copied.wait()

    def is_writing(self) -> bool:
        """Returns whether this rank is still working on the current phase of the save.

        Once it is False on all ranks, all ranks call `poll`.
        """
        return self.pending is not None and not self.pending.work.done()

    def save_phase(self) -> tuple[int, Phase] | None:
        """Returns (step, phase) of the save in progress, the same on all ranks; None if nothing is being saved."""
        return (self.pending.step, self.pending.phase) if self.pending else None

    def poll(self) -> None:
        """Moves the save in progress, if any, to its next phase. Waits for work of this phase that is not finished.

        After WRITING, rank 0 starts the commit. After COMMITTING, all ranks receive its result. Raises UserError on all
        ranks if the save failed.
        """
        with self._measure_stall():
            save = self.pending
            if not save:
                return
            if save.phase is Phase.WRITING:
                files = self.world.gather_on_rank0(save.work.result())
                save.phase = Phase.COMMITTING
                if self.world.rank == 0:
                    save.work = self.world.run_in_thread(catch_errors, self._commit, save, files)
                return
            self.pending = None
            path, failure = self.world.broadcast_object(save.work.result())
            if failure:
                raise failure
            self.last = path
            if self.world.rank == 0:
                self.report(f"checkpoint {path.name} is committed")

    def wait(self) -> None:
        """Waits until the save in progress, if any, is committed. Raises UserError on all ranks if the save failed."""
        with self._measure_stall():
            while self.pending:
                self.world.run_local(wait, [self.pending.work])
                self.poll()

    def stall_seconds(self) -> float:
        """Returns how many seconds saves have blocked training on this rank since the last call."""
        stalled = self.stalled
        self.stalled = 0.0
        return stalled

    @contextlib.contextmanager
    def _measure_stall(self) -> Iterator[None]:
        """Adds the duration of the block to `stalled`. Nested blocks are counted once."""
        before = self.stalled
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stalled = before + time.perf_counter() - began

    def _write(self, save: Save, copies: Callable[[], list[NamedPiece]], packed: bytes) -> RankFile:
        """Writes this rank's file. Runs in a thread and therefore must not call a collective."""
        path = save.folder / rank_file(self.world.rank)
        # Copy the tensors once, even if writing is retried, because training changes them afterwards.
        copied = copies()
        model_pieces = sum(is_model(name) for name, _, _ in copied)

        def write() -> FileChecksum:
            for name, _, tensor in copied[:model_pieces]:
                if not math.isfinite(sum(torch.aminmax(tensor))):
                    raise UserError(
                        f"{name} is not finite: training has diverged; lower learning_rate"
                    )
            checksum = write_pieces(path, copied, model_pieces, self.asynchronous)
            sync_folder(save.folder)
            return checksum

        checksum, error = catch_errors(retry_io, write, path)
        if error:
            error = type(error)(f"{rank_and_host()}: {error}")
        return RankFile(packed, FileName(path.name), checksum, error)

    # Only rank 0 calls the methods below.

    def _free_disk_space(self, shards: Sequence[Shard]) -> None:
        """Makes room on the disk for a checkpoint of all ranks, see Retention.free_space."""
        self.retention.free_space(
            sum(math.prod(shard.shape) * shard.data.element_size() for shard in shards)
        )

    def _commit(self, save: Save, files: Sequence[RankFile]) -> Path:
        """Turns the files of all ranks into a checkpoint at its final path, and returns this path.

        Raises UserError if a rank could not write its file, and OSError or UserError if the commit fails.
        """
        try:
            errors = [file.error for file in files if file.error]
            if errors:
                raise merge_errors(
                    errors,
                    f"the checkpoint of step {save.step} could not be saved in {self.folder}: ",
                )
            with self.lease.guard():
                size = self._write_metadata(save, files)
                path = self.retention.move_into_place(save.folder)
        finally:
            delete(save.folder)
        seconds = round(time.monotonic() - save.began, 3)
        run = self.folder.parent
        add_event(run, "checkpoint", save.step, self.lease.write, bytes=size, seconds=seconds)
        return path

    def _write_metadata(self, save: Save, files: Sequence[RankFile]) -> int:
        """Writes state.json and COMMIT. Returns the size of all files in bytes, without COMMIT."""
        sizes = [tensor.element_count() for tensor in save.tensors.values()]
        ranges, numbers = find_ranges([file.pieces for file in files], sizes)
        for tensor, number in zip(save.tensors.values(), numbers, strict=True):
            tensor.ranges = number
        contents = Contents(
            save.step, save.state, [file.name for file in files], ranges, save.tensors
        )
        path = save.folder / STATE
        write_atomically(path, json.dumps({**CHECKPOINT.header(), **asdict(contents)}))
        checksums = {file.name: file.checksum for file in files}
        checksums[FileName(STATE)] = retry_io(compute_checksum, path, path)
        commit = Commit(save.step, checksums)
        write_object(save.folder / COMMIT, {**CHECKPOINT.header(), **asdict(commit)})
        return sum(checksum.bytes for checksum in checksums.values())


def _pin(buffer: torch.Tensor) -> None:
    """Pins the memory of an existing buffer. Raises UserError if CUDA can't pin it."""
    cuda = torch.cuda.cudart()
    try:
        torch.cuda.check_error(cuda.cudaHostRegister(buffer.data_ptr(), len(buffer), 0))
    except RuntimeError as error:
        _clear_cuda_error()
        raise UserError(
            f"{len(buffer):,} bytes of host memory for saves can't be pinned ({first_line(error)}); "
            "give the job more memory"
        ) from None


def _unpin(buffer: torch.Tensor) -> None:
    """Unpins the buffer after all copies have finished. Ignores errors, because after a GPU fault the process ends."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))


def _clear_cuda_error() -> None:
    """Clears CUDA's last error of this thread. Otherwise the next kernel launch would report this error as its own."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
