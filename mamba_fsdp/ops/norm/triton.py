"""RMSNorm by Triton kernels: triton_kernels.py. For the backward pass it keeps what was normed, before the gate, and
each row's scale; PROGRAMS blocks of rows sum their part of the weight's gradient: the same bits at every run."""

import torch
from torch.autograd.function import once_differentiable

from mamba_fsdp.ops import triton

PROGRAMS = 128
WIDEST = 65536  # a block holds a row of a group
TILES = {
    (8, 0): {"ELEMENTS": 4096, "num_warps": 8}
}  # longer rows have tiles of one row, and more warps


def why_not(use):
    if use.channels > WIDEST:
        return f"its kernels take up to {WIDEST} channels, not {use.channels}"
    return None


def norm_forward(x, residual, z, weight, eps, groups, dtype):
    """(normed in `dtype`, the sum in float32 or nothing where there is z, scale (rows, groups) in float32)."""
    normed = x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty(*x.shape[:-1], groups, dtype=torch.float32)
    total = x.new_empty(x.shape if z is None else 0, dtype=torch.float32)
    _launch(
        "forward",
        dict(X=x, RESIDUAL=residual, Z=z),
        weight,
        scale,
        NORMED=normed,
        TOTAL=total,
        eps=eps,
    )
    return normed, total, scale


def norm_backward(grad, grad_total, value, z, weight, scale, grad_z=None, normed=None):
    """Gradients of x in grad's dtype, of z or, without it, of the residual, and of weight. value: x or the sum.

    grad_z: a tensor for that of z, with rows of any stride; normed: one that gets the output once more.
    """
    grad_x = grad.new_empty(grad.shape)
    sums = value.new_zeros(PROGRAMS, len(weight), dtype=torch.float32)
    other = grad_z
    if other is None:
        other = torch.empty_like(value if z is None else z, memory_format=torch.contiguous_format)
    tensors = dict(X=value, Z=z, GRAD=grad, GRAD_TOTAL=grad_total, GRAD_OTHER=other)
    _launch("backward", tensors, weight, scale, GRAD_X=grad_x, NORMED=normed, SUMS=sums)
    return grad_x, other, sums.sum(0).to(weight.dtype)


def _launch(name, tensors, weight, scale, **more):
    """Launch a kernel; `tensors` are those whose rows may have any stride, or None."""
    if scale.is_meta or not scale.numel():
        return
    from mamba_fsdp.ops.norm import triton_kernels

    groups = scale.shape[-1]
    rows = scale.numel() // groups
    channels = len(weight) // groups
    block = 1 << (channels - 1).bit_length()
    sizes = triton.blocks(TILES, weight.device)
    tile = max(sizes["ELEMENTS"] // block, 1)
    warps = min(sizes["num_warps"] * max(block // sizes["ELEMENTS"], 1), 32)
    each = tile
    if name == "backward":
        each = -(-rows // (tile * PROGRAMS)) * tile
    for key, tensor in tensors.items():
        stride = 0
        if tensor is not None:
            if tensor.stride(-1) != 1:
                tensor = tensor.contiguous()
            tensor = tensor.reshape(rows, -1)
            stride = tensor.stride(0)
        more[key] = tensor
        more[f"{key.lower()}_row"] = stride
    getattr(triton_kernels, name)[(-(-rows // each), groups)](
        WEIGHT=weight,
        SCALE=scale,
        rows=rows,
        channels=channels,
        each=each,
        TILE=tile,
        BLOCK=block,
        num_warps=warps,
        **more,
    )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, z, weight, *sizes):
        with triton.below_autograd():
            normed, total, scale = _norm(x, residual, z, weight, *sizes)
        if z is None:
            ctx.save_for_backward(total, z, weight, scale)
            ctx.mark_non_differentiable(scale)
        else:
            ctx.save_for_backward(x, z, weight, scale)
            ctx.mark_non_differentiable(scale, total)
        ctx.set_materialize_grads(False)
        return normed, total, scale

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_total, _):
        value, z, weight, scale = ctx.saved_tensors
        if grad is None:
            grad = value.new_zeros(value.shape)
        grad_x, other, grad_weight = _gradients(grad, grad_total, value, z, weight, scale)
        _, has_residual, has_z, *_ = ctx.needs_input_grad
        grad_residual = other if has_residual else None
        grad_z = other if has_z else None
        return grad_x, grad_residual, grad_z, grad_weight, None, None, None


_norm = triton.operator(
    "norm_forward(Tensor x, Tensor? residual, Tensor? z, Tensor weight, float eps, int groups, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    norm_forward,
    norm_forward,
    _Norm,
)
_gradients = triton.operator(
    "norm_backward(Tensor grad, Tensor? grad_total, Tensor value, Tensor? z, Tensor weight, "
    "Tensor scale) -> (Tensor, Tensor, Tensor)",
    norm_backward,
    norm_backward,
)


def add_rms_norm(x, residual, weight, eps, out_dtype):
    return _norm(x, residual, None, weight, eps, 1, out_dtype)[:2]


def gated_rms_norm(x, z, weight, eps, group_size):
    return _norm(x, None, z, weight, eps, x.shape[-1] // group_size, x.dtype)[0]
