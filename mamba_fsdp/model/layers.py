"""The layers: Mamba-1, Mamba-2 and attention mixers, and the MLP. Their parameters are those of spec.py.

Each mixer maps (batch, length, d_model) to the same shape: called with `seq_idx` (see mamba_fsdp/ops) for training,
or for a sequence in parts, such as single positions, with the `state` in which it leaves what the next position needs
and the `position` that the part begins at, where seq_idx is that of all positions so far. Weights may be in fp32 or
in the compute dtype: products run in their input's dtype.
"""

import torch
import torch.nn.functional as F
from torch import nn

from mamba_fsdp.conventions import compute_type
from mamba_fsdp.model import spec
from mamba_fsdp.ops.attention import attention, rotary
from mamba_fsdp.ops.conv import causal_conv_silu
from mamba_fsdp.ops.mamba1 import mamba1_mixer
from mamba_fsdp.ops.mamba2 import mamba2_mixer
from mamba_fsdp.ops.norm import gated_rms_norm
from mamba_fsdp.ops.scan import selective_scan
from mamba_fsdp.ops.ssd import ssd


class Weight(nn.Module):
    """What lies under one name: a weight, maybe a bias; called, the product with the weight."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Part(nn.Module):
    """A module with the parameters of its `kind`, a spec.Spec, without content: init.py or a checkpoint fills them."""

    kind: spec.Spec

    def __init__(self, config, backends=None):
        super().__init__()
        self.config = config
        self.backends = backends
        add_parameters(self, self.kind.parameters(config))


def add_parameters(module, parameters):
    """Make `parameters` (NAME or CHILD.NAME -> spec.Parameter) those of `module`; a child that lacks is a Weight."""
    for name, parameter in parameters.items():
        child, _, leaf = name.rpartition(".")
        if child and not hasattr(module, child):
            module.add_module(child, Weight())
        setattr(module.get_submodule(child), leaf, nn.Parameter(torch.empty(parameter.shape)))


class SSM(Part):
    """What the Mamba mixers share: the way from projection to convolution, recurrence and output, in one call where the
    backend `whole` serves, and a state that does not grow."""

    def forward(self, x, seq_idx=None, state=None, position=0):
        if self.whole in self.backends and not state:
            return self.at_once(self.in_proj(x), seq_idx)
        x, *rest = self.project(x)
        seen = 0
        entering = None
        if position:
            seen = min(position, state["conv"].shape[1])
            entering = state["ssm"]
            x = torch.cat([state["conv"][:, -seen:], x], dim=1)
        if state:
            last = x[:, -state["conv"].shape[1] :]
            state["conv"][:, -last.shape[1] :] = last
        x = causal_conv_silu(
            x,
            self.conv1d.weight,
            self.conv1d.bias,
            seq_idx=seq_idx,
            backend=self.backends["conv"],
        )
        if seen:
            x = x[:, seen:]
        y = self.scan(
            *self.scan_inputs(x, *rest),
            seq_idx=seq_idx,
            initial_state=entering,
            return_last_state=bool(state),
        )
        if state:
            y, state["ssm"] = y
        return self.project_out(y, *rest)

    def A(self):
        return -torch.exp(self.A_log.to(compute_type(self.A_log)))

    def allocate_state(self, batch, max_length, dtype, device):
        channels, _, width = self.conv1d.weight.shape
        last_inputs = torch.zeros(batch, width - 1, channels, dtype=dtype, device=device)
        shape = (batch, *self.state_shape())
        state = torch.zeros(shape, dtype=compute_type(last_inputs), device=device)
        return {"conv": last_inputs, "ssm": state}


class Mamba1(SSM):
    kind = spec.MIXERS["mamba1"]
    whole = "mamba1"

    def state_shape(self):
        return self.config.d_inner, self.config.d_state

    def at_once(self, xz, seq_idx):
        return mamba1_mixer(
            xz,
            self.conv1d.weight,
            self.conv1d.bias,
            self.x_proj.weight,
            self.dt_proj.weight,
            self.dt_proj.bias,
            self.A(),
            self.D,
            self.out_proj.weight,
            seq_idx,
            backend=self.backends["mamba1"],
        )

    def project(self, x):
        return self.in_proj(x).chunk(2, dim=-1)

    def scan_inputs(self, x, z):
        rank = self.config.resolved_dt_rank
        d_state = self.config.d_state
        dt, B, C = self.x_proj(x).split([rank, d_state, d_state], dim=-1)
        return (
            x,
            self.dt_proj(dt),
            self.A(),
            B,
            C,
            self.D,
            z,
            self.dt_proj.bias,
        )

    def scan(self, *inputs, initial_state=None, **options):
        backend = self.backends["scan"]
        if initial_state is not None and backend == "fused":  # which takes no state
            backend = "reference"
        return selective_scan(*inputs, initial_state=initial_state, **options, backend=backend)

    def project_out(self, y, z):
        return self.out_proj(y)


class Mamba2(SSM):
    kind = spec.MIXERS["mamba2"]
    whole = "mamba2"

    def state_shape(self):
        return self.config.n_ssm_head, self.config.headdim, self.config.d_state

    def at_once(self, zxbcdt, seq_idx):
        config = self.config
        return mamba2_mixer(
            zxbcdt,
            self.conv1d.weight,
            self.conv1d.bias,
            self.dt_bias,
            self.A(),
            self.D,
            self.norm.weight,
            config.norm_eps,
            self.out_proj.weight,
            seq_idx,
            ngroups=config.ngroups,
            headdim=config.headdim,
            chunk_size=config.chunk_size,
            backend=self.backends["mamba2"],
        )

    def project(self, x):
        d_inner = self.config.d_inner
        convolved = len(self.conv1d.weight)
        heads = self.config.n_ssm_head
        z, xbc, dt = self.in_proj(x).split([d_inner, convolved, heads], dim=-1)
        return xbc, z, dt

    def scan_inputs(self, xbc, z, dt):
        config = self.config
        of_groups = config.ngroups * config.d_state
        x, B, C = xbc.split([config.d_inner, of_groups, of_groups], dim=-1)
        return (
            x.unflatten(-1, (config.n_ssm_head, config.headdim)),
            dt,
            self.A(),
            B.unflatten(-1, (config.ngroups, config.d_state)),
            C.unflatten(-1, (config.ngroups, config.d_state)),
            self.D,
            self.dt_bias,
        )

    def scan(self, *inputs, **options):
        return ssd(
            *inputs,
            **options,
            chunk_size=self.config.chunk_size,
            backend=self.backends["ssd"],
        )

    def project_out(self, y, z, dt):
        normed = gated_rms_norm(
            y.flatten(-2),
            z,
            self.norm.weight,
            self.config.norm_eps,
            self.config.d_inner // self.config.ngroups,
            backend=self.backends["norm"],
        )
        return self.out_proj(normed)


class Attention(Part):
    kind = spec.MIXERS["attention"]

    def forward(self, x, seq_idx=None, state=None, position=0):
        config = self.config
        end = position + x.shape[1]
        heads = self.in_proj(x).unflatten(-1, (-1, config.resolved_head_dim))
        q, k, v = heads.split([config.n_head, config.n_kv_head, config.n_kv_head], dim=-2)
        places = positions_in_document(end, seq_idx, x.device)[..., position:]
        q, k = (rotary(t, places, config.resolved_rotary_dim, config.rope_theta) for t in (q, k))
        if state:
            state["k"][:, position:end] = k
            state["v"][:, position:end] = v
            k = state["k"][:, :end]
            v = state["v"][:, :end]
        return self.out_proj(attention(q, k, v, seq_idx=seq_idx).flatten(2))

    def allocate_state(self, batch, max_length, dtype, device):
        shape = (batch, max_length, self.config.n_kv_head, self.config.resolved_head_dim)
        return {name: torch.zeros(shape, dtype=dtype, device=device) for name in ("k", "v")}


def positions_in_document(length, seq_idx, device):
    """The positions of a row (length), or (batch, length) from each document's start in its row."""
    places = torch.arange(length, device=device)
    if seq_idx is None:
        return places
    starts = seq_idx.diff(dim=1, prepend=seq_idx[:, :1] - 1) != 0
    return places - torch.where(starts, places, 0).cummax(dim=1).values


class MLP(Part):
    """SwiGLU in the reference's layout: fc1's first half goes through, its second half is the gate."""

    kind = spec.MLP

    def forward(self, x):
        y, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(y * F.silu(gate))


MIXERS = {"mamba1": Mamba1, "mamba2": Mamba2, "attention": Attention}
