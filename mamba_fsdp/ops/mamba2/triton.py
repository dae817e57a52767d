"""The Mamba-2 mixer of the Triton backends of its parts. Of each token it keeps in_proj's output and the norm's scale; the
backward pass has the norm's output again on the way, and SSD's from the sweep that makes its states again."""

import torch
import torch.nn.functional as F

from mamba_fsdp.ops import triton
from mamba_fsdp.ops.conv.triton import conv_backward, conv_forward
from mamba_fsdp.ops.norm.triton import norm_backward, norm_forward
from mamba_fsdp.ops.ssd.triton import ssd_backward, ssd_forward


def _convolve(zxbcdt, conv_weight, conv_bias, dt_bias, A, D, seq_idx, groups):
    """z, [x, B, C] before the convolution, and SSD's inputs."""
    z, xbc, dt = zxbcdt.tensor_split([-len(conv_weight) - len(A), -len(A)], -1)
    x, bc = conv_forward(xbc, conv_weight, conv_bias, seq_idx).tensor_split([z.shape[2]], -1)
    B, C = bc.unflatten(2, (2, groups, -1)).unbind(2)
    return z, xbc, (x.unflatten(2, (len(A), -1)), dt, A, B, C, D, dt_bias, seq_idx, None)


def _forward(
    zxbcdt, conv_weight, conv_bias, dt_bias, A, D, norm_weight, out_proj, seq_idx, eps, groups, *_
):
    z, _, inputs = _convolve(zxbcdt, conv_weight, conv_bias, dt_bias, A, D, seq_idx, groups)
    normed, _, scale = norm_forward(
        ssd_forward(*inputs)[0].flatten(2), None, z, norm_weight, eps, groups, z.dtype
    )
    return F.linear(normed, out_proj.to(z.dtype)), scale


def _backward(
    grad, zxbcdt, conv_weight, conv_bias, dt_bias, A, D, norm_weight, out_proj, seq_idx, scale
):
    z, xbc, inputs = _convolve(
        zxbcdt, conv_weight, conv_bias, dt_bias, A, D, seq_idx, scale.shape[2]
    )
    y, entering = ssd_forward(*inputs, remake=True)
    grads = zxbcdt.new_empty(zxbcdt.shape)
    normed = z.new_empty(z.shape)
    of_z, of_xbc, of_dt = grads.tensor_split([-len(conv_weight) - len(A), -len(A)], -1)

    of_y, _, of_norm = norm_backward(
        grad @ out_proj.to(z.dtype), None, y.flatten(2), z, norm_weight, scale, of_z, normed
    )
    of_x, dt, of_A, of_B, of_C, of_D, of_bias, _ = ssd_backward(
        of_y.view(y.shape), None, *inputs, entering
    )
    of_dt.copy_(dt)
    of_convolved = torch.cat([of.flatten(2) for of in (of_x, of_B, of_C)], -1)
    _, *of_conv = conv_backward(of_convolved, xbc, conv_weight, conv_bias, seq_idx, of_xbc)
    return grads, *of_conv, of_bias, of_A, of_D, of_norm, triton.weight_gradient(grad, normed)


_mixer = triton.differentiable(
    "mamba2",
    "zxbcdt conv_weight conv_bias dt_bias A D norm_weight out_proj seq_idx?",
    "float eps, int groups, int headdim, int chunk_size",
    1,
    1,
    _forward,
    _backward,
)


def mamba2_mixer(*inputs):
    return _mixer(*inputs)[0]
