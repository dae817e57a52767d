"""The selective scan by mamba-ssm."""

import torch

from mamba_fsdp.ops import fused

why_unavailable = fused.need("mamba_ssm")
VARIES = "mamba-ssm's scan adds its gradients with atomics"


def takes(use):
    return "mamba-ssm's scan keeps no documents apart" if use.documents else None


def selective_scan(u, dt, A, B, C, D, z, dt_bias, documents, initial_state, return_last_state):
    assert documents is None and initial_state is None, "mamba-ssm's scan has no boundaries and no initial state"
    assert not (return_last_state and torch.is_grad_enabled()), "mamba-ssm's scan has no gradient through its state"
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    u, dt, B, C, z = (None if value is None else value.transpose(1, 2).contiguous() for value in (u, dt, B, C, z))
    A, D, dt_bias = (None if value is None else value.float() for value in (A, D, dt_bias))
    out = selective_scan_fn(u, dt, A, B, C, D, z, dt_bias, delta_softplus=True, return_last_state=return_last_state)
    return (out[0].transpose(1, 2), out[1]) if return_last_state else out.transpose(1, 2)
