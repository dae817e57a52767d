"""Attention: causal, grouped-query, blocked at documents, with rotary positions.

    o_i = sum over j <= i in the same document of softmax_j(q_i . k_j / sqrt(head_dim)) v_j

PyTorch's scaled_dot_product_attention chooses the kernel itself (flash or memory-efficient on CUDA, flash on a CPU), so
there is one backend. Rotary positions: Su et al. 2021 (arXiv 2104.09864), in the rotate-half layout of mamba-ssm.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_fsdp.conventions import compute_type

MASK_ELEMENTS = 1 << 22  # of a long sequence's mask that exist at a time


def attention(q: Tensor, k: Tensor, v: Tensor, *, seq_idx: Tensor | None = None) -> Tensor:
    """Attend from every position to itself and to those before it in its document.

    q (batch, length, heads, head_dim), which may be the last of the positions of k, v (batch, all, kv_heads, head_dim),
    where kv_heads divides heads; seq_idx (batch, all) as everywhere in ops. Returns (batch, length, heads, head_dim).
    """
    group = q.shape[2] // k.shape[2]
    assert group * k.shape[2] == q.shape[2], (
        f"{k.shape[2]} kv_heads don't divide {q.shape[2]} heads"
    )
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    every = k.shape[2]
    first = every - q.shape[2]
    if seq_idx is None and (not first or q.shape[2] == 1):  # the last position alone sees them all
        return F.scaled_dot_product_attention(q, k, v, is_causal=not first).transpose(1, 2)
    rows = every if not first else max(1, MASK_ELEMENTS // every)
    parts = []
    for start in range(first, every, rows):
        end = min(start + rows, every)
        if seq_idx is None:
            mask = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start)
        else:
            mask = (seq_idx[:, None, start:end, None] == seq_idx[:, None, None, :end]).tril(start)
        parts.append(
            F.scaled_dot_product_attention(
                q[:, :, start - first : end - first], k[:, :, :end], v[:, :, :end], attn_mask=mask
            )
        )
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


def rotary(x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
    """Rotate the first `rotary_dim` channels of every head by its position; the others pass through.

    x (batch, length, heads, head_dim); positions (length) or (batch, length), integers. Channels i and i + rotary_dim/2
    are one pair, turned by positions * theta^(-2i / rotary_dim). The angles are computed in fp32 whatever x is, as in
    the reference implementations, so that the logits of published weights come out the same.
    """
    assert rotary_dim % 2 == 0 and rotary_dim <= x.shape[-1], (
        f"rotary_dim {rotary_dim} for heads of {x.shape[-1]}"
    )
    if rotary_dim == 0:
        return x
    exponents = torch.arange(0, rotary_dim, 2, device=x.device).float() / rotary_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    real = compute_type(x)
    cos, sin = (t.to(real).unsqueeze(-2) for t in (angles.cos(), angles.sin()))
    first, second, rest = x.split(
        [rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], dim=-1
    )
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, rest], dim=-1)
