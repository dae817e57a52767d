"""The kernels of RMSNorm, forward and backward. The norm is applied to X + RESIDUAL, or to X * silu(Z); with GATE_LAST it
is applied to X, and the result is multiplied by silu(Z). RESIDUAL or Z is None.

A program holds the channels of one group of a row in registers. BLOCK is the smallest power of two that is at least
`channels`, the size of a group. A backward program takes ROWS rows, one after the other, and writes their part of the
weight's gradient to its row of SUMS. The order of all sums therefore depends only on sizes.
"""

import triton
import triton.language as tl

from mamba_fsdp.ops.triton import kernel


@triton.jit
def _read(places, inside):
    return tl.load(places, mask=inside, other=0).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.math.exp2(-1.4426950408889634 * x))


@kernel
def norm(
    X,
    WEIGHT,
    OUT,
    SCALE,
    eps,
    channels,
    BLOCK: tl.constexpr,
    RESIDUAL=None,
    TOTAL=None,
    Z=None,
    z_row=0,
    GATE_LAST: tl.constexpr = False,
):
    """Writes the result to OUT, and X + RESIDUAL to TOTAL unless TOTAL is None. Writes the factor by which each group was
    multiplied to normalize it to SCALE (rows, groups)."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.num_programs(1)
    group = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < channels
    c = group * channels + lane
    at = row * groups * channels + c
    x = _read(X + at, inside)
    if RESIDUAL is not None:
        x += _read(RESIDUAL + at, inside)
    if TOTAL is not None:
        tl.store(TOTAL + at, x, mask=inside)
    if Z is not None:
        z = _read(Z + row * z_row + c, inside)
        gate = z * _sigmoid(z)
        if not GATE_LAST:
            x *= gate
    scale = 1 / tl.sqrt(tl.sum(x * x, 0) / channels + eps)
    out = x * scale * _read(WEIGHT + c, inside)
    if GATE_LAST:
        out *= gate
    tl.store(OUT + at, out, mask=inside)
    tl.store(SCALE + row * groups + group, scale)


@kernel
def norm_back(
    GRAD,
    X,
    WEIGHT,
    SCALE,
    GRAD_X,
    SUMS,
    rows,
    channels,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GRAD_TOTAL=None,
    GRAD_RESIDUAL=None,
    Z=None,
    GRAD_Z=None,
    NORMED=None,
    z_row=0,
    grad_z_row=0,
    GATE_LAST: tl.constexpr = False,
):
    """Writes the gradients. X is the input of the forward pass, or TOTAL if there was a residual. GRAD and GRAD_TOTAL are
    the gradients of OUT and TOTAL. Unless NORMED is None, writes the norm's output to it; with GATE_LAST, this is the output
    before the gate."""
    program = tl.program_id(0).to(tl.int64)
    groups = tl.num_programs(1)
    group = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < channels
    c = group * channels + lane
    weight = _read(WEIGHT + c, inside)
    sums = tl.zeros([BLOCK], tl.float32)
    for row in range(program * ROWS, tl.minimum(program * ROWS + ROWS, rows)):
        at = row * groups * channels + c
        scale = tl.load(SCALE + row * groups + group)
        grad = _read(GRAD + at, inside)
        x = _read(X + at, inside)
        normed = x
        if Z is not None:
            z = _read(Z + row * z_row + c, inside)
            sigmoid = _sigmoid(z)
            gate = z * sigmoid
            grad_z = sigmoid * (1 + z - gate)  # the derivative of silu; the other factors follow
            if not GATE_LAST:
                grad_z *= x
                normed *= gate
        normed *= scale
        if GATE_LAST:
            grad_z *= grad * normed * weight
            grad *= gate
        if NORMED is not None:
            tl.store(NORMED + at, normed * weight, mask=inside)
        sums += grad * normed
        grad *= weight
        grad = (grad - normed * (tl.sum(grad * normed, 0) / channels)) * scale
        if GRAD_TOTAL is not None:
            grad += _read(GRAD_TOTAL + at, inside)
        if GRAD_RESIDUAL is not None:
            tl.store(GRAD_RESIDUAL + at, grad, mask=inside)
        if Z is not None:
            if not GATE_LAST:
                grad_z *= grad
                grad *= gate
            tl.store(GRAD_Z + row * grad_z_row + c, grad_z, mask=inside)
        tl.store(GRAD_X + at, grad, mask=inside)
    tl.store(SUMS + program * groups * channels + c, sums, mask=inside)
