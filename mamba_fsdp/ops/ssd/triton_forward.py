"""Kernels of the SSD's forward pass: one sweep that carries a head's states in registers from chunk to chunk.

The exponents of decays are summed as fixed-point integers (units of 2**-31), exactly: a decay between two positions is
then free, to the last bit, of whatever else the chunk holds, such as other documents. Both parts of a sum, `high` in
units of 2**-8 and `low`, are exact in fp32, and so are their differences.

Q: positions of a chunk; P: channels of a head that a program has; N: d_state; both padded. WIDE: dots in fp32, as the
interpreter needs.
"""

import triton
import triton.language as tl


@triton.jit
def dot(a, b):
    return tl.dot(a, b, allow_tf32=False)


@triton.jit
def load(pointer, row, rows, columns, left, WIDTH: tl.constexpr, SPAN: tl.constexpr, T: tl.constexpr):
    """A block (rows, columns), SPAN columns, of which `left` rows and WIDTH columns are there, the rest 0."""
    there = (rows < left)[:, None]
    if WIDTH % SPAN != 0:
        there = there & (columns < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * row + columns[None, :], mask=there, other=0.0).to(T)


@triton.jit
def add_up(dt, A, bias, steps, dt_batch, dt_row, length, heads, HEADS: tl.constexpr, Q: tl.constexpr):
    """Of a chunk's positions: steps (3, batch, heads, chunks, Q) gets delta = softplus(dt + bias) and the sums of the
    decays' exponents over the chunk up to each position, in two parts."""
    chunk, batch, r = tl.program_id(0), tl.program_id(2).to(tl.int64), tl.arange(0, Q)
    head, rows = tl.program_id(1) * HEADS + tl.arange(0, HEADS), chunk * Q + r
    is_head = head < heads
    there = (rows < length)[:, None] & is_head[None, :]
    a = tl.load(A + head, mask=is_head, other=0.0).to(tl.float32)
    b = tl.load(bias + head, mask=is_head, other=0.0).to(tl.float32)
    dt = tl.load(dt + batch * dt_batch + rows.to(tl.int64)[:, None] * dt_row + head[None, :], mask=there, other=0.0)
    dt = dt.to(tl.float32) + b[None, :]
    small = tl.exp(-tl.abs(dt))
    more = 1.0 + small  # log(more) * small / (more - 1) is log1p(small) to the last digits
    delta = tl.maximum(dt, 0.0) + tl.where(more == 1.0, small, tl.log(more) * (small / (more - 1.0)))
    delta = tl.where(there, delta, 0.0)
    sums = tl.cumsum((tl.maximum(delta * a[None, :], -128.0) * 2147483648.0).to(tl.int64), 0)  # exp(-128) is 0 in fp32
    plane = tl.num_programs(2).to(tl.int64) * heads * tl.num_programs(0) * Q
    steps += ((batch * heads + head) * tl.num_programs(0) + chunk)[None, :] * Q + r[:, None]
    tl.store(steps, delta, mask=is_head[None, :])
    tl.store(steps + plane, (sums >> 23).to(tl.float32) * 0.00390625, mask=is_head[None, :])
    tl.store(steps + 2 * plane, (sums & 8388607).to(tl.float32) * 4.656612873077393e-10, mask=is_head[None, :])


@triton.jit
def chunk_steps(steps, plane, documents, start, length, r, Q: tl.constexpr):
    """delta; the decays from the chunk before to each position and from each to the chunk's end, and the chunk's whole
    decay; both parts of the exponents' sums; the documents."""
    delta, high, low = tl.load(steps + r), tl.load(steps + plane + r), tl.load(steps + 2 * plane + r)
    high_end, low_end = tl.load(steps + plane + Q - 1), tl.load(steps + 2 * plane + Q - 1)
    from_start, to_end = tl.exp(high + low), tl.exp((high_end - high) + (low_end - low))
    total = tl.exp(high_end + low_end)
    document = r
    if documents is not None:
        document = tl.load(documents + tl.minimum(start + r, length - 1))
        before = tl.load(documents + tl.maximum(start - 1, 0))
        end = tl.load(documents + tl.minimum(start + Q, length) - 1)
        from_start = tl.where(document == before, from_start, 0.0)
        to_end = tl.where(document == end, to_end, 0.0)
        total = tl.where(before == end, total, 0.0)
    return delta, from_start, to_end, total, high, low, document


@triton.jit
def decays_within(high, low, document, r, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr):
    """From position j to i of a chunk, 0 for later j and other documents: (i, j), or (j, i) if REVERSE."""
    exponents = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    seen = r[:, None] >= r[None, :]
    if REVERSE:
        exponents, seen = -exponents, r[:, None] <= r[None, :]
    if DOCUMENTS:
        seen = seen & (document[:, None] == document[None, :])
    return tl.exp(tl.where(seen, exponents, float("-inf")))


@triton.jit
def sweep(x, B, C, D, steps, documents, first, ends, end_decays, states, out, last, x_batch, b_batch, c_batch,
          length, segments, per_segment, X_ROW: tl.constexpr, B_ROW: tl.constexpr, C_ROW: tl.constexpr,
          HEADS: tl.constexpr, SHARE: tl.constexpr, HEADDIM: tl.constexpr, TILES: tl.constexpr,
          D_STATE: tl.constexpr, LOCAL: tl.constexpr, REVERSE: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
          N: tl.constexpr, WIDE: tl.constexpr):
    """Carries the states (N, P) of a head through a segment of its sequence, from the state `first`.

    LOCAL: from zero, to the segment's `ends` and `end_decays`, which the sweeps of other segments start from; else
    `out` gets the outputs and `states` the state that enters each chunk, where they are not None. REVERSE: from the end
    with x the outputs' gradients, C for B and B for C: `out` gets the gradients of x, `states` those of the states that
    leave each chunk. SHARE: heads of a group.
    """
    T: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    chunks = tl.cdiv(length, Q)
    head, batch, segment = tl.program_id(0) // TILES, tl.program_id(1).to(tl.int64), tl.program_id(2)
    r, n, p = tl.arange(0, Q), tl.arange(0, N), tl.program_id(0) % TILES * P + tl.arange(0, P)
    place, is_channel = n[:, None] * HEADDIM + p[None, :], (p < HEADDIM)[None, :]
    last_place = (batch * HEADS + head) * HEADDIM * D_STATE + p[None, :] * D_STATE + n[:, None]
    in_last = (n < D_STATE)[:, None] & is_channel
    row = batch * HEADS + head
    state = tl.zeros([N, P], tl.float32)
    if LOCAL and REVERSE:
        segment += 1  # the first one's state goes nowhere, as the last one's in the other direction
    if not LOCAL:
        if first is not None:
            state += tl.load(first + last_place, mask=in_last, other=0.0)
        for k in range(segments - 1 - segment if REVERSE else segment):
            passed = row * segments + (segments - 1 - k if REVERSE else k)
            state = state * tl.load(end_decays + passed)
            state += tl.load(ends + passed * N * HEADDIM + place, mask=is_channel, other=0.0)
    through = tl.load(D + head).to(tl.float32)
    x += batch * x_batch + head * HEADDIM
    B += batch * b_batch + head // SHARE * D_STATE
    C += batch * c_batch + head // SHARE * D_STATE
    plane = tl.num_programs(1).to(tl.int64) * HEADS * chunks * Q
    steps += (batch * HEADS + head) * chunks * Q
    if documents is not None:
        documents += batch * length
    from_chunk = segment * per_segment
    to_chunk = tl.minimum(from_chunk + per_segment, chunks)
    decay = 1.0
    for k in range(from_chunk, to_chunk):
        chunk = from_chunk + to_chunk - 1 - k if REVERSE else k
        start = chunk * Q
        left, at = length - start, start.to(tl.int64)
        delta, from_start, to_end, total, high, low, document = chunk_steps(
            steps + start, plane, documents, start, length, r, Q)
        x_ = load(x + at * X_ROW, X_ROW, r, p, left, HEADDIM, P, T)
        b = load(B + at * B_ROW, B_ROW, r, n, left, D_STATE, N, T)
        if states is not None and not LOCAL:
            tl.store(states + (row * chunks + chunk) * N * HEADDIM + place, state.to(states.dtype.element_ty),
                     mask=is_channel)
        if out is not None and not LOCAL:
            c = load(C + at * C_ROW, C_ROW, r, n, left, D_STATE, N, T)
            weights = dot(c, tl.trans(b)) * decays_within(high, low, document, r, documents is not None, REVERSE)
            if REVERSE:
                y = (dot(c, state.to(T)) * to_end[:, None] + dot(weights.to(T), x_)) * delta[:, None]
            else:
                y = dot(c, state.to(T)) * from_start[:, None] + dot((weights * delta[None, :]).to(T), x_)
            tl.store(out + ((batch * length + start) * HEADS + head) * HEADDIM + r[:, None] * HEADS * HEADDIM
                     + p[None, :], (y + through * x_.to(tl.float32)).to(out.dtype.element_ty),
                     mask=(r < left)[:, None] & is_channel)
        scale = from_start if REVERSE else delta * to_end
        state = state * total + dot(tl.trans(b), (x_.to(tl.float32) * scale[:, None]).to(T))
        decay *= total
    if LOCAL:
        tl.store(ends + (row * segments + segment) * N * HEADDIM + place, state, mask=is_channel)
        tl.store(end_decays + row * segments + segment, decay)
    elif segment == (0 if REVERSE else segments - 1):
        tl.store(last + last_place, state, mask=in_last)
