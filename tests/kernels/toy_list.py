"""The small kernels as a list for the compiler."""

from importlib import import_module

from benchmarks.kernels import Kernel


def toy():
    return import_module("tests.kernels.toy").scaled_sum


SIGNATURE = dict(x="*bf16", y="*bf16", out="*bf16", scale="fp32", n="i32", rows="i32")
KERNELS = [
    Kernel("whole", toy, SIGNATURE, dict(BLOCK=128, MASKED=False), elements=128, mark=("LDG", 4)),
    Kernel("masked", toy, SIGNATURE, dict(BLOCK=128, MASKED=True), elements=128, mark=("LDG", 4)),
    Kernel("spilling", toy, SIGNATURE, dict(BLOCK=8192, MASKED=False), elements=8192),
]
