"""Prints what each launch of our kernels costs on an H100, by compiling it: python -m benchmarks.kernels

Counts, not times. Instructions are a thread's for an element: a (token, channel, state) of the scan, else a (token,
channel). Bytes: what a thread loads and stores for an element, from caches too.
"""

from benchmarks.kernels.compiler import compile_part
from benchmarks.kernels.install import TRITONS, triton_folder
from benchmarks.measure import command_line, table


def main() -> None:
    command_line(__doc__).parse_args()  # takes no words but --help
    rows = []
    for version in TRITONS:
        for made in compile_part(triton_folder(version), 90):
            row: dict[str, object] = {"launch": made.title, "Triton": version}
            row |= {"instructions": f"{made.instructions:.1f}", "bytes": f"{made.bytes:.1f}"}
            row |= {"registers": made.registers, "spills": made.spills, "shared": made.shared}
            rows.append(row | {"error": made.error})
    print(table(rows))


if __name__ == "__main__":
    main()
