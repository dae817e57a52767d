"""Attention of all documents of a batch in one call of the FlashAttention that newer versions of PyTorch have for
CUDA."""

import inspect
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mamba_fsdp.ops.attention.reference import attention as attention
from mamba_fsdp.ops.backends import Use

if TYPE_CHECKING:
    from mamba_fsdp.ops.attention import Documents


def why_unavailable() -> str | None:
    try:
        from torch.nn.attention.varlen import varlen_attn

        inspect.signature(varlen_attn).parameters["enable_gqa"]
    except (ImportError, KeyError):
        return "this PyTorch has no attention of all documents in one call"
    return None


def why_not(use: Use) -> str | None:
    if use.dtype not in (torch.bfloat16, torch.float16):
        return "FlashAttention takes bf16 and fp16"
    if use.channels % 8 or use.channels > 256:
        return f"FlashAttention takes heads of up to 256 channels in multiples of 8, not {use.channels}"
    return None


def packed_attention(q: Tensor, k: Tensor, v: Tensor, documents: "Documents") -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    def bounds(counts: list[int]) -> Tensor:
        limits = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        return limits.to(q.device, non_blocking=True)

    causal = (-1, 0)  # each document's last query sees its last key
    return varlen_attn(
        q,
        k,
        v,
        bounds(documents.queries),
        bounds(documents.lengths),
        max(documents.queries),
        max(documents.lengths),
        window_size=causal,
        enable_gqa=True,
    )
