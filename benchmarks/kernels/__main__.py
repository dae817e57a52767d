"""What the kernels' code asks of a GPU, compiled without one: registers, instructions, memory, the time they allow.

    python -m benchmarks.kernels [--operators scan,conv] [--cc 90] [--triton 3.6.0] [--reference] [--loops]

A row is a kernel on an architecture. regs: registers of a thread; warps: that an SM holds at a time, of those it has
room for; shared: bytes of shared memory of a program; instr and special (exp2, reciprocal ...): instructions of a
thread for a (token, channel, state) or (token, channel), see Kernel in benchmarks/kernels/__init__.py; KB/token: read
and written in the GPU's memory. The floors are ns a token of one layer that no schedule beats on each GPU: the largest
of memory, instructions, special ones and tensor cores. --reference adds mamba-ssm's Triton kernels, SSD and norms
(benchmarks/kernels/reference_triton.py), and its CUDA scan, compiled by nvcc from PyPI.

Compilers come from PyPI on first use, into a cache folder. Exit code 2 where they can't be had, 1 where a kernel does
not compile.
"""

import argparse
import sys

from benchmarks.kernels import Kernel
from benchmarks.kernels.compiler import Compiled, compile_all, kernels_of, operators
from benchmarks.kernels.install import INTERPRETER, TRITONS, triton_folder
from benchmarks.kernels.limits import GPUS, floor, occupancy
from benchmarks.kernels.reference import reference

HEAD = (
    f"{'kernel':30} {'sm':>3} {'triton':>6} {'regs':>4} {'stack':>5} {'warps':>7} {'shared':>6} {'instr':>6} "
    f"{'special':>7} {'KB/token':>8}  floor by " + " ".join(f"{name:>6}" for name in GPUS)
)


def numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def arguments():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--operators", type=lambda words: words.split(","), default=operators(), metavar="NAMES"
    )
    parser.add_argument(
        "--cc", type=numbers, default=[90], help="compute capabilities such as 80,90", metavar="CC"
    )
    parser.add_argument("--triton", choices=TRITONS, default="3.6.0")
    parser.add_argument("--reference", action="store_true", help="mamba-ssm's kernels beside ours")
    parser.add_argument("--loops", action="store_true", help="each loop's instructions by kind")
    asked = parser.parse_args()
    try:
        for operator in asked.operators:
            kernels_of(operator)
    except ModuleNotFoundError as error:
        parser.error(
            f"no kernels are listed for {operator} ({error}), only for {', '.join(operators())}"
        )
    if absent := set(asked.cc) - set(TRITONS[asked.triton]):
        parser.error(
            f"Triton {asked.triton} compiles for {TRITONS[asked.triton]}, not for {sorted(absent)}"
        )
    return asked


def row(made: Compiled, kernel: Kernel, loops: bool) -> str:
    """The lines of the table for a kernel."""
    if made.error:
        return f"{made.operator} {made.name} {made.cc}: {made.error}"
    ours, room = occupancy(made.cc, made.registers, kernel.warps, made.shared)
    floors = " ".join(f"{floor(gpu, kernel, made):6.1f}" for gpu in GPUS.values())
    line = (
        f"{made.operator + ' ' + made.name:30} {made.cc:3} {made.triton:>6} {made.registers:4} {made.stack:5} "
        f"{f'{ours}/{room}':>7} {made.shared:6} {made.instructions:6.2f} {made.special:7.2f} "
        f"{kernel.bytes_per_token / 1024:8.2f}           {floors}"
    )
    if loops:
        for loop in made.loops:
            kinds = ", ".join(
                f"{kind} {number}"
                for kind, number in sorted(loop.kinds.items(), key=lambda k: -k[1])
            )
            line += f"\n    loop at depth {loop.depth}: {loop.instructions} instructions: {kinds}"
    return line


def main() -> int:
    asked = arguments()
    requests = [
        (operator, kernel.name, cc)
        for operator in asked.operators
        for kernel in kernels_of(operator).values()
        for cc in asked.cc
        if cc in kernel.ccs
    ]
    try:
        folder = triton_folder(asked.triton)
    except OSError as why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    print(HEAD)
    failed = 0
    for made in compile_all(folder, requests):
        failed |= bool(made.error)
        print(row(made, kernels_of(made.operator)[made.name], asked.loops))
    if asked.reference:
        try:
            newer = (
                asked.triton if asked.triton >= "3" else INTERPRETER
            )  # today's torch does not load beside 2.2
            for made, kernel in reference(triton_folder(newer), asked.cc):
                failed |= bool(made.error)
                print(row(made, kernel, asked.loops))
        except OSError as why:
            print(f"error: {why}", file=sys.stderr)
            return 2
    return failed


if __name__ == "__main__":
    sys.exit(main())
