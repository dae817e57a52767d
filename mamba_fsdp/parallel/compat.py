"""What depends on the version of torch: the one place that asks."""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from mamba_fsdp.parallel.model import ParallelModel

HAS_FSDP2 = torch.__version__ >= "2.6"  # asked without importing it, which takes a second


def load_shard() -> Callable[..., ParallelModel]:
    """`shard` of fsdp2.py where torch has FSDP2, else of fsdp1.py."""
    return import_module(f"mamba_fsdp.parallel.fsdp{2 if HAS_FSDP2 else 1}").shard


def use_deterministic_algorithms(asked: bool) -> None:
    """Let this process's operations give equal results in equal runs, or be refused. Call before the first of them."""
    if asked:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # else torch refuses matrix products on a GPU
        if torch.cuda.is_available() and not HAS_FSDP2:
            torch.backends.cuda.enable_flash_sdp(
                False
            )  # torch 2.2's adds with atomics, and torch does not say so
    torch.use_deterministic_algorithms(asked)


def step_unless(optimizer: torch.optim.AdamW, refused: torch.Tensor) -> None:
    """The optimiser's step, unless the 0-dim bool `refused` is true: weights, moments and its count of steps then stay.

    A fused step reads that on the device, as torch's GradScaler has it; one without lies on a CPU, where reading it is
    no wait.
    """
    if optimizer.param_groups[0]["fused"]:
        optimizer.found_inf = refused.float()
        optimizer.step()
    elif not refused:
        optimizer.step()


def has_fused_adamw(device: torch.device) -> bool:
    """Whether torch has a fused AdamW for the device (torch 2.2: CUDA only)."""
    return device.type == "cuda" or HAS_FSDP2


def where_ranks_meet(group: Any) -> tuple[str, str]:
    """MASTER_ADDR and MASTER_PORT of the ranks of a WorkerGroup of torchrun's, once it has met the others."""
    if hasattr(group, "master_addr"):
        return group.master_addr, str(group.master_port)
    address, port = (
        group.store.get(name).decode() for name in ("MASTER_ADDR", "MASTER_PORT")
    )  # torch 2.3 and older
    return address, port
