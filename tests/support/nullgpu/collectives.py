"""Replaces NCCL on the null device: gloo exchanges copies of the tensors on the CPU."""

import contextlib
import datetime

import torch
import torch.distributed as dist

from mamba_fsdp.conventions import is_torch_2_2

NAME = "over_gloo"


class Done(dist._Work):
    """The handle of a completed collective."""

    every: list["Done"] = []

    def __init__(self, result):
        super().__init__()
        # torch 2.2 does not keep a reference to this object. Without this reference, torch would wait forever.
        if is_torch_2_2():
            self.every.append(self)
        self.future = torch.futures.Future(devices=[torch.cuda.current_device()])
        self.future.set_result(result)

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    def get_future(self):
        return self.future


class Exchange(dist._Work):
    """A tensor that is being sent to or received from another rank."""

    def __init__(self, work, tensors, copies):
        super().__init__()
        self.work = work
        self.tensors = tensors  # the tensors that `wait` fills from `copies`
        self.copies = copies

    def wait(self, timeout=None):
        self.work.wait()
        with unreported():
            for tensor, copy in zip(self.tensors, self.copies):
                tensor.copy_(copy)
        return True


@contextlib.contextmanager
def unreported():
    """Lets the host wait for the device without recording the wait. NCCL would not wait, so this is not an error of
    the step."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def on_cpu(*lists):
    """Provides copies of the tensors of each list on the CPU, and writes them back at the end of the block."""
    with unreported():
        copies = [[tensor.cpu() for tensor in tensors] for tensors in lists]
        yield copies
        for tensors, of_them in zip(lists, copies):
            for tensor, copy in zip(tensors, of_them):
                tensor.copy_(copy)


def as_bytes(tensor):
    """Returns the flat bytes of a tensor, because gloo does not support every dtype."""
    return tensor.view(-1).view(torch.uint8)


class OverGloo(dist.ProcessGroup):
    """A process group for tensors on the device."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.exchanges = []

    def getBackendName(self):
        return NAME

    @property
    def group_name(self):  # torch 2.11 defines this property only for backends in C++
        return dist.distributed_c10d._world.pg_names[self]

    def broadcast(self, tensors, options):
        with on_cpu(tensors) as (copies,):
            self.gloo.broadcast(copies, options).wait()
        return Done(tensors)

    def allreduce(self, tensors, options):
        with on_cpu(tensors) as (copies,):
            self.gloo.allreduce(copies, options).wait()
        return Done(tensors)

    def allgather(self, gathered, own, options):
        with on_cpu(*gathered, own) as copies:
            self.gloo.allgather(copies[:-1], copies[-1], options).wait()
        return Done(gathered)

    def _allgather_base(self, gathered, own, options):
        with on_cpu([gathered], [own]) as ((into,), (part,)):
            parts = list(as_bytes(into).chunk(self.size()))
            self.gloo.allgather([parts], [as_bytes(part)]).wait()
        return Done(gathered)

    def _reduce_scatter_base(self, own, parts, options):
        with on_cpu([own], [parts]) as ((into,), (whole,)):
            summed = whole.float().view(-1)
            self.gloo.allreduce([summed]).wait()
            into.view(-1).copy_(summed.chunk(self.size())[self.rank()])
        return Done(own)

    def alltoall_base(self, received, sent, received_counts, sent_counts, options):
        with on_cpu([received], [sent]) as ((into,), (whole,)):
            size = whole.element_size()
            bytes_received = [count * size for count in received_counts]
            bytes_sent = [count * size for count in sent_counts]
            self.gloo.alltoall_base(
                as_bytes(into), as_bytes(whole), bytes_received, bytes_sent
            ).wait()
        return Done(received)

    def _start_coalescing(self, device):
        pass

    def send(self, tensors, to, tag):
        with unreported():
            copies = [tensor.cpu() for tensor in tensors]
        return self.begun(Exchange(self.gloo.send(copies, to, tag), [], copies))

    def recv(self, tensors, of, tag):
        copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return self.begun(Exchange(self.gloo.recv(copies, of, tag), tensors, copies))

    def begun(self, exchange):
        """Returns the exchange. For torch 2.2, also adds it to a list, because torch 2.2 waits for all exchanges
        together."""
        if is_torch_2_2():
            self.exchanges.append(exchange)
        return exchange

    def _end_coalescing(self, device):
        for exchange in self.exchanges:
            exchange.wait()
        self.exchanges.clear()
        return Done([])

    def barrier(self, options):
        self.gloo.barrier(options).wait()
        return Done([])


def make(store, rank, size, timeout):
    return OverGloo(store, rank, size, timeout or datetime.timedelta(minutes=30))


def stand_for_nccl():
    """Makes all later process groups over nccl use gloo."""
    dist.Backend.register_backend(NAME, make, devices=["cuda"])
    of_torch = dist.init_process_group

    def init_process_group(backend=None, *given, **named):
        return of_torch(NAME if backend == "nccl" else backend, *given, **named)

    dist.init_process_group = init_process_group
