"""Defines conventions of the whole program: the label that the loss ignores, the names of dtypes, and which torch is the pinned
one."""

import torch

IGNORED_LABEL = -100  # of a token that the loss leaves out, as in torch.nn.functional.cross_entropy
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # as settings and options name them
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def compute_type(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype that an operator calculates in: float32, or float64 for float64 input."""
    return torch.promote_types(tensor.dtype, torch.float32)


def is_torch_2_2() -> bool:
    """Returns whether this is the torch of the pinned stack, which has Triton 2.2 too."""
    return torch.__version__.startswith("2.2.")
