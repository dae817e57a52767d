"""Launches kernels of Triton 2.2 in 12 us of the host's time. Its own launcher takes 95, most of them to find the kernel
that it has compiled for such arguments. Triton 3 is faster by itself."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, get_cuda_stream

class Form(NamedTuple):
    """Calls that give the same parameters, by arguments of the same types. Lists are of places among the arguments, which
    the defaults of all parameters follow."""

    tensors: list[int]
    others: list[int]
    passed: list[int]  # what the compiled kernel takes
    launches: dict[tuple[Any, ...], Callable[..., None]]  # by what Triton compiles for


class QuickKernel(JITFunction[Any]):
    """A kernel of Triton 2.2. The first launch with such arguments is Triton's own, which compiles it; later ones go to
    the compiled kernel."""

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self.defaults = [parameter.default for parameter in self.signature.parameters.values()]
        self.forms: dict[tuple[Any, ...], Form] = {}

    def run(self, *values: Any, grid: tuple[int, ...], **named: Any) -> None:
        device = torch.cuda.current_device()
        given = [*values, *named.values()]
        types = (*named, *map(type, given))
        form = self.forms.get(types)
        if form is None:
            form = self.forms[types] = self.form_of(given, named)
        # All that Triton asks of arguments before it compiles; of numbers, which are the same in most steps, more.
        key: list[Any] = [device, *[given[place] for place in form.others]]
        for place in form.tensors:
            tensor = given[place]
            address = tensor.data_ptr()
            given[place] = address
            key += (tensor.dtype, tensor.is_cuda, address % 16)
        specialisation = tuple(key)
        launch = form.launches.get(specialisation)
        if launch is None:
            compiled = super().run(*values, grid=grid, **named)
            # None: a hook on compilations has refused. Descriptors of TMA are left to Triton.
            if compiled is not None and not getattr(compiled, "tensormaps_info", ()):
                form.launches[specialisation] = _launcher(compiled)
            return
        given += self.defaults
        launch(grid, get_cuda_stream(device), [given[place] for place in form.passed])

    def form_of(self, given: list[Any], named: Mapping[str, Any]) -> Form:
        parameters = [parameter.name for parameter in self.params]
        names = [*parameters[: len(given) - len(named)], *named]
        places = {name: len(given) + index for index, name in enumerate(parameters)}
        places |= {name: index for index, name in enumerate(names)}
        tensors = [index for index, value in enumerate(given) if isinstance(value, Tensor)]
        others = [index for index in range(len(given)) if index not in tensors]
        passed = [places[parameter.name] for parameter in self.params if not parameter.is_constexpr]
        return Form(tensors, others, passed, {})


def _launcher(compiled: CompiledKernel) -> Callable[..., None]:
    """Returns a function that launches the kernel as Triton does, with Triton's hooks on launches."""
    launch = compiled.c_wrapper
    shape = (compiled.num_warps, compiled.num_ctas, *compiled.clusterDims, compiled.shared)
    function = compiled.cu_function

    def launch_compiled(grid: tuple[int, ...], stream: int, arguments: list[Any]) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        hooks = (CompiledKernel.launch_enter_hook, CompiledKernel.launch_exit_hook)
        launch(x, y, z, *shape, stream, function, *hooks, compiled, *arguments)

    return launch_compiled
