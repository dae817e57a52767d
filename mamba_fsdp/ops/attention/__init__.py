"""Computes attention: causal, grouped-query, within a document, with rotary positions.

    o_i = sum over j <= i in the same document of softmax_j(q_i . k_j / sqrt(head_dim)) v_j

Rotary positions: Su et al. 2021 (arXiv 2104.09864), in the rotate-half layout of mamba-ssm.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mamba_fsdp.conventions import compute_type
from mamba_fsdp.ops.backends import modules
from mamba_fsdp.ops.rope import frequencies

BACKENDS = modules(__name__)


@dataclass
class Documents:
    """The documents of a batch. The host needs their lengths to launch the kernels of attention. A compiled graph passes
    this object on without reading it; otherwise the graph would be compiled again for every batch."""

    # The number of positions of each document: first the documents of the first row, then of the second row, and so on.
    lengths: list[int]
    # The number of queries of each document. The queries belong to the last positions of the document. None means that
    # every position has a query.
    asking: list[int] | None = None

    @classmethod
    def of(cls, seq_idx: Tensor) -> "Documents":
        """Returns the documents of seq_idx (batch, length). If seq_idx is on a GPU, the host waits for it."""
        bounds = starts(seq_idx).flatten().nonzero().flatten().tolist()
        bounds.append(seq_idx.numel())
        return cls([end - start for start, end in pairwise(bounds)])

    @classmethod
    def asked_by_last(cls, seq_idx: Tensor, count: int) -> "Documents":
        """Returns the documents of seq_idx (batch, length) if only the last `count` positions of each row have
        queries."""
        documents = cls.of(seq_idx)
        row_length = seq_idx.shape[1]
        asking = []
        end = 0
        for length in documents.lengths:
            end = end % row_length + length  # the end of the document in its row
            asking.append(max(0, min(length, end - (row_length - count))))
        return cls(documents.lengths, asking)

    @property
    def queries(self) -> list[int]:
        """Returns the number of queries of each document."""
        return self.lengths if self.asking is None else self.asking


def starts(seq_idx: Tensor) -> Tensor:
    """Returns a bool tensor (batch, length) that is True where a document starts. The first position of each row always
    starts a document."""
    return seq_idx.diff(dim=1, prepend=seq_idx[:, :1] - 1) != 0


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Documents | None = None,
    backend: str = "reference",
) -> Tensor:
    """Returns, in the shape of q, the attention from every query to its own position and to earlier positions of its
    document.

    q (batch, length, heads, head_dim); k, v (batch, length, kv_heads, head_dim), where kv_heads divides heads. q can
    also contain only the last positions of each row. If it contains more than one of them, `documents` must be given, and
    `documents.queries` is the number of queries in each document.
    """
    assert documents or q.shape[1] in (1, k.shape[1]), f"{q.shape[1]} queries for {k.shape[1]} keys"
    assert q.shape[2] % k.shape[2] == 0, f"{k.shape[2]} kv_heads don't divide {q.shape[2]} heads"
    if documents is None:
        return BACKENDS[backend].attention(q, k, v)
    packed = (t.flatten(0, 1) for t in (q, k, v))
    return BACKENDS[backend].packed_attention(*packed, documents).unflatten(0, q.shape[:2])


def rotary(
    x: Tensor,
    positions: Tensor,
    rotary_dim: int,
    theta: float,
    scaling: tuple = ("", {}),
    length: int = 0,
) -> Tensor:
    """Returns x with the first `rotary_dim` channels of every head rotated by the position; other channels are
    unchanged.

    x (batch, length, heads, head_dim); positions (length) or (batch, length), integers. Channels i and i + rotary_dim/2
    are one pair. It is rotated by the angle positions * theta^(-2i / rotary_dim), changed by `scaling`; for `scaling` and
    `length`, see `frequencies` in ops/rope.py. The angles are in fp32 for any dtype of x, as in the reference
    implementations, so that published weights give the same logits.
    """
    assert rotary_dim % 2 == 0 and rotary_dim <= x.shape[-1], (
        f"rotary_dim {rotary_dim} for heads of {x.shape[-1]}"
    )
    if rotary_dim == 0:
        return x
    turns = frequencies(rotary_dim, theta, x.device, scaling, length)
    angles = positions[..., None].float() * turns
    real = compute_type(x)
    cos, sin = (t.to(real).unsqueeze(-2) for t in (angles.cos(), angles.sin()))
    if "attention_factor" in scaling[1]:
        cos, sin = (t * scaling[1]["attention_factor"] for t in (cos, sin))
    first, second, rest = x.split(
        [rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], dim=-1
    )
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, rest], dim=-1)
