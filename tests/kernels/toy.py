"""Small kernels to try the harness itself on."""

import triton
import triton.language as tl


@triton.jit
def scaled_sum(x, y, out, scale, n, rows, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """out[i] = scale * sum over rows of x[row, i] + y[i], in fp32."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if MASKED:
        for row in range(rows):
            total += tl.load(x + row * n + i, mask=i < n, other=0.0).to(tl.float32)
        total = scale * total + tl.load(y + i, mask=i < n, other=0.0).to(tl.float32)
        tl.store(out + i, total.to(out.dtype.element_ty), mask=i < n)
    else:
        for row in range(rows):
            total += tl.load(x + row * n + i).to(tl.float32)
        tl.store(out + i, (scale * total + tl.load(y + i).to(tl.float32)).to(out.dtype.element_ty))


@triton.jit
def product(
    x, y, out, sums, K, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TF32: tl.constexpr
):
    """out (M, N) = x (M, K) @ y (K, N), fp32, by tensor cores; sums (M) = those of its rows."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, BLOCK)
    total = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        left = tl.load(x + m[:, None] * K + (start + k)[None, :])
        total += tl.dot(left, tl.load(y + (start + k)[:, None] * N + n[None, :]), allow_tf32=TF32)
    tl.store(out + m[:, None] * N + n[None, :], total)
    tl.store(sums + m, tl.sum(total, axis=1))
