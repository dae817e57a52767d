"""Computes SSD in Triton. The forward pass is one sweep that keeps the states in registers and reads and writes only
inputs and outputs. If batch and heads are too few to fill a GPU, segments of the sequence run in parallel, after a sweep
that gives the states before the segments. The backward pass recomputes the states before pairs of chunks by a sweep from
the beginning, and computes the gradients of the states after the pairs by a sweep from the end. From both, it computes all
other gradients: through positions of the same pair, and through the states. Equal runs give equal bits, because the order
of sums depends only on sizes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mamba_fsdp.ops import triton
from mamba_fsdp.ops.backends import Use

why_unavailable = triton.why_unavailable
# With num_stages above 1, Triton prefetches the next inputs of a loop. On compute capability 10 and 12, Triton 3.5 to 3.7
# then computes wrong results (state-spaces/mamba #997), so num_stages is 1 there.
_NARROW = {"P": 32, "num_warps": 4, "num_stages": 2}
SWEEP = {
    (8, 0): _NARROW,
    (9, 0): _NARROW | {"P": 64, "num_stages": 1},
    (10, 0): _NARROW | {"P": 64, "num_stages": 1},
    (12, 0): _NARROW | {"num_stages": 1},
}
_NEAR = {"P": 64, "BLOCK": 40, "num_warps": 4, "num_stages": 2}
NEAR = {
    (8, 0): _NEAR,
    (10, 0): _NEAR | {"num_warps": 8, "num_stages": 1},
    (12, 0): _NEAR | {"num_stages": 1},
}
_FAR = {"P": 64, "ROWS": 32, "BLOCK": 20, "num_warps": 8, "num_stages": 2}
FAR = {
    (8, 0): _FAR,
    (9, 0): _FAR | {"ROWS": 64},
    (10, 0): _FAR | {"ROWS": 64, "num_stages": 1},
    (12, 0): _FAR | {"num_stages": 1},
}
STATES = 8192  # the largest size of a program's state: its channels times d_state
PROGRAMS = 512  # the number of programs of a sweep that fills a GPU
CHUNK = 32  # the number of positions of a chunk, at most
SEGMENTS = 16  # the number of segments of a sequence, at most
CHUNKS = 8  # the number of chunks of a segment, at least


class Inputs(NamedTuple):
    """The inputs of SSD as in ops/ssd. If a_is_log, A is log(-A)."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor
    seq_idx: Tensor | None
    state: Tensor | None
    a_is_log: bool = False


def why_not(use: Use) -> str | None:
    if use.dtype == torch.float32:
        return "in float32 a program's states are more than its registers hold"
    return None


def use_simpler_form() -> None:
    """Makes the kernels avoid wgmma and tcgen05 instructions, for a GPU that computes wrong results with them. Triton
    uses these instructions only with at least four warps and 64 rows."""
    for table, simpler in (
        (SWEEP, {"P": 16, "num_warps": 2, "num_stages": 1}),
        (NEAR, {"num_warps": 2}),
        (FAR, {"ROWS": 32}),
    ):
        for capability, options in table.items():
            table[capability] = options | simpler


def _rows(**tensors: Tensor) -> dict[str, int]:
    """Returns the strides along the length, as constants of a kernel. A kernel needs no registers for constants."""
    return {f"{name}_ROW": t.stride(1) for name, t in tensors.items()}


class _Call:
    """The inputs and sizes that the kernels of one call share, and the steps from which they compute decays."""

    def __init__(self, inputs: Inputs) -> None:
        from mamba_fsdp.ops.ssd.triton_kernels import add_up

        x, dt, A, B, C, D, dt_bias, seq_idx, _, a_is_log = inputs
        dtype = torch.promote_types(x.dtype, torch.promote_types(B.dtype, C.dtype))
        self.x = triton.rows(x.to(dtype))
        self.B = triton.rows(B.to(dtype))
        self.C = triton.rows(C.to(dtype))
        self.dt = triton.rows(dt)
        self.D = D
        self.bias = dt_bias
        self.seq_idx = None if seq_idx is None else seq_idx.contiguous()
        self.batch, self.length, self.heads, headdim = x.shape
        _, _, self.groups, d_state = B.shape
        N = max(16, 1 << (d_state - 1).bit_length())
        Q = max(16, min(CHUNK, 4096 // N))
        self.chunks = 2 * -(-self.length // (2 * Q))
        self.share = self.heads // self.groups
        self.constants = {
            "HEADS": self.heads,
            "SHARE": self.share,
            "HEADDIM": headdim,
            "D_STATE": d_state,
            "N": N,
            "WIDE": triton.interpreted(),
        }
        self.pairs = self.chunks // 2
        self.Q = Q
        self.W = 2 * Q
        self.steps = self.fp32(3, self.batch, self.heads, self.pairs, self.W)
        add_up[self.pairs, -(-self.heads // 8), self.batch](
            self.dt,
            A,
            self.bias,
            self.steps,
            self.dt.stride(1),
            self.length,
            self.heads,
            A_IS_LOG=a_is_log,
            HEADS=8,
            W=self.W,
        )

    def options(self, table: Mapping[tuple[int, int], triton.Blocks]) -> dict[str, int]:
        """Returns the options of a launch, from the table. The number of channels of a program, P, is reduced to those of a
        head, and so far that the registers of the program hold its states."""
        options = dict(triton.blocks(table, self.x.device))
        headdim = self.constants["HEADDIM"]
        most = min(options["P"], STATES // self.constants["N"], 1 << (headdim - 1).bit_length())
        P = max(16, most)
        # W is smaller than 2 * CHUNK if d_state is above 128.
        if "ROWS" in options and self.W < 2 * CHUNK:
            options["ROWS"] = 16
        return options | {"P": P, "TILES": -(-headdim // P)}

    def fp32(self, *shape: int) -> Tensor:
        return self.x.new_empty(shape, dtype=torch.float32)

    def sweep(
        self,
        x: Tensor,
        B: Tensor,
        C: Tensor,
        first: Tensor | None,
        out: Tensor | None,
        keep: bool = False,
        reverse: bool = False,
    ) -> tuple[Any, Tensor]:
        """Writes the outputs to `out`, whose rows may have any stride. Returns (the state before each pair of chunks, or
        None without `keep`; the last state). With `reverse`, the states are gradients of states: after each pair, and of
        the initial state. See the kernel `sweep`."""
        from mamba_fsdp.ops.ssd.triton_kernels import sweep

        options = self.options(SWEEP)
        # A num_stages above 1 prefetches the next chunk. Triton 2 can't compile a sweep that prefetches, and a sweep
        # without outputs does not become faster by it.
        if triton.is_version_2() or out is None:
            options["num_stages"] = 1
        rows = self.batch * self.heads
        headdim = self.constants["HEADDIM"]
        size = self.constants["N"] * headdim
        segments = PROGRAMS // (rows * options["TILES"])
        segments = max(1, min(SEGMENTS, self.chunks // CHUNKS, segments))
        per_segment = -(-self.chunks // segments)
        segments = -(-self.chunks // per_segment)
        ends = self.fp32(rows, segments, size)
        end_decays = self.fp32(rows, segments)
        states = x.new_empty(rows, self.pairs, size) if keep else None
        last = self.fp32(self.batch, self.heads, headdim, self.constants["D_STATE"])
        first = None if first is None else first.float().contiguous()
        for local in (True, False) if segments > 1 else (False,):
            stages = 1 if local else options["num_stages"]
            sweep[self.heads * options["TILES"], self.batch, segments - local](
                x,
                B,
                C,
                self.D,
                self.steps,
                self.seq_idx,
                first,
                ends,
                end_decays,
                states,
                out,
                last,
                self.length,
                segments,
                per_segment,
                Q=self.Q,
                LOCAL=local,
                REVERSE=reverse,
                OUT_ROW=0 if out is None else out.stride(1),
                **_rows(X=x, B=B, C=C),
                **self.constants,
                **options | {"num_stages": stages},
            )
        return states, last


def ssd_forward(inputs: Inputs, remake: bool = False) -> tuple[Tensor, Any]:
    """Returns (y, last state). The backward pass needs only the inputs. With `remake`, returns (y, (call, states before each
    pair of chunks)). If ssd_backward gets this pair of values as `remade`, it needs one sweep less."""
    x = inputs.x
    y = x.new_empty(x.shape)
    if x.is_meta and not remake:
        d_state = inputs.B.shape[3]
        return y, x.new_empty(x.shape[0], *x.shape[2:], d_state, dtype=torch.float32)
    call = _Call(inputs)
    entering, last = call.sweep(call.x, call.B, call.C, inputs.state, y, keep=remake)
    return y, (call, entering) if remake else last


def ssd_backward(
    grad: Tensor,
    grad_last: Tensor | None,
    inputs: Inputs,
    remade: tuple[_Call, Tensor] | None = None,
    results: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Returns the gradients of x, dt, A (or log(-A), if a_is_log), B, C, D, dt_bias and the initial state.

    grad_last: the gradient of the last state; None stands for zeros. remade: the second result of ssd_forward with
    `remake`. results: three tensors to which the gradients of x, of dt, and of B and C (batch, length, 2, groups, d_state)
    are written; their rows may have any stride, the same over the whole batch. With `results`, None is returned in place of
    the gradients of B and C."""
    from mamba_fsdp.ops.ssd.triton_kernels import far, finish, near

    if remade is None:
        call = _Call(inputs)
        entering, _ = call.sweep(call.x, call.B, call.C, inputs.state, None, keep=True)
    else:
        call, entering = remade
    grad = triton.rows(grad.to(call.x.dtype))
    if results is None:
        grad_x = inputs.x.new_empty(inputs.x.shape)
        grad_dt = inputs.dt.new_empty(inputs.dt.shape)
    else:
        grad_x, grad_dt, grad_BC = results
    leaving, grad_state = call.sweep(
        grad, call.C, call.B, grad_last, grad_x, keep=True, reverse=True
    )
    near_options = call.options(NEAR)
    # The prefetched tiles of a head must fit into the 99 KiB of shared memory of compute capability 8.6 and 8.9.
    if near_options["TILES"] > (3 if triton.is_version_2() else 4):
        near_options["num_stages"] = 1
    far_options = call.options(FAR)
    near_blocks = -(-call.share // near_options["BLOCK"])
    far_blocks = -(-call.share // far_options["BLOCK"])
    flows = call.fp32(call.batch, call.heads, call.pairs, 5, call.W)
    parts = call.fp32(2, near_blocks + far_blocks, *inputs.B.shape)
    parts_of_B, parts_of_C = parts
    pointers = (grad, call.x, call.B, call.C, call.steps, call.seq_idx)
    constants = call.constants | {"W": call.W} | _rows(GRAD_Y=grad, X=call.x, B=call.B, C=call.C)
    near[call.groups * near_blocks, call.pairs, call.batch](
        *pointers, parts_of_B, parts_of_C, flows, call.length, **constants, **near_options
    )
    far[call.W // far_options["ROWS"] * call.groups * far_blocks, call.pairs, call.batch](
        *pointers,
        parts_of_B[near_blocks:],
        parts_of_C[near_blocks:],
        flows,
        entering,
        leaving,
        call.length,
        **constants,
        **far_options,
    )
    totals = call.fp32(3, call.batch * call.pairs, call.heads)
    finish[call.heads, call.pairs, call.batch](
        call.dt,
        inputs.A,
        call.bias,
        call.steps,
        call.seq_idx,
        flows,
        grad_dt,
        totals,
        call.dt.stride(1),
        grad_dt.stride(1),
        call.length,
        call.heads,
        A_IS_LOG=inputs.a_is_log,
        W=call.W,
        num_warps=2,
    )
    grad_A, grad_dt_bias, grad_D = totals.sum(1)
    sums = parts.sum(1)
    if results is not None:
        grad_BC.copy_(sums.movedim(0, 2))
    grad_B, grad_C = sums if results is None else (None, None)
    return grad_x, grad_dt, grad_A, grad_B, grad_C, grad_D, grad_dt_bias, grad_state


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    return ssd_forward(Inputs(*inputs))


def _backward(grad: Tensor, grad_last: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    return ssd_backward(grad, grad_last, Inputs(*inputs))


_ssd = triton.differentiable(
    "ssd", "x dt A B C D dt_bias seq_idx? state?", "", 2, 0, _forward, _backward
)


def ssd(*inputs: Tensor | int | None) -> Tensor | tuple[Tensor, Tensor]:
    *tensors, _, seq_idx, initial_state, return_last_state = inputs  # without chunk_size
    y, last = _ssd(*tensors, seq_idx, initial_state)
    return (y, last) if return_last_state else y
