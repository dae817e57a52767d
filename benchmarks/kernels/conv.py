"""The causal convolution's kernels as mamba-1.4b calls them: 4096 channels, a slice of a projection, in bf16.

Bytes of a (token, channel) by causal-conv1d's source, halos and sums over rows counted as here: forward 4.09,
backward 6.59 (64 rows a program, which adds 5 floats a channel to memory).
"""

from benchmarks.kernels import Kernel
from mamba_fsdp.ops.conv.triton import BACKWARD, FORWARD

CHANNELS = 4096


def walk():
    from mamba_fsdp.ops.conv import triton_kernels

    return triton_kernels.walk


def kernel(name, blocks, back, bytes, seq_idx, **bounds):
    """bytes: of a (token, channel)."""
    tensors = dict(X="*bf16", WEIGHT="*bf16", BIAS="*bf16", OUT="*bf16")
    tensors |= dict(GRAD="*bf16", SUMS="*fp32") if back else {}
    strides = dict.fromkeys(
        ("x_batch", "x_row", "out_batch", "out_row", "grad_batch", "grad_row"), "i64"
    )
    sizes = dict.fromkeys(("length", "channels", "row_programs", "channel_programs"), "i32")
    absent = dict.fromkeys(
        {"GRAD", "SUMS", "DOCUMENTS"} - tensors.keys() - {"DOCUMENTS" if seq_idx else ""}
    )
    return Kernel(
        name + ", documents" * seq_idx,
        walk,
        tensors
        | strides
        | sizes
        | {"documents_batch": "i64"}
        | ({"DOCUMENTS": "*i64"} if seq_idx else {}),
        dict(WIDTH=4, BACK=back, ROWS=blocks["ROWS"], CHANNELS=blocks["CHANNELS"], **absent),
        elements=4 * blocks["CHANNELS"],
        per_token=CHANNELS,
        bytes_per_token=bytes * CHANNELS,
        warps=blocks["num_warps"],
        aligned=[*tensors, *strides, "channels"],
        **bounds,
    )


# With the rows that a program of 128 rows reads beside its own; the sums are written and read once.
AHEAD = 2 * (1 + 3 / 128) + 2
BACK = 2 * (1 + 6 / 128) + 2 * (1 + 3 / 128) + 2 + 2 * 5 * 4 / 128
KERNELS = [
    kernel("forward", FORWARD[8, 0], 0, AHEAD, False, registers=128, instructions=18.5),
    kernel("forward", FORWARD[8, 0], 0, AHEAD, True, registers=128, instructions=22.5),
    kernel("backward", BACKWARD[8, 0], 3, BACK, False, registers=128, instructions=39),
    kernel("backward", BACKWARD[8, 0], 3, BACK, True, registers=168, instructions=47),
]
