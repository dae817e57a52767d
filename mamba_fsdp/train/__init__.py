"""Train from Python: mamba_fsdp.train(num_steps=100, dataset_path="data/mine") returns the run folder.

The package holds the training loop and what it needs: schedule, optimiser, stopping, metrics.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


class Room(ModuleType):
    """A package that is a function of the library too: to import what lies in it must not take that away."""

    def __call__(self, config: str | None = None, **settings: Any) -> Path:
        """See mamba_fsdp/verbs/train.py."""
        return import_module("mamba_fsdp.verbs.train").train(config, **settings)


sys.modules[__name__].__class__ = Room
