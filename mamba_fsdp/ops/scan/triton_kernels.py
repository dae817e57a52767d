"""The selective scan's kernels (formula: __init__.py): sweeps over time that carry their states in registers.

A program is a row of the batch, CHANNELS channels with their N states (the warps share these, 16 each), and one segment
of the row's chunks. Eight lanes of a warp share the channels and four the states, so that sums over either take few
shuffles. Where batch and channels fill the GPU a row is one segment; else `local` first sweeps each segment from
nothing (CUT), and a segment begins with what the others add up to.

Positions behind the row's end have delta 0, which leaves the state as it is; a document's start has an endless step,
which clears it. A is (states, channels), a `slab`, as a state is. Positions are read a few at a time before any result
is written: for all that the compiler knows, a read behind a write depends on it. EVEN: the masks fold away.

Rows can lie so far apart that a position's address takes 64 bits: pointers move on with each tile of positions.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ENDLESS = tl.constexpr(1e30)  # times A it is a decay of 0


@triton.jit
def _load(pointer, mask):
    """In float32: the interpreter can't calculate in bfloat16."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _inside(mask, t, length, EVEN):
    """mask & (t < length), which the interpreter takes of tensors only."""
    if not EVEN:
        mask = tl.where(mask, t, length) < length
    return mask


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.math.exp2(x * -LOG2E))


@triton.jit
def _softplus(x):
    """max(x, 0) + log(1 + e) with e = exp(-|x|); log(1 + e) / e is a polynomial, off by at most 4e-8 of itself."""
    e = tl.math.exp2(tl.abs(x) * -LOG2E)
    p = ((0.0053647808 * e - 0.030065624) * e + 0.079204269) * e - 0.13753781
    p = (((p * e + 0.19153646) * e - 0.24857162) * e + 0.33321321) * e - 0.49999648
    return tl.maximum(x, 0.0) + e * (p * e + 1.0)


@triton.jit
def _slope(delta):
    """The derivative of softplus where it is delta: 1 - exp(-delta), of small ones by a polynomial (9e-8)."""
    small = (
        ((0.0068076029 * delta - 0.041042477) * delta + 0.1665636) * delta - 0.49999464
    ) * delta + 1.0
    return tl.where(delta < 0.5, delta * small, 1.0 - tl.math.exp2(delta * -LOG2E))


@triton.jit
def _delta(t, dt, bias, seq_idx, length, here, DOCUMENTS, EVEN):
    """delta at position t; negative, and not 0, at a document's start."""
    inside = _inside(here, t, length, EVEN)
    delta = _softplus(_load(dt, inside) + bias)
    if DOCUMENTS:
        at = tl.minimum(t, length - 1)
        starts = tl.load(seq_idx + at) != tl.load(seq_idx + tl.maximum(at - 1, 0))
        delta = tl.where(starts, tl.minimum(-delta, -1e-37), delta)
    if not EVEN:
        delta = tl.where(inside, delta, 0.0)
    return delta


@triton.jit
def _advance(t, h, delta, A, u, B, length, here, known, DOCUMENTS, EVEN):
    """The state after position t; the decay, the step, delta, u and B there."""
    step = delta
    if DOCUMENTS:
        step = tl.where(delta < 0.0, ENDLESS, delta)
        delta = tl.abs(delta)
    value = _load(u, _inside(here, t, length, EVEN))
    b = _load(B, _inside(known, t, length, EVEN))
    decay = tl.math.exp2(step[None, :] * A)
    return decay * h + (delta * value)[None, :] * b[:, None], decay, step, delta, value, b


@triton.jit
def _entering(h, ends, totals, A, slab, channels, other, order, count, both, here):
    """h behind `count` segments, the first of them `other`, in steps of `order`: what `local` made of each."""
    for i in range(0, count):
        decay = tl.math.exp2(_load(totals + (other + i * order) * channels, here)[None, :] * A)
        h = decay * h + _load(ends + (other + i * order) * slab, both)
    return h


@triton.jit  # one kernel: helpers would need all of its state as arguments
def local(  # noqa: PLR0915
    u,
    dt,
    A,
    z,
    B,
    bias,
    seq_idx,
    ends,
    totals,
    u_row,
    dt_row,
    z_row,
    B_row,
    length,
    channels,
    states,
    segment_chunks,
    REVERSE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    EVEN: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The state at the end of each segment but the last, of one that begins with none, and the sum of its steps.
    REVERSE: the adjoint at the start of each but the first that ends with none; u is the gradient of y, B is C."""
    row = tl.program_id(2).to(tl.int64)
    segment = tl.program_id(1)
    place = row * (tl.num_programs(1) + 1) + segment
    first = row * length
    if REVERSE:
        segment = segment + 1
        place = place + 1
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, N)
    here = (channel < channels) | EVEN
    known = (n < states) | EVEN
    corner = n[:, None] * channels + channel[None, :]
    both = known[:, None] & here[None, :]
    slab = states * channels
    A = _load(A + corner, both) * LOG2E
    bias = _load(bias + channel, here)
    seq_idx = seq_idx + first
    h = tl.zeros((N, CHANNELS), tl.float32)
    total = tl.zeros((CHANNELS,), tl.float32)
    start = segment * segment_chunks * CHUNK
    tiles = tl.cdiv(tl.minimum(segment_chunks * CHUNK, length - start), 4)
    ahead = 4
    if REVERSE:
        start += (tiles - 1) * 4
        ahead = -4
    first += start
    u = u + first * u_row + channel
    dt = dt + first * dt_row + channel
    z = z + first * z_row + channel
    B = B + first * B_row + n
    for tile in range(0, tiles):
        for k in tl.static_range(4):
            i = 3 - k if REVERSE else k
            t = start + tile * ahead + i
            delta = _delta(t, dt + i * dt_row, bias, seq_idx, length, here, DOCUMENTS, EVEN)
            if REVERSE:
                inside = _inside(here, t, length, EVEN)
                grad_y = _load(u + i * u_row, inside)
                gate = _load(z + i * z_row, inside)
                grad_y *= gate * _sigmoid(gate)
                b = _load(B + i * B_row, _inside(known, t, length, EVEN))
                h += grad_y[None, :] * b[:, None]
                step = tl.where(delta < 0.0, ENDLESS, delta)
                h *= tl.math.exp2(step[None, :] * A)
            else:
                h, _, step, _, _, _ = _advance(
                    t,
                    h,
                    delta,
                    A,
                    u + i * u_row,
                    B + i * B_row,
                    length,
                    here,
                    known,
                    DOCUMENTS,
                    EVEN,
                )
            total += step
        u += ahead * u_row
        dt += ahead * dt_row
        z += ahead * z_row
        B += ahead * B_row
    tl.store(ends + place * slab + corner, h, mask=both)
    tl.store(totals + place * channels + channel, total, mask=here)


@triton.jit
def forward(
    u,
    dt,
    A,
    B,
    C,
    D,
    z,
    bias,
    seq_idx,
    state,
    ends,
    totals,
    out,
    entries,
    last,
    u_row,
    dt_row,
    z_row,
    B_row,
    C_row,
    length,
    channels,
    states,
    segment_chunks,
    DOCUMENTS: tl.constexpr,
    CUT: tl.constexpr,
    KEEP: tl.constexpr,
    EVEN: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """y, the state at each chunk's entry and the last."""
    row = tl.program_id(2).to(tl.int64)
    segment = tl.program_id(1)
    segments = tl.num_programs(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, N)
    first = row * length
    here = (channel < channels) | EVEN
    known = (n < states) | EVEN
    corner = n[:, None] * channels + channel[None, :]
    both = known[:, None] & here[None, :]
    slab = states * channels
    A = _load(A + corner, both) * LOG2E
    D = _load(D + channel, here)
    bias = _load(bias + channel, here)
    seq_idx = seq_idx + first
    first += segment * segment_chunks * CHUNK
    u = u + first * u_row + channel
    dt = dt + first * dt_row + channel
    z = z + first * z_row + channel
    B = B + first * B_row + n
    C = C + first * C_row + n
    out = out + first * channels + channel
    four = tl.arange(0, 4)[:, None]
    h = _load(state + row * slab + corner, both)
    if CUT:
        h = _entering(
            h,
            ends + row * segments * slab + corner,
            totals + row * segments * channels + channel,
            A,
            slab,
            channels,
            0,
            1,
            segment,
            both,
            here,
        )
    chunks = tl.cdiv(length, CHUNK)
    for chunk in range(
        segment * segment_chunks, tl.minimum((segment + 1) * segment_chunks, chunks)
    ):
        if KEEP:
            tl.store(entries + (row * chunks + chunk) * slab + corner, h, mask=both)
        for t in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length), 4):
            y = tl.zeros((4, CHANNELS), tl.float32)
            for i in tl.static_range(4):
                delta = _delta(t + i, dt + i * dt_row, bias, seq_idx, length, here, DOCUMENTS, EVEN)
                h, _, _, _, _, _ = _advance(
                    t + i,
                    h,
                    delta,
                    A,
                    u + i * u_row,
                    B + i * B_row,
                    length,
                    here,
                    known,
                    DOCUMENTS,
                    EVEN,
                )
                c = _load(C + i * C_row, _inside(known, t + i, length, EVEN))
                y = tl.where(four == i, tl.sum(h * c[:, None], axis=0)[None, :], y)
            inside = _inside(here[None, :], t + four, length, EVEN) | (four < 0)
            y += D[None, :] * _load(u[None, :] + four * u_row, inside)
            gate = _load(z[None, :] + four * z_row, inside)
            y *= gate * _sigmoid(gate)
            tl.store(out[None, :] + four * channels, y, mask=inside)
            u += 4 * u_row
            dt += 4 * dt_row
            z += 4 * z_row
            B += 4 * B_row
            C += 4 * C_row
            out += 4 * channels
    if segment == segments - 1:
        tl.store(last + row * slab + corner, h, mask=both)


@triton.jit
def _gradient_of_y(t, grad_out, z, C, length, here, known, EVEN):
    """The gradient of out, times the gate's sigmoid, and of y at position t, the gate's input, its sigmoid, and C."""
    grad = _load(grad_out, _inside(here, t, length, EVEN))
    c = _load(C, _inside(known, t, length, EVEN))
    gate = _load(z, _inside(here, t, length, EVEN))
    opened = _sigmoid(gate)
    return grad * opened, grad * opened * gate, gate, opened, c


@triton.jit
def _backward_token(
    t,
    g,
    sum_A,
    sum_D,
    sum_bias,
    after,
    before,
    decay,
    step,
    delta,
    value,
    b,
    grad,
    grad_y,
    gate,
    opened,
    c,
    A,
    D,
    grad_u,
    grad_dt,
    grad_z,
    grad_BC,
    out,
    length,
    here,
    known,
    EVEN,
    N,
):
    """From the adjoint of the state after position t, less what y adds to it there, to that of the state before; the
    sums over positions with what t adds."""
    inside = _inside(here, t, length, EVEN)
    lines = _inside(known, t, length, EVEN)
    g += grad_y[None, :] * c[:, None]
    tl.store(grad_BC + N, tl.sum(after * grad_y[None, :], axis=1), mask=lines)
    tl.store(grad_BC, tl.sum(g * (delta * value)[None, :], axis=1), mask=lines)
    y = tl.sum(after * c[:, None], axis=0) + D * value
    sum_x = tl.sum(g * b[:, None], axis=0)
    g *= decay
    through_decay = g * before
    sum_A += through_decay * step[None, :]
    tl.store(grad_z, grad * y * (1.0 + gate * (1.0 - opened)), mask=inside)
    tl.store(out, y * (gate * opened), mask=inside)
    grad_raw = (tl.sum(through_decay * A, axis=0) * LN2 + sum_x * value) * _slope(delta)
    tl.store(grad_u, sum_x * delta + grad_y * D, mask=inside)
    tl.store(grad_dt, grad_raw, mask=inside)
    return (
        g,
        sum_A,
        sum_D + grad_y * value,
        sum_bias + grad_raw,
    )  # behind the row's end 0, as the slope of delta 0


@triton.jit
def _backward_chunk(
    start,
    h,
    g,
    sum_A,
    sum_D,
    sum_bias,
    A,
    bias,
    D,
    grad_out,
    u,
    dt,
    z,
    B,
    C,
    seq_idx,
    scratch,
    deltas,
    grad_u,
    grad_dt,
    grad_z,
    grad_BC,
    out,
    grad_row,
    u_row,
    dt_row,
    z_row,
    B_row,
    C_row,
    grad_z_row,
    length,
    channels,
    here,
    known,
    DOCUMENTS,
    EVEN,
    N,
    CHANNELS,
    CHUNK,
):
    """Forward through the chunk at `start` from its entry h, keeping every second state and all deltas; then back."""
    tiles = tl.cdiv(tl.minimum(CHUNK, length - start), 2)
    for tile in range(0, tiles):
        t = start + tile * 2
        kept = tile * (N + 2) * CHANNELS
        tl.store(scratch + kept, h)
        at = t.to(tl.int64)
        dt_t = dt + at * dt_row
        u_t = u + at * u_row
        B_t = B + at * B_row
        delta0 = _delta(t, dt_t, bias, seq_idx, length, here, DOCUMENTS, EVEN)
        delta1 = _delta(t + 1, dt_t + dt_row, bias, seq_idx, length, here, DOCUMENTS, EVEN)
        h, _, _, _, _, _ = _advance(t, h, delta0, A, u_t, B_t, length, here, known, DOCUMENTS, EVEN)
        h, _, _, _, _, _ = _advance(
            t + 1, h, delta1, A, u_t + u_row, B_t + B_row, length, here, known, DOCUMENTS, EVEN
        )
        tl.store(deltas + kept, delta0)
        tl.store(deltas + kept + CHANNELS, delta1)
    tl.debug_barrier()
    for i in range(1, tiles + 1):
        t = start + (tiles - i) * 2
        kept = (tiles - i) * (N + 2) * CHANNELS
        h0 = tl.load(scratch + kept)
        delta0 = tl.load(deltas + kept)
        delta1 = tl.load(deltas + kept + CHANNELS)
        at = t.to(tl.int64)
        u_t = u + at * u_row
        B_t = B + at * B_row
        C_t = C + at * C_row
        z_t = z + at * z_row
        grad_t = grad_out + at * grad_row
        grad0, grad_y0, gate0, opened0, c0 = _gradient_of_y(
            t, grad_t, z_t, C_t, length, here, known, EVEN
        )
        grad1, grad_y1, gate1, opened1, c1 = _gradient_of_y(
            t + 1, grad_t + grad_row, z_t + z_row, C_t + C_row, length, here, known, EVEN
        )
        h1, decay0, step0, delta0, u0, b0 = _advance(
            t, h0, delta0, A, u_t, B_t, length, here, known, DOCUMENTS, EVEN
        )
        _, decay1, step1, delta1, u1, b1 = _advance(
            t + 1, h1, delta1, A, u_t + u_row, B_t + B_row, length, here, known, DOCUMENTS, EVEN
        )
        grad_u_t = grad_u + at * channels
        grad_dt_t = grad_dt + at * channels
        out_t = out + at * channels
        grad_z_t = grad_z + at * grad_z_row
        grad_BC_t = grad_BC + at * (2 * N)
        g, sum_A, sum_D, sum_bias = _backward_token(
            t + 1,
            g,
            sum_A,
            sum_D,
            sum_bias,
            h,
            h1,
            decay1,
            step1,
            delta1,
            u1,
            b1,
            grad1,
            grad_y1,
            gate1,
            opened1,
            c1,
            A,
            D,
            grad_u_t + channels,
            grad_dt_t + channels,
            grad_z_t + grad_z_row,
            grad_BC_t + 2 * N,
            out_t + channels,
            length,
            here,
            known,
            EVEN,
            N,
        )
        g, sum_A, sum_D, sum_bias = _backward_token(
            t,
            g,
            sum_A,
            sum_D,
            sum_bias,
            h1,
            h0,
            decay0,
            step0,
            delta0,
            u0,
            b0,
            grad0,
            grad_y0,
            gate0,
            opened0,
            c0,
            A,
            D,
            grad_u_t,
            grad_dt_t,
            grad_z_t,
            grad_BC_t,
            out_t,
            length,
            here,
            known,
            EVEN,
            N,
        )
        h = h0
    tl.debug_barrier()
    return g, sum_A, sum_D, sum_bias


@triton.jit
def backward(
    grad_out,
    grad_last,
    u,
    dt,
    A,
    B,
    C,
    D,
    z,
    bias,
    seq_idx,
    entries,
    ends,
    totals,
    scratch,
    grad_u,
    grad_dt,
    grad_A,
    grad_BC,
    grad_D,
    grad_z,
    grad_bias,
    grad_state,
    out,
    grad_row,
    u_row,
    dt_row,
    z_row,
    B_row,
    C_row,
    grad_z_row,
    length,
    channels,
    states,
    segment_chunks,
    DOCUMENTS: tl.constexpr,
    CUT: tl.constexpr,
    EVEN: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """All gradients: of A, D and the bias by row and segment, of B and C by block of channels."""
    row = tl.program_id(2).to(tl.int64)
    segment = tl.program_id(1)
    segments = tl.num_programs(1)
    lane = tl.arange(0, CHANNELS)
    n = tl.arange(0, N)
    block = tl.program_id(0)
    channel = block * CHANNELS + lane
    first = row * length
    place = row * segments + segment
    here = (channel < channels) | EVEN
    known = (n < states) | EVEN
    corner = n[:, None] * channels + channel[None, :]
    both = known[:, None] & here[None, :]
    slab = states * channels
    A = _load(A + corner, both) * LOG2E
    D = _load(D + channel, here)
    bias = _load(bias + channel, here)
    u = u + first * u_row + channel
    dt = dt + first * dt_row + channel
    z = z + first * z_row + channel
    B = B + first * B_row + n
    C = C + first * C_row + n
    seq_idx = seq_idx + first
    grad_out = grad_out + first * grad_row + channel
    out = out + first * channels + channel
    grad_u = grad_u + first * channels + channel
    grad_dt = grad_dt + first * channels + channel
    grad_z += first * grad_z_row + channel
    grad_BC += (block.to(tl.int64) * tl.num_programs(2) * length + first) * (2 * N) + n
    scratch += (place * tl.num_programs(0) + block) * (CHUNK // 2 * (N + 2) * CHANNELS)
    deltas = scratch + lane
    scratch = scratch + lane[None, :] + (n + 2)[:, None] * CHANNELS
    sum_A = tl.zeros((N, CHANNELS), tl.float32)
    sum_D = tl.zeros((CHANNELS,), tl.float32)
    g = _load(grad_last + row * slab + corner, both)
    sum_bias = tl.zeros((CHANNELS,), tl.float32)
    if CUT:
        g = _entering(
            g,
            ends + row * segments * slab + corner,
            totals + row * segments * channels + channel,
            A,
            slab,
            channels,
            segments - 1,
            -1,
            segments - 1 - segment,
            both,
            here,
        )
    chunks = tl.cdiv(length, CHUNK)
    end = tl.minimum((segment + 1) * segment_chunks, tl.cdiv(length, CHUNK))
    for i in range(1, end - segment * segment_chunks + 1):
        h = _load(entries + (row * chunks + end - i) * slab + corner, both)
        g, sum_A, sum_D, sum_bias = _backward_chunk(
            (end - i) * CHUNK,
            h,
            g,
            sum_A,
            sum_D,
            sum_bias,
            A,
            bias,
            D,
            grad_out,
            u,
            dt,
            z,
            B,
            C,
            seq_idx,
            scratch,
            deltas,
            grad_u,
            grad_dt,
            grad_z,
            grad_BC,
            out,
            grad_row,
            u_row,
            dt_row,
            z_row,
            B_row,
            C_row,
            grad_z_row,
            length,
            channels,
            here,
            known,
            DOCUMENTS,
            EVEN,
            N,
            CHANNELS,
            CHUNK,
        )
    tl.store(grad_A + place * slab + corner, sum_A, mask=both)
    tl.store(grad_D + place * channels + channel, sum_D, mask=here)
    tl.store(grad_bias + place * channels + channel, sum_bias, mask=here)
    if segment == 0:
        tl.store(grad_state + row * slab + corner, g, mask=both)
