"""Compiles each launch of our kernels for an H100 and prints counts from its machine code: python -m benchmarks.kernels

Nothing is timed. Instructions and bytes are per element. An element is a (token, channel, state) for the scan, and a (token,
channel) for other kernels. The bytes are all bytes that a thread loads and stores; loads that a cache serves are included.
"""

from benchmarks.kernels.compiler import compile_part
from benchmarks.kernels.install import TRITONS, triton_folder
from benchmarks.measure import command_line, table


def main() -> None:
    command_line(__doc__).parse_args()  # the only option is --help
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
