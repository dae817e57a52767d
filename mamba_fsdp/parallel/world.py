"""Connects the processes that train together: their ranks, their devices, and how they exchange small objects."""

import contextlib
import os
import re
import resource
import sys
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import chain, count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mamba_fsdp.conventions import is_torch_2_2
from mamba_fsdp.errors import TransientError, UserError, first_line, merge_errors
from mamba_fsdp.storage.patience import storage_error
from mamba_fsdp.storage.threads import in_thread
from mamba_fsdp.this_process import progress

T = TypeVar("T")
Addable = TypeVar("Addable", torch.Tensor, int, float, list[float])
CPU = torch.device("cpu")
# In the errors of gloo, NCCL and the store, if the cause is another rank.
OF_A_LOSS = re.compile("onnection|peer|remote process|network|imeout|imed out")
# The process groups that have ended, with torch 2.2: it frees a group with the interpreter's lock held, and waits
# meanwhile for the group's threads, which may need the lock to free the tensors of the last exchange: the process would
# hang. Newer versions release the lock, and a group must be freed before the process ends: a thread that asks for the
# lock of an interpreter that is ending aborts the process ("terminate called without an active exception").
ENDED_GROUPS: "list[dist.ProcessGroup]" = []
WORLD_NUMBERS = count()  # of this process's trainings, equal on all ranks
# How long ranks that no launcher has started wait for each other.
MEETING = timedelta(minutes=2)
# In the environment: how many ranks the launchers of all nodes start.
ALL_RANKS = "MAMBA_FSDP_RANKS"


@dataclass
class World:
    """One process's view of all ranks. All ranks call each method at the same point; with one rank, each method is
    trivial.

    Python objects and CPU tensors are sent over gloo, device tensors over the device's own backend.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device
    timeout: timedelta | None = None  # how long a rank waits for the others; None: torch's default
    _gloo: "dist.ProcessGroup | None" = None
    _groups: "list[dist.ProcessGroup]" = field(default_factory=list)  # of some ranks

    @classmethod
    def alone(cls, *, device: torch.device = CPU) -> "World":
        """Returns the world of one process."""
        return cls(rank=0, size=1, local_size=1, device=device)

    def ensure_process_group(self) -> None:
        """Makes a process group of one rank, which sharding needs, unless a launcher has made a process group."""
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def grid(self, columns: int) -> "tuple[dist.ProcessGroup, dist.ProcessGroup]":
        """Returns (group of this rank's row, group of its column) in a grid of all ranks, filled row by row.

        The groups have the world's timeout; the groups that torch's meshes make have half an hour.
        """
        first = self.rank - self.rank % columns
        row = range(first, first + columns)
        column = range(self.rank - first, self.size, columns)
        return self._new_group(row), self._new_group(column)

    def _new_group(self, ranks: range) -> "dist.ProcessGroup":
        group = dist.new_group(list(ranks), timeout=self.timeout, use_local_synchronization=True)
        self._groups.append(group)
        return group

    def broadcast_object(self, obj: T) -> T:
        """Returns rank 0's `obj` on all ranks."""
        if self.size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=0, group=self._gloo, device=CPU)
        return box[0]

    def gather_on_rank0(self, obj: T) -> list[T]:
        """Returns, on rank 0, the `obj` of each rank in the order of ranks; on other ranks, an empty list."""
        if self.size == 1:
            return [obj]
        gathered: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(obj, gathered or None, dst=0, group=self._gloo)
        return gathered

    def gather_unique(self, findings: list[T]) -> list[T]:
        """Returns, on all ranks, the findings of all ranks, each once. Most ranks have none."""
        gathered = self.gather_on_rank0(findings)
        return self.broadcast_object(list(dict.fromkeys(chain.from_iterable(gathered))))

    def all_reduce_sum(self, value: Addable) -> Addable:
        """Returns the sum over ranks: of a tensor (in place), of a number, or of each number of a list."""
        if isinstance(value, torch.Tensor):
            if self.size > 1:
                dist.all_reduce(value, group=self._gloo if value.device.type == "cpu" else None)
            return value
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        return self.all_reduce_sum(torch.tensor(value, dtype=dtype)).tolist()

    def all_to_all(
        self, sent: torch.Tensor, counts: list[int], expected: list[int]
    ) -> torch.Tensor:
        """Returns the elements that all ranks sent to this rank, in the order of ranks: expected[r] of rank r. Sends
        the first counts[0] elements of `sent`, (n,), to rank 0, the next counts[1] to rank 1, and so on. Both tensors
        are on the device."""
        if self.size == 1:
            return sent
        received = sent.new_empty(sum(expected))
        dist.all_to_all_single(received, sent, expected, counts)
        return received

    def copy_to_device(self, numbers: list[float]) -> torch.Tensor:
        """Returns the numbers on the device, (n,) fp64. The host does not wait for the copy."""
        on_host = torch.tensor(numbers, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        return on_host.to(self.device, non_blocking=True)

    def start_copy_to_host(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        """Returns a function that waits until `numbers`, (n,), are copied to the host, and returns them. Starts the
        copy."""
        on_host = numbers.to("cpu", non_blocking=True)  # from a GPU: into pinned memory
        if self.device.type == "cpu":
            return on_host.tolist
        copied = torch.cuda.Event()
        copied.record()

        def wait_for_copy() -> list[float]:
            copied.synchronize()
            return on_host.tolist()

        return wait_for_copy

    def run_in_thread(self, work: Callable[..., T], *inputs: Any) -> Future[T]:
        """Returns the Future of `work(*inputs)`, which runs in a thread."""

        def run() -> T:
            progress.touch()  # time before the work began does not count against it
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # each thread has its own current device
            return work(*inputs)

        return in_thread(run)

    def run_local(self, work: Callable[..., T], *inputs: Any) -> T:
        """Returns the result of `work(*inputs)` on this rank, or raises its error, once the work of all ranks has
        ended.

        The work must not communicate with other ranks. It may take longer than the ranks' timeout: it runs in a thread
        while the ranks exchange heartbeats. Waiting counts as progress while another rank makes progress.
        """
        if self.size == 1:
            return work(*inputs)
        outcome = self.run_in_thread(work, *inputs)
        beats_before = -1.0
        pause = 0.001
        while True:
            mine = [float(not outcome.done()), float(progress.count)]
            working, beats = self.all_reduce_sum(mine)
            if not working:
                return outcome.result()
            if beats != beats_before:
                progress.touch_for_peer()
            beats_before = beats
            # The last rank to end does not wait: the others take part in the sum already.
            wait([outcome], timeout=pause)
            pause = min(0.5, 2 * pause)

    def on_rank0(self, action: Callable[..., T], *inputs: Any) -> T:
        """Returns, on all ranks, the result of `action(*inputs)` on rank 0. Raises its failure as a UserError on all
        ranks."""

        def act() -> tuple[Any, UserError | None]:
            return attempt(action, *inputs) if self.rank == 0 else (None, None)

        result, failure = self.broadcast_object(self.run_local(act))
        if failure:
            raise failure
        return result

    def on_all_ranks(self, work: Callable[..., T], *inputs: Any) -> T:
        """Returns the result of `work(*inputs)` on this rank, see run_local. Raises the UserErrors of all ranks, and what
        storage refuses them, as one error on all ranks."""

        def try_work() -> tuple[Any, list[UserError]]:
            try:
                return work(*inputs), []
            except UserError as error:
                return None, [error]
            except OSError as error:
                return None, [refused(error)]

        result, failure = self.run_local(try_work)
        failures = self.gather_unique(failure)
        if failures:
            raise merge_errors(failures)
        return result

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        if self.size > 1:
            dist.barrier(group=self._gloo)

    def close(self) -> None:
        """Ends the process group. While an error is being raised, it does nothing: the other ranks may never call it."""
        if dist.is_initialized() and sys.exc_info()[0] is None:
            self.barrier()
            if is_torch_2_2():
                groups = [dist.group.WORLD, self._gloo, *self._groups]
                ENDED_GROUPS.extend(group for group in groups if group)
            self._gloo = None
            self._groups.clear()
            dist.destroy_process_group()


def lost_rank(error: BaseException, rank: int) -> TransientError | None:
    """Returns the TransientError of a rank whose exchange with another failed because that one has ended or can't be reached;
    None for any other error."""
    is_of_exchange = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
    if not is_of_exchange or not OF_A_LOSS.search(str(error)):
        return None
    reason = re.sub(r"^\[\S+\] |\. This is typically .*", "", first_line(error))
    return TransientError(
        f"rank {rank} lost another rank, which has failed or can't be reached: {reason[:200]}"
    )


def attempt(action: Callable[..., Any], *inputs: Any) -> tuple[Any, UserError | None]:
    """Returns (the result of `action(*inputs)`, None), or (None, the UserError that says why it failed)."""
    try:
        return action(*inputs), None
    except UserError as error:
        return None, error
    except OSError as error:
        return None, refused(error)
    except Exception as error:
        return None, UserError(f"{type(error).__name__}: {error}")


def refused(error: OSError) -> UserError:
    """Returns the UserError of what storage refuses."""
    place = f"{error.filename}: " if error.filename else ""
    return storage_error(error, f"{place}{error.strerror or error}")


def allow_many_files() -> None:
    """Raises this process's limit of open files to the maximum: each rank, and torchrun, has a connection to every
    rank."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS reports "unlimited" but refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def start_world(*, timeout_minutes: float = 10.0) -> World:
    """Returns the world of the processes that torchrun has started, or of one process if torchrun was not used.

    timeout_minutes: how long a rank waits for the others before it fails. Raises UserError if the launcher's
    environment is incomplete or asks for more GPUs than this node has, TransientError if ranks are missing.
    """
    allow_many_files()
    if "RANK" not in os.environ:
        return World.alone(device=_acquire_device(0))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(
            f"RANK is set, but not {', '.join(missing)}; start the ranks with torchrun, or unset RANK"
        )
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    wanted = os.environ.get(ALL_RANKS, str(size))
    if wanted != str(size):  # else they would train with a smaller batch
        raise TransientError(
            f"only {size} of {wanted} ranks have met: torchrun leaves out a node whose clock is behind the others'; "
            "compare them: srun date"
        )
    device = _acquire_device(local_rank)
    # The watchdog, which looks once a second, comes first, since it says where a rank is stuck.
    timeout = timedelta(minutes=timeout_minutes, seconds=5)
    meeting: dict[str, Any] = {"store": _store(timeout, size), "rank": rank, "world_size": size}
    if device.type == "cuda":
        dist.init_process_group("nccl", **meeting, timeout=timeout)
        gloo = dist.new_group(backend="gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", **meeting, timeout=timeout)
        gloo = dist.group.WORLD
    return World(rank, size, local_size, device, timeout, gloo)


def _store(timeout: timedelta, ranks: int) -> dist.Store:
    """Returns the store at which the ranks of a new world meet, with names of its own: else a second training of these
    processes would find the addresses of the first one's ranks, and wait for them."""
    store = dist.PrefixStore(f"world {next(WORLD_NUMBERS)}", _store_of_processes(timeout, ranks))
    store.set_timeout(timeout)
    return store


@cache
def _store_of_processes(timeout: timedelta, ranks: int) -> dist.Store:
    """Returns the launcher's store, or that of rank 0 if the launcher has none. Without torchrun, whose variables may be
    left over in a shell, it says for whom it waits, and gives up after MEETING. Raises UserError."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    awaited = f"{ranks} ranks at {place}, as WORLD_SIZE and MASTER_ADDR in the environment say"
    if not is_launched:
        timeout = min(timeout, MEETING)
        if ranks > 1:
            print(f"waiting    for {awaited}", file=sys.stderr, flush=True)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        if is_launched:
            raise
        raise UserError(
            f"there are not {awaited} ({first_line(error)[:200]}); to train without other ranks: "
            "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
        ) from None
    return store


def has_gpus() -> bool:
    """Returns whether this process has GPUs to train on. CUDA_VISIBLE_DEVICES= asks for the CPU.

    Raises TransientError, with torch's own reason, if the driver shows GPUs that torch can't open: the driver is too old for
    torch's CUDA, for example, or a service on the node has failed."""
    if torch.cuda.is_available():
        return True
    if torch.cuda._device_count_nvml() > 0 or "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        try:
            torch.cuda.init()
        except Exception as error:
            raise TransientError(
                f"torch {torch.__version__} can't open the GPUs that the driver shows: {first_line(error)}; "
                "./0.create_env.sh makes the environment for this driver, CUDA_VISIBLE_DEVICES= trains on the CPU"
            ) from error
    return False


def _acquire_device(local_rank: int) -> torch.device:
    """Returns this process's device: the GPU with its number on the node, or the CPU if there are no GPUs."""
    if not has_gpus():
        return CPU
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this node has no GPU: there are {torch.cuda.device_count()}; "
            "start at most one process per GPU (torchrun --nproc_per_node)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
