"""Compiles launches of our kernels and counts registers, instructions and bytes. No GPU is needed. Triton 2.2, and 3.3 or
newer, are supported.

    PYTHONPATH=FOLDER_OF_A_TRITON python -m benchmarks.kernels.compiler CC PART PARTS

prints a JSON line for each launch whose index modulo PARTS is PART. `compile_part` runs this command in a separate process,
because a process can import only one version of Triton.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.kernels.launches import Launch, launches_on
from benchmarks.kernels.machine_code import Loop, loops, resources

PROJECT = Path(__file__).resolve().parents[2]


@dataclass
class Compiled:
    """The counts of a compiled launch, or the `error` of the compiler.

    Instructions and bytes are per element (see Launch.elements). The counts of a loop are multiplied by 32 * warps / elements,
    and summed over the innermost loops. If there is no loop, the whole kernel counts as one loop.
    """

    title: str
    cc: int
    registers: int = 0
    stack: int = 0  # in bytes per thread
    shared: int = 0  # shared memory in bytes
    spills: int = 0  # the number of instructions in innermost loops that read or write the stack
    instructions: float = 0
    bytes: float = 0  # bytes loaded and stored; loads that a cache serves are included
    copies_ahead: bool = False  # whether there are asynchronous copies
    error: str = ""


def assembly(launch: Launch, cc: int) -> tuple[dict[str, Any], int]:
    """Compiles a launch with the Triton of this process. Returns ({"ptx": str, "cubin": bytes, ...}, bytes of shared memory)."""
    import triton

    module = import_module(f"mamba_fsdp.ops.{launch.operator}.triton_kernels")
    function = getattr(module, launch.kernel)
    names = list(function.arg_names)
    indices = [names.index(name) for name in launch.aligned]
    if triton.__version__.startswith("2."):
        return _assembly_of_2(function, names, launch, cc, indices)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=function,
        signature={name: launch.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in indices},
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", cc, 32),
        options=dict(num_warps=launch.warps, num_stages=launch.stages),
    )
    return made.asm, made.metadata.shared


def _assembly_of_2(function, names, launch, cc, indices):
    import triton
    from triton.compiler import compiler

    # No launcher is made, because it would be linked to the driver's library, which can be missing.
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
    # Triton takes the types in the order in which this dict was filled, and does not sort its keys.
    types = {
        names.index(name): launch.signature[name] for name in names if name in launch.signature
    }
    made = triton.compile(
        function,
        signature=types,
        constants={names.index(name): value for name, value in launch.constants.items()},
        cc=cc,
        num_warps=launch.warps,
        num_stages=launch.stages,
        configs=[facts],
    )
    return made.asm, made.shared


def compile_one(launch: Launch, cc: int) -> Compiled:
    try:
        made, shared = assembly(launch, cc)
    except Exception as error:
        while error.__cause__:  # the innermost exception contains the reason
            error = error.__cause__
        return Compiled(launch.title, cc, error=f"{type(error).__name__}: {error}")
    registers, stack = resources(made["cubin"])
    innermost = loops(made["cubin"])

    def of_an_element(cost: Callable[[Loop], int]) -> float:
        return 32 * launch.warps * sum(map(cost, innermost)) / launch.elements

    return Compiled(
        launch.title,
        cc,
        registers,
        stack,
        shared,
        sum(loop.spills for loop in innermost),
        of_an_element(lambda loop: loop.instructions),
        of_an_element(lambda loop: loop.bytes),
        "cp.async" in made["ptx"],
    )


def environment(triton_folder: str | Path) -> dict[str, str]:
    """Returns the environment of a process that compiles with the Triton in a folder. The cache of compiled kernels is next
    to this folder."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return rest | {
        "PYTHONPATH": os.pathsep.join((str(triton_folder), str(PROJECT))),
        "TRITON_CACHE_DIR": f"{triton_folder}-compiled",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }


def compile_part(
    triton_folder: str | Path, cc: int, part: int = 0, parts: int = 1
) -> Iterator[Compiled]:
    """Compiles the launches whose index modulo `parts` is `part`, in a separate process."""
    command = [sys.executable, "-m", "benchmarks.kernels.compiler", str(cc), str(part), str(parts)]
    done = subprocess.run(
        command, text=True, capture_output=True, env=environment(triton_folder), cwd=PROJECT
    )
    for line in done.stdout.splitlines():
        yield Compiled(**json.loads(line))
    if done.returncode:  # the compiler itself can crash
        reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        yield Compiled("the next launch", cc, error=f"the compiler ended: {reason}")


def main() -> None:
    import triton

    from mamba_fsdp.ops import triton as glue

    cc, part, parts = map(int, sys.argv[1:])
    is_version_2 = triton.__version__.startswith("2.")
    with mock.patch.object(glue, "is_version_2", lambda: is_version_2):
        for launch in launches_on(cc)[part::parts]:
            print(json.dumps(asdict(compile_one(launch, cc))), flush=True)


if __name__ == "__main__":
    main()
