"""Kernels of SSD: one sweep that carries a head's states in registers from chunk to chunk; and of its backward pass,
behind the sweeps, the gradients of B and C and what a chunk says of its decays: from the other chunk of its pair, then from
the states before the pair and the gradients of those behind it; from this the gradients of dt, A, the bias.

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
def load(
    pointer, row, rows, columns, left, WIDTH: tl.constexpr, SPAN: tl.constexpr, T: tl.constexpr
):
    """A block (rows, columns), SPAN columns, of which `left` rows and WIDTH columns are there, the rest 0."""
    there = (rows < left)[:, None]
    if WIDTH % SPAN != 0:
        there = there & (columns < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * row + columns[None, :], mask=there, other=0.0).to(T)


@triton.jit
def add_up(
    dt, A, bias, steps, dt_batch, dt_row, length, heads, HEADS: tl.constexpr, Q: tl.constexpr
):
    """Of a chunk's positions: steps (3, batch, heads, chunks, Q) gets delta = softplus(dt + bias) and the sums of the
    decays' exponents over the chunk up to each position, in two parts."""
    chunk = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, Q)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    rows = chunk * Q + r
    is_head = head < heads
    there = (rows < length)[:, None] & is_head[None, :]
    a = tl.load(A + head, mask=is_head, other=0.0).to(tl.float32)
    b = tl.load(bias + head, mask=is_head, other=0.0).to(tl.float32)
    dt = tl.load(
        dt + batch * dt_batch + rows.to(tl.int64)[:, None] * dt_row + head[None, :],
        mask=there,
        other=0.0,
    )
    dt = dt.to(tl.float32) + b[None, :]
    small = tl.exp(-tl.abs(dt))
    more = 1.0 + small  # log(more) * small / (more - 1) is log1p(small) to the last digits
    delta = tl.maximum(dt, 0.0) + tl.where(
        more == 1.0, small, tl.log(more) * (small / (more - 1.0))
    )
    delta = tl.where(there, delta, 0.0)
    sums = tl.cumsum(
        (tl.maximum(delta * a[None, :], -128.0) * 2147483648.0).to(tl.int64), 0
    )  # exp(-128) is 0 in fp32
    plane = tl.num_programs(2).to(tl.int64) * heads * tl.num_programs(0) * Q
    steps += ((batch * heads + head) * tl.num_programs(0) + chunk)[None, :] * Q + r[:, None]
    tl.store(steps, delta, mask=is_head[None, :])
    tl.store(steps + plane, (sums >> 23).to(tl.float32) * 0.00390625, mask=is_head[None, :])
    tl.store(
        steps + 2 * plane,
        (sums & 8388607).to(tl.float32) * 4.656612873077393e-10,
        mask=is_head[None, :],
    )


@triton.jit
def chunk_steps(steps, plane, seq_idx, start, length, r, Q: tl.constexpr):
    """delta; the decays from the chunk before to each position and from each to the chunk's end, and the chunk's whole
    decay; both parts of the exponents' sums; the documents."""
    delta = tl.load(steps + r)
    high = tl.load(steps + plane + r)
    low = tl.load(steps + 2 * plane + r)
    high_end = tl.load(steps + plane + Q - 1)
    low_end = tl.load(steps + 2 * plane + Q - 1)
    from_start = tl.exp(high + low)
    to_end = tl.exp((high_end - high) + (low_end - low))
    total = tl.exp(high_end + low_end)
    document = r
    if seq_idx is not None:
        document = tl.load(seq_idx + tl.minimum(start + r, length - 1))
        before = tl.load(seq_idx + tl.minimum(tl.maximum(start, 1), length) - 1)
        end = tl.load(seq_idx + tl.minimum(start + Q, length) - 1)
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
        exponents = -exponents
        seen = r[:, None] <= r[None, :]
    if DOCUMENTS:
        seen = seen & (document[:, None] == document[None, :])
    return tl.exp(tl.where(seen, exponents, float("-inf")))


@triton.jit  # one kernel: helpers would need all of its state as arguments
def sweep(  # noqa: C901, PLR0915
    x,
    B,
    C,
    D,
    steps,
    seq_idx,
    first,
    ends,
    end_decays,
    states,
    out,
    last,
    x_batch,
    b_batch,
    c_batch,
    length,
    segments,
    per_segment,
    X_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    C_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEADDIM: tl.constexpr,
    TILES: tl.constexpr,
    D_STATE: tl.constexpr,
    LOCAL: tl.constexpr,
    REVERSE: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Carries the states (N, P) of a head through a segment of its sequence, from the state `first`.

    LOCAL: from zero, to the segment's `ends` and `end_decays`, which the sweeps of other segments start from; else
    `out` gets the outputs and `states` the state that enters each pair of chunks, where they are not None. REVERSE: from
    the end with x the outputs' gradients, C for B and B for C: `out` gets the gradients of x, `states` those of the
    states that leave each pair. SHARE: heads of a group.
    """
    T: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    chunks = 2 * tl.cdiv(length, 2 * Q)
    head = tl.program_id(0) // TILES
    batch = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2)
    r = tl.arange(0, Q)
    n = tl.arange(0, N)
    p = tl.program_id(0) % TILES * P + tl.arange(0, P)
    place = n[:, None] * HEADDIM + p[None, :]
    is_channel = (p < HEADDIM)[None, :]
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
    if seq_idx is not None:
        seq_idx += batch * length
    from_chunk = segment * per_segment
    to_chunk = tl.minimum(from_chunk + per_segment, chunks)
    decay = 1.0
    for k in range(from_chunk, to_chunk):
        chunk = from_chunk + to_chunk - 1 - k if REVERSE else k
        start = chunk * Q
        left = length - start
        at = start.to(tl.int64)
        delta, from_start, to_end, total, high, low, document = chunk_steps(
            steps + start, plane, seq_idx, start, length, r, Q
        )
        x_ = load(x + at * X_ROW, X_ROW, r, p, left, HEADDIM, P, T)
        b = load(B + at * B_ROW, B_ROW, r, n, left, D_STATE, N, T)
        if states is not None and not LOCAL:
            if chunk % 2 == REVERSE:
                tl.store(
                    states + (row * chunks + chunk) // 2 * N * HEADDIM + place,
                    state.to(states.dtype.element_ty),
                    mask=is_channel,
                )
        if out is not None and not LOCAL:
            c = load(C + at * C_ROW, C_ROW, r, n, left, D_STATE, N, T)
            weights = dot(c, tl.trans(b)) * decays_within(
                high, low, document, r, seq_idx is not None, REVERSE
            )
            if REVERSE:
                y = (dot(c, state.to(T)) * to_end[:, None] + dot(weights.to(T), x_)) * delta[
                    :, None
                ]
            else:
                y = dot(c, state.to(T)) * from_start[:, None] + dot(
                    (weights * delta[None, :]).to(T), x_
                )
            tl.store(
                out
                + ((batch * length + start) * HEADS + head) * HEADDIM
                + r[:, None] * HEADS * HEADDIM
                + p[None, :],
                (y + through * x_.to(tl.float32)).to(out.dtype.element_ty),
                mask=(r < left)[:, None] & is_channel,
            )
        scale = from_start if REVERSE else delta * to_end
        state = state * total + dot(tl.trans(b), (x_.to(tl.float32) * scale[:, None]).to(T))
        decay *= total
    if LOCAL:
        tl.store(ends + (row * segments + segment) * N * HEADDIM + place, state, mask=is_channel)
        tl.store(end_decays + row * segments + segment, decay)
    elif segment == (0 if REVERSE else segments - 1):
        tl.store(last + last_place, state, mask=in_last)


@triton.jit  # one kernel: helpers would need all of its state as arguments
def between(  # noqa: PLR0915
    dy,
    x,
    B,
    C,
    steps,
    seq_idx,
    dB,
    dC,
    flows,
    dy_batch,
    x_batch,
    b_batch,
    c_batch,
    length,
    DY_ROW: tl.constexpr,
    X_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    C_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEADDIM: tl.constexpr,
    TILES: tl.constexpr,
    D_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """What the first chunk of a pair gives to the second: dB of the first, dC of the second, the sixth row of `flows`.

    The arguments are those of `gradients`, which goes on from here.
    """
    T: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    per_group = tl.cdiv(SHARE, BLOCK)
    pairs = tl.cdiv(length, 2 * Q)
    groups = HEADS // SHARE
    pair = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    batches = tl.num_programs(2)
    group = tl.program_id(0) // per_group
    block = tl.program_id(0) % per_group
    start = 2 * pair * Q
    left = length - start
    at = start.to(tl.int64)
    r = tl.arange(0, Q)
    n = tl.arange(0, N)
    x += batch * x_batch + at * X_ROW
    dy += batch * dy_batch + (at + Q) * DY_ROW
    B += batch * b_batch + at * B_ROW + group * D_STATE
    C += batch * c_batch + (at + Q) * C_ROW + group * D_STATE
    b = load(B, B_ROW, r, n, left, D_STATE, N, T)
    c = load(C, C_ROW, r, n, left - Q, D_STATE, N, T)
    cb = dot(c, tl.trans(b))
    db = tl.zeros([Q, N], tl.float32)
    dc = tl.zeros([Q, N], tl.float32)
    plane = batches.to(tl.int64) * HEADS * pairs * 2 * Q
    if seq_idx is not None:
        seq_idx += batch * length
    first = block * BLOCK
    for head in range(group * SHARE + first, group * SHARE + tl.minimum(first + BLOCK, SHARE)):
        own = (batch * HEADS + head) * pairs + pair
        delta, _, to_end, total_of_first, _, _, _ = chunk_steps(
            steps + own * 2 * Q, plane, seq_idx, start, length, r, Q
        )
        _, from_start, _, total_of_second, _, _, _ = chunk_steps(
            steps + (own * 2 + 1) * Q, plane, seq_idx, start + Q, length, r, Q
        )
        products = tl.zeros([Q, Q], tl.float32)
        for tile in tl.static_range(TILES):
            p = tile * P + tl.arange(0, P)
            x_ = load(x + head * HEADDIM, X_ROW, r, p, left, HEADDIM, P, T)
            dy_ = load(dy + head * HEADDIM, DY_ROW, r, p, left - Q, HEADDIM, P, T)
            products += dot(dy_, tl.trans(x_))
        products *= from_start[:, None] * to_end[None, :]
        grad_cb = (products * delta[None, :]).to(T)
        dc += dot(grad_cb, b)
        db += dot(tl.trans(grad_cb), c)
        products *= cb
        passed = flows + (own * 2 * 6 + 4) * Q
        tl.store(passed + 3, total_of_second)
        tl.store(passed + 6 * Q + 3, total_of_first)
        flow = passed + Q + r
        tl.store(flow, tl.sum(products, 0))
        tl.store(flow + 6 * Q, tl.sum(products * delta[None, :], 1))
    place = (((block * batches + batch) * length + start + r) * groups + group)[
        :, None
    ] * D_STATE + n[None, :]
    is_state = (n < D_STATE)[None, :]
    tl.store(dB + place, db, mask=(r < left)[:, None] & is_state)
    tl.store(dC + Q * groups * D_STATE + place, dc, mask=(r < left - Q)[:, None] & is_state)


@triton.jit  # one kernel: helpers would need all of its state as arguments
def gradients(  # noqa: PLR0915
    dy,
    x,
    B,
    C,
    steps,
    seq_idx,
    entering,
    leaving,
    dB,
    dC,
    flows,
    dy_batch,
    x_batch,
    b_batch,
    c_batch,
    length,
    DY_ROW: tl.constexpr,
    X_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    C_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEADDIM: tl.constexpr,
    TILES: tl.constexpr,
    D_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Of one chunk and up to BLOCK heads of a group, one after another: dB and dC add up on the way.

    entering, leaving: the states before its pair of chunks, and the gradients of those after it; the pair's other chunk
    is the neighbouring program's, so that both come from memory once. Of this block's heads: dB, dC (blocks of a
    group's heads, batch, length, groups, d_state), still to be summed. Of each head: `flows` (batch, heads, chunks, 6,
    Q), see `finish`. All but the states are fp32.
    """
    T: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    per_group = tl.cdiv(SHARE, BLOCK)
    pairs = tl.cdiv(length, 2 * Q)
    groups = HEADS // SHARE
    pair = tl.program_id(1)
    second = tl.program_id(0) % 2
    chunk = 2 * pair + second
    batch = tl.program_id(2).to(tl.int64)
    group = tl.program_id(0) // 2 // per_group
    block = tl.program_id(0) // 2 % per_group
    start = chunk * Q
    batches = tl.num_programs(2)
    left = length - start
    at = start.to(tl.int64)
    r = tl.arange(0, Q)
    n = tl.arange(0, N)
    B += batch * b_batch + at * B_ROW + group * D_STATE
    C += batch * c_batch + at * C_ROW + group * D_STATE
    b = load(B, B_ROW, r, n, left, D_STATE, N, T)
    c = load(C, C_ROW, r, n, left, D_STATE, N, T)
    cb = dot(c, tl.trans(b))
    place = (((block * batches + batch) * length + start + r) * groups + group)[
        :, None
    ] * D_STATE + n[None, :]
    is_state = (n < D_STATE)[None, :]
    of_first = (r < left * (1 - second))[:, None]
    of_second = (r < left * second)[:, None]
    db = tl.load(dB + place, mask=of_first & is_state, other=0.0)
    dc = tl.load(dC + place, mask=of_second & is_state, other=0.0)
    plane = batches.to(tl.int64) * HEADS * pairs * 2 * Q
    if seq_idx is not None:
        seq_idx += batch * length
    first = block * BLOCK
    for head in range(group * SHARE + first, group * SHARE + tl.minimum(first + BLOCK, SHARE)):
        row = (batch * HEADS + head) * pairs + pair
        own = 2 * row + second
        delta, from_start, to_end, total, high, low, document = chunk_steps(
            steps + own * Q, plane, seq_idx, start, length, r, Q
        )
        total_of_other = tl.load(flows + (own * 6 + 4) * Q + 3)
        from_pair = from_start * tl.where(second == 1, total_of_other, 1.0)
        to_pair_end = to_end * tl.where(second == 1, 1.0, total_of_other)
        x_head = x + batch * x_batch + at * X_ROW + head * HEADDIM
        dy_head = dy + batch * dy_batch + at * DY_ROW + head * HEADDIM
        products = tl.zeros([Q, Q], tl.float32)
        for tile in tl.static_range(TILES):
            p = tile * P + tl.arange(0, P)
            x_ = load(x_head, X_ROW, r, p, left, HEADDIM, P, T)
            dy_ = load(dy_head, DY_ROW, r, p, left, HEADDIM, P, T)
            products += dot(dy_, tl.trans(x_))
        products *= decays_within(high, low, document, r, seq_idx is not None, False)
        grad_cb = (products * delta[None, :]).to(T)
        dc += dot(grad_cb, b)
        db += dot(tl.trans(grad_cb), c)
        flow = flows + own * 6 * Q + r
        passed = flows + (own * 6 + 4) * Q
        products *= cb
        tl.store(flow, tl.sum(products, 0))
        passing = tl.cumsum(
            tl.trans(products * delta[None, :]), 0
        )  # in the dot's layout Triton 2.2 has no cumsum
        tl.store(flow + Q, tl.sum(tl.where(r[:, None] < r[None, :], passing, 0.0), 1))
        read_sum = tl.zeros([Q], tl.float32)
        kept_sum = tl.zeros([Q], tl.float32)
        across = tl.zeros([P], tl.float32)
        through = tl.zeros([P], tl.float32)
        for tile in tl.static_range(TILES):
            p = tile * P + tl.arange(0, P)
            if TILES > 1:
                x_ = load(x_head, X_ROW, r, p, left, HEADDIM, P, T)
                dy_ = load(dy_head, DY_ROW, r, p, left, HEADDIM, P, T)
            state = row * N * HEADDIM + n[:, None] * HEADDIM + p[None, :]
            s = tl.load(entering + state, mask=(p < HEADDIM)[None, :], other=0.0).to(T)
            g = tl.load(leaving + state, mask=(p < HEADDIM)[None, :], other=0.0).to(T)
            read = dot(dy_, tl.trans(s)) * from_pair[:, None]
            dc += read
            read_sum += tl.sum(read * c.to(tl.float32), 1)
            kept = dot(x_, tl.trans(g)) * to_pair_end[:, None]
            db += kept * delta[:, None]
            kept_sum += tl.sum(kept * b.to(tl.float32), 1)
            across += tl.sum(s.to(tl.float32) * g.to(tl.float32), 0)
            through += tl.sum(x_.to(tl.float32) * dy_.to(tl.float32), 0)
        tl.store(flow + 2 * Q, read_sum)
        tl.store(flow + 3 * Q, kept_sum)
        tl.store(passed, tl.sum(across, 0) * total * total_of_other)
        tl.store(passed + 1, tl.sum(through, 0))
        far = tl.where(second == 1, read_sum, kept_sum * delta)
        tl.store(passed + 2, tl.sum(far, 0))
    there = (r < left)[:, None] & is_state
    tl.store(dB + place, db, mask=there)
    tl.store(dC + place, dc, mask=there)


@triton.jit
def finish(
    dt,
    A,
    bias,
    steps,
    seq_idx,
    flows,
    ddt,
    totals,
    dt_batch,
    dt_row,
    length,
    heads,
    Q: tl.constexpr,
):
    """ddt (batch, length, heads) and, of this chunk's positions for A, the bias, D, totals (3, batch, chunks, heads).

    `flows` of each position: what its input gives to the chunk's outputs; what all inputs up to it give to those behind
    it; what its output gets of the pairs of chunks before; what its input gives to the pairs behind. In a fifth row what
    passes the whole pair, what passes D, and what the chunk gets of the pairs before, if it is the second, or else gives
    to those behind. In a sixth what its input gives to the pair's second chunk, or its output gets of the first. All are
    times the gradients; where one input gives, without delta.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(1)
    batches = tl.num_programs(2)
    start = chunk * Q
    r = tl.arange(0, Q)
    row = (batch * heads + head) * chunks + chunk
    second = chunk % 2
    flow = flows + row * 6 * Q + r
    passed = flows + (row * 6 + 4) * Q
    passed_by_other = passed + (1 - 2 * second) * 6 * Q
    given = tl.load(flow)
    within = tl.load(flow + Q - 1, mask=r > 0, other=0.0)
    near = tl.load(flow + 5 * Q)
    read = tl.load(flow + 2 * Q) + near * second
    kept = tl.load(flow + 3 * Q) + near * (1 - second)
    across = tl.load(passed) + tl.load(passed_by_other + 2)
    through = tl.load(passed + 1)
    if seq_idx is not None:
        seq_idx += batch * length
    delta, _, _, _, _, _, document = chunk_steps(
        steps + row * Q, batches.to(tl.int64) * heads * chunks * Q, seq_idx, start, length, r, Q
    )

    # delta[t] A counts in each decay that passes position t: into later positions, out of earlier ones.
    passing = tl.where(r[:, None] >= r[None, :], read[:, None], (delta * kept)[:, None])
    if seq_idx is not None:
        passing = tl.where(document[:, None] == document[None, :], passing, 0.0)
    passing = within + tl.sum(passing, 0) + across
    there = r < length - start
    dt = dt + batch * dt_batch + (start + r).to(tl.int64) * dt_row + head
    raw = tl.load(dt, mask=there, other=0.0).to(tl.float32) + tl.load(bias + head).to(tl.float32)
    grad = (given + kept + tl.load(A + head).to(tl.float32) * passing) * tl.exp(
        raw - delta
    )  # the slope of softplus
    grad = tl.where(there, grad, 0.0)
    tl.store(
        ddt + (batch * length + start + r) * heads + head, grad.to(ddt.dtype.element_ty), mask=there
    )
    totals += (batch * chunks + chunk) * heads + head
    tl.store(totals, tl.sum(passing * delta, 0))
    tl.store(totals + batches * chunks * heads, tl.sum(grad, 0))
    tl.store(totals + 2 * batches * chunks * heads, through)
