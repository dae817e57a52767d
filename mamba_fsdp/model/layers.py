"""The layers: Mamba-1, Mamba-2 and attention mixers, the MLP, the norm. Parameters have the reference checkpoints' names.

Each mixer maps (batch, length, d_model) to the same shape, and has `step` for one token with a recurrent state. Weights may be
in fp32 or in the compute dtype: products run in the dtype of their input.
"""

import torch
import torch.nn.functional as F
from torch import nn

from mamba_fsdp.ops.attention import attention, attention_step, rotary
from mamba_fsdp.ops.causal_conv import causal_conv_step
from mamba_fsdp.ops.norm import gated_rms_norm
from mamba_fsdp.ops.selective_scan import mamba1_inner, selective_scan_step
from mamba_fsdp.ops.ssd import mamba2_inner, ssd_step


def empty(*shape):
    """A parameter without content: init.py or a checkpoint fills it."""
    return nn.Parameter(torch.empty(*shape))


class Weight(nn.Module):
    """A weight matrix, and a bias where it has one, under the names that nn.Linear and nn.Conv1d give them."""

    def __init__(self, *shape, bias=False):
        super().__init__()
        self.weight = empty(*shape)
        if bias:
            self.bias = empty(shape[0])

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Mamba1(nn.Module):
    def __init__(self, config, kernels):
        super().__init__()
        self.kernels = kernels
        self.d_state, self.dt_rank = config.d_state, config.resolved_dt_rank
        self.in_proj = Weight(2 * config.d_inner, config.d_model)
        self.conv1d = Weight(config.d_inner, 1, config.d_conv, bias=True)
        self.x_proj = Weight(self.dt_rank + 2 * self.d_state, config.d_inner)
        self.dt_proj = Weight(config.d_inner, self.dt_rank, bias=True)
        self.A_log = empty(config.d_inner, self.d_state)
        self.D = empty(config.d_inner)
        self.out_proj = Weight(config.d_model, config.d_inner)

    def forward(self, x, documents=None):
        return mamba1_inner(self.in_proj(x), self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight, self.dt_proj.bias,
                            -torch.exp(self.A_log.float()), self.D, self.out_proj.weight, documents=documents, kernels=self.kernels)

    def allocate_state(self, batch, _max_length, dtype, device):
        d_inner, _, width = self.conv1d.weight.shape
        return {"conv": torch.zeros(batch, width - 1, d_inner, dtype=dtype, device=device),
                "ssm": torch.zeros(batch, d_inner, self.d_state, device=device)}

    def step(self, x, state, _position):
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = causal_conv_step(state["conv"], x, self.conv1d.weight, self.conv1d.bias)
        dt, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        y = selective_scan_step(state["ssm"], x, self.dt_proj(dt), -torch.exp(self.A_log.float()), B, C, self.D, z, self.dt_proj.bias)
        return self.out_proj(y)


class Mamba2(nn.Module):
    def __init__(self, config, kernels):
        super().__init__()
        self.kernels = kernels
        self.d_inner, self.heads, self.groups, self.d_state = config.d_inner, config.n_ssm_head, config.ngroups, config.d_state
        self.headdim, self.chunk_size, self.eps = config.headdim, config.chunk_size, config.norm_eps
        d_conv_channels = self.d_inner + 2 * self.groups * self.d_state
        self.in_proj = Weight(self.d_inner + d_conv_channels + self.heads, config.d_model)  # [z, x, B, C, dt]
        self.conv1d = Weight(d_conv_channels, 1, config.d_conv, bias=True)
        self.dt_bias = empty(self.heads)
        self.A_log = empty(self.heads)
        self.D = empty(self.heads)
        self.norm = Weight(self.d_inner)
        self.out_proj = Weight(config.d_model, self.d_inner)

    def forward(self, x, documents=None):
        return mamba2_inner(self.in_proj(x), self.conv1d.weight, self.conv1d.bias, self.dt_bias, -torch.exp(self.A_log.float()), self.D,
                            self.norm.weight, self.eps, self.out_proj.weight, headdim=self.headdim, ngroups=self.groups,
                            d_state=self.d_state, chunk_size=self.chunk_size, documents=documents, kernels=self.kernels)

    def allocate_state(self, batch, _max_length, dtype, device):
        channels, _, width = self.conv1d.weight.shape
        return {"conv": torch.zeros(batch, width - 1, channels, dtype=dtype, device=device),
                "ssm": torch.zeros(batch, self.heads, self.headdim, self.d_state, device=device)}

    def step(self, x, state, _position):
        d_bc = self.groups * self.d_state
        z, xbc, dt = self.in_proj(x).split([self.d_inner, self.d_inner + 2 * d_bc, self.heads], dim=-1)
        x, B, C = causal_conv_step(state["conv"], xbc, self.conv1d.weight, self.conv1d.bias).split([self.d_inner, d_bc, d_bc], dim=-1)
        B, C = (t.unflatten(1, (self.groups, self.d_state)) for t in (B, C))
        y = ssd_step(state["ssm"], x.unflatten(1, (self.heads, self.headdim)), dt, -torch.exp(self.A_log.float()), B, C, self.D, self.dt_bias)
        return self.out_proj(gated_rms_norm(y.flatten(1), z, self.norm.weight, self.eps, self.d_inner // self.groups))


class Attention(nn.Module):
    def __init__(self, config, kernels):
        super().__init__()
        self.kernels = kernels
        self.heads, self.kv_heads, self.head_dim = config.n_head, config.n_kv_head, config.resolved_head_dim
        self.rotary_dim, self.theta = config.resolved_rotary_dim, config.rope_theta
        self.in_proj = Weight((self.heads + 2 * self.kv_heads) * self.head_dim, config.d_model)  # rows [q, k, v]
        self.out_proj = Weight(config.d_model, self.heads * self.head_dim)

    def _project(self, x, positions):
        q, k, v = self.in_proj(x).unflatten(-1, (-1, self.head_dim)).split([self.heads, self.kv_heads, self.kv_heads], dim=-2)
        return rotary(q, positions, self.rotary_dim, self.theta), rotary(k, positions, self.rotary_dim, self.theta), v

    def forward(self, x, documents=None):
        # Rotary positions are relative, so a document's results do not depend on where in the row it starts.
        positions = torch.arange(x.shape[1], device=x.device) if documents is None else positions_in_document(documents)
        return self.out_proj(attention(*self._project(x, positions), documents=documents, kernels=self.kernels).flatten(2))

    def allocate_state(self, batch, max_length, dtype, device):
        shape = (batch, max_length, self.kv_heads, self.head_dim)
        return {"k": torch.zeros(shape, dtype=dtype, device=device), "v": torch.zeros(shape, dtype=dtype, device=device)}

    def step(self, x, state, position):
        q, k, v = self._project(x[:, None], torch.tensor([position], device=x.device))
        state["k"][:, position], state["v"][:, position] = k[:, 0], v[:, 0]
        return self.out_proj(attention_step(q[:, 0], state["k"], state["v"], position + 1).flatten(1))


def positions_in_document(documents):
    """(batch, length) document indices -> (batch, length) positions counted from each document's start in the row."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.cat([torch.ones_like(documents[:, :1], dtype=torch.bool), documents[:, 1:] != documents[:, :-1]], dim=1)
    return places - torch.where(starts, places, 0).cummax(dim=1).values


class MLP(nn.Module):
    """SwiGLU in the reference's layout: fc1's first half goes through, its second half is the gate."""

    def __init__(self, config):
        super().__init__()
        self.fc1 = Weight(2 * config.d_intermediate, config.d_model)
        self.fc2 = Weight(config.d_model, config.d_intermediate)

    def forward(self, x):
        y, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(y * F.silu(gate))


MIXERS = {"mamba1": Mamba1, "mamba2": Mamba2, "attention": Attention}
