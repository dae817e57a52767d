"""Holds all code that depends on the version of torch."""

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib import import_module

import torch
import torch.distributed as dist

from mamba_fsdp.parallel.model import ParallelModel

HAS_FSDP2 = torch.__version__ >= "2.6"  # importing FSDP2 would take a second


def load_shard() -> Callable[..., ParallelModel]:
    """Returns `shard` of fsdp2.py if torch has FSDP2, else `shard` of fsdp1.py."""
    name = "fsdp2" if HAS_FSDP2 else "fsdp1"
    return import_module(f"mamba_fsdp.parallel.{name}").shard


@contextlib.contextmanager
def deterministic_algorithms(asked: bool) -> Iterator[None]:
    """If asked, makes torch refuse operations whose results differ between equal runs, until the block ends. Enter it
    before the first operation."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    had_flash = torch.backends.cuda.flash_sdp_enabled()
    try:
        if asked:
            # Without this setting, torch refuses matrix products on a GPU.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            # torch would fill every new empty tensor with NaN; our operators write tensors before they read them.
            torch.utils.deterministic.fill_uninitialized_memory = False
            if torch.cuda.is_available() and not HAS_FSDP2:
                # torch 2.2's flash attention adds with atomics, and torch does not refuse it.
                torch.backends.cuda.enable_flash_sdp(False)
        torch.use_deterministic_algorithms(asked)
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.backends.cuda.enable_flash_sdp(had_flash)


def step_unless(optimizer: torch.optim.AdamW, refused: torch.Tensor) -> None:
    """Takes the optimiser's step, unless the 0-dim bool `refused` is true: weights, moments and step count then stay.

    A fused AdamW reads `refused` on the device, as with torch's GradScaler. With any other AdamW, `refused` is on the
    CPU, where reading it waits for nothing.
    """
    if optimizer.param_groups[0]["fused"]:
        optimizer.found_inf = refused.float()
        optimizer.step()
    elif not refused:
        optimizer.step()


def has_fused_adamw(device: torch.device) -> bool:
    """Returns whether torch has a fused AdamW for the device; torch 2.2 has it only for CUDA."""
    return device.type == "cuda" or HAS_FSDP2


def gather_into(gathered: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fills the flat tensor `gathered` with the flat tensors `own` of all ranks of the group."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own, group=group)


def scatter_sum(own: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fills the flat tensor `own` with this rank's part of the sum of all ranks' `parts`, which may be overwritten."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(own, parts, group=group)
