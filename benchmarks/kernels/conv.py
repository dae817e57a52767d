"""Lists the causal convolution's kernels as mamba-1.4b calls them: 4096 channels, a slice of a projection, in bf16."""

from benchmarks.kernels import Kernel
from mamba_fsdp.ops.conv.triton import BACKWARD, FORWARD


def walk():
    from mamba_fsdp.ops.conv import triton_kernels

    return triton_kernels.walk


def kernel(name, blocks, back, seq_idx, **bounds):
    tensors = dict(X="*bf16", WEIGHT="*bf16", BIAS="*bf16", OUT="*bf16")
    tensors |= dict(GRAD="*bf16", SUMS="*fp32") if back else {}
    strides = dict.fromkeys(
        ("x_batch", "x_row", "out_batch", "out_row", "grad_batch", "grad_row"), "i64"
    )
    sizes = dict.fromkeys(("length", "channels", "row_programs", "channel_programs"), "i32")
    absent = dict.fromkeys(
        {"GRAD", "SUMS", "SEQ_IDX"} - tensors.keys() - {"SEQ_IDX" if seq_idx else ""}
    )
    return Kernel(
        name + ", documents" * seq_idx,
        walk,
        tensors
        | strides
        | sizes
        | {"seq_idx_batch": "i64"}
        | ({"SEQ_IDX": "*i64"} if seq_idx else {}),
        dict(WIDTH=4, BACK=back, ROWS=blocks["ROWS"], CHANNELS=blocks["CHANNELS"], **absent),
        elements=4 * blocks["CHANNELS"],
        warps=blocks["num_warps"],
        aligned=[*tensors, *strides, "channels"],
        **bounds,
    )


KERNELS = [
    kernel("forward", FORWARD[8, 0], 0, False, registers=128, instructions=18.5),
    kernel("forward", FORWARD[8, 0], 0, True, registers=128, instructions=22.5),
    kernel("backward", BACKWARD[8, 0], 3, False, registers=128, instructions=39),
    kernel("backward", BACKWARD[8, 0], 3, True, registers=168, instructions=47),
]
