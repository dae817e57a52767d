"""The selective scan in Triton: triton_kernels.py. Equal inputs give equal bits on equal GPUs: nothing is added by
atomics, and how a row is cut depends on its sizes alone."""

import torch
from torch import Tensor

from mamba_fsdp.ops import triton

takes = triton.takes
CHUNK = 64  # positions from one kept state to the next
FILL = 1024  # programs that keep a GPU busy: where batch and channels make fewer, rows are cut
TABLE = {(8, 0): {"CHANNELS": 32, "num_warps": 1}}  # of all kernels; warps for each 16 states


def _rows(a):
    """(batch, length, channels), or None, as the kernels read it: channels side by side, rows evenly spaced."""
    return (
        a
        if a is None or (a.stride(2) == 1 and a.stride(0) == a.shape[1] * a.stride(1))
        else a.contiguous()
    )


class _Scan:
    """How the rows of a scan are cut, and the arguments that its kernels share."""

    def __init__(self, u, dt, A, B, C, D, z, dt_bias, seq_idx):
        sizes, A = triton.blocks(TABLE, u.device), A.T.float().contiguous()
        (batch, length, channels), states = u.shape, len(A)
        blocks, chunks = -(-channels // sizes["CHANNELS"]), -(-length // CHUNK)
        segment_chunks = -(-chunks // min(-(-FILL // (batch * blocks)), chunks))
        self.grid, self.entries = (
            (blocks, -(-chunks // segment_chunks), batch),
            (batch, chunks, states, channels),
        )
        self.u, self.dt, self.B, self.C, self.z = map(_rows, (u, dt, B, C, z))
        self.D, bias = (
            A.new_zeros(channels) if v is None else v.contiguous() for v in (D, dt_bias)
        )
        N = 1 << (states - 1).bit_length()
        self.shared = dict(
            A=A,
            bias=bias,
            seq_idx=u if seq_idx is None else seq_idx.contiguous(),
            length=length,
            channels=channels,
            states=states,
            segment_chunks=segment_chunks,
            CHUNK=CHUNK,
            N=N,
            EVEN=channels % sizes["CHANNELS"] == length % 4 == 0 and states == N,
            CHANNELS=sizes["CHANNELS"],
            num_warps=sizes["num_warps"] * -(-N // 16),
            DOCUMENTS=seq_idx is not None,
        )

    def floats(self, *shape):
        return self.u.new_empty(shape, dtype=torch.float32)

    def state(self, given):
        """(batch, d_inner, d_state), or None for zeros, as (batch, d_state, d_inner)."""
        batch, _, states, channels = self.entries
        return (
            self.floats(batch, states, channels).zero_()
            if given is None
            else given.mT.float().contiguous()
        )

    def launch(self, kernel, value, z, matrix, reverse, **arguments):
        """A kernel behind `local`, which goes before with value, z and matrix where rows are cut. Nothing happens for
        tensors without content."""
        if self.u.is_meta:
            return
        from mamba_fsdp.ops.scan import triton_kernels as kernels

        (blocks, segments, batch), (_, _, states, channels) = self.grid, self.entries
        self.shared |= dict(
            ends=self.floats(batch, segments, states, channels),
            totals=self.floats(batch, segments, channels),
        )
        if segments > 1:
            kernels.local[blocks, segments - 1, batch](
                **self.shared,
                **_activations(u=value, dt=self.dt, z=value if z is None else z, B=matrix),
                REVERSE=reverse,
                GATED=reverse and z is not None,
            )
        rows = _activations(
            u=self.u, dt=self.dt, B=self.B, C=self.C, z=self.u if self.z is None else self.z
        )
        getattr(kernels, kernel)[self.grid](
            **self.shared, **rows, **arguments, D=self.D, CUT=segments > 1, GATED=self.z is not None
        )


def _activations(**given):
    """Arguments of a kernel: activations and the distances of their rows."""
    return given | {f"{name}_row": a.stride(1) for name, a in given.items()}


def scan_forward(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    seq_idx: Tensor | None,
    state: Tensor | None,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state and, with `keep`, what scan_backward begins at: states (batch, chunks, d_state, d_inner)."""
    scan = _Scan(u, dt, A, B, C, D, z, dt_bias, seq_idx)
    state, out = scan.state(state), u.new_empty(u.shape)
    last, entries = torch.empty_like(state), scan.floats(*scan.entries if keep else (0, 0, 0, 0))
    scan.launch(
        "forward",
        scan.u,
        None,
        scan.B,
        False,
        state=state,
        out=out,
        last=last,
        entries=entries,
        KEEP=keep,
    )
    return out, last.mT, entries


def scan_backward(
    grad_out: Tensor,
    grad_last: Tensor | None,
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    seq_idx: Tensor | None,
    entries: Tensor,
    want_out: bool = False,
    grad_z: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of u, dt, A, B, C, D, z, dt_bias and the initial state; and with want_out y again, as it was given.
    Those of z and y are empty where there is none. grad_z: where to write that of z."""
    scan, grad_out = (
        _Scan(u, dt, A, B, C, D, z, dt_bias, seq_idx),
        _rows(grad_out),
    )
    (blocks, segments, batch), (_, _, states, channels) = scan.grid, scan.entries
    grad_last, out = scan.state(grad_last), u.new_empty(u.shape if want_out else (0, 0, 0))
    grad_state, grad_u, grad_dt = (
        torch.empty_like(grad_last),
        u.new_empty(u.shape),
        dt.new_empty(u.shape),
    )
    grad_z = u.new_empty((0, 0, 0) if z is None else u.shape) if grad_z is None else grad_z
    grad_A = scan.floats(batch, segments, states, channels)
    grad_D, grad_bias = (scan.floats(batch, segments, channels) for _ in range(2))
    grad_BC = scan.floats(
        blocks, *B.shape[:2], 2, scan.shared["N"]
    )  # an entry for each block of channels
    scratch = scan.floats(
        batch * segments * blocks, CHUNK // 2 * (scan.shared["N"] + 2) * scan.shared["CHANNELS"]
    )
    scan.launch(
        "backward",
        grad_out,
        scan.z,
        scan.C,
        True,
        **_activations(grad_z=grad_z),
        grad_out=grad_out,
        grad_row=grad_out.stride(1),
        grad_last=grad_last,
        entries=entries,
        scratch=scratch,
        grad_u=grad_u,
        grad_dt=grad_dt,
        grad_A=grad_A,
        grad_BC=grad_BC,
        grad_D=grad_D,
        grad_bias=grad_bias,
        grad_state=grad_state,
        out=out,
        WITH_OUT=want_out,
    )
    return (
        grad_u,
        grad_dt,
        grad_A.sum((0, 1)).T,
        *(grad_BC[:, :, :, i, :states].sum(0).to(v.dtype) for i, v in enumerate((B, C))),
        grad_D.sum((0, 1)),
        grad_z,
        grad_bias.sum((0, 1)),
        grad_state.mT,
        out,
    )


def _backward(*inputs):
    *inputs, _, entries = inputs  # the initial state has left its part in `entries`
    return scan_backward(*inputs, entries)[:-1]


_forward = triton.differentiable(
    "scan",
    "u dt A B C D? z? dt_bias? seq_idx? state?",
    "bool keep",
    2,
    1,
    scan_forward,
    _backward,
)


def selective_scan(*inputs):
    *inputs, return_last_state = inputs
    out, last, _ = _forward(*inputs, torch.is_grad_enabled())
    return (out, last) if return_last_state else out
