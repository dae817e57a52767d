"""Launches kernels of Triton 2.2 in 6 us of the host's time. Its own launcher takes 95, most of them to find the kernel
that it has compiled for such arguments. Triton 3 is faster by itself."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

NUMBERS = frozenset((int, bool, float, type(None)))


class Form(NamedTuple):
    """What the launches share that name the same arguments, of the same types. Arguments are known by their places."""

    tensors: list[int]
    numbers: Callable[[list[Any]], Any]
    defaults: list[Any]  # of the parameters that are not named
    taken: Callable[[list[Any]], tuple[Any, ...]]  # by the compiled kernel, of arguments and defaults
    launches: dict[tuple[Any, ...], Callable[..., None]]


class QuickKernel(JITFunction[Any]):
    """A kernel of Triton 2.2. The first launch with such arguments is Triton's own, which compiles it; later ones go to
    the compiled kernel."""

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self.forms: dict[tuple[Any, ...], Form] = {}

    def run(self, *values: Any, grid: tuple[int, ...], **named: Any) -> None:
        device = torch._C._cuda_getDevice()
        arguments = [*values, *named.values()]
        kinds = (len(values), *named, *map(type, arguments))
        form = self.forms.get(kinds)
        if form is None:
            form = self.forms[kinds] = self.form_of(arguments, list(named))
        # All that Triton asks of arguments before it compiles; of numbers, which are the same in most steps, more.
        key = [device, form.numbers(arguments)]
        for place in form.tensors:
            tensor = arguments[place]
            address = tensor.data_ptr()
            arguments[place] = address
            key += (tensor.dtype, tensor.is_cuda, address % 16)
        specialisation = tuple(key)
        launch = form.launches.get(specialisation)
        if launch:
            stream = torch._C._cuda_getCurrentRawStream(device)
            launch(grid, stream, form.taken(arguments + form.defaults))
            return
        compiled = super().run(*values, grid=grid, **named)
        # None: a hook on compilations has refused. Descriptors of TMA are left to Triton.
        if compiled and not getattr(compiled, "tensormaps_info", ()):
            form.launches[specialisation] = _launcher(compiled)

    def form_of(self, arguments: list[Any], names: list[str]) -> Form:
        """Returns the form of arguments, the last of which have these names."""
        parameters = {parameter.name: parameter for parameter in self.params}
        names = [*parameters][: len(arguments) - len(names)] + names
        absent = [name for name in parameters if name not in names]
        places = {name: place for place, name in enumerate(names + absent)}
        are_numbers = [type(argument) in NUMBERS for argument in arguments]
        taken = [name for name in parameters if not parameters[name].is_constexpr]
        return Form(
            tensors=[place for place, is_number in enumerate(are_numbers) if not is_number],
            numbers=itemgetter(*(place for place, is_one in enumerate(are_numbers) if is_one)),
            defaults=[parameters[name].default for name in absent],
            taken=itemgetter(*(places[name] for name in taken)),
            launches={},
        )


def _launcher(compiled: CompiledKernel) -> Callable[..., None]:
    """Returns a function that launches the kernel as Triton does, with Triton's hooks on launches."""
    launch = compiled.c_wrapper
    shape = (compiled.num_warps, compiled.num_ctas, *compiled.clusterDims, compiled.shared)
    function = compiled.cu_function

    def launch_compiled(grid: tuple[int, ...], stream: int, arguments: tuple[Any, ...]) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        hooks = (CompiledKernel.launch_enter_hook, CompiledKernel.launch_exit_hook)
        launch(x, y, z, *shape, stream, function, *hooks, compiled, *arguments)

    return launch_compiled
