"""The state-space dual of Mamba-2 (SSD): a selective scan with one decay per head, in chunked matrix form.

    dt_t = softplus(dt_t + dt_bias);  h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  y_t = h_t C_t + D x_t

Dao and Gu 2024 (arXiv 2405.21060), section 6.
"""

import torch
import torch.nn.functional as F

CHUNK = 64


def ssd(x, dt, A, B, C, D=None, dt_bias=None, *, chunk_size, documents=None, initial_state=None,
        return_last_state=False, kernels="portable"):
    """Run the recurrence over a whole sequence.

    x (batch, length, heads, headdim); dt (batch, length, heads) before bias and softplus; A (heads), negative; B, C
    (batch, length, groups, d_state), heads shared evenly among groups; D, dt_bias (heads) or None; states (batch, heads,
    headdim, d_state). `documents` (batch, length): the state restarts where it changes; an initial state belongs to
    the first document of its row. Returns y like x, and with `return_last_state` (y, last state in fp32).
    """
    batch, length, heads, headdim = x.shape
    groups, d_state = B.shape[-2:]
    work = torch.promote_types(x.dtype, torch.float32)
    dt = F.softplus(dt.to(work) + (0 if dt_bias is None else dt_bias.to(work)))
    q = min(chunk_size, CHUNK)
    pad = -length % q
    if documents is None:
        documents = torch.zeros(batch, length, dtype=torch.int32, device=x.device)
    documents = F.pad(documents[:, None].to(work), (0, pad), mode="replicate")[:, 0].unflatten(1, (-1, q))
    xw = F.pad(x.to(work), (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, q))
    dtw = F.pad(dt, (0, 0, 0, pad)).unflatten(1, (-1, q))
    Bw, Cw = (F.pad(t.to(work), (0, 0, 0, 0, 0, pad)).repeat_interleave(heads // groups, 2).unflatten(1, (-1, q))
              for t in (B, C))
    logs = (dtw * A.to(work)).double().cumsum(2)
    inside = documents[:, :, :, None] == documents[:, :, None, :]
    inside = inside.tril()[..., None]
    L = (logs[:, :, :, None] - logs[:, :, None]).to(work).masked_fill(~inside, -torch.inf).exp()
    xdt = xw * dtw[..., None]
    y = torch.einsum("bcihn,bcjhn,bcijh,bcjhp->bcihp", Cw, Bw, L, xdt)
    to_end = (documents == documents[:, :, -1:])[..., None] * (logs[:, :, -1:] - logs).to(work).exp()
    added = torch.einsum("bcjhn,bcjh,bcjhp->bchpn", Bw, to_end, xdt)
    state = torch.zeros_like(added[:, 0]) if initial_state is None else initial_state.to(work)
    before = torch.cat([documents[:, :1, 0], documents[:, :-1, -1]], 1)
    from_start = (documents == before[..., None])[..., None] * logs.to(work).exp()
    states = []
    for c in range(added.shape[1]):
        states.append(state)
        state = from_start[:, c, -1, :, None, None] * state + added[:, c]
    y = y + torch.einsum("bcihn,bchpn,bcih->bcihp", Cw, torch.stack(states, 1), from_start)
    y = y.flatten(1, 2)[:, :length]
    if D is not None:
        y = y + D.to(work)[:, None] * x.to(work)
    y = y.to(x.dtype)
    return (y, state) if return_last_state else y


def ssd_step(state, x, dt, A, B, C, D=None, dt_bias=None):
    """One token of the recurrence; updates `state` (batch, heads, headdim, d_state, fp32) in place.

    x (batch, heads, headdim), dt (batch, heads), B, C (batch, groups, d_state); the rest as in `ssd`. Returns y like x.
    """
    work = state.dtype
    dt = F.softplus(dt.to(work) + (0 if dt_bias is None else dt_bias.to(work)))
    B, C = (t.to(work).repeat_interleave(x.shape[1] // t.shape[1], dim=1) for t in (B, C))
    state.mul_((dt * A.to(work)).exp()[..., None, None])
    state.add_((dt[..., None] * x.to(work))[..., None] * B[:, :, None])
    y = (state @ C[..., None])[..., 0]
    if D is not None:
        y = y + D.to(work)[:, None] * x.to(work)
    return y.to(x.dtype)


def mamba2_inner(zxbcdt, conv_weight, conv_bias, dt_bias, A, D, norm_weight, norm_eps, out_proj_weight, *, headdim,
                 ngroups, d_state, chunk_size, documents=None, kernels="portable"):
    """The Mamba-2 mixer after its in_proj: convolution, SSD, gated norm, out_proj.

    zxbcdt (batch, length, 2 d_inner + 2 ngroups d_state + heads), laid out [z, x, B, C, dt]; conv_weight (d_inner + 2
    ngroups d_state, 1, width) and conv_bias over [x, B, C]; norm_weight (d_inner), normed per group; out_proj_weight
    (d_model, d_inner). Returns (batch, length, d_model).
    """
    from mamba_fsdp.ops.causal_conv import causal_conv_silu
    from mamba_fsdp.ops.norm import gated_rms_norm

    d_inner, heads, bc = norm_weight.shape[0], A.shape[0], ngroups * d_state
    z, xbc, dt = zxbcdt.split([d_inner, d_inner + 2 * bc, heads], dim=-1)
    xbc = causal_conv_silu(xbc, conv_weight, conv_bias, documents=documents, kernels=kernels)
    x, B, C = xbc.split([d_inner, bc, bc], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    B, C = (t.unflatten(-1, (ngroups, d_state)) for t in (B, C))
    y = ssd(x, dt, A, B, C, D, dt_bias, chunk_size=chunk_size, documents=documents, kernels=kernels)
    y = gated_rms_norm(y.flatten(-2), z, norm_weight, norm_eps, d_inner // ngroups)
    return F.linear(y, out_proj_weight.to(y.dtype))
