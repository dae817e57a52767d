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
