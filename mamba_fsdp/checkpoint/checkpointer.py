"""Saving: each rank writes its own file, a commit makes them one checkpoint.

A checkpoint is written under a hidden name (.step_00001000.<unique>.partial), in threads beside training. Each file is
flushed and read back; then rank 0 writes state.json and COMMIT and gives the folder its name. A process that dies at
any instant leaves a hidden folder, which the next run removes, and never half a checkpoint under a name that could be
chosen.
"""

import functools
import json
import math
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.checkpoint.files import NAMES, checksum, write_pieces
from mamba_fsdp.checkpoint.folder import is_model, newest_whole, stored_name
from mamba_fsdp.checkpoint.ranges import find_layouts, packed, part_to_write
from mamba_fsdp.checkpoint.retention import Retention, delete
from mamba_fsdp.errors import StorageError, UserError, joined
from mamba_fsdp.formats import CHECKPOINT
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World, attempt
from mamba_fsdp.report.records import add_event
from mamba_fsdp.run_layout import (
    CHECKPOINTS,
    COMMIT,
    STATE,
    committed,
    rank_file,
    step_name,
    step_of,
)
from mamba_fsdp.storage import hidden_beside, retry_io, sync_folder, write_atomically

SECONDS_OF_SILENCE = 120.0  # without progress, after which nobody waits for a rank that writes


@dataclass
class Save:
    """One save under way. `outcome`, by `stage`: 0, what this rank's writing will have come to, {"file", ...} or
    {"error"}; 1, on rank 0, which was told all of that, (what it has committed, error). What changes the tensors calls
    `copied.wait()`."""

    step: int
    partial: Path
    state: dict[str, Any]
    tensors: dict[str, dict[str, Any]]  # stored name -> its entry in state.json, but for the layout
    pieces: bytes  # of this rank, packed
    stood_still: float = 0.0  # seconds before it
    began: float = field(default_factory=time.monotonic)
    stage: int = 0
    copied: threading.Event | torch.cuda.Event = field(default_factory=threading.Event)
    buffers: list[torch.Tensor] = field(default_factory=list)  # for the copies
    outcome: Future[Any] = field(init=False, repr=False)


def _stalls(method):
    """A method of Checkpointer that training waits for, as `stall_seconds` tells."""

    @functools.wraps(method)
    def timed(self, *given, **named):
        outermost, self._since = not self._since, self._since or time.perf_counter()
        try:
            method(self, *given, **named)
        finally:
            if outermost:
                self._stalled, self._since = self._stood_still(), 0.0

    return timed


class Checkpointer:
    """The checkpoints of one run folder. All ranks call each method at the same point.

    keep, keep_every (steps): see Retention. asynchronous: `save` returns at once; the tensors are copied to host memory
    and written beside training, which calls `wait_for_copies` before it changes them, and `settle` when no rank
    `is_writing`. report: called on rank 0 with a sentence for the user.
    A run folder belongs to one run at a time: what an earlier one left half-written, be it a model, is removed here.
    check_ours: called on rank 0 before the folder is changed; raises UserError when it belongs to another run by then.
    """

    def __init__(
        self,
        run_folder: str | Path,
        world: World,
        *,
        keep: int = 3,
        keep_every: int = 0,
        asynchronous: bool = True,
        report: Callable[[str], None] = print,
        check_ours: Callable[[], None] = lambda: None,
    ):
        self.folder = Path(run_folder) / CHECKPOINTS
        self.world, self.asynchronous, self.report, self.check_ours = (
            world,
            asynchronous,
            report,
            check_ours,
        )
        self.retention = Retention(self.folder, keep, keep_every, report)
        self.pending: Save | None = None
        self.buffers: list[torch.Tensor] = []  # for the copies, kept over saves
        self._stalled = self._told = self._since = (
            0.0  # seconds in all, those told; when it began to stand still
        )
        self.last: Path | None = None
        self.newest_step = -1  # of the newest checkpoint that it has resumed from or committed
        self.world.on_rank0(lambda: retry_io(self._make_ready, self.folder))

    def newest(self, shards: Sequence[Shard] = ()) -> Path | None:
        """Path of the newest whole checkpoint, or None; broken ones are reported and passed over. shards: for `load`.
        Raises UserError when there are checkpoints but none is whole."""
        self.wait()
        if self.last is None:
            self.last, broken = newest_whole(self.folder, self.world, self.report, shards=shards)
            self.retention.broken.update(broken)
            self.newest_step = _step(self.last)
        return self.last

    def to_resume(self, shards: Sequence[Shard]) -> Path | None:
        """As `newest`, but what it has saved itself is verified again: it may be broken by now."""
        self.wait()
        self.last = None
        return self.newest(shards)

    def check_room(self, shards: Sequence[Shard]) -> None:
        """Says where there is room for one checkpoint only. Raises UserError on all ranks where there is none."""

        def check():
            free, needed = self._need_room("a checkpoint", shards)
            if (
                free < 2 * needed and len(committed(self.folder)) < self.retention.keep
            ):  # else each makes room
                self.report(
                    f"warning    {self.folder} has room for one checkpoint only ({needed / 1e9:.3f} GB)"
                )

        self.world.on_rank0(check)

    @_stalls
    def save(self, step: int, shards: Sequence[Shard], state: dict[str, Any]) -> None:
        """Save `shards` (the same names on all ranks) and rank 0's `state`, a dict for JSON, as checkpoint of `step`.

        Raises UserError on all ranks when an earlier save failed, when space is short, or (not asynchronous) when this
        save fails. Does nothing when the checkpoint of this step stands already.
        """
        self.wait()
        if self.last is not None and self.last.name == step_name(step):
            return
        shards = sorted(shards, key=lambda shard: not is_model(stored_name(shard.name)))
        pieces = []
        for turn, shard in enumerate(shards):
            start, stop = part_to_write(
                shard.data.numel(), shard.replicas, shard.replica_index, turn
            )
            pieces.append((stored_name(shard.name), shard.start + start, shard.data[start:stop]))
        partial = self.world.on_rank0(
            lambda: retry_io(lambda: self._make_partial(step, shards), self.folder)
        )
        tensors = {
            stored_name(shard.name): {
                "shape": list(shard.shape),
                "dtype": NAMES[shard.data.dtype],
                "tied": list(shard.tied),
            }
            for shard in shards
        }
        told = packed([(start, tensor.numel()) for _, start, tensor in pieces])
        save = Save(
            step, partial, json.loads(json.dumps(state)), tensors, told, self._stood_still()
        )
        self.pending = save
        pieces = [piece for piece in pieces if piece[2].numel()]
        copy = self._start_copying(save, [tensor for _, _, tensor in pieces])
        save.outcome = self.world.run_in_thread(lambda: self._write(save, pieces, copy))
        if not self.asynchronous:
            self.wait()

    def _start_copying(self, save, tensors):
        """What gives the tensors' copies on the host, to be called in the writing thread."""
        on_gpu = self.world.device.type == "cuda"
        if not (self.asynchronous or on_gpu):
            return lambda: tensors
        save.buffers, self.buffers = self.buffers, []
        if [(old.shape, old.dtype) for old in save.buffers] != [
            (new.shape, new.dtype) for new in tensors
        ]:
            save.buffers = [
                torch.empty(new.shape, dtype=new.dtype, pin_memory=on_gpu) for new in tensors
            ]
        if on_gpu:
            beside, save.copied = torch.cuda.Stream(), torch.cuda.Event()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                torch._foreach_copy_(save.buffers, tensors, non_blocking=True)
                save.copied.record()

        def copies():
            if on_gpu:
                save.copied.synchronize()
            else:
                torch._foreach_copy_(save.buffers, tensors)  # one call, which needs no GIL
                save.copied.set()
            return save.buffers

        return copies

    @_stalls
    def wait_for_copies(self) -> None:
        """Call before weights and moments change: waits until they are copied, on a GPU the device, not the host."""
        if self.pending:
            self.pending.copied.wait()

    def is_writing(self) -> bool:
        """Whether this rank still writes, or commits. Once none does, all ranks call `settle`."""
        return self.pending is not None and not self.pending.outcome.done()

    def stage(self) -> tuple[int, int] | None:
        """How far the save has come, the same on all ranks: what `is_writing` told holds for this stage."""
        return (self.pending.step, self.pending.stage) if self.pending else None

    @_stalls
    def settle(self) -> None:
        """Where all have written the save under way, if any, rank 0 begins to commit it; where it has, all learn of it.
        Raises UserError on all ranks if it failed."""
        save = self.pending
        if not save:
            return
        outcome = save.outcome.result()
        save.stage += 1
        if save.stage == 1:
            told = self.world.gather_on_rank0((outcome, save.pieces))
            if self.world.rank == 0:
                save.outcome = self.world.run_in_thread(
                    lambda: attempt(lambda: self._commit(save, told))
                )
            return
        self.pending = None
        self.buffers = save.buffers
        committed, failure = self.world.broadcast_object(outcome)
        if failure:
            raise failure
        self.last, self.newest_step = committed, save.step
        self.retention.broken.discard(committed.name)
        if self.world.rank == 0:
            self.report(f"checkpoint {committed.name} is committed")

    @_stalls
    def wait(self, patient: bool = True) -> None:
        """Wait for the save under way, and for its commit. Raises UserError on all ranks if it failed, and a
        StorageError if an asynchronous one stands still: then it stays under way, and no other is begun. patient: False
        only looks whether it stands still."""
        while save := self.pending:
            silent = self.world.run_local(functools.partial(self._stands_still, save, patient))
            late = self.world.gather_unique(
                [f"rank {self.world.rank} on {socket.gethostname()}"] * silent
            )
            if late:
                raise StorageError(
                    f"the checkpoint of step {save.step} is still being written: "
                    f"{', '.join(late[:4] + ['...'] * (len(late) > 4))} made no progress for "
                    f"{SECONDS_OF_SILENCE:g} s"
                )
            if not patient:
                return
            self.settle()

    def _stands_still(self, save, patient):
        while not save.outcome.done():
            silent = (
                self.asynchronous
                and time.monotonic() - max(heart.beside, save.began) > SECONDS_OF_SILENCE
            )
            if silent or not patient:
                return silent
            wait([save.outcome], timeout=min(1.0, SECONDS_OF_SILENCE))
        return False

    def stall_seconds(self) -> float:
        """Seconds since the last call in which this rank's program stood still for saving."""
        before, self._told = self._told, self._stood_still()
        return self._told - before

    def _stood_still(self):
        return self._stalled + (
            time.perf_counter() - since if (since := self._since) else 0.0
        )  # for two threads

    def _write(self, save, pieces, copy):
        """Write this rank's file. Runs in a thread and therefore talks to no other rank. Returns the outcome."""
        path = save.partial / rank_file(self.world.rank)
        where = f"rank {self.world.rank} on {socket.gethostname()}"
        try:
            pieces = [(name, start, copied) for (name, start, _), copied in zip(pieces, copy())]
            model_pieces = sum(is_model(name) for name, _, _ in pieces)
            written = retry_io(
                lambda: write_pieces(path, pieces, model_pieces, from_disk=self.asynchronous), path
            )
            sync_folder(save.partial)
            return {"file": path.name, **written}
        except StorageError as error:
            return {"error": StorageError(f"{where}: {error}")}
        except BaseException as error:
            said = (
                error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            )
            hint = (
                " (do all nodes share the run folder's storage?)"
                if isinstance(error, FileNotFoundError)
                else ""
            )
            return {"error": UserError(f"{where}: {path}: {said}{hint}")}

    # Rank 0 alone does the rest.

    def _make_ready(self):
        self.check_ours()
        self.retention.clean()

    def _need_room(self, what, shards):
        """(bytes that are free, bytes of all ranks' shards). Raises UserError where `what` does not fit."""
        needed = sum(math.prod(shard.shape) * shard.data.element_size() for shard in shards)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise UserError(
                f"{what} needs {needed / 1e9:.3f} GB, but {self.folder} has only {free / 1e9:.3f} GB free; "
                "make room, keep fewer checkpoints or choose another folder"
            )
        return free, needed

    def _make_partial(self, step, shards):
        self.check_ours()
        self._need_room(f"the checkpoint of step {step}", shards)
        partial = hidden_beside(self.folder / step_name(step))
        partial.mkdir()
        return partial

    def _commit(self, save, told):
        """Turn the files into a checkpoint: what stands under its final name is whole and durable; its path.
        told: by each rank, (outcome, pieces)."""
        try:
            size = self._complete(save, told)
            result = self.retention.place(save.partial, save.step)
        except BaseException:  # what is left takes the room that the next attempt needs
            delete(save.partial)
            raise
        add_event(
            self.folder.parent,
            "checkpoint",
            save.step,
            bytes=size,
            seconds=round(time.monotonic() - save.began, 3),
            stall_seconds=round(self._stood_still() - save.stood_still, 3),
        )
        return result

    def _complete(self, save, told):
        """Write state.json and COMMIT; the bytes of all files. Raises UserError where a rank could not write."""
        outcomes = [outcome for outcome, _ in told]
        errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
        if errors:
            raise joined(errors, f"the checkpoint of step {save.step} could not be saved: ")
        layouts, numbers = find_layouts(
            [pieces for _, pieces in told],
            [math.prod(entry["shape"]) for entry in save.tensors.values()],
        )
        for (name, entry), number in zip(save.tensors.items(), numbers):
            assert number is not None, f"the ranks did not write the whole of {name}"
            entry["layout"] = number
        files = {outcome.pop("file"): outcome for outcome in outcomes}
        content = {
            **CHECKPOINT.header(),
            "step": save.step,
            "state": save.state,
            "files": list(files),
            "layouts": layouts,
            "tensors": save.tensors,
        }
        write_atomically(save.partial / STATE, json.dumps(content))
        files[STATE] = retry_io(lambda: checksum(save.partial / STATE), save.partial / STATE)
        commit = {**CHECKPOINT.header(), "step": save.step, "files": files}
        write_atomically(save.partial / COMMIT, json.dumps(commit, indent=1))
        self.check_ours()
        return sum(file["bytes"] for file in files.values())


def _step(checkpoint):
    """Of a checkpoint's folder; -1 of none."""
    return step_of(checkpoint.name) if checkpoint else -1
