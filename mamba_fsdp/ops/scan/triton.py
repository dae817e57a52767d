"""Computes the selective scan with the Triton kernels in triton_kernels.py. Equal inputs give equal bits on equal GPUs:
no kernel uses atomic additions, and how a row is cut into segments depends only on sizes."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_fsdp.ops import triton
from mamba_fsdp.ops.backends import Use

why_unavailable = triton.why_unavailable
TILE = 4  # the number of positions that a kernel reads together
CHUNK = 64  # the number of positions from one kept state to the next
# The number of programs that keep a GPU busy. If batch and channels give fewer, rows are cut into segments.
FILL = 1024
# Channels of a program, in the forward and in the backward pass. A program has a warp for every 16 states.
FORWARD_CHANNELS = 32
CHANNELS = 32
# The largest d_state that each version of Triton is known to compile. With 128, the compiler of Triton 2.2 crashes.
STATES_OF_2 = 64
STATES = 256


class Inputs(NamedTuple):
    """The inputs of a scan, as in ops/scan. BC (batch, length, 2, d_state) contains B and C. If a_is_log, A is log(-A)."""

    u: Tensor
    dt: Tensor
    A: Tensor
    BC: Tensor
    D: Tensor
    z: Tensor
    dt_bias: Tensor
    seq_idx: Tensor | None
    a_is_log: bool = False


def why_not(use: Use) -> str | None:
    most = STATES_OF_2 if triton.is_version_2() else STATES
    if use.channels > most:
        return (
            f"with this Triton, the kernels support a d_state of up to {most}, not {use.channels}"
        )
    return None


def segments_of(programs: int, chunks: int) -> tuple[int, int]:
    """Returns the number of segments of a row, and the number of chunks of a segment.

    programs: the number of programs if rows are not cut into segments. chunks: the number of chunks of a row."""
    most = min(chunks, -(-FILL // programs))
    segment_chunks = -(-chunks // most)
    return -(-chunks // segment_chunks), segment_chunks


def _state(initial: Tensor | None) -> Tensor | None:
    """Returns a state (batch, d_inner, d_state) as (batch, d_state, d_inner). Returns None for None, which the kernels take
    as a state of zeros."""
    return None if initial is None else initial.mT.float().contiguous()


class _Scan:
    """The segments of a scan's rows, and the arguments that its kernels share."""

    def __init__(self, inputs: Inputs, channels: int) -> None:
        u, dt, A, BC, D, z, dt_bias, seq_idx, a_is_log = inputs
        self.batch, length, self.channels = u.shape
        self.states = A.shape[1]
        N = max(16, 1 << (self.states - 1).bit_length())  # Triton 2.2 reads past smaller tensors
        self.blocks = -(-self.channels // channels)
        self.chunks = -(-length // CHUNK)
        self.segments, segment_chunks = segments_of(self.batch * self.blocks, self.chunks)
        self.u = u.contiguous()
        z = triton.rows(z)
        short = -length % TILE
        starts = None
        if seq_idx is not None:
            starts = F.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).int(), (1, short))
        BC = BC.float().contiguous()
        if short or self.states < N:
            BC = F.pad(BC, (0, N - self.states, 0, 0, 0, short))
        self.shared = dict(
            dt=dt.contiguous(),
            z=z,
            z_row=z.stride(1),
            A=A.contiguous(),
            BC=BC,
            D=D.contiguous(),
            bias=dt_bias.contiguous(),
            starts=starts,
            length=length,
            channels=self.channels,
            states=self.states,
            segment_chunks=segment_chunks,
            CUT=self.segments > 1,
            A_IS_LOG=a_is_log,
            CHUNK=CHUNK,
            N=N,
            EVEN=self.channels % channels == short == 0 and self.states == N,
            CHANNELS=channels,
            num_warps=-(-N // 16),
        )

    def floats(self, *shape: int) -> Tensor:
        return self.u.new_empty(shape, dtype=torch.float32)

    def slabs(self, *places: int) -> Tensor:
        """Returns uninitialised states, (*places, d_state, d_inner)."""
        return self.floats(*places, self.states, self.channels)

    def sweep(self, segments: int, u: Tensor, **others: Tensor | bool | None) -> None:
        """Launches the kernel `sweep`. others: the arguments that differ from launch to launch."""
        from mamba_fsdp.ops.scan.triton_kernels import sweep

        sweep[self.blocks, segments, self.batch](u=u, **self.shared, **others)

    def cut(self, u: Tensor, reverse: bool) -> None:
        """If rows are cut into segments, computes the state at the end of each segment, for a state of zeros before the
        segment. From these states, the kernels compute the true states before the segments.

        reverse: computes the gradient of the state before each segment instead, for a gradient of zeros after it. u is then
        the gradient of y."""
        ends = self.slabs(self.batch, self.segments)
        self.shared["ends"] = ends
        self.shared["totals"] = self.floats(self.batch, self.segments, self.channels)
        if self.segments > 1:
            absent = dict.fromkeys(("state", "out", "entries", "last"))
            self.sweep(self.segments - 1, u, **absent, LOCAL=True, REVERSE=reverse)


def scan_forward(
    inputs: Inputs, state: Tensor | None, keep: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (y, last state, entries). With `keep`, `entries` contains the state before each chunk, (batch, chunks,
    d_state, d_inner), for scan_backward. Otherwise it is empty."""
    scan = _Scan(inputs, FORWARD_CHANNELS)
    u = inputs.u
    last = scan.slabs(scan.batch)
    out = u.new_empty(u.shape)
    entries = scan.slabs(scan.batch, scan.chunks) if keep else scan.floats(0, 0, 0, 0)
    if not u.is_meta:
        scan.cut(scan.u, reverse=False)
        scan.sweep(
            scan.segments,
            scan.u,
            state=_state(state),
            out=out,
            entries=entries if keep else None,
            last=last,
            LOCAL=False,
            REVERSE=False,
        )
    return out, last.mT, entries


def scan_backward(
    grad_out: Tensor,
    grad_last: Tensor | None,
    inputs: Inputs,
    entries: Tensor,
    grad_z: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns the gradients of u, dt, A (or log(-A), if a_is_log), BC, D, z, dt_bias and the initial state, and then y.
    The gradient of z is written to `grad_z`, if given."""
    scan = _Scan(inputs, CHANNELS)
    u, dt, A, *_ = inputs
    grad_out = grad_out.contiguous()
    grad_state = scan.slabs(scan.batch)
    out = u.new_empty(u.shape)
    grad_u = u.new_empty(u.shape)
    grad_dt = dt.new_empty(u.shape)
    if grad_z is None:
        grad_z = u.new_empty(u.shape)
    parts = scan.batch * scan.segments
    grad_sums = scan.floats(parts, A.numel() + 2 * scan.channels)
    N = scan.shared["N"]
    grad_BC = scan.floats(
        scan.blocks, *scan.shared["BC"].shape
    )  # one part of the gradient for each block of channels
    scratch = scan.floats(parts * scan.blocks, CHUNK // TILE + 2, N + TILE, CHANNELS)
    from mamba_fsdp.ops.scan.triton_kernels import backward

    scan.cut(grad_out, reverse=True)
    backward[scan.blocks, scan.segments, scan.batch](
        **scan.shared,
        u=scan.u,
        grad_out=grad_out,
        grad_z=grad_z,
        grad_z_row=grad_z.stride(1),
        grad_last=_state(grad_last),
        entries=entries,
        scratch=scratch,
        grad_u=grad_u,
        grad_dt=grad_dt,
        grad_BC=grad_BC,
        grad_sums=grad_sums,
        grad_state=grad_state,
        out=out,
    )
    grad_A, grad_D, grad_bias = grad_sums.sum(0).tensor_split([A.numel(), -scan.channels])
    return (
        grad_u,
        grad_dt,
        grad_A.view(A.shape),
        grad_BC.sum(0)[:, : u.shape[1], :, : scan.states],
        grad_D,
        grad_z,
        grad_bias,
        grad_state.mT,
        out,
    )


def _forward(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    *rest, state, keep = others
    return scan_forward(Inputs(u, dt, A, torch.stack([B, C], 2), *rest), state, keep)


def _backward(*inputs: Any) -> tuple[Tensor, ...]:
    # The backward pass uses `entries` and does not need the initial state.
    grad, grad_last, u, dt, A, B, C, *rest, _, entries = inputs
    scanned = Inputs(u, dt, A, torch.stack([B, C], 2), *rest)
    grad_u, grad_dt, grad_A, grad_BC, *grads, _ = scan_backward(grad, grad_last, scanned, entries)
    return grad_u, grad_dt, grad_A, *grad_BC.unbind(2), *grads


_scan = triton.differentiable(
    "scan",
    "u dt A B C D z dt_bias seq_idx? state?",
    "bool keep",
    2,
    1,
    _forward,
    _backward,
)


def selective_scan(*inputs: Tensor | bool | None) -> Tensor | tuple[Tensor, Tensor]:
    *tensors, return_last_state = inputs
    out, last, _ = _scan(*tensors, torch.is_grad_enabled())
    return (out, last) if return_last_state else out
