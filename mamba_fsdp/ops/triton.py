"""What the triton backends share: operators that torch knows by name, sizes of blocks.

The modules of kernels import triton at their tops and are themselves imported on first use. TRITON_INTERPRET=1 in the
environment runs the kernels on a CPU, for tests.
"""

import os
from collections.abc import Callable, Mapping
from itertools import compress
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mamba_fsdp.ops.backends import Use

os.environ.setdefault(
    "TRITON_DEFAULT_FP_FUSION", "1"
)  # from 3.10 on, a * b + c is else two instructions
LIBRARY = torch.library.Library("mamba_fsdp", "FRAGMENT")
Blocks = Mapping[str, int]  # constants of a kernel, and its num_warps


def takes(use: Use) -> str | None:
    """The answer of the backends whose kernels calculate in float32 whatever they are given."""
    return "its kernels calculate in float32" if use.dtype == torch.float64 else None


def operator(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: type[Function] | None = None,
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


def differentiable(
    name: str,
    tensors: str,
    others: str,
    results: int,
    kept: int,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """The operator NAME_forward, whose gradient is the operator NAME_backward.

    tensors: names of the inputs, a ? behind what may be None; others: what follows them, as in a schema.
    forward(*tensors, *others) -> `results` tensors, the first like the first input or always used, then `kept` ones for
    the backward pass; it takes tensors without content, too. backward(*gradients of the results, *tensors, *kept) ->
    those of all tensors but `seq_idx`, of any dtype, and anything for a tensor that is None.
    """
    names = tensors.split()
    wanted = [of != "seq_idx?" for of in names]

    class Gradient(Function):
        @staticmethod
        def forward(ctx, *inputs):
            with below_autograd():
                made = whole(*inputs)
            keep = made[results:] if kept else ()
            ctx.save_for_backward(*inputs[: len(names)], *keep)
            ctx.mark_non_differentiable(*keep)
            ctx.set_materialize_grads(False)
            ctx.others = len(inputs) - len(names)
            return made

        @staticmethod
        @once_differentiable
        def backward(ctx, *grads):
            inputs = ctx.saved_tensors
            first = torch.zeros_like(inputs[0]) if grads[0] is None else grads[0]
            found = iter(gradients(first, *grads[1:results], *inputs))
            found = [next(found) if has_one else None for has_one in wanted]
            return *(None if tensor is None else grad for grad, tensor in zip(found, inputs)), *[
                None
            ] * ctx.others

    def run(grad, *inputs):
        found = zip(backward(grad, *inputs), compress(inputs[results - 1 :], wanted))
        return tuple(
            grad.new_empty(0) if leaf is None else of.to(leaf.dtype).contiguous()
            for of, leaf in found
        )

    def like(grad, *inputs):
        return tuple(
            grad.new_empty(0) if leaf is None else leaf.new_empty(leaf.shape)
            for leaf in compress(inputs[results - 1 :], wanted)
        )

    given = [f"Tensor? {of[:-1]}" if of.endswith("?") else f"Tensor {of}" for of in names]
    grads, keep = (
        (f"Tensor? grad{i}" for i in range(1, results)),
        (f"Tensor kept{i}" for i in range(kept)),
    )
    gradients = operator(
        f"{name}_backward({', '.join(['Tensor grad', *grads, *given, *keep])}) -> "
        f"({', '.join(['Tensor'] * sum(wanted))})",
        run,
        like,
    )
    whole = operator(
        f"{name}_forward({', '.join(given + [others] * bool(others))}) -> "
        f"({', '.join(['Tensor'] * (results + kept))})",
        forward,
        forward,
        Gradient,
    )
    return whole


def of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of W in x @ W.T for that of the product, both (batch, length, channels)."""
    return grad.flatten(0, 1).T @ x.flatten(0, 1)


def blocks(table: Mapping[tuple[int, int], Blocks], device: torch.device) -> Blocks:
    """The sizes for a kernel: those of its `table` for the newest architecture (compute capability) that is not newer
    than the device's, so that equal devices give equal bits at every start."""
    own = torch.cuda.get_device_capability(device) if device.type == "cuda" else min(table)
    return table[max(known for known in table if known <= own)]


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
