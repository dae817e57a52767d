"""Prints what each listed kernel costs on an H100, by compiling it:  python -m benchmarks.kernels [OPERATOR ...]

Instructions and cycles are a thread's for an element, so that cycles / instructions is what waiting adds; an element is
a (token, channel, state) of the scan, else a (token, channel). 1e9 elements x 1 cycle are 0.034 ms. Bytes: what a
thread loads and stores for an element, from caches too; after the /, the least that memory must pass (norms only).
"""

import sys

from benchmarks.kernels.compiler import compile_all, kernels_of, operators
from benchmarks.kernels.install import TRITONS, triton_folder

ROW = "{:8} {:26} {:>6} {:>9} {:>6} {:>8} {:>12} {:>8} {:>10}"


def main() -> None:
    print(
        ROW.format(
            "operator",
            "kernel",
            "Triton",
            *"registers shared programs instructions cycles bytes".split(),
        )
    )
    for version in TRITONS:
        asked = [
            (operator, name, 90)
            for operator in sys.argv[1:] or operators()
            for name, kernel in kernels_of(operator).items()
            if 90 in kernel.ccs
        ]
        for made in compile_all(triton_folder(version), asked):
            floor = kernels_of(made.operator)[made.name].floor
            figures = (
                made.registers,
                made.shared,
                made.programs,
                f"{made.instructions:.1f}",
                f"{made.cycles:.1f}",
                f"{made.bytes:.1f}" + (f" / {floor:.0f}" if floor else ""),
            )
            print(made.error or ROW.format(made.operator, made.name, version, *figures), flush=True)


if __name__ == "__main__":
    main()
