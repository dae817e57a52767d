"""Computes attention of all documents of a batch in one call of PyTorch's FlashAttention for CUDA. The internal operator
aten._flash_attention_forward takes the bounds of the documents in torch 2.2 and in newer versions. The public varlen_attn
is not enough: torch 2.2 lacks it, and in torch 2.10 it supports neither grouped queries nor a window."""

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mamba_fsdp.conventions import is_torch_2_2
from mamba_fsdp.ops.attention.reference import attention as attention
from mamba_fsdp.ops.attention.reference import of_one_document
from mamba_fsdp.ops.backends import Use

if TYPE_CHECKING:
    from mamba_fsdp.ops.attention import Documents


def why_not(use: Use) -> str | None:
    if use.dtype not in (torch.bfloat16, torch.float16):
        return "FlashAttention takes bf16 and fp16"
    if use.channels % 8 or use.channels > 256:
        return f"FlashAttention takes heads of up to 256 channels in multiples of 8, not {use.channels}"
    if use.deterministic and is_torch_2_2():
        return "deterministic=true, and the FlashAttention of torch 2.2 adds with atomics"
    return None


def packed_attention(q: Tensor, k: Tensor, v: Tensor, documents: "Documents") -> Tensor:
    # On the meta device, the operator of torch 2.2 does not accept bounds. `of_one_document` returns a tensor of the same
    # shape.
    if q.is_meta and is_torch_2_2():
        return of_one_document(q, k, v)

    def bounds(counts: list[int]) -> Tensor:
        limits = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        return limits.to(q.device, non_blocking=True)

    out, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        bounds(documents.queries),
        bounds(documents.lengths),
        max(documents.queries),
        max(documents.lengths),
        0.0,  # dropout
        True,  # causal: the last query of a document sees the document's last key
        False,  # does not return a mask for debugging
    )
    return out
