"""The kernels of RMSNorm, behind a residual sum or, with Z, a gate. A program takes TILE rows of a group of channels at
a time, all of which BLOCK covers."""

import triton
import triton.language as tl


@triton.jit
def forward(
    X,
    RESIDUAL,
    Z,
    WEIGHT,
    NORMED,
    TOTAL,
    SCALE,
    eps,
    rows,
    channels,
    each,
    x_row,
    residual_row,
    z_row,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    line = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, BLOCK)[None, :]
    row = line[:, None]
    place = group * channels + c
    inside = (row < rows) & (c < channels)
    at = row * groups * channels + place
    value = tl.load(X + row * x_row + place, mask=inside, other=0).to(tl.float32)
    if Z is not None:
        z = tl.load(Z + row * z_row + place, mask=inside, other=0).to(tl.float32)
        value *= z / (1 + tl.math.exp2(-1.4426950408889634 * z))
    else:
        if RESIDUAL is not None:
            value += tl.load(RESIDUAL + row * residual_row + place, mask=inside, other=0)
        tl.store(TOTAL + at, value, mask=inside)
    scale = 1 / tl.sqrt(tl.sum(value * value, 1) / channels + eps)
    tl.store(SCALE + line * groups + group, scale, mask=line < rows)
    weight = tl.load(WEIGHT + place, mask=c < channels, other=0).to(tl.float32)
    tl.store(
        NORMED + at, (value * scale[:, None] * weight).to(NORMED.dtype.element_ty), mask=inside
    )


@triton.jit
def backward(
    GRAD,
    GRAD_TOTAL,
    X,
    Z,
    WEIGHT,
    SCALE,
    GRAD_X,
    GRAD_OTHER,
    NORMED,
    SUMS,
    rows,
    channels,
    each,
    grad_row,
    grad_total_row,
    x_row,
    z_row,
    grad_other_row,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """X: what was normed, before the gate. `each` rows a program: SUMS (programs, channels) gets their part of the
    weight's gradient. GRAD_OTHER: of Z, or of the sum in float32. NORMED gets the output once more."""
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    c = tl.arange(0, BLOCK)[None, :]
    begin = tl.program_id(0) * each
    place = group * channels + c
    sums = tl.zeros([TILE, BLOCK], tl.float32)
    for first in range(begin, tl.minimum(begin + each, rows), TILE):
        line = first + tl.arange(0, TILE).to(tl.int64)
        row = line[:, None]
        inside = (row < rows) & (c < channels)
        at = row * groups * channels + place
        grad = tl.load(GRAD + row * grad_row + place, mask=inside, other=0).to(tl.float32)
        x = tl.load(X + row * x_row + place, mask=inside, other=0).to(tl.float32)
        scale = tl.load(SCALE + line * groups + group, mask=line < rows, other=0)[:, None]
        normed = x * scale
        if Z is not None:
            z = tl.load(Z + row * z_row + place, mask=inside, other=0).to(tl.float32)
            s = 1 / (1 + tl.math.exp2(-1.4426950408889634 * z))
            gate = z * s
            slope = x * s * (1 + z * (1 - s))
            normed *= gate
        weight = tl.load(WEIGHT + place, mask=c < channels, other=0).to(tl.float32)
        if NORMED is not None:
            tl.store(NORMED + at, (normed * weight).to(NORMED.dtype.element_ty), mask=inside)
        sums += grad * normed
        grad *= weight
        grad = (grad - normed * (tl.sum(grad * normed, 1) / channels)[:, None]) * scale
        if Z is not None:
            of_z = (grad * slope).to(GRAD_OTHER.dtype.element_ty)
            tl.store(GRAD_OTHER + row * grad_other_row + place, of_z, mask=inside)
            grad *= gate
        else:
            if GRAD_TOTAL is not None:
                grad += tl.load(GRAD_TOTAL + row * grad_total_row + place, mask=inside, other=0)
            tl.store(GRAD_OTHER + row * grad_other_row + place, grad, mask=inside)
        tl.store(GRAD_X + at, grad.to(GRAD_X.dtype.element_ty), mask=inside)
    place += tl.program_id(0).to(tl.int64) * groups * channels
    tl.store(SUMS + place, tl.sum(sums, 0)[None, :], mask=c < channels)
