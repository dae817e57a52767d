"""Launches kernels of Triton 2.2 in 8 us of CPU time. The launcher of Triton 2.2 takes 95 us, mostly to find the kernel
that it has compiled for the types of the arguments. The launcher of Triton 3 is faster."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

NUMBERS = frozenset((int, bool, float, type(None)))


class QuickKernel(JITFunction[Any]):
    """A kernel of Triton 2.2. Triton itself compiles and launches it the first time that arguments have certain types;
    later launches call the compiled kernel directly."""

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        super().__init__(function, **options)
        self.names = [parameter.name for parameter in self.params]
        self.defaults = [parameter.default for parameter in self.params]
        self.runtime_names = [
            parameter.name for parameter in self.params if not parameter.is_constexpr
        ]
        self.launches: dict[tuple[Any, ...], Callable[..., None]] = {}

    def run(self, *values: Any, grid: tuple[int, ...], **named: Any) -> None:
        device = torch._C._cuda_getDevice()
        arguments = [*values, *named.values()]
        # The key contains everything about the arguments that Triton compiles for. It contains the values of
        # numbers, because they are the same in most steps.
        key = [device, len(values), *named, *map(type, arguments)]
        for place, value in enumerate(arguments):
            if type(value) in NUMBERS:
                key.append(value)
            else:
                address = value.data_ptr()
                arguments[place] = address
                key += (value.dtype, value.is_cuda, address % 16)
        specialisation = tuple(key)
        launch = self.launches.get(specialisation)
        if launch:
            stream = torch._C._cuda_getCurrentRawStream(device)
            launch(grid, stream, arguments + self.defaults)
            return
        compiled = super().run(*values, grid=grid, **named)
        # `compiled` is None if a compilation hook refused. Kernels with TMA descriptors are always launched by Triton.
        if compiled and not getattr(compiled, "tensormaps_info", ()):
            names = [*self.names[: len(values)], *named, *self.names]
            select = itemgetter(*map(names.index, self.runtime_names))
            self.launches[specialisation] = _launcher(compiled, select)


def _launcher(compiled: CompiledKernel, select: Callable[[list[Any]], Any]) -> Callable[..., None]:
    """Returns a function that launches the kernel as Triton does, and calls the launch hooks.

    select: a function that returns the parameters of the kernel, from a list of the arguments and the defaults."""
    launch = compiled.c_wrapper
    shape = (compiled.num_warps, compiled.num_ctas, *compiled.clusterDims, compiled.shared)
    function = compiled.cu_function

    def launch_compiled(grid: tuple[int, ...], stream: int, arguments: list[Any]) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        hooks = (CompiledKernel.launch_enter_hook, CompiledKernel.launch_exit_hook)
        launch(x, y, z, *shape, stream, function, *hooks, compiled, *select(arguments))

    return launch_compiled
