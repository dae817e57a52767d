"""The kernels of the selective scan (formula: __init__.py). They sweep over time and keep the states in registers.

A program is a warp (more warps for more than 16 states) and computes, for one row of the batch, CHANNELS channels with
their N states over one segment of the row's chunks. If batch and channels fill the GPU, a row is one segment. Otherwise
LOCAL sweeps go through each segment from a zero state, and the state before a segment is computed from their results.

Positions are read in tiles of four; each tile is read while the previous one is computed. A is (channels, states), or
log(-A) if A_IS_LOG. A `slab` is the number of elements of a state (states, channels). BC (batch, tiles, 4, 2, N) contains B
and C in float32, padded with zeros after the states and after the row's end. `starts` (batch, tiles, 4) is not 0 where a
document starts; an endless step clears the state there. Positions after the row's end have delta 0, which leaves the
state unchanged. EVEN: no mask is needed.

Forward in time, a thread has all states of a channel, so that sums over states need no other thread. Backward in time,
there are also sums over channels, so that eight threads share the channels and four share the states. The compiler
chooses the layout of a tensor by how it is read: `_alone` keeps a thread from reading several channels at once.

Rows can lie so far apart that a position's address takes 64 bits; therefore pointers advance with each tile.
"""

import triton
import triton.language as tl

from mamba_fsdp.ops.triton import kernel

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ENDLESS = tl.constexpr(1e30)  # a step that makes the decay 0


@triton.jit
def _load(pointer, mask):
    """Returns the values in float32. The interpreter can't calculate in bfloat16."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _inside(mask, t, length, EVEN):
    """Returns mask & (t < length), in a form that the interpreter accepts: its & takes only tensors."""
    if not EVEN:
        mask = tl.where(mask, t, length) < length
    return mask


@triton.jit
def _picked(tile, chosen, axis: tl.constexpr):
    """Returns the one chosen row or column of a tile. It adds the values as integers, because the compiler removes
    additions of zero only for integers."""
    bits = tl.where(chosen, tile.to(tl.int32, bitcast=True), 0)
    return tl.expand_dims(tl.sum(bits, axis=axis).to(tl.float32, bitcast=True), axis)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.math.exp2(x * -LOG2E))


@triton.jit
def _softplus(x):
    """Returns max(x, 0) + log(1 + e) with e = exp(-|x|). log(1 + e) / e is a polynomial with a relative error of
    4e-8."""
    e = tl.math.exp2(tl.abs(x) * -LOG2E)
    p = ((0.0053647808 * e - 0.030065624) * e + 0.079204269) * e - 0.13753781
    p = (((p * e + 0.19153646) * e - 0.24857162) * e + 0.33321321) * e - 0.49999648
    return tl.maximum(x, 0.0) + e * (p * e + 1.0)


@triton.jit
def _slope(delta):
    """Returns the derivative of softplus where softplus is delta: 1 - exp(-delta), by a polynomial (9e-8) for small
    delta."""
    small = (
        ((0.0068076029 * delta - 0.041042477) * delta + 0.1665636) * delta - 0.49999464
    ) * delta + 1.0
    return tl.where(delta < 0.5, delta * small, 1.0 - tl.math.exp2(delta * -LOG2E))


@triton.jit
def _steps(dt, bias, starts, inside, EVEN):
    """Returns delta at the positions of a tile, and the steps of the states: like delta, but endless at the start of a
    document."""
    delta = _softplus(dt.to(tl.float32) + bias)
    if not EVEN:
        delta = tl.where(inside, delta, 0.0)
    step = delta
    if starts is not None:
        step = tl.where(starts != 0, ENDLESS, delta)
    return delta, step


@triton.jit
def _alone(CHANNELS):
    """Returns the program's channels, (1, CHANNELS), with a hint that makes a thread read one channel at a time."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    return tl.multiple_of(channel[None, :], (1, 1))


@triton.jit
def _rates(A, n, channel, states, mask, A_IS_LOG):
    """Returns the rates of decay: the logarithm to base 2 of the decay for a step of 1."""
    a = _load(A + channel * states + n, mask)
    if A_IS_LOG:
        a = -tl.math.exp2(a * LOG2E)
    return a * LOG2E


@triton.jit
def _read_BC(BC, N):
    """Returns B and C, as one (N, 2) tensor for each of the four positions of a tile."""
    return tl.load(BC), tl.load(BC + 2 * N), tl.load(BC + 4 * N), tl.load(BC + 6 * N)


@triton.jit
def _one_of(bc0, bc1, bc2, bc3, i: tl.constexpr):
    bc = bc0
    if i == 1:
        bc = bc1
    if i == 2:
        bc = bc2
    if i == 3:
        bc = bc3
    return bc


@triton.jit
def _read(tensor, row, inside):
    """Returns four positions of a tensor, (4, CHANNELS)."""
    return tl.load(tensor + tl.arange(0, 4)[:, None] * row, mask=inside, other=0.0)


@triton.jit
def _through_tile(h, y, step, x, bc0, bc1, bc2, bc3, A, LOCAL, REVERSE):
    """Returns the state after the positions of a tile (with REVERSE, before them), and y with the contribution of the
    states added."""
    two = tl.arange(0, 2)[None, :]
    four = tl.arange(0, 4)[:, None]
    for j in tl.static_range(4):
        i = 3 - j if REVERSE else j
        bc = _one_of(bc0, bc1, bc2, bc3, 3 - j if REVERSE else j)
        now = _picked(step, four == i, 0)
        decay = tl.math.exp2(now * A)
        c = _picked(bc, two == 1, 1)
        x_now = _picked(x, four == i, 0)
        if REVERSE:
            h = decay * (h + x_now * c)
        else:
            h = decay * h + x_now * _picked(bc, two == 0, 1)
        if not LOCAL:
            y += tl.where(four == i, tl.sum(h * c, axis=0)[None, :], 0.0)
    return h, y


@triton.jit  # helpers would need all of its state as arguments
def _through_chunk(  # noqa: PLR0915
    h,
    sums,
    tile,
    tiles,
    A,
    D,
    bias,
    u,
    dt,
    z,
    z_row,
    BC,
    starts,
    out,
    grad_out,
    grad_z,
    grad_z_row,
    scratch,
    length,
    channels,
    REVERSE,
    EVEN,
    N,
    CHANNELS,
):
    """Goes through `tiles` tiles, from the state h and the tile number `tile` on; with REVERSE, backward. Returns the state
    after these tiles, and `sums` (4, CHANNELS). Writes y to `out`.

    A (N, CHANNELS), D and bias (1, CHANNELS) are values; the pointers point to the row. Without `out`, the steps are
    added to `sums`. With `scratch` (tiles + 1, N + 4, CHANNELS), the state before each tile and the deltas of the tile are
    written to it, followed by the last state. The gradient of z is then written too, and the gradient of D is added to
    `sums`.
    """
    n = tl.arange(0, N)[:, None]
    four = tl.arange(0, 4)[:, None]
    channel = _alone(CHANNELS)
    here = (channel < channels) | EVEN
    t = tile * 4
    at = t.to(tl.int64)
    place = at * channels + channel
    u += place
    dt += place
    z += at * z_row + channel
    BC = BC + t * (2 * N) + n + tl.arange(0, 2)[None, :] * N
    inside = _inside(here, t + four, length, EVEN)
    bc0, bc1, bc2, bc3 = _read_BC(BC, N)
    is_start = None
    if starts is not None:
        starts += t + four
        is_start = tl.load(starts)
    dt_now = _read(dt, channels, inside)
    z_now = _read(z, z_row, inside)
    u_now = _read(u, channels, inside)
    if out is not None:
        out += place
    if scratch is not None:
        scratch += tl.multiple_of(tl.arange(0, CHANNELS)[None, :], (1, 1))
        grad_out += place
        grad_z += at * grad_z_row + channel
        grad = _read(grad_out, channels, inside)
    for k in range(0, tiles):
        # The next tile is read before this one is computed. In the last iteration, the same tile is read again.
        ahead = tl.where(k + 1 < tiles, -4 if REVERSE else 4, 0)
        t += ahead
        u += ahead * channels
        dt += ahead * channels
        z += ahead * z_row
        BC += ahead * (2 * N)
        inside_next = _inside(here, t + four, length, EVEN)
        bc0_next, bc1_next, bc2_next, bc3_next = _read_BC(BC, N)
        if starts is not None:
            starts += ahead
            is_start_next = tl.load(starts)
        dt_next = _read(dt, channels, inside_next)
        z_next = _read(z, z_row, inside_next)
        u_next = _read(u, channels, inside_next)
        if scratch is not None:
            grad_out += ahead * channels
            grad_next = _read(grad_out, channels, inside_next)

        delta, step = _steps(dt_now, bias, is_start, inside, EVEN)
        value = u_now.to(tl.float32)
        gate = z_now.to(tl.float32)
        opened = _sigmoid(gate)
        if scratch is not None:
            tl.store(scratch + n * CHANNELS, h)
            tl.store(scratch + (N + four) * CHANNELS, delta)
            scratch += (N + 4) * CHANNELS
        x = value * gate * opened if REVERSE else delta * value
        h, y = _through_tile(h, D * value, step, x, bc0, bc1, bc2, bc3, A, out is None, REVERSE)
        if out is None:
            sums += step
        else:
            tl.store(out + four * channels, y * gate * opened, mask=inside)
            out += 4 * channels
        if scratch is not None:
            of_gate = grad.to(tl.float32) * opened
            sums += of_gate * gate * value
            of_gate *= y * (1.0 + gate * (1.0 - opened))
            tl.store(grad_z + four * grad_z_row, of_gate, mask=inside)
            grad_z += 4 * grad_z_row
            grad = grad_next
        inside = inside_next
        bc0 = bc0_next
        bc1 = bc1_next
        bc2 = bc2_next
        bc3 = bc3_next
        if starts is not None:
            is_start = is_start_next
        dt_now = dt_next
        z_now = z_next
        u_now = u_next
    if scratch is not None:
        tl.store(scratch + n * CHANNELS, h)
    return h, sums


@triton.jit
def _entering(h, ends, totals, A, slab, channels, other, order, count, both, here):
    """Returns the state after `count` segments, computed from the state h before them and the results of LOCAL sweeps.

    other: the number of the first of these segments. order: 1 if the numbers of the next ones increase, -1 if they
    decrease."""
    for i in range(0, count):
        decay = tl.math.exp2(_load(totals + (other + i * order) * channels, here) * A)
        h = decay * h + _load(ends + (other + i * order) * slab, both)
    return h


@kernel
def sweep(
    u,
    dt,
    A,
    BC,
    D,
    z,
    bias,
    starts,
    state,
    ends,
    totals,
    out,
    entries,
    last,
    z_row,
    length,
    channels,
    states,
    segment_chunks,
    LOCAL: tl.constexpr,
    REVERSE: tl.constexpr,
    CUT: tl.constexpr,
    A_IS_LOG: tl.constexpr,
    EVEN: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes y, the last state and, unless `entries` is None, the state at each chunk's entry.

    LOCAL: instead, it goes through each segment but the last from a state of zeros. It writes the state at the end of the
    segment to `ends` and the sum of the segment's steps to `totals`; out, entries and last are None. LOCAL and REVERSE: it
    goes backward through each segment but the first, from zeros at the segment's end. It writes the adjoint (the gradient of
    the state) at the segment's start to `ends`; u is then the gradient of y.
    """
    row = tl.program_id(2).to(tl.int64)
    segment = tl.program_id(1)
    segments = tl.num_programs(1)
    if LOCAL:
        segments += 1
    if REVERSE:
        segment += 1
    channel = _alone(CHANNELS)
    n = tl.arange(0, N)[:, None]
    here = (channel < channels) | EVEN
    both = ((n < states) | EVEN) & here
    corner = n * channels + channel
    slab = states * channels
    place = row * segments + segment
    row_tiles = tl.cdiv(length, 4)
    first = row * length * channels
    u += first
    dt += first
    z += row * length * z_row
    BC += row * row_tiles * (8 * N)
    if starts is not None:
        starts += row * row_tiles * 4
    if out is not None:
        out += first
    rates = _rates(A, n, channel, states, both, A_IS_LOG)
    h = tl.zeros((N, CHANNELS), tl.float32)
    sums = tl.zeros((4, CHANNELS), tl.float32)
    if state is not None:
        h += _load(state + row * slab + corner, both)
    if CUT and not LOCAL:
        totals_row = totals + row * segments * channels + channel
        ends_row = ends + row * segments * slab + corner
        h = _entering(h, ends_row, totals_row, rates, slab, channels, 0, 1, segment, both, here)
    chunks = tl.cdiv(length, CHUNK)
    chunk = segment * segment_chunks
    count = tl.minimum(segment_chunks, chunks - chunk)
    for k in range(0, count):
        of = chunk + (count - 1 - k if REVERSE else k)
        tile = of * (CHUNK // 4)
        tiles = tl.minimum(CHUNK // 4, row_tiles - tile)
        if entries is not None:
            tl.store(entries + (row * chunks + of) * slab + corner, h, mask=both)
        h, sums = _through_chunk(
            h,
            sums,
            tile + tiles - 1 if REVERSE else tile,
            tiles,
            rates,
            _load(D + channel, here),
            _load(bias + channel, here),
            u,
            dt,
            z,
            z_row,
            BC,
            starts,
            out,
            None,
            None,
            None,
            None,
            length,
            channels,
            REVERSE,
            EVEN,
            N,
            CHANNELS,
        )
    if LOCAL:
        tl.store(ends + place * slab + corner, h, mask=both)
        tl.store(totals + place * channels + channel, tl.sum(sums, axis=0)[None, :], mask=here)
    elif segment == segments - 1:
        tl.store(last + row * slab + corner, h, mask=both)


@triton.jit
def _position(
    i,
    t,
    u,
    grad_out,
    channels,
    z,
    z_row,
    deltas,
    BC,
    starts,
    A,
    inside,
    N,
    CHANNELS,
):
    """Returns delta, the decay, u, delta * u, the gradient of y, B and C of position t + i. `starts` is of the row; the
    other pointers are to position t."""
    delta = tl.load(deltas + i * CHANNELS)
    value = _load(u + i * channels, inside)
    gate = _load(z + i * z_row, inside)
    grad_y = _load(grad_out + i * channels, inside) * gate * _sigmoid(gate)
    step = delta
    if starts is not None:
        step = tl.where(tl.load(starts + t + i) != 0, ENDLESS, delta)
    decay = tl.math.exp2(step[None, :] * A)
    BC += i * 2 * N
    return delta, decay, value, delta * value, grad_y, tl.load(BC), tl.load(BC + N)


@triton.jit
def _back(
    i,
    g,
    sum_A,
    sum_bias,
    after,
    before,
    decay,
    delta,
    value,
    grad_y,
    b,
    c,
    A,
    D,
    grad_u,
    grad_dt,
    grad_BC,
    channels,
    inside,
    N,
):
    """Returns the adjoint (the gradient) of the state before position i of a tile, and sum_A and sum_bias with this
    position added. Writes the other gradients of the position. The argument g is the adjoint of the state after the
    position, without the part from y at the position."""
    grad_BC += i * 2 * N
    g += grad_y[None, :] * c[:, None]
    tl.store(grad_BC + N, tl.sum(after * grad_y[None, :], axis=1))
    tl.store(grad_BC, tl.sum(g * (delta * value)[None, :], axis=1))
    sum_x = tl.sum(g * b[:, None], axis=0)
    g *= decay
    through_decay = g * before
    sum_A += through_decay * delta[None, :]  # through_decay is 0 where a document starts
    grad_raw = (tl.sum(through_decay * A, axis=0) * LN2 + sum_x * value) * _slope(delta)
    tl.store(grad_u + i * channels, sum_x * delta + grad_y * D, mask=inside)
    tl.store(grad_dt + i * channels, grad_raw, mask=inside)
    return g, sum_A, sum_bias + grad_raw  # after the row's end, delta and its slope are 0


@kernel  # one kernel: helpers would need all of its state as arguments
def backward(  # noqa: PLR0915
    grad_out,
    grad_last,
    u,
    dt,
    A,
    BC,
    D,
    z,
    bias,
    starts,
    entries,
    ends,
    totals,
    scratch,
    grad_u,
    grad_dt,
    grad_BC,
    grad_z,
    grad_sums,
    grad_state,
    out,
    z_row,
    grad_z_row,
    length,
    channels,
    states,
    segment_chunks,
    CUT: tl.constexpr,
    A_IS_LOG: tl.constexpr,
    EVEN: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes all gradients and y. grad_BC gets the contribution of each block of channels to the gradients of B and C.
    grad_sums gets, side by side, the contributions of each row and segment to the gradients of A, D and the bias."""
    row = tl.program_id(2).to(tl.int64)
    segment = tl.program_id(1)
    segments = tl.num_programs(1)
    block = tl.program_id(0)
    lane = tl.arange(0, CHANNELS)
    n = tl.arange(0, N)
    channel = block * CHANNELS + lane
    here = (channel < channels) | EVEN
    both = ((n < states) | EVEN)[:, None] & here[None, :]
    corner = n[:, None] * channels + channel[None, :]
    slab = states * channels
    place = row * segments + segment
    row_tiles = tl.cdiv(length, 4)
    first = row * length * channels
    grad_BC += (block.to(tl.int64) * tl.num_programs(2) + row) * row_tiles * (8 * N) + n
    BC += row * row_tiles * (8 * N)
    if starts is not None:
        starts += row * row_tiles * 4
    u += first
    dt += first
    grad_out += first
    out += first
    grad_u = grad_u + first + channel
    grad_dt = grad_dt + first + channel
    z += row * length * z_row
    grad_z += row * length * grad_z_row
    scratch += (place * tl.num_programs(0) + block) * ((CHUNK // 4 + 2) * (N + 4) * CHANNELS)
    # The rates go through memory: loaded from A directly, they would have another layout over the threads.
    rates = scratch + (CHUNK // 4 + 1) * (N + 4) * CHANNELS + n[:, None] * CHANNELS + lane[None, :]
    tl.store(rates, _rates(A, n[:, None], channel[None, :], states, both, A_IS_LOG))
    tl.debug_barrier()
    D_back = _load(D + channel, here)
    sum_A = tl.zeros((N, CHANNELS), tl.float32)
    sum_bias = tl.zeros((CHANNELS,), tl.float32)
    sum_D = tl.zeros((4, CHANNELS), tl.float32)
    g = tl.zeros((N, CHANNELS), tl.float32)
    if grad_last is not None:
        g += _load(grad_last + row * slab + corner, both)
    if CUT:
        A_back = tl.load(rates)
        totals_row = totals + row * segments * channels + channel[None, :]
        ends_row = ends + row * segments * slab + corner
        last = segments - 1
        to_end = last - segment
        g = _entering(
            g, ends_row, totals_row, A_back, slab, channels, last, -1, to_end, both, here[None, :]
        )
    chunks = tl.cdiv(length, CHUNK)
    end = tl.minimum((segment + 1) * segment_chunks, chunks)
    for i in range(1, end - segment * segment_chunks + 1):
        tile = (end - i) * (CHUNK // 4)
        tiles = tl.minimum(CHUNK // 4, row_tiles - tile)
        alone = _alone(CHANNELS)
        here_alone = (alone < channels) | EVEN
        both_alone = ((n[:, None] < states) | EVEN) & here_alone
        rates_alone = _rates(A, n[:, None], alone, states, both_alone, A_IS_LOG)
        D_alone = _load(D + alone, here_alone)
        bias_alone = _load(bias + alone, here_alone)
        entry = entries + (row * chunks + end - i) * slab + (n[:, None] * channels + alone)
        h = _load(entry, both_alone)
        _, sum_D = _through_chunk(
            h,
            sum_D,
            tile,
            tiles,
            rates_alone,
            D_alone,
            bias_alone,
            u,
            dt,
            z,
            z_row,
            BC,
            starts,
            out,
            grad_out,
            grad_z,
            grad_z_row,
            scratch,
            length,
            channels,
            False,
            EVEN,
            N,
            CHANNELS,
        )
        tl.debug_barrier()
        A_back = tl.load(rates)
        kept = scratch + tiles * ((N + 4) * CHANNELS)
        after = tl.load(kept + n[:, None] * CHANNELS + lane[None, :])
        for k in range(1, tiles + 1):
            t = (tile + tiles - k) * 4
            at = t.to(tl.int64)
            kept -= (N + 4) * CHANNELS
            h0 = tl.load(kept + n[:, None] * CHANNELS + lane[None, :])
            deltas = kept + N * CHANNELS + lane
            u_t = u + at * channels + channel
            grad_t = grad_out + at * channels + channel
            z_t = z + at * z_row + channel
            BC_t = BC + at * (2 * N) + n
            inside0 = _inside(here, t, length, EVEN)
            inside1 = _inside(here, t + 1, length, EVEN)
            inside2 = _inside(here, t + 2, length, EVEN)
            inside3 = _inside(here, t + 3, length, EVEN)
            delta0, decay0, u0, x0, grad0, b0, c0 = _position(
                0,
                t,
                u_t,
                grad_t,
                channels,
                z_t,
                z_row,
                deltas,
                BC_t,
                starts,
                A_back,
                inside0,
                N,
                CHANNELS,
            )
            delta1, decay1, u1, x1, grad1, b1, c1 = _position(
                1,
                t,
                u_t,
                grad_t,
                channels,
                z_t,
                z_row,
                deltas,
                BC_t,
                starts,
                A_back,
                inside1,
                N,
                CHANNELS,
            )
            delta2, decay2, u2, x2, grad2, b2, c2 = _position(
                2,
                t,
                u_t,
                grad_t,
                channels,
                z_t,
                z_row,
                deltas,
                BC_t,
                starts,
                A_back,
                inside2,
                N,
                CHANNELS,
            )
            delta3, decay3, u3, x3, grad3, b3, c3 = _position(
                3,
                t,
                u_t,
                grad_t,
                channels,
                z_t,
                z_row,
                deltas,
                BC_t,
                starts,
                A_back,
                inside3,
                N,
                CHANNELS,
            )
            grad_u_t = grad_u + at * channels
            grad_dt_t = grad_dt + at * channels
            grad_BC_t = grad_BC + at * (2 * N)
            h1 = decay0 * h0 + x0[None, :] * b0[:, None]
            h2 = decay1 * h1 + x1[None, :] * b1[:, None]
            h3 = decay2 * h2 + x2[None, :] * b2[:, None]
            g, sum_A, sum_bias = _back(
                3,
                g,
                sum_A,
                sum_bias,
                after,
                h3,
                decay3,
                delta3,
                u3,
                grad3,
                b3,
                c3,
                A_back,
                D_back,
                grad_u_t,
                grad_dt_t,
                grad_BC_t,
                channels,
                inside3,
                N,
            )
            g, sum_A, sum_bias = _back(
                2,
                g,
                sum_A,
                sum_bias,
                h3,
                h2,
                decay2,
                delta2,
                u2,
                grad2,
                b2,
                c2,
                A_back,
                D_back,
                grad_u_t,
                grad_dt_t,
                grad_BC_t,
                channels,
                inside2,
                N,
            )
            g, sum_A, sum_bias = _back(
                1,
                g,
                sum_A,
                sum_bias,
                h2,
                h1,
                decay1,
                delta1,
                u1,
                grad1,
                b1,
                c1,
                A_back,
                D_back,
                grad_u_t,
                grad_dt_t,
                grad_BC_t,
                channels,
                inside1,
                N,
            )
            g, sum_A, sum_bias = _back(
                0,
                g,
                sum_A,
                sum_bias,
                h1,
                h0,
                decay0,
                delta0,
                u0,
                grad0,
                b0,
                c0,
                A_back,
                D_back,
                grad_u_t,
                grad_dt_t,
                grad_BC_t,
                channels,
                inside0,
                N,
            )
            after = h0
        tl.debug_barrier()
    if A_IS_LOG:
        sum_A *= tl.load(rates) * LN2
    grad_sums += place * (slab + 2 * channels)
    tl.store(grad_sums + channel[None, :] * states + n[:, None], sum_A, mask=both)
    tl.store(grad_sums + slab + channel, tl.sum(sum_D, axis=0), mask=here)
    tl.store(grad_sums + slab + channels + channel, sum_bias, mask=here)
    if segment == 0:
        tl.store(grad_state + row * slab + corner, g, mask=both)
