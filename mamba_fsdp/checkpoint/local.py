"""The local tier: frequent checkpoints on the nodes' own disks, each rank's file also on the next node's.

    LOCAL_CHECKPOINT_PATH/<run>-<checksum of its path>/<id>/step_00000100/
      rank_00008.safetensors ...   of this node's ranks, and copies of those of the node before
      state.json  COMMIT           as in the run folder (folder.py), the same on all nodes

<id> is the run's (LOCAL in its folder): what an earlier run of the same path left is not this one's. A checkpoint is
whole when each file that COMMIT names is whole on any node; at a start the nodes fetch what their ranks lack.
"""

import contextlib
import json
import os
import socket
import uuid
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mamba_fsdp.checkpoint.folder import Reader, problem_of, problems, to_be_filled
from mamba_fsdp.checkpoint.retention import Retention, delete, size_of
from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import COMMIT, LOCAL, STATE, committed, rank_file, step_name, step_of
from mamba_fsdp.storage import exists, read_object, write_atomically

KEEP = 2  # whole checkpoints of a node; another is being written beside them
BLOCK = 1 << 24  # bytes of a file under way between nodes that a rank holds
HOST = socket.gethostname()


class LocalTier:
    """The local checkpoints of one run. All ranks call each method at the same point, but for `copy_to_neighbour`
    and `keep`.

    path: the same words on all nodes, with variables of their environment. report: takes a sentence for the user.
    Raises UserError on all ranks where a node has no such folder, or where it is one folder for all.
    """

    def __init__(
        self, path: str, run_folder: str | Path, world: World, report: Callable[[str], None]
    ):
        self.world, self.note = world, Path(run_folder) / LOCAL
        # Each sentence once: what fails may fail at each save.
        self.say = lru_cache(report) if world.rank == 0 else lambda sentence: None
        self.node, self.nodes = world.rank // world.local_size, world.size // world.local_size
        run, self.root = os.path.realpath(run_folder), Path(os.path.expandvars(path))
        identity, probe = world.on_rank0(lambda: (self._identity(), f".{uuid.uuid4().hex}"))
        self.folder = self.root / f"{Path(run).name}-{zlib.crc32(run.encode()):08x}" / identity
        self.retention = Retention(self.folder, KEEP)
        uneven = world.all_reduce_sum(world.local_size) != world.size * world.local_size
        self._lead(lambda: self._make_folder(probe, uneven))
        if self.nodes > 1:
            self.column = dist.new_group(
                list(range(world.local_rank, world.size, world.local_size)),
                backend="gloo",
                timeout=world.timeout,
                use_local_synchronization=True,
            )
        copies = (
            f", each file also on the next of {self.nodes} nodes"
            if self.nodes > 1
            else "; one node: no copies"
        )
        self.say(f"local      frequent checkpoints in {self.root}{copies}")
        if size := sum(world.gather_on_rank0(self._lead(self._remove_others) or 0)):
            self.say(
                f"cleaned    {size / 1e9:.3f} GB of local checkpoints removed, unfinished or of "
                f"earlier runs in {run}"
            )

    def _remove_others(self):
        """What killed saves and earlier runs of this path left on this node. Returns its bytes."""
        others = {*self.folder.glob(".*"), *self.folder.parent.iterdir()} - {self.folder}
        size = sum(map(size_of, others))
        list(map(delete, others))
        return size

    def copy_to_neighbour(self, path: Path) -> str:
        """Send this rank's file to the next node while that of the node before comes; why it did not come, or "". For
        the thread that has written the file: this group of ranks talks of nothing else meanwhile."""
        try:
            if self.nodes > 1:
                before = (self.world.rank - self.world.local_size) % self.world.size
                self._exchange(path, 1, path.with_name(rank_file(before)), -1)
            return ""
        except (OSError, RuntimeError) as error:
            return f"{HOST}: {getattr(error, 'strerror', None) or error}"

    def texts(self, step: int, partial: Path, missing: Sequence[str]) -> dict[str, str]:
        """state.json and COMMIT, which rank 0 has written into `partial`, for `commit`. missing: why copies are."""
        if missing:
            self.say(
                f"warning: files of local checkpoints have no copy on the next node: {missing[0]}"
            )
        write_atomically(self.note, json.dumps({"id": self.folder.name, "step": step}))
        return {name: (partial / name).read_text() for name in (STATE, COMMIT)}

    def keep(
        self, step: int, partial: Path, texts: dict[str, str], failure: UserError | None
    ) -> list[UserError]:
        """Make what all ranks have written a checkpoint on this node, or remove it after this failure or another, which
        is returned. For a thread: a disk may hang."""

        def place():
            if failure:
                raise failure
            for name, text in texts.items() if self.node else ():  # COMMIT last
                write_atomically(partial / name, text)
            self.retention.place(partial, step)

        try:
            self._on_first(place)
            return []
        except UserError as error:
            delete(partial)
            return [error]

    def fetch(self, after: int, shards: Sequence[Shard]) -> Path | None:
        """This node's folder of the newest whole checkpoint of a step later than `after`, or None. What this node's
        ranks need for `shards` has come into it from other nodes. Broken ones are reported and passed over."""
        mine = self._lead(
            lambda: [
                (step_of(path.name), zlib.crc32((path / COMMIT).read_bytes()))
                for path in committed(self.folder)
                if not problems(path, World.alone(), "state")
            ]
        )
        told = list(enumerate(self.world.gather_on_rank0(mine or [])))
        owner_of = {
            which: rank for rank, found in reversed(told) for which in found if which[0] > after
        }
        for (step, _), owner in self.world.broadcast_object(sorted(owner_of.items(), reverse=True)):
            try:
                return self._gathered(step, owner, shards)
            except UserError as error:
                self.say(f"warning: the local checkpoint of step {step} is passed over: {error}")
        return None

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, which the run takes anew; says so where one was not whole."""
        if (made := self.world.on_rank0(lambda: self._noted()["step"])) > step:
            self.say(f"warning: the local checkpoint of step {made} is not whole on these nodes")
        self._lead(
            lambda: list(
                map(
                    self.retention.remove,
                    (path for path in committed(self.folder) if path.name > step_name(step)),
                )
            )
        )

    def _gathered(self, step, owner, shards):
        """The folder of `step`, which holds what this node's ranks need for the shards. Raises UserError on all."""
        world, folder = self.world, self.folder / step_name(step)
        sent = world.gather_on_rank0(
            {name: (folder / name).read_text() for name in (STATE, COMMIT)}
            if world.rank == owner
            else None
        )
        texts = world.broadcast_object(sent[owner] if sent else {})
        self._lead(
            lambda: (folder.mkdir(exist_ok=True), write_atomically(folder / STATE, texts[STATE]))
        )
        entries = json.loads(texts[COMMIT])["files"]
        names = np.array(sorted(entries.keys() - {STATE}))
        wrong, flags = world.on_all_ranks(lambda: self._look(folder, names, entries, shards))
        for problem in world.tell_all(wrong):
            self.say(f"warning: local checkpoint of step {step}: {problem}")
        told = world.gather_on_rank0(
            zlib.compress(np.packbits(flags, axis=1).tobytes())
        )  # a bit for each file
        transfers = world.on_rank0(lambda: self._transfers(names, told))
        world.on_all_ranks(lambda: self._bring(folder, names, entries, transfers))
        self._lead(lambda: write_atomically(folder / COMMIT, texts[COMMIT]))
        return folder

    def _look(self, folder, names, entries, shards):
        """(problems, [which files are whole, of those that this rank looks at; which it needs for its shards])."""
        reader, wrong, whole, wanted = (
            Reader(folder),
            [],
            np.zeros(len(names), bool),
            to_be_filled(shards),
        )
        needed = {
            file
            for name, shard in wanted.items()
            if name in reader.tensors
            for file, *_ in reader.where(name, shard.start, shard.start + shard.data.numel())
        }
        for number in range(self.world.local_rank, len(names), self.world.local_size):
            if exists(folder / names[number]):
                if problem := problem_of(
                    folder / names[number], entries[names[number]], wanted=wanted
                ):
                    wrong.append(f"{HOST}: {problem}")
                    to_be_filled(shards)  # anew
                whole[number] = not problem
        return wrong, np.array([whole, [name in needed for name in names]])

    def _transfers(self, names, told):
        """What nodes lack: rows (how many nodes onwards the next holder is, node, number of the file), by rounds. told:
        by each rank, packed, what _look has found. On rank 0. Raises UserError where no node has a file whole."""
        bits = np.array(
            [np.frombuffer(zlib.decompress(flags), np.uint8).reshape(2, -1) for flags in told]
        )
        table = (
            np.unpackbits(bits, axis=2, count=len(names))
            .reshape(self.nodes, -1, 2, len(names))
            .any(axis=1)
        )
        whole, wanted = table[:, 0], table[:, 1]
        if len(lost := names[~whole.any(axis=0)]):
            raise UserError(
                f"{lost[0]}{f' and {len(lost) - 1} more' * (len(lost) > 1)} is whole on no node"
            )
        return sorted(
            (int(np.roll(whole[:, number], -node).argmax()), int(node), int(number))
            for node, number in np.argwhere(wanted & ~whole)
        )

    def _bring(self, folder, names, entries, transfers):
        """Fetch what this node lacks, in rounds in which each node sends to one and receives from one. The thread of
        on_all_ranks, which runs it, may talk to this group of ranks."""
        mine = [row for row in transfers if row[2] % self.world.local_size == self.world.local_rank]
        for way in sorted({way for way, _, _ in mine}):
            sent, received = (
                [names[number] for row_way, node, number in mine if (row_way, node) == (way, here)]
                for here in ((self.node - way) % self.nodes, self.node)
            )
            for name, copy in zip_longest(sent, received):
                try:
                    self._exchange(name and folder / name, -way, copy and folder / copy, way)
                except OSError as error:
                    raise UserError(f"{HOST}: {folder}: {error.strerror}") from None
                if copy and (problem := problem_of(folder / copy, entries[copy])):
                    raise UserError(f"{HOST}: {problem}")

    def _identity(self):
        if not exists(self.note):
            write_atomically(self.note, json.dumps({"id": uuid.uuid4().hex[:12], "step": -1}))
        return self._noted()["id"]

    def _noted(self):
        return read_object(
            self.note,
            {"id": ..., "step": -1},
            "remove it: the run then resumes from its own folder's "
            "checkpoints, and forgets the local ones",
        )

    def _make_folder(self, probe, uneven):
        if "$" in str(self.root):
            raise UserError(
                f"local_checkpoint_path {self.root}: this variable is not set on {HOST}"
            )
        if uneven:
            raise UserError("local_checkpoint_path needs the same number of ranks on each node")
        self.root.mkdir(
            exist_ok=True
        )  # but not its parent: that may be a disk which is not mounted
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            (self.folder / probe).mkdir()
        except FileExistsError:
            raise UserError(
                f"local_checkpoint_path {self.root} is one folder for several nodes; name one on each "
                "node's own disk, or leave it out"
            ) from None

    def _lead(self, action):
        """As _on_first, once that has ended on all."""
        return self.world.on_all_ranks(lambda: self._on_first(action))

    def _on_first(self, action):
        """What `action()` returns on the first rank of each node; None on the others."""
        try:
            return action() if self.world.local_rank == 0 else None
        except OSError as error:
            raise UserError(
                f"local_checkpoint_path on {HOST}: {error.filename}: {error.strerror}"
            ) from None

    def _exchange(self, source: Path | None, to: int, target: Path | None, origin: int) -> None:
        """Send the file `source` to the node so many onwards (`to`) while `target` comes from that so many onwards
        (`origin`), or one of them. Where a disk fails both streams still run to their end, with other bytes, for the
        other rank counts on them. Raises OSError then, RuntimeError where the other rank is gone."""
        failures: list[OSError] = []
        to, origin = (
            (self.node + way) % self.nodes * self.world.local_size + self.world.local_rank
            for way in (to, origin)
        )

        def try_to(action, *given):
            try:
                return None if failures else action(*given)
            except OSError as error:
                failures.append(error)

        def swap(sent, received):
            under_way = [dist.isend(sent, to, group=self.column)] if len(sent) else []
            under_way += [dist.irecv(received, origin, group=self.column)] if len(received) else []
            for each in under_way:
                each.wait()

        with contextlib.ExitStack() as files:
            reading = try_to(
                lambda: files.enter_context(open(source or os.devnull, "rb", buffering=0))
            )
            writing = try_to(
                lambda: files.enter_context(open(target or os.devnull, "wb", buffering=0))
            )
            sizes = torch.tensor([try_to(lambda: os.fstat(reading.fileno()).st_size) or 0, 0])
            swap(sizes[: bool(source)], sizes[2 - bool(target) :])
            buffers = torch.empty(2, BLOCK, dtype=torch.uint8)
            for start in range(0, int(sizes.max()), BLOCK):
                mine, theirs = (
                    block[: max(0, min(BLOCK, int(size) - start))]
                    for block, size in zip(buffers, sizes)
                )
                try_to(lambda block: reading.readinto(block), mine.numpy())
                swap(mine, theirs)
                try_to(lambda block: writing.write(block), theirs.numpy())
                heart.beat()
            if target:
                try_to(lambda: os.fsync(writing.fileno()))
        if failures:
            raise failures[0]
