"""Connects the processes of a distributed run: their ranks, their devices, and collectives for small objects."""

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
from mamba_fsdp.storage.retry import storage_error
from mamba_fsdp.storage.threads import in_thread
from mamba_fsdp.this_process import progress

T = TypeVar("T")
Addable = TypeVar("Addable", torch.Tensor, int, float, list[float])
CPU = torch.device("cpu")
# Matches error messages of gloo, NCCL and the store that are caused by the loss of another rank.
PEER_LOST = re.compile("onnection|peer|remote process|network|imeout|imed out")
# Keeps destroyed process groups alive, with torch 2.2 only. That version frees a group while it holds the GIL, and
# waits for the threads of the group. These threads can need the GIL to free the tensors of the last collective, so
# the process hangs. Newer versions release the GIL. There the groups must be freed before the process ends, because a
# thread that needs the GIL of a finalizing interpreter aborts the process ("terminate called without an active
# exception").
ENDED_GROUPS: "list[dist.ProcessGroup]" = []
world_numbers = count()  # numbers the worlds that this process creates; equal on all ranks
# How long ranks wait for each other if they were not started by torchrun.
RENDEZVOUS_TIMEOUT = timedelta(minutes=2)
# Name of the environment variable with the number of ranks that the launchers of all nodes start together.
EXPECTED_RANKS = "MAMBA_FSDP_RANKS"


@dataclass
class World:
    """All ranks of the run, as seen from one of them.

    The methods that communicate are collectives: all ranks must call them in the same order. With a single rank they do
    not communicate. Python objects and CPU tensors are sent over gloo, device tensors over the device's backend.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device
    timeout: timedelta | None = None  # timeout of collectives; None: torch's default
    _gloo: "dist.ProcessGroup | None" = None
    _groups: "list[dist.ProcessGroup]" = field(default_factory=list)  # groups of some ranks

    @classmethod
    def alone(cls, *, device: torch.device = CPU) -> "World":
        """Returns a world with a single process."""
        return cls(rank=0, size=1, local_size=1, device=device)

    def ensure_process_group(self) -> None:
        """Creates a process group with one rank if there is no process group yet. Sharding needs one."""
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def grid(self, columns: int) -> "tuple[dist.ProcessGroup, dist.ProcessGroup]":
        """Arranges all ranks in a grid, row by row, and returns the process groups of this rank's row and column.

        The groups have the timeout of the world. The groups of a torch DeviceMesh would have a timeout of half an hour.
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
        """Returns the `obj` of rank 0 on all ranks."""
        if self.size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=0, group=self._gloo, device=CPU)
        return box[0]

    def gather_on_rank0(self, obj: T) -> list[T]:
        """Returns the `obj` of each rank, in the order of ranks, on rank 0. Returns an empty list on the other
        ranks."""
        if self.size == 1:
            return [obj]
        gathered: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(obj, gathered or None, dst=0, group=self._gloo)
        return gathered

    def gather_unique(self, findings: list[T]) -> list[T]:
        """Returns the findings of all ranks without duplicates, on all ranks. A rank can have an empty list."""
        gathered = self.gather_on_rank0(findings)
        return self.broadcast_object(list(dict.fromkeys(chain.from_iterable(gathered))))

    def all_reduce_sum(self, value: Addable) -> Addable:
        """Returns the sum over ranks of a number, of each number of a list, or of a tensor (in place)."""
        if isinstance(value, torch.Tensor):
            if self.size > 1:
                dist.all_reduce(value, group=self._gloo if value.device.type == "cpu" else None)
            return value
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        return self.all_reduce_sum(torch.tensor(value, dtype=dtype)).tolist()

    def all_to_all(
        self, sent: torch.Tensor, counts: list[int], expected: list[int]
    ) -> torch.Tensor:
        """Sends a part of `sent` to each rank, and returns the elements that were sent to this rank.

        sent: (n,), on the device: the first counts[0] elements are sent to rank 0, the next counts[1] to rank 1, and so
        on. Returns (m,), on the device: expected[0] elements from rank 0, then expected[1] from rank 1, and so on."""
        if self.size == 1:
            return sent
        received = sent.new_empty(sum(expected))
        dist.all_to_all_single(received, sent, expected, counts)
        return received

    def copy_to_device(self, numbers: list[float]) -> torch.Tensor:
        """Copies numbers to the device, and returns them as a tensor (n,) fp64. The host does not wait for the copy."""
        on_host = torch.tensor(numbers, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        return on_host.to(self.device, non_blocking=True)

    def start_copy_to_host(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        """Starts to copy `numbers` (n,) to the host. Returns a function that waits for the copy and returns the
        numbers."""
        on_host = numbers.to("cpu", non_blocking=True)  # a copy from a GPU goes into pinned memory
        if self.device.type == "cpu":
            return on_host.tolist
        copied = torch.cuda.Event()
        copied.record()

        def wait_for_copy() -> list[float]:
            copied.synchronize()
            return on_host.tolist()

        return wait_for_copy

    def run_in_thread(self, work: Callable[..., T], *inputs: Any) -> Future[T]:
        """Runs `work(*inputs)` in a thread, and returns its Future."""

        def run() -> T:
            progress.touch()  # the watchdog does not count the time before the work began
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # each thread has its own current device
            return work(*inputs)

        return in_thread(run)

    def run_local(self, work: Callable[..., T], *inputs: Any) -> T:
        """Runs `work(*inputs)` on every rank, waits until it has ended on all ranks, and returns this rank's result or
        raises this rank's exception.

        The work must not communicate with other ranks. It can take longer than the timeout of the world, because it
        runs in a thread while the ranks exchange heartbeats. While another rank makes progress, waiting for it counts
        as progress too.
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
            # If this is the slowest rank, `wait` returns as soon as its work ends. The other ranks are then already
            # waiting in the next sum, so that all ranks return without a delay.
            wait([outcome], timeout=pause)
            pause = min(0.5, 2 * pause)

    def on_rank0(self, action: Callable[..., T], *inputs: Any) -> T:
        """Runs `action(*inputs)` on rank 0, and returns its result on all ranks. If the action raises an exception, all
        ranks raise a UserError."""

        def act() -> tuple[Any, UserError | None]:
            return catch_errors(action, *inputs) if self.rank == 0 else (None, None)

        result, failure = self.broadcast_object(self.run_local(act))
        if failure:
            raise failure
        return result

    def on_all_ranks(self, work: Callable[..., T], *inputs: Any) -> T:
        """Runs `work(*inputs)` on every rank, and returns this rank's result; see run_local.

        If the work raises UserError or OSError on some ranks, all ranks raise one UserError with the messages of these
        ranks."""

        def try_work() -> tuple[Any, list[UserError]]:
            try:
                return work(*inputs), []
            except UserError as error:
                return None, [error]
            except OSError as error:
                return None, [as_user_error(error)]

        result, failure = self.run_local(try_work)
        failures = self.gather_unique(failure)
        if failures:
            raise merge_errors(failures)
        return result

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        if self.size > 1:
            dist.barrier(group=self._gloo)

    def close(self) -> None:
        """Destroys the process groups, after a barrier. While an exception is being handled it does nothing, because
        other ranks might never reach the barrier."""
        if dist.is_initialized() and sys.exc_info()[0] is None:
            self.barrier()
            if is_torch_2_2():
                groups = [dist.group.WORLD, self._gloo, *self._groups]
                ENDED_GROUPS.extend(group for group in groups if group)
            self._gloo = None
            self._groups.clear()
            dist.destroy_process_group()


def peer_lost_error(error: BaseException, rank: int) -> TransientError | None:
    """Returns a TransientError if `error` was raised because another rank has ended or can't be reached, else None.

    rank: this rank, for the message."""
    is_of_exchange = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
    if not is_of_exchange or not PEER_LOST.search(str(error)):
        return None
    reason = re.sub(r"^\[\S+\] |\. This is typically .*", "", first_line(error))
    return TransientError(
        f"rank {rank} lost another rank, which has failed or can't be reached: {reason[:200]}"
    )


def catch_errors(action: Callable[..., Any], *inputs: Any) -> tuple[Any, UserError | None]:
    """Calls `action(*inputs)`. Returns (result, None), or (None, the exception as a UserError)."""
    try:
        return action(*inputs), None
    except UserError as error:
        return None, error
    except OSError as error:
        return None, as_user_error(error)
    except Exception as error:
        return None, UserError(f"{type(error).__name__}: {error}")


def as_user_error(error: OSError) -> UserError:
    """Returns a UserError with the path and the reason of an OSError. It is a StorageError if a retry can succeed."""
    place = f"{error.filename}: " if error.filename else ""
    return storage_error(error, f"{place}{error.strerror or error}")


def allow_many_files() -> None:
    """Raises the soft limit of open files to the hard limit. Each rank and torchrun have a connection to every rank, so
    that large runs exceed the usual soft limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS reports "unlimited" but refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def start_world(*, timeout_minutes: float = 10.0) -> World:
    """Returns the world of the processes that torchrun has started, or a world with one process without torchrun.

    timeout_minutes: how long a rank waits for the others before it fails. Raises UserError if the environment variables
    of the launcher are incomplete, if there are more processes than GPUs on this node, or if the ranks of processes that
    torchrun did not start can't connect. Raises TransientError if ranks are missing, or if torch can't open the GPUs.
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
    wanted = os.environ.get(EXPECTED_RANKS, str(size))
    if wanted != str(size):  # without this check, fewer ranks would train with a smaller batch
        raise TransientError(
            f"only {size} of {wanted} ranks have started; torchrun leaves out a node whose clock is behind: run `date` on "
            "all nodes (with Slurm: srun date), and set the wrong clock"
        )
    device = _acquire_device(local_rank)
    # The timeout is five seconds longer than the watchdog's. The watchdog checks once a second, and it must fail first,
    # because its message shows where a rank is stuck.
    timeout = timedelta(minutes=timeout_minutes, seconds=5)
    process_group_args: dict[str, Any] = {
        "store": _create_store(timeout, size),
        "rank": rank,
        "world_size": size,
    }
    if device.type == "cuda":
        dist.init_process_group("nccl", **process_group_args, timeout=timeout)
        gloo = dist.new_group(backend="gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", **process_group_args, timeout=timeout)
        gloo = dist.group.WORLD
    return World(rank, size, local_size, device, timeout, gloo)


def _create_store(timeout: timedelta, ranks: int) -> dist.Store:
    """Returns the store through which the ranks of a new world find each other.

    Each world has its own prefix of keys. Otherwise a second training in the same processes would read the addresses
    from the first one, and wait for connections that no longer exist."""
    store = dist.PrefixStore(f"world {next(world_numbers)}", _rendezvous_store(timeout, ranks))
    store.set_timeout(timeout)
    return store


@cache
def _rendezvous_store(timeout: timedelta, ranks: int) -> dist.Store:
    """Returns the store of the launcher, or a store that rank 0 serves if the launcher has none.

    If torchrun did not start this process, the variables can be left over in a shell, and no other rank will come. In
    this case, the function prints what it waits for, and raises UserError after RENDEZVOUS_TIMEOUT."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    awaited = f"{ranks} ranks at {place} (from WORLD_SIZE and MASTER_ADDR in the environment)"
    if not is_launched:
        timeout = min(timeout, RENDEZVOUS_TIMEOUT)
        if ranks > 1:
            print(f"waiting    for {awaited}", file=sys.stderr, flush=True)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        if is_launched:
            raise
        raise UserError(
            f"can't connect {awaited}: {first_line(error)[:200]}; to train with one rank: "
            "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
        ) from None
    return store


def has_gpus() -> bool:
    """Returns whether this process has GPUs. An empty CUDA_VISIBLE_DEVICES selects the CPU.

    Raises TransientError with torch's reason if the driver reports GPUs that torch can't open. This happens if the
    driver is too old for torch's CUDA, for example, or if a service on the node has failed."""
    if torch.cuda.is_available():
        return True
    if torch.cuda._device_count_nvml() > 0 or "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        try:
            torch.cuda.init()
        except Exception as error:
            raise TransientError(
                f"torch {torch.__version__} can't open the GPUs that the driver shows: {first_line(error)}; "
                "run ./0.create_env.sh to create an environment for this driver, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
            ) from error
    return False


def _acquire_device(local_rank: int) -> torch.device:
    """Returns the device of this process: the GPU with the index `local_rank`, or the CPU if there are no GPUs. Raises
    UserError if the node has GPUs, but none with this index; raises TransientError as has_gpus does."""
    if not has_gpus():
        return CPU
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this node has no GPU: the node has only {torch.cuda.device_count()}; "
            "start at most one process per GPU (torchrun --nproc_per_node)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
