"""Defines conventions of the whole program: the label that the loss ignores, the names of dtypes, and the version of
torch in the pinned environment."""

import torch

IGNORED_LABEL = -100  # the default ignore_index of torch.nn.functional.cross_entropy
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # {name of a dtype in settings and options: dtype}
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def compute_type(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which an operator computes: float32, or float64 if the input is float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def is_torch_2_2() -> bool:
    """Returns whether torch is version 2.2, the version in the pinned environment. That environment also has Triton 2.2."""
    return torch.__version__.startswith("2.2.")
