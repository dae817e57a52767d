"""What depends on the version of torch: the one place that asks."""

try:
    from torch.distributed.fsdp import fully_shard  # noqa: F401
    HAS_FSDP2 = True
except ImportError:
    HAS_FSDP2 = False


def has_fused_adamw(device):
    """Whether torch has a fused AdamW for the device (torch 2.2: CUDA only)."""
    return device.type == "cuda" or HAS_FSDP2
