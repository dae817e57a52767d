"""What depends on the version of torch: the one place that asks."""

import torch.distributed.fsdp

HAS_FSDP2 = hasattr(torch.distributed.fsdp, "fully_shard")


def load_shard():
    """`shard` of fsdp2.py where torch has FSDP2, else of fsdp1.py."""
    if HAS_FSDP2:
        from mamba_fsdp.parallel.fsdp2 import shard
    else:
        from mamba_fsdp.parallel.fsdp1 import shard
    return shard


def has_fused_adamw(device):
    """Whether torch has a fused AdamW for the device (torch 2.2: CUDA only)."""
    return device.type == "cuda" or HAS_FSDP2
