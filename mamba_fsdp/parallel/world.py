"""The processes that train together: who is who, what device each uses, and the few things they tell each other."""

import gc
import os
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart

CPU = torch.device("cpu")


@dataclass
class World:
    """One process's view. Every method is called by all ranks at the same place; with one process all are trivial.

    Python objects and CPU tensors travel over gloo, device tensors over the device's own backend.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_count: int
    device: torch.device
    _gloo: object = None  # the gloo group

    @classmethod
    def alone(cls, *, device=CPU):
        """The world of one process."""
        return cls(rank=0, size=1, local_rank=0, local_size=1, node_count=1, device=device)

    @property
    def device_type(self):
        return self.device.type

    def need_process_group(self):
        """Make the group of one that sharding needs where no launcher has made one."""
        if not dist.is_initialized():
            backend = "nccl" if self.device_type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def broadcast_object(self, obj):
        """Rank 0's `obj`, on every rank."""
        if self.size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=0, group=self._gloo, device=CPU)
        return box[0]

    def gather_objects(self, obj):
        """Every rank's `obj` in the order of ranks, on every rank."""
        if self.size == 1:
            return [obj]
        gathered = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self._gloo)
        return gathered

    def all_reduce_sum(self, value):
        """The sum over ranks: of a tensor (changed in place and returned), of a number, or of each number of a list."""
        if isinstance(value, torch.Tensor):
            if self.size > 1:
                dist.all_reduce(value, group=self._gloo if value.device.type == "cpu" else None)
            return value
        if isinstance(value, (list, tuple)):
            return self.all_reduce_sum(torch.tensor(value, dtype=torch.float64)).tolist()
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        return self.all_reduce_sum(torch.tensor(value, dtype=dtype)).item()

    def run_local(self, work):
        """What `work()` returns on this rank, once every rank's has ended. It must not talk to other ranks.

        It may take longer than the ranks' timeout: they exchange signs of life while it runs in a thread, so that to
        wait for a rank with a slow disk counts as progress for as long as it gets on, and no longer. Raises what
        this rank's work raises.
        """
        if self.size == 1:
            return work()
        outcome = Future()

        def run():
            try:
                if self.device_type == "cuda":
                    torch.cuda.set_device(self.device)  # each thread has its own
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=run, name="run_local", daemon=True).start()
        beats_before, pause = None, 0.001
        while True:
            working, beats = self.all_reduce_sum([float(not outcome.done()), float(heart.work)])
            if not working:
                return outcome.result()
            if beats != beats_before:
                heart.another_beats()
            beats_before = beats
            time.sleep(pause)
            pause = min(0.5, 2 * pause)

    def on_rank0(self, action):
        """What `action()` returns on rank 0, on every rank. Raises its failure as a UserError on every rank."""
        result, failure = self.broadcast_object(self.run_local(lambda: _attempt(action) if self.rank == 0 else None))
        if failure:
            raise UserError(failure)
        return result

    def barrier(self):
        """Return when every rank has come here."""
        if self.size > 1:
            dist.barrier(group=self._gloo)

    def close(self):
        """End the process group. Drop model and optimizer first: a gloo process can abort at exit otherwise.

        While an error is on its way out the others may never come, so then nobody is waited for.
        """
        if dist.is_initialized() and sys.exc_info()[0] is None:
            gc.collect()
            self.barrier()
            dist.destroy_process_group()


def _attempt(action):
    """(what it returns, None), or (None, a sentence that says why it failed)."""
    try:
        return action(), None
    except UserError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def start_world(*, timeout_minutes=10.0):
    """Join the processes that torchrun has started; a world of one where none has.

    timeout_minutes: how long a rank waits for the others before it gives up with an error. Raises UserError when the
    launcher's environment is incomplete or asks for more GPUs than this node has.
    """
    environment = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    if environment["RANK"] is None:
        return World.alone(device=_take_device(0))
    missing = [name for name, value in environment.items() if value is None]
    if missing:
        raise UserError(f"RANK is set, but not {', '.join(missing)}; start the ranks with torchrun, or unset RANK to "
                        "train with one process")
    rank, size, local_rank, local_size = (int(value) for value in environment.values())
    device, timeout = _take_device(local_rank), timedelta(minutes=timeout_minutes)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    gloo = dist.new_group(backend="gloo", timeout=timeout) if device.type == "cuda" else dist.group.WORLD
    return World(rank, size, local_rank, local_size, max(1, size // local_size), device, gloo)


def _take_device(local_rank):
    """This process's device: the GPU of its number on the node where there are GPUs."""
    if not torch.cuda.is_available():
        return CPU
    if local_rank >= torch.cuda.device_count():
        raise UserError(f"process {local_rank} of this node has no GPU: there are {torch.cuda.device_count()}; "
                        "start at most one process per GPU (torchrun --nproc_per_node)")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
