"""Launches of kernels as a Triton of choice compiles them for a GPU of choice, run on the CPU by ptx.py.

    with compiled("2.2.0", 80, triton_kernels):
        selective_scan(...)  # by the kernels of that module

A launch decides as Triton's does what the compiler knows: of_launch in benchmarks/kernels/compiler.py.
"""

import inspect
import json
import subprocess
import sys
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from benchmarks.kernels import Kernel
from benchmarks.kernels.compiler import PROJECT, assembly, environment, of_launch
from benchmarks.kernels.install import triton_folder
from mamba_fsdp.ops import triton as glue


@lru_cache
def compiler(version):
    """A process with that Triton, which answers a line with a line."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.compiled"],
        env=environment(triton_folder(version)),
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@lru_cache
def program(version, request):
    from ptx import Program

    process = compiler(version)
    process.stdin.write(request + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline() or '{"error": "the compiler ended"}')
    assert "error" not in answer, f"Triton {version}: {answer['error']}"
    return Program(answer["ptx"]), answer["shared"]


class Compiled:
    """Stands in for a kernel: launched by [grid](arguments, constants, num_warps)."""

    def __init__(self, kernel, module, name, version, cc):
        self.parameters = inspect.signature(kernel.fn).parameters
        self.request = dict(module=module, name=name, cc=cc)
        self.version = version

    def __getitem__(self, grid):
        return lambda *positional, **named: self.launch(grid, *positional, **named)

    def launch(self, grid, *positional, num_warps=4, num_stages=3, **named):
        unknown = named.keys() - self.parameters.keys()
        assert not unknown, f"a GPU's launch would refuse {unknown}, which the interpreter ignores"
        values = {name: parameter.default for name, parameter in self.parameters.items()}
        values |= dict(zip(self.parameters, positional)) | named
        known = of_launch(self.parameters, values)
        grid = grid(values) if callable(grid) else grid
        code, shared = program(
            self.version,
            json.dumps(self.request | known | dict(warps=num_warps, stages=num_stages)),
        )
        code.launch(grid, num_warps, [values[name] for name in known["signature"]], shared)


@contextmanager
def compiled(version, cc, *modules):
    """Kernels of these modules run as that Triton compiles them for that architecture."""
    from triton.runtime.interpreter import InterpretedFunction

    try:
        compiler(version)
    except OSError as why:
        import pytest

        pytest.skip(str(why))
    kernels = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, InterpretedFunction)
    ]
    patches = [
        patch.object(module, name, Compiled(value, module.__name__, name, version, cc))
        for module, name, value in kernels
    ]
    patches.append(patch.object(glue, "is_version_2", lambda: version.startswith("2.")))
    with patch.object(glue, "interpreted", lambda: False):
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


def main():
    sys.path.append(str(Path(__file__).parent))
    for line in sys.stdin:
        request = json.loads(line)
        module = request.pop("module")
        cc = request.pop("cc")
        stages = {cc: request.pop("stages")}
        name = request["name"]
        try:
            kernel = Kernel(
                function=lambda m=module, n=name: getattr(import_module(m), n),
                elements=1,
                stages=stages,
                **request,
            )
            made, shared = assembly(kernel, cc)
            answer = {"ptx": made["ptx"], "shared": shared}
        except Exception as error:
            while error.__cause__:  # Triton tells the line outside first
                error = error.__cause__
            answer = {"error": f"{request}: {type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
