"""What the triton forms share: whether Triton serves here, operators that torch knows by name, sizes of blocks.

The modules of kernels import triton at their tops and are themselves imported on first use. TRITON_INTERPRET=1 in the
environment runs the kernels on a CPU, for tests.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.ops.forms import Use
from mamba_fsdp.storage import write_atomically

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # from 3.10 on, a * b + c is else two instructions
LIBRARY = torch.library.Library("mamba_fsdp", "FRAGMENT")
Blocks = Mapping[str, int]  # constants of a kernel, and its num_warps
tuned: dict[str, Blocks] = {}  # by kernel: what a timing on this kind of GPU chose instead of the tables
tables: dict[str, Mapping[tuple[int, int], Blocks]] = {}  # by kernel: what it was launched with


def why_unavailable() -> str | None:
    """What keeps Triton from serving on this machine."""
    try:
        import triton  # noqa: F401
    except Exception as error:  # a build for another PyTorch fails in many ways
        return f"triton does not load ({type(error).__name__}: {first_line(error)})"
    return None


def takes(use: Use) -> str | None:
    """The answer of the forms whose kernels calculate in float32 whatever they are given."""
    return "its kernels calculate in float32" if use.dtype == torch.float64 else None


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


def remaking(name: str, leaves: str, others: str, kept: int, forward: Callable[..., Any], backward: Callable[..., Any],
             fake: Callable[..., Any]) -> Callable[..., Any]:
    """A function by the operator NAME_forward, whose gradient NAME_backward makes again what it needs of the inputs.

    forward(*leaves, documents, *others) -> (output, *what is kept), `kept` tensors; backward(gradient of the output,
    *leaves, documents, *what is kept) -> gradients of the leaves, of any dtype. leaves: names; others: as in a schema;
    fake: of forward. The function returns the output alone.
    """
    count, tensors = len(leaves.split()), ", ".join(f"Tensor {leaf}" for leaf in leaves.split()) + ", Tensor? documents"

    class Gradient(Function):
        @staticmethod
        def forward(ctx, *inputs):
            with below_autograd():
                output, *keep = whole(*inputs)
            ctx.save_for_backward(*inputs[:count + 1], *keep)
            ctx.mark_non_differentiable(*keep)
            ctx.set_materialize_grads(False)
            return output, *keep

        @staticmethod
        @once_differentiable
        def backward(ctx, grad, *_):
            return *gradients(grad, *ctx.saved_tensors), None, *[None for _ in others.split(",")]

    gradients = operator(f"{name}_backward(Tensor grad, {tensors}, {', '.join(f'Tensor kept{i}' for i in range(kept))})"
                         f" -> ({', '.join(['Tensor'] * count)})",
                         lambda grad, *rest: tuple(of.to(leaf.dtype) for of, leaf in zip(backward(grad, *rest), rest)),
                         lambda _, *inputs: tuple(leaf.new_empty(leaf.shape) for leaf in inputs[:count]))
    whole = operator(f"{name}_forward({tensors}, {others}) -> ({', '.join(['Tensor'] * (1 + kept))})", forward, fake,
                     Gradient)
    return lambda *inputs: whole(*inputs)[0]


def of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of W in x @ W.T for that of the product, both (batch, length, channels)."""
    return grad.flatten(0, 1).T @ x.flatten(0, 1)


def blocks(kernel: str, table: Mapping[tuple[int, int], Blocks], device: torch.device) -> Blocks:
    """The sizes for a kernel: what was tuned, else those of the `table` for the newest architecture (compute
    capability) that is not newer than the device's, so that equal devices give equal bits at every start."""
    tables[kernel] = table
    if kernel in tuned:
        return tuned[kernel]
    own = torch.cuda.get_device_capability(device) if device.type == "cuda" else min(table)
    return table[max(known for known in table if known <= own)]


def tune(run: Callable[[], Any], path: Path, seconds: Callable[[Callable[[], Any]], float] | None = None) -> None:
    """Has `blocks` give the fastest sizes of each kernel that run() launches: those in the file at `path`, else timed
    and kept there. The file should be one of this kind of GPU, this Triton and these shapes.

    Tried are all entries of a kernel's table, each with 1, 2, 4 and 8 warps. seconds(run): measures, infinite where the
    sizes do not fit. Raises UserError where the file can't be read.
    """
    if path.exists():
        try:
            tuned.update(json.loads(path.read_text()))
        except ValueError:
            raise UserError(f"{path}: not sizes of kernels in JSON; delete it, and they are timed again") from None
        return
    run()
    for kernel, table in list(tables.items()):
        candidates = [dict(sizes, num_warps=warps) for sizes in table.values() for warps in (1, 2, 4, 8)]
        times = []
        for candidate in candidates:
            tuned[kernel] = candidate
            times.append((seconds or _seconds)(run))
        tuned[kernel] = candidates[times.index(min(times))]
    write_atomically(path, json.dumps(tuned, indent=1))


def _seconds(run):
    """Of the fastest of three runs behind one that compiles."""
    times = []
    try:
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    except Exception:  # too many registers or bytes of shared memory are told in many ways
        return float("inf")
    return min(times[1:])


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
