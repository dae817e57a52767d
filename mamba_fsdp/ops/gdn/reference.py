"""Computes the gated delta rule in plain PyTorch, chunk by chunk. For the backward pass it keeps, for each chunk, the
tensors of _Chunk, the state before it, the inverse of I + M, and U.

Queries stand above keys in one matrix, because both read the state and both are multiplied with the chunk's keys. The
gradient of what the queries read is the gradient of y. The gradient of what the keys read is that of the right-hand side
of the chunk's equation, with the sign changed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba_fsdp.conventions import compute_type
from mamba_fsdp.ops.ssd.reference import decays, running_sums

EPS = 1e-6  # is added to the squared lengths of q and k
CHUNK = 64  # positions of a chunk; larger chunks need more products, smaller ones more states


def _by_head(t: Tensor, like: Tensor) -> Tensor:
    """Returns t (batch, size, groups, channels) as (batch, heads, size, channels), in the dtype of `like` (batch, size,
    heads)."""
    # The heads are made contiguous, because torch.cat is then much faster.
    heads = t.to(like.dtype).transpose(1, 2).contiguous()
    share = like.shape[2] // t.shape[2]
    return heads if share == 1 else heads.repeat_interleave(share, 1)


def _by_position(t: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Returns the reverse of _by_head in `dtype`; the heads of each group are summed."""
    if t.shape[1] > groups:
        t = t.unflatten(1, (groups, -1)).sum(2)
    return t.transpose(1, 2).to(dtype).contiguous()


class _Chunk(NamedTuple):
    """The tensors from which the outputs and the state of a chunk are computed; each is (batch, heads, ...)."""

    qk: Tensor  # the queries above the keys, each divided by its length
    scale: Tensor  # 1 / length of each query and key
    beta: Tensor
    products: Tensor  # the products of queries and keys with keys
    weights: Tensor  # the factors of these products in y and in M
    start_weights: Tensor  # the factors of what qk reads from the state before the chunk
    to_end: Tensor  # the decay from each position to the end of the chunk
    decay: Tensor  # the decay of the state over the whole chunk

    @classmethod
    def of(cls, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, seq_idx: Tensor | None) -> "_Chunk":
        documents = None if seq_idx is None else seq_idx.unsqueeze(1)
        tables = decays(-g.unsqueeze(1), -g.new_ones(g.shape[2]), documents)
        within, from_start, to_end = (t.squeeze(1) for t in tables)
        from_start, to_end = (t.transpose(1, 2).unsqueeze(3) for t in (from_start, to_end))
        beta = beta.transpose(1, 2).unsqueeze(3)
        raw = torch.cat([_by_head(q, g), _by_head(k, g)], dim=2)
        scale = torch.rsqrt(raw.square().sum(3, keepdim=True) + EPS)
        qk = raw * scale
        of_query = k.shape[3] ** -0.5
        weights = torch.cat([within * of_query, (within * beta).tril(-1)], dim=2)
        start_weights = torch.cat([from_start * of_query, from_start * beta], dim=2)
        products = qk @ qk[:, :, g.shape[1] :].transpose(2, 3)
        decay = from_start[:, :, -1:]
        return cls(qk, scale, beta, products, weights, start_weights, to_end, decay)

    def parts(self) -> tuple[Tensor, ...]:
        """Returns the keys, the scores of queries with keys, and M."""
        size = self.beta.shape[2]
        weighted = self.products * self.weights
        return self.qk[:, :, size:], *weighted.split(size, dim=2)


class _GatedDeltaRule(torch.autograd.Function):
    """The gated delta rule over a chunk, with its gradients. q, k, v are of any dtype; g, beta and the state before the
    chunk are in compute type. It returns y and the state after the chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        seq_idx: Tensor | None,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        chunk = _Chunk.of(q, k, g, beta, seq_idx)
        keys, scores, M = chunk.parts()
        identity = torch.eye(len(M[0, 0]), dtype=g.dtype, device=g.device)
        solution = torch.linalg.solve_triangular(M, identity, upper=False, unitriangular=True)
        read = (chunk.qk @ state).mul_(chunk.start_weights)
        of_queries, of_keys = read.chunk(2, dim=2)
        added = solution @ (_by_head(v, g) * chunk.beta - of_keys)
        ctx.save_for_backward(*chunk, seq_idx, state, solution, added)
        ctx.dtype = v.dtype
        ctx.groups = k.shape[2]
        y = scores @ added + of_queries
        last = (keys * chunk.to_end).transpose(2, 3) @ added
        return _by_position(y, v.shape[2], v.dtype), last.addcmul_(state, chunk.decay)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        *saved, seq_idx, state, solution, added = ctx.saved_tensors
        chunk = _Chunk(*saved)
        keys, scores, _ = chunk.parts()
        size = keys.shape[2]
        grad = grad.to(state.dtype).transpose(1, 2).contiguous()
        grad_added = scores.transpose(2, 3) @ grad
        grad_added += (keys * chunk.to_end) @ grad_last
        grad_side = solution.transpose(2, 3) @ grad_added
        grad_read = torch.cat([grad, -grad_side], dim=2)

        # Gradients through the state before the chunk, through the state after the chunk, and within the chunk.
        reading = grad_read * chunk.start_weights
        grad_state = (chunk.qk.transpose(2, 3) @ reading).addcmul_(grad_last, chunk.decay)
        grad_qk = reading @ state.transpose(2, 3)
        grad_start = (grad_qk * chunk.qk).sum(3)
        grad_k = (added * chunk.to_end) @ grad_last.transpose(2, 3)
        grad_end = (grad_k * keys).sum(3)
        grad_decay = (state * grad_last).sum((2, 3)).mul_(chunk.decay.flatten(1))
        grad_products = (grad_read @ added.transpose(2, 3)).mul_(chunk.weights)
        grad_qk += grad_products @ keys
        grad_k += grad_products.transpose(2, 3) @ chunk.qk
        grad_qk[:, :, size:] += grad_k
        grad_qk -= chunk.qk * (grad_qk * chunk.qk).sum(3, keepdim=True)
        grad_q, grad_k = grad_qk.mul_(chunk.scale).chunk(2, dim=2)
        grad_beta = (grad_side * added).sum(3, keepdim=True) / chunk.beta

        # The exponent of the decay from position j to i is the sum of g[t] with j < t <= i.
        flows = grad_products.mul_(chunk.products).unflatten(2, (2, -1)).sum(2)
        flows.diagonal(dim1=2, dim2=3).zero_()
        passing = flows.sum(3) - flows.sum(2) + grad_start.unflatten(2, (2, -1)).sum(2)
        backwards = None if seq_idx is None else seq_idx.flip(1)
        passing = running_sums(passing.transpose(1, 2).flip(1), backwards).flip(1)
        grad_end = grad_end.transpose(1, 2)
        passing += running_sums(grad_end) - grad_end + grad_decay.unsqueeze(1)
        return (
            _by_position(grad_q, ctx.groups, ctx.dtype),
            _by_position(grad_k, ctx.groups, ctx.dtype),
            _by_position(grad_side.mul_(chunk.beta), grad.shape[1], ctx.dtype),
            passing,
            grad_beta.squeeze(3).transpose(1, 2),
            None,
            grad_state,
        )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    seq_idx: Tensor | None,
    initial_state: Tensor | None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    real = compute_type(v)
    state = initial_state
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    state = state.to(real)
    beta = beta.to(real).clamp(min=1e-20)  # the backward pass divides by beta
    chunks = zip(*(t.split(CHUNK, dim=1) for t in (q, k, v, g.to(real), beta)))
    outputs = []
    for index, inputs in enumerate(chunks):
        documents = None
        if seq_idx is not None:
            start = index * CHUNK
            documents = seq_idx[:, start : start + CHUNK]
            if index:
                continues = documents[:, 0] == seq_idx[:, start - 1]
                state = torch.where(continues[:, None, None, None], state, 0)
        y, state = _GatedDeltaRule.apply(*inputs, documents, state)
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    return (y, state) if return_last_state else y
