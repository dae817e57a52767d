"""Pretrain Mamba language models with FSDP. README.md says how to use it and what lies where.

From Python: `load` a model, let it `generate`, `evaluate` it, read training `batches`; README.md shows them.
"""

from importlib import import_module

__version__ = "1.0"
PUBLIC = {
    "load": "verbs.loading",
    "generate": "verbs.generate",
    "evaluate": "verbs.evaluate",
    "batches": "data.selection",
}


def __getattr__(name: str) -> object:  # late: importing torch takes seconds
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
