"""Contains the functions that depend on the version of torch."""

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib import import_module

import torch
import torch.distributed as dist

from mamba_fsdp.parallel.model import ParallelModel

# This compares versions, because an attempt to import FSDP2 would take a second.
HAS_FSDP2 = torch.__version__ >= "2.6"


def load_shard() -> Callable[..., ParallelModel]:
    """Returns the function `shard` of fsdp2.py if torch has FSDP2, otherwise the function `shard` of fsdp1.py."""
    name = "fsdp2" if HAS_FSDP2 else "fsdp1"
    return import_module(f"mamba_fsdp.parallel.{name}").shard


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Makes torch use deterministic algorithms inside the block, if `enabled`. torch then raises an error for
    operations that have no deterministic algorithm. Enter the context before the first operation."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    had_flash = torch.backends.cuda.flash_sdp_enabled()
    try:
        if enabled:
            # torch raises an error for matrix products on a GPU if this variable is not set.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            # torch would fill every new empty tensor with NaN. This is not needed, because our operators write each
            # tensor before they read it.
            torch.utils.deterministic.fill_uninitialized_memory = False
            if torch.cuda.is_available() and not HAS_FSDP2:
                # The flash attention of torch 2.2 uses atomic additions, but torch does not raise an error for it.
                torch.backends.cuda.enable_flash_sdp(False)
        torch.use_deterministic_algorithms(enabled)
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.backends.cuda.enable_flash_sdp(had_flash)


def step_unless_rejected(optimizer: torch.optim.AdamW, rejected: torch.Tensor) -> None:
    """Takes a step of the optimizer. If the 0-dim bool tensor `rejected` is true, nothing is changed: neither weights
    nor moments nor the step count.

    A fused AdamW reads `rejected` on the device, as it does with torch's GradScaler. For any other AdamW, `rejected`
    must be on the CPU, where reading it does not wait for a device.
    """
    if optimizer.param_groups[0]["fused"]:
        optimizer.found_inf = rejected.float()
        optimizer.step()
    elif not rejected:
        optimizer.step()


def has_fused_adamw(device: torch.device) -> bool:
    """Returns whether torch has a fused AdamW for this device. torch 2.2 has one only for CUDA."""
    return device.type == "cuda" or HAS_FSDP2


def gather_into(gathered: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather: fills the 1-D tensor `gathered` with the 1-D tensors `own` of all ranks of the group."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own, group=group)


def scatter_sum(own: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Reduce-scatter: fills the 1-D tensor `own` with this rank's part of the sum of `parts` over all ranks of the
    group. The content of `parts` can be overwritten."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(own, parts, group=group)
