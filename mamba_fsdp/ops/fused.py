"""What the fused forms share: whether mamba-ssm and causal-conv1d load, and how these take documents."""

import importlib
from collections.abc import Callable

import torch

from mamba_fsdp.errors import first_line


def need(*packages: str) -> Callable[[], str | None]:
    """The why_unavailable() of a form that calls these CUDA libraries: what keeps them from loading."""
    def why_unavailable() -> str | None:
        for package in packages:
            try:
                importlib.import_module(package)
            except Exception as error:  # a build for another PyTorch fails in many ways
                return f"{package} does not load ({type(error).__name__}: {first_line(error)})"
        return None
    return why_unavailable


def seq_idx(documents: torch.Tensor | None) -> torch.Tensor | None:
    """`documents` as the libraries take it: int32, and 0 where an initial state continues."""
    return None if documents is None else (documents - documents[:, :1]).to(torch.int32).contiguous()
