"""The norm's kernels with the longest rows that they take, as a list for the compiler."""

from benchmarks.kernels.norm import ADDED, GATED, kernel
from mamba_fsdp.ops.norm.triton import WIDEST

KERNELS = [
    kernel(f"{name}, {which}", which, tensors, WIDEST, 0)
    for which in ("forward", "backward")
    for name, tensors in (("sum", ADDED), ("gate", GATED))
]
