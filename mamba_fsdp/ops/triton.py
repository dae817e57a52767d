"""Defines what triton backends share: operators that torch knows by name, and the block sizes of their kernels.

The modules of kernels import triton at the top and are themselves imported on first use. TRITON_INTERPRET=1 in the
environment runs the kernels on a CPU, for tests.
"""

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mamba_fsdp.conventions import is_torch_2_2
from mamba_fsdp.storage.retry import exists

# From Triton 3.10 on, a * b + c is compiled to two instructions unless this is set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
LIBRARY = torch.library.Library("mamba_fsdp", "FRAGMENT")
RUNS: dict[str, Callable[..., Any]] = {}  # {name of an operator: its `run`}
# The oldest supported compute capability. The table of every kernel has an entry for it.
OLDEST = (8, 0)
Blocks = Mapping[str, int]  # {name: value} of a kernel's constants and of num_warps and num_stages
# Arguments that Triton does not specialize for: it compiles no other code if they are divisible by 16 or equal to 1. Most
# of them depend on the number of positions, which differs in each prompt and in the last window of an evaluation. The
# alignment of addresses does not depend on them.
LENGTH_ARGUMENTS = (
    "length rows row_programs segments per_segment segment_chunks vocab labels token_weights"
).split()


def why_unavailable() -> str | None:
    """Returns what this machine lacks for Triton kernels: a new enough GPU, a C compiler or Python's headers. Returns None
    if it lacks nothing."""
    if interpreted():
        return None
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) < OLDEST:
            return (
                f"the kernels are for GPUs of compute capability 8.0 and newer, not {major}.{minor}"
            )
    if not os.environ.get("CC") and not shutil.which("gcc") and not shutil.which("clang"):
        return "Triton finds no C compiler: install gcc, or name one in the environment as CC"
    scheme = sysconfig.get_default_scheme().replace(
        "posix_local", "posix_prefix"
    )  # the scheme in which Triton looks for headers
    header = os.path.join(sysconfig.get_path("include", scheme), "Python.h")
    if not exists(header):
        return f"Triton needs Python's headers: install python3-dev, there is no {header}"
    return None


def operator(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: type[Function] | None = None,
) -> Callable[..., Any]:
    """Returns torch.ops.mamba_fsdp.NAME, defined by a schema such as "scan_forward(Tensor u, Tensor? z) -> (Tensor,
    Tensor)".

    torch.compile takes the operator as one call. run launches the kernels and returns only new tensors; fake returns
    empty tensors of the same shapes and dtypes. gradient is a Function; its forward calls the operator within
    `below_autograd()`. Its backward calls another operator, so the backward pass is one call too.
    """
    name = schema.partition("(")[0]
    RUNS[name] = run
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CPU")
    LIBRARY.impl(name, run, "CUDA")
    LIBRARY.impl(name, fake, "Meta")
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
    """Returns the operator NAME_forward; its gradient is the operator NAME_backward.

    tensors: names of the inputs, with a ? after each that may be None; others: the arguments that follow, as in a
    schema. forward(*tensors, *others) returns `results` tensors and `kept` tensors for the backward pass; it also takes
    meta tensors. Its first result must have the shape and dtype of the first input, or its gradient must never be
    missing. backward(*gradients of the results, *tensors, *kept) returns the gradients of all tensors but `seq_idx`, in
    any dtype, and anything for a tensor that is None.
    """
    names = tensors.split()
    has_gradient = [name != "seq_idx?" for name in names]

    class Gradient(Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            with below_autograd():
                outputs = forward_operator(*inputs)
            for_backward = outputs[results:] if kept else ()
            ctx.save_for_backward(*inputs[: len(names)], *for_backward)
            ctx.mark_non_differentiable(*for_backward)
            ctx.set_materialize_grads(False)
            ctx.others = len(inputs) - len(names)
            return outputs

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            first = torch.zeros_like(saved[0]) if grads[0] is None else grads[0]
            computed = iter(backward_operator(first, *grads[1:results], *saved))
            input_grads = []
            for tensor, has_one in zip(saved, has_gradient):
                grad = next(computed) if has_one else None
                input_grads.append(None if tensor is None else grad)
            return *input_grads, *[None] * ctx.others

    def differentiable_inputs(inputs: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Returns the inputs that have a gradient; some can be None. inputs: the arguments of the backward operator without
        the first one."""
        leaves = inputs[results - 1 : results - 1 + len(names)]
        return [leaf for leaf, has_one in zip(leaves, has_gradient) if has_one]

    def run_backward(grad: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        input_grads = []
        for leaf, input_grad in zip(differentiable_inputs(inputs), backward(grad, *inputs)):
            if leaf is None:
                input_grad = grad.new_empty(0)
            else:
                input_grad = input_grad.to(leaf.dtype).contiguous()
            input_grads.append(input_grad)
        return tuple(input_grads)

    def fake_backward(grad: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        leaves = differentiable_inputs(inputs)
        return tuple(grad.new_empty(0) if v is None else v.new_empty(v.shape) for v in leaves)

    inputs = [f"Tensor? {n[:-1]}" if n.endswith("?") else f"Tensor {n}" for n in names]
    grads = ["Tensor grad", *(f"Tensor? grad{i}" for i in range(1, results))]
    saved = [f"Tensor kept{i}" for i in range(kept)]
    last = [others] if others else []
    backward_operator = operator(
        _schema(f"{name}_backward", [*grads, *inputs, *saved], sum(has_gradient)),
        run_backward,
        fake_backward,
    )
    forward_operator = operator(
        _schema(f"{name}_forward", [*inputs, *last], results + kept), forward, forward, Gradient
    )
    return forward_operator


def _schema(name: str, arguments: list[str], results: int) -> str:
    return f"{name}({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of W in the product x @ W.T. grad: the gradient of the product. x and grad are (batch, length,
    channels)."""
    return grad.flatten(0, 1).T @ x.flatten(0, 1)


def rows(t: Tensor) -> Tensor:
    """Returns t (batch, length, ...) as (batch, length, channels), with contiguous channels and with positions that are
    evenly spaced over the whole batch. Tensors that the model makes are not copied."""
    t = t.flatten(2)
    is_even = len(t) == 1 or t.stride(0) == t.shape[1] * t.stride(1)
    return t if is_even and t.stride(2) == 1 else t.contiguous()


def blocks(table: Mapping[tuple[int, int], Blocks], device: torch.device) -> Blocks:
    """Returns the block sizes of a kernel: the entry of `table` for the newest compute capability that is not newer than
    the device. They depend only on the device, so that equal devices give equal bits."""
    own = _capability(device) if device.type == "cuda" else OLDEST
    if own in table:
        return table[own]
    return table[max(capability for capability in table if capability <= own)]


# Each call of the function without the cache takes 5 us.
_capability = functools.cache(torch.cuda.get_device_capability)


def is_version_2() -> bool:
    """Returns whether Triton is the version of torch 2.2."""
    return is_torch_2_2()


def kernel(function: Callable[..., None]) -> Any:
    """Decorates a kernel that the host launches. Functions that kernels call are decorated with triton.jit."""
    if is_version_2() and not interpreted():
        from mamba_fsdp.ops.quick_kernel import QuickKernel

        return QuickKernel(function, do_not_specialize=LENGTH_ARGUMENTS)
    import triton

    return triton.jit(function, do_not_specialize=LENGTH_ARGUMENTS)


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
