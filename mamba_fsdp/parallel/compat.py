"""What depends on the version of torch: the one place that asks."""

from collections.abc import Callable

import torch.distributed.fsdp

from mamba_fsdp.parallel.model import ParallelModel

HAS_FSDP2 = hasattr(torch.distributed.fsdp, "fully_shard")


def load_shard() -> Callable[..., ParallelModel]:
    """`shard` of fsdp2.py where torch has FSDP2, else of fsdp1.py."""
    if HAS_FSDP2:
        from mamba_fsdp.parallel.fsdp2 import shard
    else:
        from mamba_fsdp.parallel.fsdp1 import shard
    return shard


def has_fused_adamw(device: torch.device) -> bool:
    """Whether torch has a fused AdamW for the device (torch 2.2: CUDA only)."""
    return device.type == "cuda" or HAS_FSDP2
