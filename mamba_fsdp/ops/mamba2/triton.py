"""Computes the Mamba-2 mixer by the Triton backends of convolution, SSD and the gated norm. It keeps in_proj's output
and the norm's scale. The backward pass recomputes the norm's output, and SSD's output together with SSD's states."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from mamba_fsdp.ops import triton
from mamba_fsdp.ops.conv.triton import conv_backward, conv_forward
from mamba_fsdp.ops.norm.triton import gated_norm, gated_norm_backward
from mamba_fsdp.ops.ssd.triton import Inputs, ssd_backward, ssd_forward


class Mixer(NamedTuple):
    """The tensors of the mixer, as in ops/mamba2."""

    zxbcdt: Tensor
    conv_weight: Tensor
    conv_bias: Tensor
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    norm: Tensor
    out_proj: Tensor
    seq_idx: Tensor | None


def _parts(zxbcdt: Tensor, conv_weight: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Returns z, [x, B, C] and dt, as views."""
    return zxbcdt.tensor_split([-conv_weight.shape[0] - heads, -heads], -1)


def _split(xbc: Tensor, d_inner: int, heads: int, groups: int) -> tuple[Tensor, Tensor]:
    """Returns two views of `xbc`: SSD's x, and B and C in one tensor (batch, length, 2, groups, d_state)."""
    rows = xbc.shape[:2]
    x, BC = xbc.tensor_split([d_inner], -1)
    d_state = BC.shape[2] // (2 * groups)
    return x.view(*rows, heads, d_inner // heads), BC.view(*rows, 2, groups, d_state)


def _convolve(mixer: Mixer, groups: int) -> tuple[Tensor, Tensor, Inputs]:
    """Returns z, [x, B, C] before the convolution, and SSD's inputs."""
    zxbcdt, conv_weight, conv_bias, dt_bias, A_log, D, _, _, seq_idx = mixer
    z, xbc, dt = _parts(zxbcdt, conv_weight, A_log.numel())
    convolved = conv_forward(xbc, conv_weight, conv_bias, seq_idx)
    x, BC = _split(convolved, z.shape[2], A_log.numel(), groups)
    B, C = BC.unbind(2)
    return z, xbc, Inputs(x, dt, A_log, B, C, D, dt_bias, seq_idx, None, a_is_log=True)


def _forward(*tensors_and_sizes: Any) -> tuple[Tensor, Tensor]:
    *tensors, eps, groups, _, _ = tensors_and_sizes
    mixer = Mixer(*tensors)
    z, _, inputs = _convolve(mixer, groups)
    y, _ = ssd_forward(inputs)
    normed, scale = gated_norm(y.flatten(2), z, mixer.norm, eps, z.shape[2] // groups)
    return F.linear(normed, mixer.out_proj), scale


def _backward(grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    *kept, scale = tensors
    mixer = Mixer(*kept)
    zxbcdt, conv_weight, conv_bias, _, A_log, _, norm, out_proj, seq_idx = mixer
    z, xbc, inputs = _convolve(mixer, scale.shape[1])
    y, remade = ssd_forward(inputs, remake=True)
    grad_zxbcdt = zxbcdt.new_empty(zxbcdt.shape)
    grad_z, grad_xbc, grad_dt = _parts(grad_zxbcdt, conv_weight, A_log.numel())
    normed = z.new_empty(z.shape)
    grad_normed = grad @ out_proj
    grad_y, _, grad_norm = gated_norm_backward(
        grad_normed, y.flatten(2), z, norm, scale, grad_z=grad_z, normed=normed
    )
    grad_convolved = xbc.new_empty(xbc.shape)
    grad_x, grad_BC = _split(grad_convolved, z.shape[2], A_log.numel(), scale.shape[1])
    _, _, grad_A, _, _, grad_D, grad_dt_bias, _ = ssd_backward(
        grad_y.view(y.shape),
        None,
        inputs,
        remade=remade,
        results=(grad_x, grad_dt, grad_BC),
    )
    _, *grad_conv = conv_backward(grad_convolved, xbc, conv_weight, conv_bias, seq_idx, grad_xbc)
    grad_out = triton.weight_gradient(grad, normed)
    return grad_zxbcdt, *grad_conv, grad_dt_bias, grad_A, grad_D, grad_norm, grad_out


_mixer = triton.differentiable(
    "mamba2",
    "zxbcdt conv_weight conv_bias dt_bias A_log D norm_weight out_proj seq_idx?",
    "float eps, int groups, int headdim, int chunk_size",
    1,
    1,
    _forward,
    _backward,
)


def mamba2_mixer(*inputs: Tensor | float | None) -> Tensor:
    return _mixer(*inputs)[0]
