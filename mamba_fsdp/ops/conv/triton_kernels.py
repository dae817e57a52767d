"""The kernel of the causal convolution, forward and backward. A program computes ROWS rows of CHANNELS channels. It keeps
the last inputs, x1 to x3, in registers and reads two rows ahead. It begins five rows early to fill these registers.

w0 to w3 are the weights of x[t] to x[t-3]; weights beyond the convolution's width are 0.

Each variable that a loop changes is initialised with a tensor of its own. Triton 3 treats a variable as unchanged if an
iteration ends with the tensor with which the variable began, even under another name: x3, which takes the value of
next2, would stay 0 if both were initialised with the same tensor.
"""

import triton.language as tl

from mamba_fsdp.ops.triton import kernel


@kernel  # one kernel: helpers would need all of its state as arguments
def walk(  # noqa: PLR0915
    X,
    WEIGHT,
    BIAS,
    SEQ_IDX,
    OUT,
    GRAD,
    SUMS,
    length,
    channels,
    x_row,
    out_row,
    grad_row,
    row_programs,
    channel_programs,
    WIDTH: tl.constexpr,
    BACK: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Writes the result to OUT if BACK is 0. If BACK is 3, writes the gradient of X to OUT. The gradient of a row depends on
    GRAD up to three rows later, so r1 to r3 accumulate the gradients of the rows t-1 to t-3. Each program also writes the
    contribution of its rows to the gradients of the weight and of the bias into its row of SUMS (sequences *
    row_programs, channels * WIDTH + channels)."""
    rows = tl.program_id(0) // channel_programs
    batch = (rows // row_programs).to(tl.int64)
    begin = rows % row_programs * ROWS
    readable = tl.minimum(begin + ROWS + BACK, length)
    early = batch * length + begin - 5
    end = tl.minimum(begin + ROWS, length) + BACK
    c = tl.program_id(0) % channel_programs * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    weight = WEIGHT + c * WIDTH + WIDTH - 1
    w0 = tl.load(weight, mask=inside, other=0).to(tl.float32)
    w1 = tl.load(weight - 1, mask=inside, other=0).to(tl.float32)
    w2 = tl.load(weight - 2, mask=c < (channels if WIDTH > 2 else 0), other=0).to(tl.float32)
    w3 = tl.load(weight - 3, mask=c < (channels if WIDTH > 3 else 0), other=0).to(tl.float32)
    bias = tl.load(BIAS + c, mask=inside, other=0).to(tl.float32)
    x1 = tl.zeros([CHANNELS], tl.float32)
    x2 = tl.zeros([CHANNELS], tl.float32)
    x3 = tl.zeros([CHANNELS], tl.float32)
    r1 = tl.zeros([CHANNELS], tl.float32)
    r2 = tl.zeros([CHANNELS], tl.float32)
    r3 = tl.zeros([CHANNELS], tl.float32)
    sum0 = tl.zeros([CHANNELS], tl.float32)
    sum1 = tl.zeros([CHANNELS], tl.float32)
    sum2 = tl.zeros([CHANNELS], tl.float32)
    sum3 = tl.zeros([CHANNELS], tl.float32)
    sums = tl.zeros([CHANNELS], tl.float32)
    x = X + early * x_row + c
    out = OUT + (early - BACK) * out_row + c
    next1 = tl.zeros([CHANNELS], X.dtype.element_ty)
    next2 = tl.zeros([CHANNELS], X.dtype.element_ty)
    if BACK:
        grad = GRAD + early * grad_row + c
        ahead1 = tl.zeros([CHANNELS], GRAD.dtype.element_ty)
        ahead2 = tl.zeros([CHANNELS], GRAD.dtype.element_ty)
    if SEQ_IDX is not None:
        document = SEQ_IDX + early
        last = tl.load(SEQ_IDX)
        same1 = begin < 0
        same2 = begin < 0
    for start in range(begin - 5, begin + ROWS + BACK, 4):
        for step in tl.static_range(4):
            t = start + step
            row = t + tl.zeros(
                [CHANNELS], tl.int32
            )  # the interpreter needs tensors as parts of a mask
            x0 = next1.to(tl.float32)
            next1 = next2
            next2 = tl.load(
                x + 2 * x_row, mask=inside & (row >= -2) & (row + 2 < readable), other=0
            )
            if SEQ_IDX is not None:
                own = tl.load(document, mask=(t >= 0) & (t < length), other=0)
                same = own == last
                last = own
                document = document + 1
                x1 = tl.where(same, x1, 0.0)
                x2 = tl.where(same, x2, 0.0)
                x3 = tl.where(same, x3, 0.0)
            v = bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            s = 1 / (1 + tl.math.exp2(-1.4426950408889634 * v))
            value = v * s
            if BACK:
                g0 = ahead1.to(tl.float32) * s * (1 + v * (1 - s))
                ahead1 = ahead2
                ahead2 = tl.load(
                    grad + 2 * grad_row,
                    mask=inside & (row + 2 >= begin) & (row + 2 < readable),
                    other=0,
                )
                g1 = g0
                g2 = g0
                g3 = g0
                if SEQ_IDX is not None:
                    both = same & same1
                    same3 = same & same2
                    same1 = same
                    same2 = both
                    g1 = tl.where(same1, g0, 0.0)
                    g2 = tl.where(same2, g0, 0.0)
                    g3 = tl.where(same3, g0, 0.0)
                # With this order of statements, ptxas finds registers for all values on sm_80 and sm_86.
                value = r3 + w3 * g3
                next_r1 = w0 * g0
                next_r2 = r1 + w1 * g1
                r3 = r2 + w2 * g2
                r2 = next_r2
                r1 = next_r1
                g0 = tl.where(t < begin + ROWS, g0, 0.0)
                sum0 = sum0 + g0 * x0
                sum1 = sum1 + g0 * x1
                sum2 = sum2 + g0 * x2
                sum3 = sum3 + g0 * x3
                sums = sums + g0
                grad += grad_row
            tl.store(
                out,
                value.to(OUT.dtype.element_ty),
                mask=inside & (row >= begin + BACK) & (row < end),
            )
            x3 = x2
            x2 = x1
            x1 = x0
            x = x + x_row
            out = out + out_row
    if BACK:
        place = SUMS + rows.to(tl.int64) * (WIDTH + 1) * channels
        taps = place + c * WIDTH + WIDTH - 1
        tl.store(taps, sum0, mask=inside)
        tl.store(taps - 1, sum1, mask=inside)
        tl.store(taps - 2, sum2, mask=c < (channels if WIDTH > 2 else 0))
        tl.store(taps - 3, sum3, mask=c < (channels if WIDTH > 3 else 0))
        tl.store(place + channels * WIDTH + c, sums, mask=inside)
