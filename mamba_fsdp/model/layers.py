"""Defines the layers as modules: Mamba-1, Mamba-2, Mamba-3, Gated DeltaNet, attention and MLP. spec.py describes their
parameters.

Each mixer maps x (batch, length, d_model) to a tensor of the same shape. It can be called in three ways:

    In training, with `seq_idx` (see mamba_fsdp/ops) and its `documents` (see ops/attention).
    With `state`, the dict of the tensors that describe the earlier positions. It is empty before the first position. The
    mixer replaces the tensors in it.
    With context parallelism, after its `context` has been set (see parallel/context.py). x is then this rank's part of
    the sequence, but seq_idx covers the whole sequence.

Weights can be in fp32 or in the compute dtype. Matrix products run in the dtype of their input.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_fsdp.conventions import compute_type
from mamba_fsdp.model import spec
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.ops.attention import Documents, attention, rotary, starts
from mamba_fsdp.ops.conv import causal_conv_silu
from mamba_fsdp.ops.gdn import gated_delta_rule
from mamba_fsdp.ops.mamba1 import mamba1_mixer
from mamba_fsdp.ops.mamba2 import mamba2_mixer
from mamba_fsdp.ops.negative_exp import NegativeExp
from mamba_fsdp.ops.norm import gated_rms_norm
from mamba_fsdp.ops.norm.reference import rms_norm
from mamba_fsdp.ops.scan import selective_scan
from mamba_fsdp.ops.ssd import ssd, weighted_ssd
from mamba_fsdp.ops.ssd.entering import decays_from_start, output_of_state
from mamba_fsdp.ops.ssd.reference import running_sums

MixerState = dict[str, Tensor]  # a mixer's state after the earlier positions


class Weight(nn.Module):
    """A weight with an optional bias. A call of the module multiplies its input by the weight, and does not add the
    bias."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Sublayer(nn.Module):
    """The base class of the mixers and the MLP. `kind` describes the parameters. They are not initialized here: their
    values come from init.py or from a checkpoint."""

    kind: spec.Spec
    context: Any = None  # a ContextGroup if ranks share each sequence

    def __init__(self, config: ModelConfig, backends: Mapping[str, str]) -> None:
        super().__init__()
        self.config = config
        self.backends = backends
        parameters = self.kind.parameters(config)
        self.rows = next(parameter.rows for parameter in parameters.values() if parameter.rows)
        self.factors = {
            name: config.multiplier(f"{self.kind.multiplier_prefix}_{name}") for name in self.rows
        }
        self.input_multiplier = config.multiplier(f"{self.kind.multiplier_prefix}_in")
        output = config.multiplier(f"{self.kind.multiplier_prefix}_out")
        self.output_multiplier = output * config.multiplier("residual")
        add_parameters(self, parameters)

    def project_in(self, x: Tensor, stack: nn.Module) -> Tensor:
        """Returns the product of x with the stacked matrices, (..., rows). The output of each matrix is multiplied by
        the matrix's multiplier."""
        y = stack(x)
        if set(self.factors.values()) == {1.0}:
            return y
        outputs = zip(y.split(list(self.rows.values()), dim=-1), self.factors.values())
        return torch.cat([multiply(*output) for output in outputs], dim=-1)

    def forward_with_multipliers(self, x: Tensor, *where: Any) -> Tensor:
        """Returns the output of the sublayer, with the multipliers of its input and output applied. A block adds this output
        to the residual stream."""
        return multiply(self(multiply(x, self.input_multiplier), *where), self.output_multiplier)


def add_parameters(module: nn.Module, parameters: spec.Parameters) -> None:
    """Adds the parameters, by NAME or CHILD.NAME, to `module`. A child that does not exist is added as a Weight."""
    for name, parameter in parameters.items():
        child, _, leaf = name.rpartition(".")
        if child and not hasattr(module, child):
            module.add_module(child, Weight())
        setattr(module.get_submodule(child), leaf, nn.Parameter(torch.empty(parameter.shape)))


def multiply(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


class SSM(Sublayer):
    """The base class of the mixers with a recurrence: input projection, convolution, recurrence, output projection.

    If `backends` contains the operator `whole_mixer_operator`, one operator computes everything after the input
    projection. The size of the state does not depend on the length of the sequence."""

    def forward(
        self,
        x: Tensor,
        seq_idx: Tensor | None = None,
        documents: Documents | None = None,
        state: MixerState | None = None,
    ) -> Tensor:
        if self.context:
            return self.forward_context_parallel(x, seq_idx)
        if self.whole_mixer_operator in self.backends and state is None:
            return self.run_whole_mixer(self.project_in(x, self.in_proj), seq_idx)
        x, *rest = self.project(x)
        earlier = 0
        entering = None
        if state:
            earlier = state["conv"].shape[1]
            entering = state["ssm"]
            x = torch.cat([state["conv"], x], dim=1)
        if state is not None:
            width = self.conv1d.weight.shape[2]
            state["conv"] = x[:, 1 - width :].clone()  # a view would keep all inputs in memory
        x = causal_conv_silu(
            x,
            self.conv1d.weight,
            getattr(self.conv1d, "bias", None),
            seq_idx=seq_idx,
            backend=self.backends["conv"],
        )
        if earlier:
            x = x[:, earlier:]
        y = self.scan(
            *self.scan_inputs(x, *rest),
            seq_idx=seq_idx,
            initial_state=entering,
            return_last_state=state is not None,
        )
        if state is not None:
            y, state["ssm"] = y
        return self.project_out(y, *rest)

    def forward_context_parallel(self, x: Tensor, seq_idx: Tensor | None) -> Tensor:
        """Returns the output for this rank's part of a sequence. The earlier ranks have the positions before it."""
        context = self.context
        length = x.shape[1]
        x, *rest = self.project(x)
        earlier = self.conv1d.weight.shape[2] - 1
        x = causal_conv_silu(
            torch.cat([context.previous_inputs(x, earlier), x], dim=1),
            self.conv1d.weight,
            getattr(self.conv1d, "bias", None),
            seq_idx=context.own_columns(seq_idx, length, before=earlier),
            backend=self.backends["conv"],
        )
        y = self.scan_context_parallel(
            *self.scan_inputs(x[:, earlier:], *rest),
            seq_idx=context.own_columns(seq_idx, length),
            continues=context.continues_document(seq_idx, length),
        )
        return self.project_out(y, *rest)

    def A(self) -> Tensor:
        return NegativeExp.apply(self.A_log.to(compute_type(self.A_log)))


class Mamba1(SSM):
    kind = spec.MIXERS["mamba1"]
    whole_mixer_operator = "mamba1"

    def state_shape(self) -> tuple[int, ...]:
        return self.config.d_inner, self.config.d_state

    def run_whole_mixer(self, xz: Tensor, seq_idx: Tensor | None) -> Tensor:
        return mamba1_mixer(
            xz,
            self.conv1d.weight,
            self.conv1d.bias,
            self.x_proj.weight.to(xz.dtype),
            self.dt_proj.weight.to(xz.dtype),
            self.dt_proj.bias,
            self.A_log,
            self.D,
            self.out_proj.weight.to(xz.dtype),
            seq_idx,
            backend=self.backends["mamba1"],
        )

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.project_in(x, self.in_proj).chunk(2, dim=-1)

    def scan_inputs(self, x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        rank = self.config.resolved_dt_rank
        d_state = self.config.d_state
        dt, B, C = self.x_proj(x).split([rank, d_state, d_state], dim=-1)
        eps = self.config.bcdt_norm_eps
        if eps:
            dt, B, C = (unweighted_rms_norm(t, eps) for t in (dt, B, C))
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

    def scan(
        self, *inputs: Tensor, initial_state: Tensor | None = None, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        backend = self.backends["scan"]
        # The fused operator does not accept an initial state.
        if initial_state is not None and backend == "fused":
            backend = "reference"
        return selective_scan(*inputs, initial_state=initial_state, **options, backend=backend)

    def scan_context_parallel(
        self,
        u: Tensor,
        dt: Tensor,
        A: Tensor,
        *rest: Tensor,
        seq_idx: Tensor | None,
        continues: Tensor,
    ) -> Tensor:
        """Returns the output for this rank's positions. Two scans are needed: the first scan starts from zeros and computes
        the last state for the later ranks; the second scan starts from the state after all earlier ranks."""
        *_, dt_bias = rest
        _, last = self.scan(u, dt, A, *rest, seq_idx=seq_idx, return_last_state=True)
        delta = F.softplus(dt.to(A.dtype) + dt_bias)
        decay = torch.exp(delta.sum(1).unsqueeze(2) * A) * continues[:, -1, None, None]
        entering = self.context.entering_state(last, decay) * continues[:, 0, None, None]
        return self.scan(u, dt, A, *rest, seq_idx=seq_idx, initial_state=entering)

    def project_out(self, y: Tensor, z: Tensor) -> Tensor:
        return self.out_proj(y)


def unweighted_rms_norm(x: Tensor, eps: float) -> Tensor:
    """Returns the RMSNorm of x over its last dimension, without weights."""
    values = x.to(compute_type(x))
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class Mamba2(SSM):
    kind = spec.MIXERS["mamba2"]
    whole_mixer_operator = "mamba2"

    def state_shape(self) -> tuple[int, ...]:
        return self.config.n_ssm_head, self.config.headdim, self.config.d_state

    def run_whole_mixer(self, zxbcdt: Tensor, seq_idx: Tensor | None) -> Tensor:
        config = self.config
        return mamba2_mixer(
            zxbcdt,
            self.conv1d.weight,
            self.conv1d.bias,
            self.dt_bias,
            self.A_log,
            self.D,
            self.norm.weight,
            self.out_proj.weight.to(zxbcdt.dtype),
            seq_idx,
            config.norm_eps,
            config.ngroups,
            config.headdim,
            config.chunk_size,
            backend=self.backends["mamba2"],
        )

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        d_inner = self.config.d_inner
        convolved = len(self.conv1d.weight)
        heads = self.config.n_ssm_head
        z, xbc, dt = self.project_in(x, self.in_proj).split([d_inner, convolved, heads], dim=-1)
        return xbc, z, dt

    def scan_inputs(self, xbc: Tensor, z: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        config = self.config
        group_channels = config.ngroups * config.d_state
        x, B, C = xbc.split([config.d_inner, group_channels, group_channels], dim=-1)
        return (
            x.unflatten(-1, (config.n_ssm_head, config.headdim)),
            dt,
            self.A(),
            B.unflatten(-1, (config.ngroups, config.d_state)),
            C.unflatten(-1, (config.ngroups, config.d_state)),
            self.D,
            self.dt_bias,
        )

    def scan(self, *inputs: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        return ssd(
            *inputs,
            **options,
            chunk_size=self.config.chunk_size,
            backend=self.backends["ssd"],
        )

    def scan_context_parallel(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        dt_bias: Tensor,
        *,
        seq_idx: Tensor | None,
        continues: Tensor,
    ) -> Tensor:
        """Returns the output for this rank's positions: the output of a scan that starts from zeros, plus the
        contribution of the state after all earlier ranks."""
        y, last = self.scan(x, dt, A, B, C, D, dt_bias, seq_idx=seq_idx, return_last_state=True)
        decays = decays_from_start(dt, A, dt_bias) * continues.unsqueeze(2)
        entering = self.context.entering_state(last, decays[:, -1, :, None, None])
        return y + output_of_state(C, entering, decays).to(y.dtype)

    def project_out(self, y: Tensor, z: Tensor, dt: Tensor) -> Tensor:
        y = y.flatten(-2)
        if self.config.ssm_norm == "none":
            return self.out_proj(y * F.silu(z))
        gated = gated_rms_norm(
            y,
            z,
            self.norm.weight,
            self.config.norm_eps,
            self.config.d_inner // self.config.ngroups,
            norm_first=self.config.ssm_norm == "before",
            backend=self.backends["norm"],
        )
        return self.out_proj(gated)


def heavy_tail(x: Tensor) -> Tensor:
    """Returns 1 + x for positive x and 1 / (1 - x) for negative x, elementwise."""
    return x.clamp(min=0) + 1 / (1 - x.clamp(max=0))


class Mamba3(Mamba2):
    """Mamba-3 with one input and one output per head (arXiv 2603.15569, mamba-ssm's modules/mamba3.py).

    With delta = softplus(dt + dt_bias), alpha = exp(-activation(A) delta), lambda = sigmoid(trapezoid):

        h[t] = alpha h[t-1] + (1 - lambda) delta alpha x[t-1] B[t-1]^T + lambda delta x[t] B[t]^T
        y[t] = h[t] C[t] + D x[t]

    B and C are normalized, and each head adds its bias to them. Pairs of channels in their first halves are then
    rotated by the sum of pi tanh(angles) delta up to position t.

    In this recurrence, each input enters the state twice: at its own position and at the next one. The scan adds it
    only once, at its own position, with the sum of both weights. The output of that position would then contain the
    second weight too early, so this contribution is subtracted.
    """

    kind = spec.MIXERS["mamba3"]

    def forward(
        self,
        x: Tensor,
        seq_idx: Tensor | None = None,
        documents: Documents | None = None,
        state: MixerState | None = None,
    ) -> Tensor:
        config = self.config
        rows = list(self.rows.values())
        continues: Any = None
        if self.context:
            continues = self.context.continues_document(seq_idx, x.shape[1])
            seq_idx = self.context.own_columns(seq_idx, x.shape[1])
        z, x, B, C, dt, A, trapezoid, angles = self.project_in(x, self.in_proj).split(rows, dim=-1)
        real = compute_type(x)
        x = x.unflatten(-1, (-1, config.headdim))
        delta = F.softplus(dt.to(real) + self.dt_bias)
        positive = F.softplus if config.decay_activation == "softplus" else heavy_tail
        decay = positive(A.to(real)).clamp(min=1e-4) * delta
        former_weight = delta * torch.sigmoid(-trapezoid.to(real))
        next_weight = F.pad(former_weight[:, 1:], (0, 0, 0, 1))
        if seq_idx is not None:
            is_last = starts(seq_idx).roll(-1, 1)
            next_weight = next_weight.masked_fill(is_last.unsqueeze(2), 0)

        steps = math.pi * torch.tanh(angles.to(real)).unsqueeze(2) * delta.unsqueeze(3)
        angle = running_sums(steps.double().flatten(2), seq_idx)
        if self.context:
            through = continues[:, -1:].to(angle.dtype)
            before = self.context.entering_state(angle[:, -1], through)
            angle = angle + before.unsqueeze(1) * continues.unsqueeze(2)
        angle = angle.view(steps.shape)
        entering = None
        if state:
            angle = angle + state["angle"].unsqueeze(1)
            former = state["x"].unsqueeze(3) * state["B"].unsqueeze(2)
            entering = state["ssm"] + former_weight[:, 0, :, None, None] * former
        angle = angle.remainder(2 * math.pi).to(real)
        B = self.norm_per_head(B, self.B_norm, self.B_bias)
        C = self.norm_per_head(C, self.C_norm, self.C_bias)
        # B . C can be computed before the rotation, because rotating both vectors does not change it.
        own_output = self.D - next_weight * (B * C).sum(3)
        B = rotate_pairs(B, angle).to(x.dtype)
        C = rotate_pairs(C, angle).to(x.dtype)

        y = weighted_ssd(
            x,
            decay,
            delta - former_weight + next_weight,
            B,
            C,
            chunk_size=config.chunk_size,
            seq_idx=seq_idx,
            initial_state=entering,
            return_last_state=state is not None or bool(self.context),
            backend=self.backends["ssd"],
        )
        if self.context:
            y, last = y
            decays = running_sums(-decay).exp() * continues.unsqueeze(2)
            y = y + self.output_of_earlier_ranks(x, B, C, decays, former_weight[:, 0], last)
        if state is not None:
            y, state["ssm"] = y
            state["angle"] = angle[:, -1].clone()  # a view would keep all positions in memory
            state["B"] = B[:, -1].clone()
            state["x"] = x[:, -1].clone()
        y = y + own_output.unsqueeze(3) * x
        return self.out_proj((y.flatten(2) * F.silu(z)).to(z.dtype))

    def output_of_earlier_ranks(
        self, x: Tensor, B: Tensor, C: Tensor, decays: Tensor, former_weight: Tensor, last: Tensor
    ) -> Tensor:
        """Returns the contribution of the earlier ranks to this rank's output. It comes from the state after
        their positions; the second weight of the previous rank's last input is included."""
        former_x = self.context.previous_inputs(x, 1).squeeze(1)
        former_B = self.context.previous_inputs(B, 1).squeeze(1)
        former = (former_weight.unsqueeze(2) * former_x).unsqueeze(3) * former_B.unsqueeze(2)
        through = decays[:, -1, :, None, None]
        entering = self.context.entering_state(last + through * former, through) + former
        return output_of_state(C, entering, decays).to(x.dtype)

    def norm_per_head(self, x: Tensor, norm: nn.Module, bias: Tensor) -> Tensor:
        """Normalizes x (batch, length, groups * d_state), repeats each group for its heads, and adds the bias of each
        head. Returns (batch, length, heads, d_state)."""
        config = self.config
        x = x.unflatten(-1, (config.ngroups, -1))
        x = rms_norm(x, norm.weight, config.norm_eps, compute_type(x))
        return x.repeat_interleave(config.n_ssm_head // config.ngroups, dim=2) + bias.squeeze(1)


class GatedDeltaNet(SSM):
    """Gated DeltaNet (arXiv 2412.06464, and the models olmo_hybrid and qwen3_5 of transformers).

    There are `ngroups` heads of queries and keys, with d_state channels each, and d_inner / headdim heads of values,
    with headdim channels each. Several heads of values share a head of queries and keys. With a and b from the input
    projection:

        g = -exp(A_log) softplus(a + dt_bias),    beta = sigmoid(b), or twice that with allow_neg_eigval
    """

    kind = spec.MIXERS["gdn"]
    whole_mixer_operator = ""

    def state_shape(self) -> tuple[int, ...]:
        return self.config.n_ssm_head, self.config.d_state, self.config.headdim

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        d_inner = self.config.d_inner
        convolved = len(self.conv1d.weight)
        heads = self.config.n_ssm_head
        return self.project_in(x, self.in_proj).split([convolved, d_inner, heads, heads], dim=-1)

    def scan_inputs(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        config = self.config
        keys = config.ngroups * config.d_state
        q, k, v = qkv.split([keys, keys, config.d_inner], dim=-1)
        real = compute_type(qkv)
        return (
            q.unflatten(-1, (config.ngroups, -1)),
            k.unflatten(-1, (config.ngroups, -1)),
            v.unflatten(-1, (-1, config.headdim)),
            self.A() * F.softplus(a.to(real) + self.dt_bias),
            torch.sigmoid(b.to(real)) * (1 + config.allow_neg_eigval),
        )

    def scan(self, *inputs: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        return gated_delta_rule(*inputs, **options, backend=self.backends["gdn"])

    def project_out(self, y: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
        normed = gated_rms_norm(
            y,
            z.unflatten(-1, y.shape[2:]),
            self.norm.weight,
            self.config.resolved_gdn_norm_eps,
            self.config.headdim,
            norm_first=True,
            backend=self.backends["norm"],
        )
        return self.out_proj(normed.flatten(2))


def rotate_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """Rotates pairs of channels: channels 2i and 2i + 1 of x (..., d_state) by angle[..., i]. The channels after these
    pairs are returned unchanged."""
    angles = angle.shape[-1]
    first, second = x[..., : 2 * angles].unflatten(-1, (angles, 2)).unbind(-1)
    cos = angle.cos()
    sin = angle.sin()
    pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return torch.cat([pairs.flatten(-2), x[..., 2 * angles :]], dim=-1)


class Attention(Sublayer):
    kind = spec.MIXERS["attention"]

    def forward(
        self,
        x: Tensor,
        seq_idx: Tensor | None = None,
        documents: Documents | None = None,
        state: MixerState | None = None,
    ) -> Tensor:
        config = self.config
        position = state["k"].shape[1] if state else 0
        if self.context:
            position = self.context.rank * x.shape[1]
        end = position + x.shape[1]
        if seq_idx is not None:
            seq_idx = seq_idx[:, :end]
        heads = self.project_in(x, self.in_proj).unflatten(-1, (-1, config.resolved_head_dim))
        others = [config.n_kv_head, config.n_kv_head]
        q, k, v = heads.split([heads.shape[2] - sum(others), *others], dim=-2)
        if config.attention_gate:
            q, gate = q.unflatten(2, (-1, 2)).unbind(3)
        if config.qk_norm != "none":
            # rms_norm normalizes over as many channels as there are weights: over one head, or over all heads.
            q = rms_norm(q, self.q_norm.weight, config.norm_eps, q.dtype)
            k = rms_norm(k, self.k_norm.weight, config.norm_eps, k.dtype)
        places = positions_in_document(end, seq_idx, x.device)[..., position:]
        rotation = (places, config.resolved_rotary_dim, config.rope_theta, config.rope, end)
        q, k = (rotary(t, *rotation) for t in (q, k))
        if state:
            k = torch.cat([state["k"], k], dim=1)
            v = torch.cat([state["v"], v], dim=1)
            # Only the last positions have queries. A single query does not need this description.
            if x.shape[1] > 1:
                documents = Documents([end] * len(x), [x.shape[1]] * len(x))
        if state is not None:
            state |= {"k": k, "v": v}
        if self.context:
            k_and_v = self.context.gather_sequence(torch.cat([k, v], dim=2))
            k, v = k_and_v[:, :end].chunk(2, dim=2)
        y = attention(q, k, v, documents=documents, backend=self.backends["attention"])
        if config.attention_gate:
            y = y * torch.sigmoid(gate)
        return self.out_proj(y.flatten(2))


def positions_in_document(length: int, seq_idx: Tensor | None, device: torch.device) -> Tensor:
    """Returns the position of each token in its row, (length,). With seq_idx, returns the position in its document,
    (batch, length)."""
    places = torch.arange(length, device=device)
    if seq_idx is None:
        return places
    return places - torch.where(starts(seq_idx), places, 0).cummax(dim=1).values


class MLP(Sublayer):
    """The MLP, with SwiGLU or squared ReLU. With SwiGLU, the second half of the output of fc1 is the gate."""

    kind = spec.MLP

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        y = self.project_in(x, self.fc1)
        if self.config.mlp_activation == "relu2":
            return self.fc2(F.relu(y).square())
        y, gate = y.chunk(2, dim=-1)
        return self.fc2(y * F.silu(gate))


MIXERS = {
    "mamba1": Mamba1,
    "mamba2": Mamba2,
    "mamba3": Mamba3,
    "gdn": GatedDeltaNet,
    "attention": Attention,
    "mlp": MLP,
}
