"""Compiles the listed kernels for GPUs that need not be here, and counts what matters. Triton 2.2 and 3.3 or newer.

    PYTHONPATH=FOLDER_OF_A_TRITON python -m benchmarks.kernels.compiler < REQUESTS > ANSWERS

One JSON line for each: a request is [operator, kernel's name, compute capability such as 90], an answer the fields of
Compiled, or {"error": ...}. `compile_all` runs this in a process of its own, since a process has one Triton.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.kernels import Kernel
from benchmarks.kernels.machine_code import Loop, loops, resources

PROJECT = Path(__file__).resolve().parents[2]
Request = tuple[str, str, int]


@dataclass
class Compiled:
    """A kernel's code for an architecture, or the `error` that kept it from being compiled. instructions and bytes: of
    a thread, for an element (see Kernel)."""

    operator: str
    name: str
    cc: int
    registers: int = 0
    stack: int = 0  # bytes
    shared: int = 0  # bytes
    spills: int = 0
    instructions: float = 0
    bytes: float = 0
    error: str = ""


OPERATORS = ("conv", "norm", "scan", "ssd")  # the modules of this folder that list kernels


def operators() -> tuple[str, ...]:
    return OPERATORS


def kernels_of(operator: str) -> dict[str, Kernel]:
    """Returns {name: kernel} of a module of this folder."""
    listed = import_module(f"benchmarks.kernels.{operator}").KERNELS
    return {kernel.name: kernel for kernel in listed}


def assembly(kernel: Kernel, cc: int) -> tuple[dict[str, Any], int]:
    """Returns {"ptx": str, "cubin": bytes, ...} and bytes of shared memory, from this process's Triton."""
    import triton

    function = kernel.function()
    names = list(function.arg_names)
    indices = [names.index(name) for name in kernel.aligned]
    if triton.__version__.startswith("2."):
        return _assembly_of_2(function, names, kernel, cc, indices)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=function,
        signature={name: kernel.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in kernel.constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in indices},
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", cc, 32),
        options=dict(num_warps=kernel.warps, num_stages=kernel.stages.get(cc, 1)),
    )
    return made.asm, made.metadata.shared


def _assembly_of_2(function, names, kernel, cc, indices):
    import triton
    from triton.compiler import compiler

    # The launcher would be linked to the driver's library, which is not here: it is left out.
    compiler.make_stub = lambda *_, **__: ""
    compiler.CompiledKernel = lambda fn, so_path, metadata, asm: SimpleNamespace(
        asm=asm, shared=metadata["shared"]
    )
    facts = compiler.instance_descriptor(
        divisible_by_16=set(indices),
        equal_to_1=set(),
        ids_of_folded_args=set(),
        divisible_by_8=set(),
    )
    # It reads the types in their order, whatever their numbers.
    types = {
        names.index(name): kernel.signature[name] for name in names if name in kernel.signature
    }
    made = triton.compile(
        function,
        signature=types,
        constants={names.index(name): value for name, value in kernel.constants.items()},
        cc=cc,
        num_warps=kernel.warps,
        num_stages=kernel.stages_of_2 or kernel.stages.get(cc, 1),
        configs=[facts],
    )
    return made.asm, made.shared


def of_an_element(kernel: Kernel, found: list[Loop], cost: Callable[[Loop], int]) -> float:
    """Returns the loops' costs for a thread and an element."""
    inner = sum(cost(loop) for loop in found if loop.depth == 0)
    total = inner / kernel.elements
    if kernel.trips:
        around = sum(cost(loop) for loop in found if loop.depth == 1)
        total += around / (kernel.elements * kernel.trips)
    return 32 * kernel.warps * total


def compile_one(operator: str, name: str, cc: int) -> Compiled:
    kernel = kernels_of(operator)[name]
    made, shared = assembly(kernel, cc)
    registers, stack = resources(made["cubin"])
    found = loops(made["cubin"])
    return Compiled(
        operator,
        name,
        cc,
        registers,
        stack,
        shared,
        sum(loop.spills for loop in found if loop.depth == 0),
        of_an_element(kernel, found, lambda loop: loop.instructions),
        of_an_element(kernel, found, lambda loop: loop.bytes),
    )


def environment(triton_folder: str | Path) -> dict[str, str]:
    """Returns the environment of a process that compiles with the Triton in a folder; its cache is kept next to
    that."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return rest | {
        "PYTHONPATH": os.pathsep.join((str(triton_folder), str(PROJECT))),
        "TRITON_CACHE_DIR": f"{triton_folder}-compiled",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }


def compile_all(triton_folder: str | Path, requests: Iterable[Request]) -> Iterator[Compiled]:
    """Compiles in a process of its own. If a kernel fails, `error` says why."""
    requests = list(requests)
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels.compiler"],
        input=lines,
        text=True,
        capture_output=True,
        env=environment(triton_folder),
        cwd=PROJECT,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"operator"')]
    for line in answers:
        yield Compiled(**json.loads(line))
    if len(answers) < len(requests):  # the compiler itself can crash
        reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        yield Compiled(*requests[len(answers)], error=f"the compiler ended: {reason}")


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = compile_one(*request)
        except Exception as error:
            answer = Compiled(*request, error=f"{type(error).__name__}: {error}")
        print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    main()
