"""Computes attention by PyTorch's scaled_dot_product_attention, which chooses the kernel itself: flash or
memory-efficient on CUDA, flash on a CPU. No kernel gets a mask of (length, length), and no key is copied for the query
heads that share it."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from mamba_fsdp.ops.attention import Documents

# The largest number of elements of a mask. A mask is needed only if just the last positions of a document have queries.
MASK_ELEMENTS = 1 << 22


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[2] > k.shape[2]:
        return torch.stack([of_one_document(*row) for row in zip(q, k, v)])
    is_causal = q.shape[1] > 1  # a single query is the last position, which sees all keys
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return _without_mask(q, k, v, is_causal).transpose(1, 2)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, documents: "Documents") -> Tensor:
    queries = q.split(documents.queries)
    parts = zip(queries, k.split(documents.lengths), v.split(documents.lengths))
    return torch.cat([of_one_document(*part) for part in parts if len(part[0])])


def of_one_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the output of attention in one document, in the shape of q.

    q (queries, heads, head_dim): the queries of the document's last positions. k, v (length, kv_heads, head_dim): the
    keys and values of all its positions. For the kernel, the key heads are the batch, and the query heads that share a
    key head are the heads. k and v are expanded to these heads as views with a stride of 0, without a copy."""
    q = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
    k, v = (t.transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1) for t in (k, v))
    if q.shape[2] == k.shape[2]:
        out = _without_mask(q, k, v, is_causal=True)
    else:
        out = _of_last_positions(q, k, v)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _without_mask(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    if q.is_meta:  # for meta tensors, PyTorch would choose a kernel that keeps all scores
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _of_last_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the output for the queries of the last positions, in the shape of q. A few queries are computed at a time,
    so that each mask is small.

    q (key heads, query heads of a key head, queries, head_dim); k, v have `length` in place of `queries`."""
    length = k.shape[2]
    first = length - q.shape[2]
    at_a_time = max(1, MASK_ELEMENTS // length)
    parts = []
    for start in range(first, length, at_a_time):
        end = min(start + at_a_time, length)
        mask = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start)
        some = q[:, :, start - first : end - first]
        parts.append(
            F.scaled_dot_product_attention(some, k[:, :, :end], v[:, :, :end], attn_mask=mask)
        )
    return torch.cat(parts, dim=2)
