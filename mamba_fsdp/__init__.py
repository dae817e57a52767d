"""Pretrains Mamba language models with FSDP. README.md explains how to use this package, and docs/architecture.md
describes its modules.

The Python interface consists of nine functions. `tokenize` converts text, `train` trains a model, and `load` loads one.
`generate`, `evaluate` and `export` use a model. `inspect` describes a file or folder, `report` describes runs, and
`batches` reads training data. README.md has examples. A mistake in the arguments raises mamba_fsdp.errors.UserError.
"""

import os
from importlib import import_module

# GOMP_SPINCOUNT sets how often an OpenMP thread polls before it sleeps while it waits for other threads; 30000 polls
# take about a millisecond. Without polling, a step on a CPU takes up to twice as long. Longer polling takes the cores
# from other programs (measured at commit 947f88a). Torch reads GOMP_SPINCOUNT when it is imported, and ranks inherit it.
# If the user has set GOMP_SPINCOUNT or OMP_WAIT_POLICY, nothing is changed.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")

__version__ = "1.0"
PUBLIC = {  # {name of a public function: its module}
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
__all__ = [*PUBLIC]  # help() lists these names


def __getattr__(name: str) -> object:
    """Imports a public function at its first use, because importing torch takes seconds."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    command_line = import_module(f"{__name__}.command_line")
    function = getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
    globals()[name] = command_line.python_function(function, f"{__name__}.{name}")
    return globals()[name]


def __dir__() -> "list[str]":
    return [*PUBLIC, "__doc__", "__version__"]
