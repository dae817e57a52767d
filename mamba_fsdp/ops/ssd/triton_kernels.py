"""The kernels of SSD. `sweep` carries a head's states in registers from chunk to chunk. After the sweeps of the
backward pass, `near` and `far` compute the gradients of B and C and the `flows` of each position: `near` from the positions
of the same pair of chunks, `far` from the states before the pair and through the gradients of the states after it. From the
flows, `finish` computes the gradients of dt, A and the bias.

The exponents of decays are summed exactly, as fixed-point integers (units of 2**-31). Then no other position of the chunk,
for example of another document, changes a single bit of the decay between two positions. Both parts of a sum, `high` in
units of 2**-8 and `low`, are exact in fp32, and so are their differences.

Q: number of positions of a chunk. W: number of positions of a pair of chunks. P: number of channels of a head in a
program, a power of two. N: d_state, rounded up to a power of two. WIDE: matrix products are computed in fp32, because the
interpreter needs this.

A loop over heads loads the steps of the next head before it computes the current one. With num_stages above 1, Triton
also prefetches x, grad_y and the states, by asynchronous copies.
"""

import triton
import triton.language as tl

from mamba_fsdp.ops.triton import kernel


@triton.jit
def dot(a, b):
    return tl.dot(a, b, allow_tf32=False)


@triton.jit
def load(
    pointer, row, rows, columns, left, WIDTH: tl.constexpr, SPAN: tl.constexpr, T: tl.constexpr
):
    """Returns a block (rows, columns) with SPAN columns. Rows from `left` on and columns from WIDTH on are 0."""
    is_valid = (rows < left)[:, None]
    if WIDTH % SPAN != 0:
        is_valid = is_valid & (columns < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * row + columns[None, :], mask=is_valid, other=0.0).to(T)


@triton.jit
def load_A(A, heads, mask, A_IS_LOG: tl.constexpr):
    """Returns A of these heads. A_IS_LOG: the tensor contains log(-A)."""
    a = tl.load(A + heads, mask=mask, other=0.0).to(tl.float32)
    if A_IS_LOG:
        a = -tl.exp(a)
    return a


@kernel
def add_up(
    dt,
    A,
    bias,
    steps,
    dt_row,
    length,
    heads,
    A_IS_LOG: tl.constexpr,
    HEADS: tl.constexpr,
    W: tl.constexpr,
):
    """Writes steps (3, batch, heads, pairs, W) of a pair's positions: delta = softplus(dt + bias), and the sum of the
    decays' exponents over the pair up to each position, in two parts."""
    pair = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, W)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    rows = pair * W + r
    is_head = head < heads
    is_valid = (rows < length)[:, None] & is_head[None, :]
    a = load_A(A, head, is_head, A_IS_LOG)
    b = tl.load(bias + head, mask=is_head, other=0.0).to(tl.float32)
    dt = tl.load(
        dt + (batch * length + rows)[:, None] * dt_row + head[None, :],
        mask=is_valid,
        other=0.0,
    )
    dt = dt.to(tl.float32) + b[None, :]
    small = tl.exp(-tl.abs(dt))
    more = 1.0 + small  # log(more) * small / (more - 1) is an accurate log1p(small)
    delta = tl.maximum(dt, 0.0) + tl.where(
        more == 1.0, small, tl.log(more) * (small / (more - 1.0))
    )
    delta = tl.where(is_valid, delta, 0.0)
    sums = tl.cumsum(
        (tl.maximum(delta * a[None, :], -128.0) * 2147483648.0).to(tl.int64), 0
    )  # exp(-128) is 0 in fp32
    plane = tl.num_programs(2).to(tl.int64) * heads * tl.num_programs(0) * W
    steps += ((batch * heads + head) * tl.num_programs(0) + pair)[None, :] * W + r[:, None]
    tl.store(steps, delta, mask=is_head[None, :])
    tl.store(steps + plane, (sums >> 23).to(tl.float32) * 0.00390625, mask=is_head[None, :])
    tl.store(
        steps + 2 * plane,
        (sums & 8388607).to(tl.float32) * 4.656612873077393e-10,
        mask=is_head[None, :],
    )


@triton.jit
def documents_of(seq_idx, start, length, r, ROWS: tl.constexpr):
    """Returns four values for ROWS positions from `start` on, of which r selects some:

    document   the document of each selected position
    goes_on    whether the position is in the same document as the position before `start`
    lasts      whether the position is in the same document as the last of the ROWS positions
    through    whether the position before `start` and the last position are in the same document

    Without seq_idx, all positions are in one document, and `document` has no meaning.
    """
    document = r
    goes_on = r >= 0
    lasts = r >= 0
    through = True
    if seq_idx is not None:
        document = tl.load(seq_idx + tl.minimum(start + r, length - 1))
        before = tl.load(seq_idx + tl.minimum(tl.maximum(start, 1), length) - 1)
        end = tl.load(seq_idx + tl.minimum(start + ROWS, length) - 1)
        goes_on = document == before
        lasts = document == end
        through = before == end
    return document, goes_on, lasts, through


@triton.jit
def steps_of(steps, plane, row, r, W: tl.constexpr):
    """Returns, for the positions r of a pair: delta, and both parts of the sum of exponents up to the position. Then come
    both parts of the sum over all W positions."""
    steps += row * W
    return (
        tl.load(steps + r),
        tl.load(steps + plane + r),
        tl.load(steps + 2 * plane + r),
        tl.load(steps + plane + W - 1),
        tl.load(steps + 2 * plane + W - 1),
    )


@triton.jit
def decays(high, low, high_end, low_end, goes_on, lasts, through):
    """Returns the decays from before the first position to each position, from each position to the last one, and from
    before the first position to the last one."""
    from_start = tl.where(goes_on, tl.exp(high + low), 0.0)
    to_end = tl.where(lasts, tl.exp((high_end - high) + (low_end - low)), 0.0)
    total = tl.where(through, tl.exp(high_end + low_end), 0.0)
    return from_start, to_end, total


@triton.jit
def decays_within(high, low, document, r, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr):
    """Returns the decays from position j to i of a chunk, as a matrix (i, j), or (j, i) if REVERSE. A decay is 0 if j is
    after i or in another document."""
    exponents = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    seen = r[:, None] >= r[None, :]
    if REVERSE:
        exponents = -exponents
        seen = r[:, None] <= r[None, :]
    if DOCUMENTS:
        seen = seen & (document[:, None] == document[None, :])
    return tl.exp(tl.where(seen, exponents, float("-inf")))


@triton.jit
def outputs_of(state, x, b, c, delta, within, from_start, to_end, T: tl.constexpr, REVERSE):
    """Returns a chunk's outputs (Q, P), without D. `state` is the state before the chunk. REVERSE: the gradients of the
    chunk's inputs; `state` is the gradient of the state after it."""
    weights = dot(c, tl.trans(b)) * within
    if REVERSE:
        y = dot(c, state.to(T)) * to_end[:, None] + dot(weights.to(T), x)
        y *= delta[:, None]
    else:
        y = dot(c, state.to(T)) * from_start[:, None]
        y += dot((weights * delta[None, :]).to(T), x)
    return y


@kernel  # one kernel: helpers would need all of its state as arguments
def sweep(  # noqa: PLR0915
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
    length,
    segments,
    per_segment,
    X_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    C_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
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

    LOCAL: starts from zeros and writes the segment's `ends` and `end_decays`, from which the sweeps of other segments
    start. Otherwise it writes the outputs to `out`, and the state before each pair of chunks to `states`, unless they are
    None. REVERSE: goes backward, with the gradients of the outputs as x, C as B, and B as C. It writes the gradients of x
    to `out`, and the gradients of the states after each pair to `states`. SHARE: the number of heads of a group.
    """
    T: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    chunks = 2 * tl.cdiv(length, 2 * Q)
    head = tl.program_id(0) // TILES
    batch = tl.program_id(1).to(tl.int64)
    # A LOCAL sweep leaves out one segment, of which no other needs the result: the last, or with REVERSE the first.
    segment = tl.program_id(2) + (1 if LOCAL and REVERSE else 0)
    r = tl.arange(0, Q)
    n = tl.arange(0, N)
    p = tl.program_id(0) % TILES * P + tl.arange(0, P)
    place = n[:, None] * HEADDIM + p[None, :]
    is_channel = (p < HEADDIM)[None, :]
    last_place = (batch * HEADS + head) * HEADDIM * D_STATE + p[None, :] * D_STATE + n[:, None]
    in_last = (n < D_STATE)[:, None] & is_channel
    row = batch * HEADS + head
    state = tl.zeros([N, P], tl.float32)
    if not LOCAL:
        if first is not None:
            state += tl.load(first + last_place, mask=in_last, other=0.0)
        for k in range(segments - 1 - segment if REVERSE else segment):
            passed = row * segments + (segments - 1 - k if REVERSE else k)
            state = state * tl.load(end_decays + passed)
            state += tl.load(ends + passed * N * HEADDIM + place, mask=is_channel, other=0.0)
    through = tl.load(D + head).to(tl.float32)
    before = batch * length
    x += before * X_ROW + head * HEADDIM
    B += before * B_ROW + head // SHARE * D_STATE
    C += before * C_ROW + head // SHARE * D_STATE
    if out is not None:
        out += before * OUT_ROW + head * HEADDIM
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
        document, goes_on, lasts, is_one = documents_of(seq_idx, start, length, r, Q)
        delta, high, low, high_end, low_end = steps_of(steps + start, plane, 0, r, Q)
        is_second = chunk % 2 == 1  # second chunk of its pair; the sums begin at the pair's start
        high_before = tl.load(steps + plane + start - 1, mask=is_second, other=0.0)
        low_before = tl.load(steps + 2 * plane + start - 1, mask=is_second, other=0.0)
        high -= high_before
        low -= low_before
        from_start, to_end, total = decays(
            high, low, high_end - high_before, low_end - low_before, goes_on, lasts, is_one
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
            within = decays_within(high, low, document, r, seq_idx is not None, REVERSE)
            y = outputs_of(state, x_, b, c, delta, within, from_start, to_end, T, REVERSE)
            tl.store(
                out + at * OUT_ROW + r[:, None] * OUT_ROW + p[None, :],
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


@kernel  # one kernel: helpers would need all of its state as arguments
def near(  # noqa: PLR0915
    grad_y,
    x,
    B,
    C,
    steps,
    seq_idx,
    grad_B,
    grad_C,
    flows,
    length,
    GRAD_Y_ROW: tl.constexpr,
    X_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    C_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEADDIM: tl.constexpr,
    TILES: tl.constexpr,
    D_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Writes the gradients of B and C through the positions of a pair, for up to BLOCK heads of a group. Writes the first
    three of the `flows`.

    grad_B, grad_C (blocks of a group's heads, batch, length, groups, d_state): the caller sums them over the blocks. flows
    (batch, heads, pairs, 5, W): see `finish`. All three are fp32.
    """
    T: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    per_group = tl.cdiv(SHARE, BLOCK)
    pairs = tl.cdiv(length, W)
    groups = HEADS // SHARE
    pair = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    batches = tl.num_programs(2)
    group = tl.program_id(0) // per_group
    block = tl.program_id(0) % per_group
    start = pair * W
    left = length - start
    at = batch * length + start
    r = tl.arange(0, W)
    n = tl.arange(0, N)
    x += at * X_ROW
    grad_y += at * GRAD_Y_ROW
    B += at * B_ROW + group * D_STATE
    C += at * C_ROW + group * D_STATE
    b = load(B, B_ROW, r, n, left, D_STATE, N, T)
    c = load(C, C_ROW, r, n, left, D_STATE, N, T)
    cb = dot(c, tl.trans(b))
    grad_cb = tl.zeros([W, W], tl.float32)
    plane = batches.to(tl.int64) * HEADS * pairs * W
    if seq_idx is not None:
        seq_idx += batch * length
    document, _, _, _ = documents_of(seq_idx, start, length, r, W)
    first = group * SHARE + block * BLOCK
    end = tl.minimum(first + BLOCK, (group + 1) * SHARE)
    delta, high, low, _, _ = steps_of(steps, plane, (batch * HEADS + first) * pairs + pair, r, W)
    for head in range(first, end):
        row = (batch * HEADS + head) * pairs + pair
        next_row = row + tl.where(head + 1 < end, pairs, 0)
        next_delta, next_high, next_low, _, _ = steps_of(steps, plane, next_row, r, W)
        products = tl.zeros([W, W], tl.float32)
        for tile in tl.static_range(TILES):
            p = tile * P + tl.arange(0, P)
            x_ = load(x + head * HEADDIM, X_ROW, r, p, left, HEADDIM, P, T)
            grad_y_ = load(grad_y + head * HEADDIM, GRAD_Y_ROW, r, p, left, HEADDIM, P, T)
            products += dot(grad_y_, tl.trans(x_))
        flow = flows + row * 5 * W + r
        tl.store(flow + 2 * W, tl.sum(tl.where(r[:, None] == r[None, :], products, 0.0), 1))
        products *= decays_within(high, low, document, r, seq_idx is not None, False)
        grad_cb += products * delta[None, :]
        products *= cb
        tl.store(flow, tl.sum(products, 0))
        tl.store(flow + W, tl.sum(products * delta[None, :], 1))
        delta = next_delta
        high = next_high
        low = next_low
    place = (((block * batches + batch) * length + start + r) * groups + group) * D_STATE
    in_row = r < left
    in_state = n < D_STATE
    # The result is not computed as dot(trans(grad_cb), c): with such an operand in registers, Triton 3.4 and newer have
    # computed wrong results on Hopper (flash-linear-attention #640).
    tl.store(
        grad_B + place[None, :] + n[:, None],
        dot(tl.trans(c), grad_cb.to(T)),
        mask=in_row[None, :] & in_state[:, None],
    )
    tl.store(
        grad_C + place[:, None] + n[None, :],
        dot(grad_cb.to(T), b),
        mask=in_row[:, None] & in_state[None, :],
    )


@kernel  # one kernel: helpers would need all of its state as arguments
def far(  # noqa: PLR0915
    grad_y,
    x,
    B,
    C,
    steps,
    seq_idx,
    grad_B,
    grad_C,
    flows,
    entering,
    leaving,
    length,
    GRAD_Y_ROW: tl.constexpr,
    X_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    C_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEADDIM: tl.constexpr,
    TILES: tl.constexpr,
    D_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Writes the gradients of B and C through the states, for ROWS of a pair's positions and up to BLOCK heads of a
    group. Writes the last two of the `flows`.

    entering, leaving: the states before the pair, and the gradients of the states after it. Programs of the same pair
    run at about the same time, so `entering` and `leaving` are read from memory only once. grad_B, grad_C, flows: as in
    `near`.
    """
    T: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    per_group = tl.cdiv(SHARE, BLOCK)
    parts: tl.constexpr = W // ROWS
    pairs = tl.cdiv(length, W)
    groups = HEADS // SHARE
    pair = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    batches = tl.num_programs(2)
    part = tl.program_id(0) % parts
    group = tl.program_id(0) // parts // per_group
    block = tl.program_id(0) // parts % per_group
    start = pair * W
    left = length - start
    at = batch * length + start
    r = part * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, N)
    x += at * X_ROW
    grad_y += at * GRAD_Y_ROW
    B += at * B_ROW + group * D_STATE
    C += at * C_ROW + group * D_STATE
    b = load(B, B_ROW, r, n, left, D_STATE, N, T)
    c = load(C, C_ROW, r, n, left, D_STATE, N, T)
    grad_b = tl.zeros([ROWS, N], tl.float32)
    grad_c = tl.zeros([ROWS, N], tl.float32)
    plane = batches.to(tl.int64) * HEADS * pairs * W
    if seq_idx is not None:
        seq_idx += batch * length
    _, goes_on, lasts, is_one = documents_of(seq_idx, start, length, r, W)
    first = group * SHARE + block * BLOCK
    end = tl.minimum(first + BLOCK, (group + 1) * SHARE)
    delta, high, low, high_end, low_end = steps_of(
        steps, plane, (batch * HEADS + first) * pairs + pair, r, W
    )
    read_before = tl.zeros([ROWS], tl.float32)
    kept_before = tl.zeros([ROWS], tl.float32)
    across_before = 0.0
    for unit in range(first * TILES, end * TILES):
        head = unit // TILES
        tile = unit % TILES
        row = (batch * HEADS + head) * pairs + pair
        next_row = row + tl.where((tile == TILES - 1) & (head + 1 < end), pairs, 0)
        next_delta, next_high, next_low, next_high_end, next_low_end = steps_of(
            steps, plane, next_row, r, W
        )
        from_start, to_end, total = decays(high, low, high_end, low_end, goes_on, lasts, is_one)
        p = tile * P + tl.arange(0, P)
        x_ = load(x + head * HEADDIM, X_ROW, r, p, left, HEADDIM, P, T)
        grad_y_ = load(grad_y + head * HEADDIM, GRAD_Y_ROW, r, p, left, HEADDIM, P, T)
        state = row * N * HEADDIM + n[:, None] * HEADDIM + p[None, :]
        s = tl.load(entering + state, mask=(p < HEADDIM)[None, :], other=0.0).to(T)
        g = tl.load(leaving + state, mask=(p < HEADDIM)[None, :], other=0.0).to(T)
        reads = grad_y_.to(tl.float32) * from_start[:, None]
        keeps = x_.to(tl.float32) * to_end[:, None]
        grad_c = tl.dot(reads.to(T), tl.trans(s), acc=grad_c, allow_tf32=False)
        grad_b = tl.dot((keeps * delta[:, None]).to(T), tl.trans(g), acc=grad_b, allow_tf32=False)
        read = tl.sum(dot(c, s) * reads, 1)
        kept = tl.sum(dot(b, g) * keeps, 1)
        across = tl.sum(tl.sum(s.to(tl.float32) * g.to(tl.float32), 0), 0) * total
        if TILES > 1:  # the last tile stores the sum over the whole head
            read += tl.where(tile == 0, 0.0, read_before)
            kept += tl.where(tile == 0, 0.0, kept_before)
            across += tl.where(tile == 0, 0.0, across_before)
            read_before = read
            kept_before = kept
            across_before = across
        flow = flows + row * 5 * W + r
        tl.store(flow + 3 * W, read + tl.where(r == W - 1, across, 0.0))
        tl.store(flow + 4 * W, kept)
        delta = next_delta
        high = next_high
        low = next_low
        high_end = next_high_end
        low_end = next_low_end
    place = (((block * batches + batch) * length + start + r) * groups + group)[
        :, None
    ] * D_STATE + n[None, :]
    is_valid = (r < left)[:, None] & (n < D_STATE)[None, :]
    tl.store(grad_B + place, grad_b, mask=is_valid)
    tl.store(grad_C + place, grad_c, mask=is_valid)


@kernel
def finish(
    dt,
    A,
    bias,
    steps,
    seq_idx,
    flows,
    grad_dt,
    totals,
    dt_row,
    grad_dt_row,
    length,
    heads,
    A_IS_LOG: tl.constexpr,
    W: tl.constexpr,
):
    """Writes grad_dt (batch, length, heads), and each pair's contribution to the gradients of A, the bias and D to totals
    (3, batch, pairs, heads).

    A flow is what inputs contribute to outputs, multiplied by the gradients of these outputs. `flows` has five of them
    for each position, in this order:

        outflow   from its input to the outputs of its pair, without the factor delta of the position
        inflow    from the inputs of its pair to its output, with their factors delta
        through   from its input to its own output through D, without the factor D
        read      from earlier pairs to its output; for the last position, also from earlier pairs to later pairs
        kept      from its input to later pairs, without the factor delta of the position
    """
    head = tl.program_id(0)
    pair = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    pairs = tl.num_programs(1)
    batches = tl.num_programs(2)
    start = pair * W
    r = tl.arange(0, W)
    row = (batch * heads + head) * pairs + pair
    flow = flows + row * 5 * W + r
    outflow = tl.load(flow)
    inflow = tl.load(flow + W)
    through = tl.load(flow + 2 * W)
    read = tl.load(flow + 3 * W)
    kept = tl.load(flow + 4 * W)
    delta = tl.load(steps + row * W + r)

    # The exponent of the decay from position j to i is the sum of delta[t] A with j < t <= i. `passing` is therefore the
    # sum of the flows from inputs before t to outputs at or after t.
    passing = tl.where(
        r[:, None] >= r[None, :], read[:, None], (delta * (outflow + kept) - inflow)[:, None]
    )
    if seq_idx is not None:
        document, _, _, _ = documents_of(seq_idx + batch * length, start, length, r, W)
        passing = tl.where(document[:, None] == document[None, :], passing, 0.0)
    passing = tl.sum(passing, 0)
    is_valid = r < length - start
    at = batch * length + start + r
    raw = tl.load(dt + at * dt_row + head, mask=is_valid, other=0.0).to(tl.float32) + tl.load(
        bias + head
    ).to(tl.float32)
    a = load_A(A, head, head < heads, A_IS_LOG)
    # exp(raw - delta) is the slope of softplus.
    grad = (outflow + kept + a * passing) * tl.exp(raw - delta)
    grad = tl.where(is_valid, grad, 0.0)
    tl.store(
        grad_dt + at * grad_dt_row + head,
        grad.to(grad_dt.dtype.element_ty),
        mask=is_valid,
    )
    totals += (batch * pairs + pair) * heads + head
    grad_A = tl.sum(passing * delta, 0)
    if A_IS_LOG:
        grad_A *= a
    tl.store(totals, grad_A)
    tl.store(totals + batches * pairs * heads, tl.sum(grad, 0))
    tl.store(totals + 2 * batches * pairs * heads, tl.sum(through, 0))
