"""torch.compiler.disable without its seconds of imports where nothing is compiled."""

import sys
from collections.abc import Callable
from typing import Any

import torch

waiting: list[Any] = []


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for functions of a module that are called by their global name."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.disable(function)
    waiting.append(function)
    return function


def settle() -> None:
    """To be called before anything is compiled."""
    while waiting:
        function = waiting.pop()
        function.__globals__[function.__name__] = torch.compiler.disable(function)
