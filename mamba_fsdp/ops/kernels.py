"""Which form of the operators a run uses: portable (plain PyTorch), native (C, on a CPU) or fused (CUDA libraries)."""

import importlib

import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.ops import native

FUSED_PACKAGES = ("mamba_ssm", "causal_conv1d")
WHAT = {
    "native": "(C for Mamba-1's scan and convolution, plain PyTorch for the rest)",
    "fused": "(mamba-ssm, causal-conv1d and PyTorch's attention; where documents are kept apart, Mamba-1 runs its portable "
             "scan, because mamba-ssm's takes no boundaries)",
}

_explanation = "kernels: not chosen yet"


def compute_type(tensor):
    """The dtype an operator calculates in: float32, or float64 for float64 input."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _why_no_fused():
    """None when the CUDA libraries load, else the reason."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    for package in FUSED_PACKAGES:
        try:
            importlib.import_module(package)
        except Exception as error:  # a build for another PyTorch fails in many ways
            return f"{package} does not load ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    return None


def resolve(setting, device_type):
    """The form to use for `setting` (auto, portable or fused) on `device_type` (cpu or cuda): portable, native or fused.

    Raises UserError when fused is asked for and can't be had.
    """
    global _explanation
    assert setting in ("auto", "portable", "fused") and device_type in ("cpu", "cuda"), (setting, device_type)
    if setting == "portable":
        _explanation = "kernels: portable (plain PyTorch), as set"
        return "portable"
    best, why_not = ("fused", _why_no_fused()) if device_type == "cuda" else ("native", native.why_unavailable())
    if why_not and setting == "fused":
        raise UserError(f"--kernels=fused: {why_not}; mend that, or use --kernels=auto")
    _explanation = f"kernels: portable (plain PyTorch), because {why_not}" if why_not else f"kernels: {best} {WHAT[best]}"
    return "portable" if why_not else best


def explain():
    """One line for the log: what the last resolve() chose and why."""
    return _explanation
