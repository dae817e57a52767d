"""Saves checkpoints: each rank writes its own file, and a commit makes them one checkpoint.

A checkpoint is written in the own folder of the run's lease (run/lease.py), in threads while training continues. Each
file is flushed and read back; then rank 0 writes state.json and COMMIT and moves the checkpoint to where it counts. A
process that dies at any instant leaves its own folder, which the next run removes, and never half a checkpoint under a
name that could be chosen.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.contents import Commit, Contents, FileChecksum, StoredTensor
from mamba_fsdp.checkpoint.files import DTYPE_NAMES, NamedPiece, checksum_of, write_pieces
from mamba_fsdp.checkpoint.folder import is_model, stored_name
from mamba_fsdp.checkpoint.ranges import find_ranges, pack, part_to_write
from mamba_fsdp.checkpoint.restore import Found, WholeCheckpoint, find_checkpoint, load
from mamba_fsdp.checkpoint.retention import Retention
from mamba_fsdp.errors import UserError, first_line, merge_errors
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World, attempt
from mamba_fsdp.run.layout import rank_file, step_name
from mamba_fsdp.run.lease import Lease
from mamba_fsdp.run.names import CHECKPOINTS, COMMIT, STATE
from mamba_fsdp.run.records import add_event
from mamba_fsdp.storage.formats import CHECKPOINT
from mamba_fsdp.storage.patience import delete, retry_io, sync_folder, write_atomically
from mamba_fsdp.storage.typed_json import FileName, write_object
from mamba_fsdp.this_process import rank_and_host

ALIGNMENT = 64  # of a tensor in host memory, in bytes


class Phase(enum.Enum):
    """The progress of a save, the same on all ranks: `settle` goes from one phase to the next."""

    WRITING = enum.auto()  # each rank copies its tensors to host memory and writes them to its file
    COMMITTING = enum.auto()  # all have written; rank 0 makes the files one checkpoint


@dataclass
class RankFile:
    """A rank's report to rank 0 about the file that it has written."""

    pieces: bytes  # this rank's piece of each tensor, see `pack`
    name: FileName
    checksum: FileChecksum
    error: UserError | None = None  # why the file could not be written; then it has no checksum


@dataclass
class Save:
    """A save under way."""

    step: int
    folder: Path  # in the own folder of the lease, until it is committed
    state: dict[str, Any]  # what the program reads when it resumes
    tensors: dict[str, StoredTensor]  # by stored name; `ranges` is set once all ranks have written
    phase: Phase = Phase.WRITING
    began: float = field(default_factory=time.monotonic)
    copied: threading.Event | torch.cuda.Event = field(default_factory=threading.Event)
    # While the phase is WRITING, its result is this rank's RankFile; then, on rank 0, what `attempt` returns for the
    # commit.
    work: Future[Any] = field(default_factory=Future)


class Checkpointer:
    """The checkpoints of one run folder; rank 0 holds its `lease`. All ranks call each method at the same point.

    keep, keep_every (steps): see Retention. asynchronous: `save` returns at once; the tensors are copied to host memory
    and written while training continues. Training calls `wait_for_copies` before it changes them, and `settle` when no
    rank `is_writing`. report: called on rank 0 with a sentence for the user.
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
        report: Callable[[str], None] = print,
    ) -> None:
        self.folder = Path(run_folder) / CHECKPOINTS
        self.world = world
        self.lease = lease
        self.asynchronous = asynchronous
        self.report = report
        self.retention = Retention(self.folder, lease, keep, keep_every, report)
        self.pending: Save | None = None
        self.last: Path | None = None  # the checkpoint that was resumed from or committed last
        self.buffer = torch.empty(0, dtype=torch.uint8)  # for the copies, reused by each save
        self.is_pinned = False  # the buffer, for a GPU
        self.stalled = 0.0  # seconds, see stall_seconds

    def resume(self, shards: Sequence[Shard], found: Found | None = None) -> WholeCheckpoint:
        """Fills the shards from the newest whole checkpoint, which it verifies in the same pass and returns. found: see
        `find_checkpoint`. Raises UserError as that and `load` do."""
        run = self.folder.parent
        newest = find_checkpoint(run, self.world, self.report, shards=shards, found=found)
        self.retention.broken.update(newest.broken)
        self.last = newest.path
        load(newest, shards, self.world)
        return newest

    def make_room(self, shards: Sequence[Shard]) -> None:
        """Makes room for saves: in host memory, which is allocated once, and on the disk, see _free_disk. Each rank calls
        it by itself. Raises UserError if there is too little."""
        if self.world.rank == 0:
            self._free_disk(shards)
        self._host_memory([shard.data[start:stop] for shard, start, stop in self._parts(shards)])

    def close(self) -> None:
        """Gives the pinned memory back. Nothing is saved afterwards; a save under way is given up.

        While an error is being raised on one of several ranks, it does nothing: the device may wait for a rank that has
        ended, and the process ends too."""
        is_failing = sys.exc_info()[0] is not None
        if self.is_pinned and not (is_failing and self.world.size > 1):
            self.is_pinned = False
            _unpin(self.buffer)

    def save(self, step: int, shards: Sequence[Shard], state: dict[str, Any]) -> None:
        """Saves `shards` (the same names on all ranks) and rank 0's `state`, a dict for JSON, as checkpoint of `step`.

        Raises UserError on all ranks if an earlier save failed, if space is short, or (not asynchronous) if this save
        fails. Does nothing if the checkpoint of this step is committed already.
        """
        with self._training_waits():
            self.wait()
            if self.last == self.folder / step_name(step):
                return
            self._begin(step, shards, state)
            if not self.asynchronous:
                self.wait()

    def _parts(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, int, int]]:
        """Yields (shard, start, stop), the elements that this rank writes of each shard, the model's first."""
        shards = sorted(shards, key=lambda shard: not is_model(stored_name(shard.name)))
        for turn, shard in enumerate(shards):
            count = shard.data.numel()
            yield shard, *part_to_write(count, shard.replicas, shard.replica_index, turn)

    def _begin(self, step: int, shards: Sequence[Shard], state: dict[str, Any]) -> None:
        ranges = []  # (start, count): what this rank writes of each tensor
        pieces = []
        tensors = {}
        for shard, start, stop in self._parts(shards):
            name = stored_name(shard.name)
            ranges.append((shard.start + start, stop - start))
            if start < stop:
                pieces.append((name, shard.start + start, shard.data[start:stop]))
            dtype = DTYPE_NAMES[shard.data.dtype]
            tensors[name] = StoredTensor(list(shard.shape), dtype, 0)

        def make_folder() -> Path:
            self._free_disk(shards)
            folder = self.lease.own / step_name(step)
            with self.lease.guard():
                folder.mkdir(exist_ok=True)  # a save that failed may have left it
            return folder

        folder = self.world.on_rank0(retry_io, make_folder, self.folder)
        state = json.loads(json.dumps(state))  # a copy, since training changes it
        save = Save(step, folder, state, tensors)
        copies = self._start_copying(save, pieces)
        self.pending = save
        save.work = self.world.run_in_thread(self._write, save, copies, pack(ranges))

    def _start_copying(
        self, save: Save, pieces: Sequence[NamedPiece]
    ) -> Callable[[], list[NamedPiece]]:
        """Starts copying the pieces to host memory. Returns a function, for the writing thread, that waits for the
        copies and returns them as named pieces."""
        tensors = [tensor for _, _, tensor in pieces]
        buffers = self._host_memory(tensors)
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
                    torch._foreach_copy_(buffers, tensors)  # one call, which releases the GIL
                finally:
                    save.copied.set()  # also after a failure, since training waits for it
            else:
                save.copied.synchronize()
            both = zip(pieces, buffers, strict=True)
            return [(name, start, buffer) for (name, start, _), buffer in both]

        return wait_for_copies

    def _host_memory(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns a tensor in host memory like each of these 1-D tensors. All lie in one buffer, which is allocated once,
        since only one save is under way at a time. For a GPU it is pinned in place, since torch's own pinned memory is
        rounded up to a power of two."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        if not len(self.buffer):  # all saves are alike
            self.buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            if self.world.device.type == "cuda" and len(self.buffer):
                _pin(self.buffer)
                self.is_pinned = True
        places = self.buffer.split(sizes)
        return [place[: tensor.nbytes].view(tensor.dtype) for place, tensor in zip(places, tensors)]

    def wait_for_copies(self) -> None:
        """Waits until the tensors are copied; call it before weights and moments change. On a GPU the device waits, not
        the host."""
        if self.pending:
            with self._training_waits():
                self.pending.copied.wait()

    def is_writing(self) -> bool:
        """Returns whether this rank still writes, or commits. Once no rank does, all ranks call `settle`."""
        return self.pending is not None and not self.pending.work.done()

    def stage(self) -> tuple[int, Phase] | None:
        """Returns the step and phase of the save under way, the same on all ranks; `is_writing` refers to that
        phase."""
        return (self.pending.step, self.pending.phase) if self.pending else None

    def settle(self) -> None:
        """Takes the save under way, if any, to its next phase: rank 0 begins to commit what all ranks have written, or
        all ranks learn how the commit ended. Raises UserError on all ranks if it failed."""
        with self._training_waits():
            save = self.pending
            if not save:
                return
            if save.phase is Phase.WRITING:
                files = self.world.gather_on_rank0(save.work.result())
                save.phase = Phase.COMMITTING
                if self.world.rank == 0:
                    save.work = self.world.run_in_thread(attempt, self._commit, save, files)
                return
            self.pending = None
            path, failure = self.world.broadcast_object(save.work.result())
            if failure:
                raise failure
            self.last = path
            if self.world.rank == 0:
                self.report(f"checkpoint {path.name} is committed")

    def wait(self) -> None:
        """Waits for the save under way, and for its commit. Raises UserError on all ranks if it failed."""
        with self._training_waits():
            while self.pending:
                self.world.run_local(wait, [self.pending.work])
                self.settle()

    def stall_seconds(self) -> float:
        """Returns the seconds that training has waited for saves on this rank, since the last call."""
        stalled = self.stalled
        self.stalled = 0.0
        return stalled

    @contextlib.contextmanager
    def _training_waits(self) -> Iterator[None]:
        """Adds the time in the block to `stalled`, counting nested blocks once."""
        before = self.stalled
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stalled = before + time.perf_counter() - began

    def _write(self, save: Save, copies: Callable[[], list[NamedPiece]], packed: bytes) -> RankFile:
        """Writes this rank's file. Runs in a thread and therefore calls no collective."""
        path = save.folder / rank_file(self.world.rank)
        # Only once, even if writing is retried: training changes the tensors after this.
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

        checksum, error = attempt(retry_io, write, path)
        if error:
            error = type(error)(f"{rank_and_host()}: {error}")
        return RankFile(packed, FileName(path.name), checksum, error)

    # The methods below run on rank 0 only.

    def _free_disk(self, shards: Sequence[Shard]) -> None:
        """Makes room for all ranks' shards together, see Retention.make_room."""
        self.retention.make_room(
            sum(math.prod(shard.shape) * shard.data.element_size() for shard in shards)
        )

    def _commit(self, save: Save, files: Sequence[RankFile]) -> Path:
        """Turns the files of all ranks into a checkpoint, and returns its path: what has this name is whole and durable.
        Raises UserError if a rank could not write."""
        try:
            errors = [file.error for file in files if file.error]
            if errors:
                raise merge_errors(
                    errors,
                    f"the checkpoint of step {save.step} could not be saved in {self.folder}: ",
                )
            with self.lease.guard():
                size = self._complete(save, files)
                path = self.retention.place(save.folder)
        finally:
            delete(save.folder)
        seconds = round(time.monotonic() - save.began, 3)
        run = self.folder.parent
        add_event(run, "checkpoint", save.step, self.lease.write, bytes=size, seconds=seconds)
        return path

    def _complete(self, save: Save, files: Sequence[RankFile]) -> int:
        """Writes state.json and COMMIT. Returns the bytes of all files."""
        sizes = [tensor.element_count() for tensor in save.tensors.values()]
        ranges, numbers = find_ranges([file.pieces for file in files], sizes)
        for tensor, number in zip(save.tensors.values(), numbers, strict=True):
            tensor.ranges = number
        names = [file.name for file in files]
        contents = Contents(save.step, save.state, names, ranges, save.tensors)
        path = save.folder / STATE
        write_atomically(path, json.dumps({**CHECKPOINT.header(), **asdict(contents)}))
        checksums = {file.name: file.checksum for file in files}
        checksums[FileName(STATE)] = retry_io(partial(checksum_of, path), path)
        commit = Commit(save.step, checksums)
        write_object(save.folder / COMMIT, {**CHECKPOINT.header(), **asdict(commit)})
        return sum(checksum.bytes for checksum in checksums.values())


def _pin(buffer: torch.Tensor) -> None:
    """Pins the buffer where it lies. Raises UserError if the driver refuses."""
    cuda = torch.cuda.cudart()
    try:
        torch.cuda.check_error(cuda.cudaHostRegister(buffer.data_ptr(), len(buffer), 0))
    except RuntimeError as error:
        _forget_last_error()
        raise UserError(
            f"{len(buffer):,} bytes of host memory for saves can't be pinned ({first_line(error)}); "
            "give the job more memory"
        ) from None


def _unpin(buffer: torch.Tensor) -> None:
    """Undoes _pin, once no copy is under way. A lost GPU refuses; its process ends."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))


def _forget_last_error() -> None:
    """Has CUDA forget the last error of this thread, which it keeps until a launch asks for it; else that would be a
    launch that has done nothing wrong."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
