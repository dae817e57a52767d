"""Implements the recurrences by their definitions, position by position."""

import torch
import torch.nn.functional as F


def loop(u, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx=None):
    """Computes the recurrence of Mamba-1. Returns (y with the shape of u, last state of shape (batch, channels,
    d_state))."""
    # The default threshold of 20 causes an error of 1e-10.
    delta = F.softplus(dt + dt_bias, threshold=50)
    state, ys = initial_state, []
    for t in range(u.shape[1]):
        decay = torch.exp(delta[:, t, :, None] * A)
        if seq_idx is not None and t > 0:
            decay = decay * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None]
        state = decay * state + (delta[:, t] * u[:, t])[..., None] * B[:, t, None]
        ys.append((state * C[:, t, None]).sum(-1) + D * u[:, t])
    return torch.stack(ys, dim=1) * F.silu(z), state


def recurrence(x, dt, A, B, C, D, dt_bias, seq_idx=None, initial_state=None):
    """Computes the recurrence of Mamba-2. Returns (y with the shape of x, last state of shape (batch, heads, headdim,
    d_state))."""
    batch, length, heads, headdim = x.shape
    delta = F.softplus(dt + dt_bias)
    B, C = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    state = (
        x.new_zeros(batch, heads, headdim, B.shape[3]) if initial_state is None else initial_state
    )
    ys = []
    for t in range(length):
        if seq_idx is not None and t > 0:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        state = state * torch.exp(delta[:, t] * A)[..., None, None]
        state = state + (delta[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        ys.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(ys, dim=1), state


def delta_recurrence(q, k, v, g, beta, seq_idx=None, initial_state=None):
    """Computes the recurrence of Gated DeltaNet. Returns (y with the shape of v, last state of shape (batch, heads,
    channels of a key, channels of a value))."""
    heads = v.shape[2]
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (q, k))
    state = initial_state
    if state is None:
        state = v.new_zeros(len(v), heads, k.shape[3], v.shape[3])
    ys = []
    for t in range(v.shape[1]):
        if seq_idx is not None and t > 0:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        state = state * torch.exp(g[:, t])[..., None, None]
        held = (state * k[:, t, ..., None]).sum(2)
        state = state + k[:, t, ..., None] * (beta[:, t, :, None] * (v[:, t] - held)).unsqueeze(2)
        ys.append((state * q[:, t, ..., None]).sum(2) * k.shape[3] ** -0.5)
    return torch.stack(ys, dim=1), state


def random_documents(batch, length):
    """Returns a random seq_idx of shape (batch, length) with about four documents per row."""
    starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(1)) < 4 / length
    return starts.int().cumsum(1).int()


def ssd_values(randn, batch, length, heads, headdim, groups, d_state):
    """Returns {name: input of the SSD}. The numbers are drawn by randn(*shape)."""
    return dict(
        x=randn(batch, length, heads, headdim),
        dt=randn(batch, length, heads) - 1,
        A=-torch.exp(randn(heads)),
        B=randn(batch, length, groups, d_state),
        C=randn(batch, length, groups, d_state),
        D=randn(heads),
        dt_bias=randn(heads),
    )
