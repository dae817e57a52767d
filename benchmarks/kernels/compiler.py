"""Compiles the listed kernels for GPUs that need not be here, and counts what matters. Triton 2.2 and 3.3 or newer.

    PYTHONPATH=FOLDER_OF_A_TRITON python -m benchmarks.kernels.compiler < REQUESTS > ANSWERS

One JSON line for each: a request is [operator, kernel's name, compute capability such as 90], an answer the fields of
Compiled, or {"error": ...}. `compile_all` runs this in a process of its own, since a process has one Triton.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.kernels import Kernel
from benchmarks.kernels.machine_code import Loop, loops, resources

PROJECT = Path(__file__).resolve().parents[2]
Request = tuple[str, str, int]
POINTERS = {
    "float32": "*fp32",
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "int32": "*i32",
    "int64": "*i64",
    "bool": "*i1",
    "uint8": "*u8",
    "int8": "*i8",
    "int16": "*i16",
}


@dataclass
class Compiled:
    """A kernel's code for an architecture, or the `error` that kept it from being compiled. instructions: of a thread,
    for an element (see Kernel)."""

    operator: str
    name: str
    cc: int
    triton: str = ""
    registers: int = 0
    stack: int = 0  # bytes
    shared: int = 0  # bytes
    programs: int = 0  # on a multiprocessor
    instructions: float = 0
    cycles: float = (
        0  # as instructions: of a scheduler with as many warps as fit, by the model in latency.py
    )
    bytes: float = 0  # as instructions: loaded and stored, from caches too
    loops: list[Loop] = field(default_factory=list)
    error: str = ""

    @property
    def spills(self) -> int:
        return sum(loop.kinds.get("spill", 0) for loop in self.loops if not loop.depth)


def operators() -> list[str]:
    """Returns the modules of this folder that list kernels of ours."""
    found = {
        path.stem for path in Path(__file__).parent.glob("*.py") if "\nKERNELS" in path.read_text()
    }
    return sorted(found)


def kernels_of(operator: str) -> dict[str, Kernel]:
    """Returns {name: kernel} of a module of this folder, or of any module by its dotted name."""
    listed = import_module(
        operator if "." in operator else f"benchmarks.kernels.{operator}"
    ).KERNELS
    return {kernel.name: kernel for kernel in listed}


def of_launch(parameters: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what Triton makes of a launch's arguments: `constants`, `signature` and `aligned` of a Kernel.

    parameters: of inspect.signature. None and integers that are 1 are constants; Triton is told which pointers and
    integers are divisible by 16.
    """
    constants = {}
    signature = {}
    aligned = []
    for name, parameter in parameters.items():
        value = values.get(name, parameter.default)
        if (
            "constexpr" in str(parameter.annotation)
            or value is None
            or (type(value) is int and value == 1)
        ):
            constants[name] = value
        elif hasattr(value, "data_ptr"):
            signature[name] = POINTERS[str(value.dtype).removeprefix("torch.")]
        else:
            wide = "i64" if not -(2**31) <= value < 2**31 else "i32"
            signature[name] = "fp32" if isinstance(value, float) else wide
        number = value.data_ptr() if hasattr(value, "data_ptr") else value
        if name in signature and isinstance(number, int) and number % 16 == 0:
            aligned.append(name)
    return dict(constants=constants, signature=signature, aligned=aligned)


def assembly(kernel: Kernel, cc: int) -> tuple[dict[str, Any], int]:
    """Returns {"ptx": str, "cubin": bytes, ...} and bytes of shared memory, from this process's Triton."""
    import triton

    function = kernel.function()
    names = list(function.arg_names)
    aligned = (
        [name for name, type in kernel.signature.items() if type.startswith("*")]
        if kernel.aligned is None
        else kernel.aligned
    )
    indices = [names.index(name) for name in aligned]
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


def programs_on_sm(kernel: Kernel, registers: int, shared: int) -> int:
    """Returns how many fit one of Hopper's multiprocessors: 64 K registers, 8 at a time for each thread, and 227
    KiB."""
    of_a_program = -(-registers // 8) * 8 * 32 * kernel.warps
    return min(kernel.programs, 65536 // of_a_program, 227 * 1024 // (shared + 1024))


def count(kernel: Kernel, found: list[Loop], cost: Callable[[Loop], float]) -> float:
    """Returns the loops' costs for a thread and an element."""

    def of(loop):
        return 32 * kernel.warps * cost(loop)

    inner = [loop for loop in found if loop.depth == 0]
    total = 0.0
    unrolled = {}
    if kernel.mark:
        opcode, number = kernel.mark
        unrolled = {
            id(loop): sum(n for name, n in loop.opcodes.items() if name.startswith(opcode)) / number
            for loop in inner
        }
        largest = max(unrolled.values())
        hot = next(
            loop for loop in inner if unrolled[id(loop)] == largest
        )  # the others: what is left over
        inner = [loop for loop in inner if loop is hot or not unrolled[id(loop)]]
    for loop in inner:
        total += of(loop) / kernel.elements / (unrolled.get(id(loop)) or 1)
    if kernel.trips:
        total += sum(of(loop) for loop in found if loop.depth == 1) / (
            kernel.elements * kernel.trips
        )
    return total


def compile_one(operator: str, name: str, cc: int) -> Compiled:
    import triton

    kernel = kernels_of(operator)[name]
    made, shared = assembly(kernel, cc)
    registers, stack = resources(made["cubin"])
    found = loops(made["cubin"])
    programs = programs_on_sm(kernel, registers, shared)
    warps = max(1, programs * kernel.warps / 4)  # on a scheduler
    return Compiled(
        operator,
        name,
        cc,
        triton.__version__,
        registers,
        stack,
        shared,
        programs,
        count(kernel, found, lambda loop: loop.instructions),
        count(kernel, found, lambda loop: max(loop.slots, loop.cycles / warps)),
        count(kernel, found, lambda loop: loop.bytes),
        found,
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
        fields = json.loads(line)
        yield Compiled(**fields | {"loops": [Loop(**loop) for loop in fields["loops"]]})
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
