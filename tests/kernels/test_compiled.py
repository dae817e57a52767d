"""Every listed kernel compiles for GPUs that are not here, without spilling, within the bounds beside it.

By default each on one pair of architecture and Triton, in turn; KERNEL_GATES=all tests/run.sh
tests/kernels/test_compiled.py takes all pairs. Triton keeps what it compiled beside itself.
"""

import os

import pytest

from benchmarks.kernels.compiler import compile_all, kernels_of, operators
from benchmarks.kernels.install import TRITONS, triton_folder

pytestmark = pytest.mark.slow
PAIRS = [(version, cc) for version, ccs in TRITONS.items() for cc in ccs]
# KiB of shared memory that a program may have, by compute capability (NVIDIA's CUDA programming guide).
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


def requests(version):
    """[operator, kernel, compute capability] to be compiled with this Triton."""
    chosen = []
    for operator in operators():
        for number, kernel in enumerate(kernels_of(operator).values()):
            pairs = [pair for pair in PAIRS if pair[1] in kernel.ccs]
            if os.environ.get("KERNEL_GATES") != "all":
                pairs = [pairs[7 * number % len(pairs)]]
            for of_version, cc in pairs:
                if of_version == version and cc in kernel.ccs:
                    chosen.append((operator, kernel.name, cc))
    return chosen


def complaints(made):
    """What a kernel's code breaks, in words."""
    if made.error:
        return [made.error]
    kernel = kernels_of(made.operator)[made.name]
    bounds = {
        "registers": kernel.registers,
        "stack": kernel.stack,
        "shared": min(kernel.shared, SHARED[made.cc] * 1024),
        "instructions": kernel.instructions,
        "spills": kernel.spills,
        "bytes": kernel.bytes,
    }
    found = {what: getattr(made, what) for what in bounds}
    return [
        f"{what} {found[what]:.6g}, bound {bounds[what]}"
        for what in bounds
        if found[what] > bounds[what]
    ]


@pytest.mark.parametrize("version", TRITONS)
def test_every_kernel_keeps_its_bounds(version):
    asked = requests(version)
    try:
        made = list(compile_all(triton_folder(version), asked))
    except OSError as why:
        pytest.skip(str(why))
    assert [(one.operator, one.name, one.cc) for one in made] == asked
    wrong = {(one.operator, one.name, one.cc): complaints(one) for one in made}
    assert not any(wrong.values()), {of: said for of, said in wrong.items() if said}
