"""What the triton forms share: whether Triton serves here, operators that torch knows by name, sizes of blocks.

The modules of kernels import triton at their tops and are themselves imported on first use. TRITON_INTERPRET=1 in the
environment runs the kernels on a CPU, for tests.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import Function

from mamba_fsdp.errors import first_line

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # from 3.10 on, a * b + c is else two instructions
LIBRARY = torch.library.Library("mamba_fsdp", "FRAGMENT")
Blocks = Mapping[str, int]  # constants of a kernel, and its num_warps
tuned: dict[str, Blocks] = {}  # by kernel: what a timing on this kind of GPU chose instead of the tables


def why_unavailable() -> str | None:
    """What keeps Triton from serving on this machine."""
    try:
        import triton  # noqa: F401
    except Exception as error:  # a build for another PyTorch fails in many ways
        return f"triton does not load ({type(error).__name__}: {first_line(error)})"
    return None


def operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any], gradient: type[Function] | None = None
             ) -> Callable[..., Any]:
    """torch.ops.mamba_fsdp.NAME for a schema such as "scan_forward(Tensor u, Tensor? z) -> (Tensor, Tensor)".

    torch.compile takes it as one call. run: launches the kernels; returns new tensors only. fake: returns empty tensors
    of the same shapes and dtypes for tensors without content. gradient: a Function whose forward calls the operator
    within `below_autograd()`; its backward calls another operator, so that this is one call as well.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    for device, function in (("CPU", run), ("CUDA", run), ("Meta", fake)):
        LIBRARY.impl(name, function, device)
    if gradient:
        LIBRARY.impl(name, gradient.apply, "Autograd")
    return getattr(torch.ops.mamba_fsdp, name)


below_autograd = torch._C._AutoDispatchBelowAutograd


def blocks(kernel: str, table: Mapping[tuple[int, int], Blocks], device: torch.device) -> Blocks:
    """The sizes for a kernel: what was tuned, else those of the `table` for the newest architecture (compute
    capability) that is not newer than the device's, so that equal devices give equal bits at every start."""
    if kernel in tuned:
        return tuned[kernel]
    own = torch.cuda.get_device_capability(device) if device.type == "cuda" else min(table)
    return table[max(known for known in table if known <= own)]


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
