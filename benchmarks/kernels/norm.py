"""RMSNorm's kernels in bf16: with the residual sum of mamba-1.4b (2048 channels), with the gate of mamba2-2.7b (5120)."""

from benchmarks.kernels import Kernel
from mamba_fsdp.ops.norm.triton import TILES

BOTH = dict(
    WEIGHT="*fp32",
    NORMED="*bf16",
    SCALE="*fp32",
    rows="i32",
    channels="i32",
    each="i32",
    x_row="i64",
    z_row="i64",
)
ADDED = dict(
    forward=dict(X="*bf16", RESIDUAL="*fp32", TOTAL="*fp32"),
    backward=dict(X="*fp32", GRAD_TOTAL="*fp32", GRAD_OTHER="*fp32"),
)
GATED = dict(
    forward=dict(X="*bf16", Z="*bf16", TOTAL="*fp32"),
    backward=dict(X="*bf16", Z="*bf16", GRAD_OTHER="*bf16"),
)
OF_PASS = dict(
    forward=dict(eps="fp32", residual_row="i64"),
    backward=dict(
        GRAD="*bf16",
        GRAD_X="*bf16",
        SUMS="*fp32",
        grad_row="i64",
        grad_total_row="i64",
        grad_other_row="i64",
    ),
)
ABSENT = dict(forward=("RESIDUAL", "Z"), backward=("GRAD_TOTAL", "Z", "NORMED"))


def kernel(name, which, tensors, channels, **bounds):
    """A kernel of `which` pass."""

    def function():
        from mamba_fsdp.ops.norm import triton_kernels

        return getattr(triton_kernels, which)

    signature = BOTH | OF_PASS[which] | tensors[which]
    if which == "backward":
        del signature["NORMED"]
    block = 1 << (channels - 1).bit_length()
    sizes = TILES[8, 0]
    tile = max(sizes["ELEMENTS"] // block, 1)
    constants = dict(TILE=tile, BLOCK=block) | dict.fromkeys(set(ABSENT[which]) - signature.keys())
    return Kernel(
        name,
        function,
        signature,
        constants,
        elements=tile * channels,
        warps=min(sizes["num_warps"] * max(block // sizes["ELEMENTS"], 1), 32),
        aligned=[name for name in signature if name not in ("eps", "rows", "each")],
        **bounds,
    )


KERNELS = [
    kernel("sum, forward", "forward", ADDED, 2048, registers=48, instructions=24),
    kernel("sum, backward", "backward", ADDED, 2048, registers=128, instructions=29.5),
    kernel("gate, forward", "forward", GATED, 5120, registers=44, instructions=43.5),
    kernel(
        "gate, backward",
        "backward",
        GATED,
        5120,
        registers=128,
        instructions=60,
        ccs=(80, 86, 89, 90, 100),
        # sm_120 spills 64 bytes of a thread with Triton 3.9
    ),
]
