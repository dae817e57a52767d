"""Compares our kernels with forms that counts and models did not choose (RESULTS.md): milliseconds of a layer, forward
and backward, each form in turn, twice."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.values import TRITON, uses_of
from mamba_fsdp.errors import first_line
from mamba_fsdp.ops.backends import resolve_backends

ROUNDS = 2
AS_IT_IS = "as it is"
TABLES = ("SWEEP", "NEAR", "FAR")
# Of an operator's module: a number's other value, or what is other in each entry of a table.
FORMS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "scan": {
        AS_IT_IS: {},
        "half as many programs if rows are cut": {"FILL": 512},
        "twice as many": {"FILL": 2048},
        "a state kept of every 32 positions": {"CHUNK": 32},
    },
    "ssd": {
        AS_IT_IS: {},
        "nothing copied ahead": dict.fromkeys(TABLES, {"num_stages": 1}),
        "the sweeps copy nothing ahead": {"SWEEP": {"num_stages": 1}},
        "all copy ahead, on Blackwell too": dict.fromkeys(TABLES, {"num_stages": 2}),
        "far of 32 positions": {"FAR": {"ROWS": 32}},
        "no wgmma in near": {"NEAR": {"num_warps": 2}},
    },
}


@contextmanager
def form(operator: str, changes: Mapping[str, Any]) -> Iterator[None]:
    module = import_module(f"mamba_fsdp.ops.{operator}.triton")
    with ExitStack() as changed:
        for name, other in changes.items():
            if isinstance(other, dict):
                other = {cc: entry | other for cc, entry in getattr(module, name).items()}
            changed.enter_context(patch.object(module, name, other))
        yield


def measure(device: torch.device, small: bool) -> Iterator[dict[str, object]]:
    """Yields a row per form, in the first model that has the operator."""
    left = dict(FORMS)
    for model, use in uses_of(device, small):
        choice = resolve_backends("auto", device.type, use.uses, preferred=TRITON)
        for operator in [each for each in left if each in use.uses]:
            forms = left.pop(operator)
            taken: dict[str, list[float]] = {title: [] for title in forms}
            notes = dict.fromkeys(forms, "")
            for _ in range(ROUNDS):
                for title, changes in forms.items():
                    try:
                        with form(operator, changes):
                            taken[title].append(use.layers.milliseconds(choice.backends))
                    except Exception as error:  # such as a GPU's lack of shared memory
                        notes[title] = f"{type(error).__name__}: {first_line(error)}"
            for title, times in taken.items():
                row: dict[str, object] = {"model": model, "operator": operator, "form": title}
                row |= {"ms": "-", "x as it is": "-", "note": notes[title]}
                if times:
                    best = min(times)
                    row["ms"] = f"{best:.2f}"
                    if taken[AS_IT_IS]:
                        row["x as it is"] = f"{min(taken[AS_IT_IS]) / best:.2f}"
                yield row
