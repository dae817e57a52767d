"""Pretrains Mamba language models with FSDP. README.md says how to use it, docs/architecture.md what
lies where.

From Python: `tokenize` text, `train` a model or `load` one, let it `generate`, `evaluate` it, `export` it, `inspect` any
of these files, `report` on runs, read training `batches`; README.md shows them. A mistake in the arguments is a
mamba_fsdp.errors.UserError.
"""

import os
from importlib import import_module

# How long a thread spins while it waits for the others of a step, before it sleeps: about a millisecond. Without spinning
# a step on a CPU takes up to twice as long; longer spinning takes the cores from other programs
# (measured at 947f88a). Torch reads it when it is imported, ranks inherit it, and the user's own choice stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")

__version__ = "1.0"
PUBLIC = {  # name of a function: its module
    "tokenize": "verbs.tokenize",
    "train": "launch.in_process",
    "load": "inference.loading",
    "generate": "inference.generate",
    "evaluate": "inference.evaluate",
    "batches": "data.selection",
    "inspect": "verbs.inspect",
    "report": "verbs.report",
    "export": "verbs.export",
}
__all__ = [*PUBLIC]  # help() shows them


def __getattr__(name: str) -> object:  # late: importing torch takes seconds
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    command_line = import_module(f"{__name__}.command_line")
    function = getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
    globals()[name] = command_line.python_function(function, f"{__name__}.{name}")
    return globals()[name]


def __dir__() -> "list[str]":
    return [*PUBLIC, "__doc__", "__version__"]
