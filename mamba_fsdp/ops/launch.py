"""Launches Triton's kernels with little of the host's time. Triton 2.2 takes 100 us for each launch, most of them to find
the kernel that it has compiled for such arguments; Triton 3 is faster by itself."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, get_cuda_stream

from mamba_fsdp.ops.triton import interpreted, is_version_2

OPTIONS = ("num_warps", "num_stages")


class QuickKernel(JITFunction[Any]):
    """A kernel of Triton 2.2. The first launch of a specialisation is Triton's own, which compiles it; later ones go to
    the compiled kernel."""

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        parameters = self.signature.parameters.values()
        self.names = tuple(parameter.name for parameter in parameters)
        self.defaults = {parameter.name: parameter.default for parameter in parameters}
        constants = {self.names[index] for index in self.constexprs}
        self.constants = constants.union(OPTIONS)
        self.passed = itemgetter(*(name for name in self.names if name not in constants))
        self.specialised: dict[tuple[Any, ...], CompiledKernel] = {}

    def run(self, *values: Any, grid: tuple[int, ...], **named: Any) -> Any:
        device = torch.cuda.current_device()
        given = dict(zip(self.names, values))
        given.update(named)
        arguments = self.defaults | given
        key: list[Any] = [device, *given]
        # What Triton asks of arguments before it compiles; a number beyond 32 bits counts as a whole.
        for name, value in given.items():
            if name in self.constants:
                key.append(value)
            elif isinstance(value, Tensor):
                address = value.data_ptr()
                arguments[name] = address
                key += (value.dtype, value.is_cuda, address % 16 == 0)
            elif not isinstance(value, int):
                key.append(type(value))
            elif -(2**31) <= value < 2**31:
                key += (type(value), value % 16 == 0, value % 8 == 0, value == 1)
            else:
                key.append(value)
        specialisation = tuple(key)
        compiled = self.specialised.get(specialisation)
        if compiled is None:
            compiled = super().run(*values, grid=grid, **named)
            if compiled is not None:
                self.specialised[specialisation] = compiled
            return compiled
        compiled[(*grid, 1, 1)](*self.passed(arguments), stream=get_cuda_stream(device))
        return compiled


def kernel(function: Callable[..., None]) -> Any:
    """Decorates a kernel that is launched, as triton.jit does."""
    if is_version_2() and not interpreted():
        return QuickKernel(function)
    return triton.jit(function)
