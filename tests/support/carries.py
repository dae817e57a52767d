"""Finds variables of our kernels that Triton 3 wrongly treats as constant in a loop. Uses the Triton on the path:

    python -m tests.support.carries    prints a JSON object

If a variable has the same tensor at the start and at the end of an iteration, Triton does not carry it to the next
iteration. That is wrong if the loop assigns the tensor of another variable to it, and the other variable changes.
"""

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from unittest import mock

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, code_generator
from triton.compiler.compiler import make_backend

from benchmarks.kernels.launches import launches_on
from mamba_fsdp.ops import triton as glue

TOY = """
import triton
import triton.language as tl

@triton.jit
def toy(x, count):
    new = tl.load(x)
    old = new
    for k in range(0, count):
        tl.store(x + k, old)
        old = new
        new = tl.load(x + k)
"""


class Check:
    """Compares the variables at the start and at the end of the first iteration of each loop."""

    def __init__(self):
        self.compared = 0
        self.suspicious = set()

    def find_carries(self, generator, node, liveins, ignore=frozenset()):
        """Replaces CodeGenerator._find_carries and returns the same result."""
        block = generator.builder.create_block()
        generator.builder.set_insertion_point_to_start(block)
        generator.scf_stack.append(node)
        generator.visit_compound_statement(node.body)
        generator.scf_stack.pop()
        block.erase()
        names = []
        handles = []
        types = []
        for name, value in liveins.items():
            if name in ignore or not code_generator._is_triton_value(value):
                continue
            before = code_generator.flatten_values_to_ir([value])
            after = code_generator.flatten_values_to_ir([generator.lscope[name]])
            self.compared += 1
            if before != after:
                names.append(name)
                types.append(value.type)
                handles.extend(before)
            elif name in generator.local_defs:
                self.suspicious.add(name)
        generator.lscope = liveins.copy()
        generator.local_defs = {}
        return names, handles, types


def check(function, signature, constants, aligned=(), **options):
    """Runs Triton's front end on a kernel, and returns the Check of its loops."""
    names = list(function.arg_names)
    source = ASTSource(
        fn=function,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    found = Check()
    with mock.patch.object(
        code_generator.CodeGenerator,
        "_find_carries",
        lambda generator, *given, **named: found.find_carries(generator, *given, **named),
    ):
        helpers = backend.get_codegen_implementation(parsed), backend.get_module_map()
        source.make_ir(target, parsed, *helpers, context)
    return found


def main():
    with tempfile.TemporaryDirectory() as folder, mock.patch("sys.path", [folder, *sys.path]):
        Path(folder, "toy_kernel.py").write_text(TOY)
        toy = import_module("toy_kernel").toy
        of_toy = check(toy, {"x": "*fp32", "count": "i32"}, {})
    report = {"toy": sorted(of_toy.suspicious), "launches": 0, "compared": 0, "suspicious": []}
    with mock.patch.object(glue, "is_version_2", lambda: False):
        for launch in launches_on(90) + launches_on(90, "fp32"):
            module = import_module(f"mamba_fsdp.ops.{launch.operator}.triton_kernels")
            found = check(
                getattr(module, launch.kernel),
                launch.signature,
                launch.constants,
                launch.aligned,
                num_warps=launch.warps,
                num_stages=launch.stages,
            )
            report["launches"] += 1
            report["compared"] += found.compared
            report["suspicious"] += [f"{launch.title}: {name}" for name in found.suspicious]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
