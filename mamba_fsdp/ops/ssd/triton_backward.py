"""Kernels of the SSD's backward pass, behind the sweeps: from the states at both ends of a chunk and the gradients of
those, the gradients of B and C, and what the chunk says of its decays; from this the gradients of dt, A, the bias."""

import triton
import triton.language as tl

from mamba_fsdp.ops.ssd.triton_forward import chunk_steps, decays_within, dot, load


@triton.jit
def gradients(dy, x, B, C, steps, documents, entering, leaving, dB, dC, flows, sums, dy_batch, x_batch, b_batch,
              c_batch, length, DY_ROW: tl.constexpr, X_ROW: tl.constexpr, B_ROW: tl.constexpr, C_ROW: tl.constexpr,
              HEADS: tl.constexpr, SHARE: tl.constexpr, HEADDIM: tl.constexpr, TILES: tl.constexpr,
              D_STATE: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
              N: tl.constexpr, WIDE: tl.constexpr):
    """Of one chunk, K of the N states and up to BLOCK heads of a group, one after another: dB and dC add up on the way.

    entering, leaving: the states, and the gradients of those after the chunk. Of this block's heads: dB, dC (blocks of
    a group's heads, batch, length, groups, d_state). Of this block's states: `flows` (N / K, batch, heads, chunks, 4,
    Q) and `sums` (N / K, batch, heads, chunks, 2), see `finish`. All are fp32 and still to be summed.
    """
    T: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    per_group, chunks, groups = tl.cdiv(SHARE, BLOCK), tl.cdiv(length, Q), HEADS // SHARE
    part, chunk, batch = tl.program_id(0) % (N // K), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, block = tl.program_id(0) // (N // K) // per_group, tl.program_id(0) // (N // K) % per_group
    start, batches = chunk * Q, tl.num_programs(2)
    left, at = length - start, start.to(tl.int64)
    r, n = tl.arange(0, Q), part * K + tl.arange(0, K)
    B += batch * b_batch + at * B_ROW + group * D_STATE
    C += batch * c_batch + at * C_ROW + group * D_STATE
    b, c = load(B, B_ROW, r, n, left, D_STATE, K, T), load(C, C_ROW, r, n, left, D_STATE, K, T)
    cb = dot(c, tl.trans(b))
    db, dc = tl.zeros([Q, K], tl.float32), tl.zeros([Q, K], tl.float32)
    plane = batches.to(tl.int64) * HEADS * chunks * Q
    if documents is not None:
        documents += batch * length
    first = block * BLOCK
    for head in range(group * SHARE + first, group * SHARE + tl.minimum(first + BLOCK, SHARE)):
        row = batch * HEADS + head
        delta, from_start, to_end, _, high, low, document = chunk_steps(
            steps + (row * chunks + chunk) * Q, plane, documents, start, length, r, Q)
        products = tl.zeros([Q, Q], tl.float32)
        for tile in tl.static_range(TILES):
            p = tile * P + tl.arange(0, P)
            x_ = load(x + batch * x_batch + at * X_ROW + head * HEADDIM, X_ROW, r, p, left, HEADDIM, P, T)
            dy_ = load(dy + batch * dy_batch + at * DY_ROW + head * HEADDIM, DY_ROW, r, p, left, HEADDIM, P, T)
            products += dot(dy_, tl.trans(x_))
        products *= decays_within(high, low, document, r, documents is not None, False)
        grad_cb = (products * delta[None, :]).to(T)
        dc += dot(grad_cb, b)
        db += dot(tl.trans(grad_cb), c)
        own = ((part * batches + batch) * HEADS + head) * chunks + chunk
        flow = flows + own * 4 * Q + r
        products *= cb
        tl.store(flow, tl.sum(products, 0))
        passing = tl.cumsum(tl.trans(products * delta[None, :]), 0)  # in the dot's layout Triton 2.2 has no cumsum
        tl.store(flow + Q, tl.sum(tl.where(r[:, None] < r[None, :], passing, 0.0), 1))
        read_sum, kept_sum = tl.zeros([Q], tl.float32), tl.zeros([Q], tl.float32)
        across, through = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
        for tile in tl.static_range(TILES):
            p = tile * P + tl.arange(0, P)
            if TILES > 1:
                x_ = load(x + batch * x_batch + at * X_ROW + head * HEADDIM, X_ROW, r, p, left, HEADDIM, P, T)
                dy_ = load(dy + batch * dy_batch + at * DY_ROW + head * HEADDIM, DY_ROW, r, p, left, HEADDIM, P, T)
            state = (row * chunks + chunk) * N * HEADDIM + n[:, None] * HEADDIM + p[None, :]
            s = tl.load(entering + state, mask=(p < HEADDIM)[None, :], other=0.0).to(T)
            g = tl.load(leaving + state, mask=(p < HEADDIM)[None, :], other=0.0).to(T)
            read = dot(dy_, tl.trans(s)) * from_start[:, None]
            dc += read
            read_sum += tl.sum(read * c.to(tl.float32), 1)
            kept = dot(x_, tl.trans(g)) * to_end[:, None]
            db += kept * delta[:, None]
            kept_sum += tl.sum(kept * b.to(tl.float32), 1)
            across += tl.sum(s.to(tl.float32) * g.to(tl.float32), 0)
            through += tl.sum(x_.to(tl.float32) * dy_.to(tl.float32), 0)
        tl.store(flow + 2 * Q, read_sum)
        tl.store(flow + 3 * Q, kept_sum)
        tl.store(sums + own * 2, tl.sum(across, 0))
        tl.store(sums + own * 2 + 1, tl.sum(through, 0))
    place = (((block * batches + batch) * length + start + r) * groups + group)[:, None] * D_STATE + n[None, :]
    there = (r < left)[:, None] & (n < D_STATE)[None, :]
    tl.store(dB + place, db, mask=there)
    tl.store(dC + place, dc, mask=there)


@triton.jit
def finish(dt, A, bias, steps, documents, flows, sums, ddt, totals, dt_batch, dt_row, length, heads,
           PARTS: tl.constexpr, Q: tl.constexpr):
    """ddt (batch, length, heads) and, of this chunk's positions for A, the bias, D, totals (3, batch, chunks, heads).

    `flows` of each position: what its input gives to the chunk's outputs; what all inputs up to it give to those behind
    it; what its output gets of the chunk before; what its input gives to the chunks behind. `sums`: what passes the
    whole chunk, and what passes D. All are times the gradients; where one input gives, without delta.
    """
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks, batches = tl.num_programs(1), tl.num_programs(2)
    start, r = chunk * Q, tl.arange(0, Q)
    row = (batch * heads + head) * chunks + chunk
    given, within, read, kept = (tl.zeros([Q], tl.float32), tl.zeros([Q], tl.float32), tl.zeros([Q], tl.float32),
                                 tl.zeros([Q], tl.float32))
    across, through = 0.0, tl.load(sums + row * 2 + 1)
    for part in tl.static_range(PARTS):
        own = part * batches.to(tl.int64) * heads * chunks + row
        flow = flows + own * 4 * Q + r
        given += tl.load(flow)
        within += tl.load(flow + Q - 1, mask=r > 0, other=0.0)
        read += tl.load(flow + 2 * Q)
        kept += tl.load(flow + 3 * Q)
        across += tl.load(sums + own * 2)
    if documents is not None:
        documents += batch * length
    delta, _, _, total, _, _, document = chunk_steps(
        steps + row * Q, batches.to(tl.int64) * heads * chunks * Q, documents, start, length, r, Q)

    # delta[t] A counts in each decay that passes position t: into later positions, out of earlier ones.
    passing = tl.where(r[:, None] >= r[None, :], read[:, None], (delta * kept)[:, None])
    if documents is not None:
        passing = tl.where(document[:, None] == document[None, :], passing, 0.0)
    passing = within + tl.sum(passing, 0) + total * across
    there, dt = r < length - start, dt + batch * dt_batch + (start + r).to(tl.int64) * dt_row + head
    raw = tl.load(dt, mask=there, other=0.0).to(tl.float32) + tl.load(bias + head).to(tl.float32)
    grad = (given + kept + tl.load(A + head).to(tl.float32) * passing) * tl.exp(raw - delta)  # the slope of softplus
    grad = tl.where(there, grad, 0.0)
    tl.store(ddt + (batch * length + start + r) * heads + head, grad.to(ddt.dtype.element_ty), mask=there)
    totals += (batch * chunks + chunk) * heads + head
    tl.store(totals, tl.sum(passing * delta, 0))
    tl.store(totals + batches * chunks * heads, tl.sum(grad, 0))
    tl.store(totals + 2 * batches * chunks * heads, through)
