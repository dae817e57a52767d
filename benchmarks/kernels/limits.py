"""What an SM has room for, and the time on known GPUs that a kernel's work allows at best."""

from typing import NamedTuple

from benchmarks.kernels import Kernel

# By compute capability, from NVIDIA's CUDA programming guide: an SM's warps, programs, and KiB of shared memory.
ROOM = {
    80: (64, 32, 164),
    86: (48, 16, 100),
    89: (48, 24, 100),
    90: (64, 32, 228),
    100: (64, 32, 228),
    120: (48, 24, 100),
}
REGISTERS = 65536  # of an SM, in four parts; a warp gets them by 256


class GPU(NamedTuple):
    """From NVIDIA's data sheets: SXM modules with the larger memory, boost clock."""

    cc: int
    sms: int
    ghz: float
    terabytes: float  # of memory, per second
    teraflops: float  # of tensor cores on bf16, dense


GPUS = {
    "A100": GPU(80, 108, 1.41, 2.039, 312),
    "H100": GPU(90, 132, 1.98, 3.35, 989),
    "H200": GPU(90, 132, 1.98, 4.8, 989),
    "B200": GPU(100, 148, 1.965, 8.0, 2250),
}


def occupancy(cc: int, registers: int, warps: int, shared: int) -> tuple[int, int]:
    """Warps that an SM holds of programs with so many warps, and how many it has room for."""
    room, programs, kib = ROOM[cc]
    of_a_warp = -(-registers * 32 // 256) * 256
    fit = [programs, room // warps, REGISTERS // 4 // of_a_warp * 4 // warps]
    if shared:
        fit.append(kib * 1024 // (shared + 1024))
    return min(fit) * warps, room


def floor(gpu: GPU, kernel: Kernel, made) -> float:
    """ns a token, of one layer: the slowest of memory, issued instructions, special ones and tensor cores."""
    clocks = kernel.per_token / gpu.sms / gpu.ghz
    return max(
        kernel.bytes_per_token / gpu.terabytes / 1000,
        made.instructions * clocks / 128,
        made.special * clocks / 16,
        kernel.flops_per_token / gpu.teraflops / 1000,
    )
