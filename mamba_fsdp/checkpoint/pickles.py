"""Other programs' pickles without their programs: tensors and plain values come out, all else stands still.

A pickle names classes and functions, and whoever loads it calls them. Here nothing that it names is looked up: of the
libraries that trainers save things of, an empty class stands for each, and any other name is refused.
"""

import pickle
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

LIBRARIES = {"torch", "numpy", "datetime", "collections", "pathlib", "composer", "omegaconf", "_codecs"}
REAL = {("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): tuple,
        ("torch._utils", "_rebuild_tensor_v2"): lambda *parts: torch._utils._rebuild_tensor_v2(*parts),
        ("torch._utils", "_rebuild_parameter"): lambda tensor, *rest: tensor}


class Inert:
    """Stands for an object of another program's class, with what would be its attributes."""

    def __init__(self, *arguments: Any, **more: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})

    append = extend = add = __setitem__ = __init__


class Unpickler(pickle.Unpickler):
    """Raises UnpicklingError for names of other libraries than LIBRARIES: os.system is one."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] not in LIBRARIES and name != "set":
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of weights")
        # Each is a class of its own, so that a pickle can change no other's.
        return REAL.get((module, name)) or type(name, (Inert,), {})


def read_plain(path: Path) -> Any:
    """The content of a pickle without tensors. Raises whatever a damaged one runs into."""
    with open(path, "rb") as file:
        return Unpickler(file).load()


def read_tensors(path: Path) -> Any:
    """The content of a zip archive of torch.save, its tensors mapped. Raises UnpicklingError, OSError, RuntimeError."""
    ours = types.SimpleNamespace(Unpickler=Unpickler, __name__=__name__)
    try:
        return torch.load(str(path), "cpu", pickle_module=ours, weights_only=False, mmap=True)
    except (TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        raise pickle.UnpicklingError(f"its pickle is broken ({type(error).__name__}: {error})") from None
