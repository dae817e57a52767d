"""Compares the Triton kernels of the selective scan with the reference backend in float64."""

from functools import partial

import pytest
import torch

from mamba_fsdp.ops.scan import selective_scan
from mamba_fsdp.ops.scan import triton as backend
from tests.support.compare import assert_like_reference

scan, reference = (
    partial(selective_scan, return_last_state=True, backend=name)
    for name in ("triton", "reference")
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Makes each row a single segment of several chunks."""
    torch.manual_seed(0)
    monkeypatch.setattr(backend, "CHUNK", 8)
    monkeypatch.setattr(backend, "FILL", 1)


def inputs(batch, length, channels, states, dtype=torch.float32, without=()):
    """Returns the inputs of a scan. As in a model, u and z are slices of one tensor, and B and C of another."""
    xz = torch.randn(batch, length, 2 * channels).to(dtype)
    x_dbl = torch.randn(batch, length, 3 + 2 * states).to(dtype)
    u, z = xz.chunk(2, dim=-1)
    _, B, C = x_dbl.split([3, states, states], dim=-1)
    seq_idx = (torch.rand(batch, length) < 0.15).cumsum(1) + 3
    dt = 2 * torch.randn(batch, length, channels).to(dtype) - 1
    leaves = dict(
        u=u,
        dt=dt,
        A=-torch.rand(channels, states).exp(),
        B=B,
        C=C,
        D=torch.randn(channels),
        z=z,
        dt_bias=torch.randn(channels),
        seq_idx=seq_idx,
        initial_state=torch.randn(batch, channels, states),
    )
    return leaves | dict.fromkeys(without)


@pytest.mark.parametrize(
    "sizes, segments, without",
    [
        pytest.param((1, 11, 33, 5), 1, (), id="odd"),
        pytest.param((1, 12, 32, 16), 1, (), id="no masks"),
        pytest.param((1, 21, 3, 4), 3, (), id="in segments"),
        pytest.param((1, 16, 32, 2), 2, ("seq_idx",), id="in segments without masks"),
        pytest.param((2, 9, 2, 20), 1, ("seq_idx",), id="20 states"),
        pytest.param((2, 1, 3, 1), 1, ("initial_state",), id="one of all"),
    ],
)
def test_equals_float64(monkeypatch, sizes, segments, without):
    monkeypatch.setattr(backend, "FILL", segments * sizes[0] * -(-sizes[2] // 32))
    assert_like_reference(scan, reference, inputs(*sizes, without=without))


def test_bf16_in_and_out():
    dtype = torch.bfloat16
    leaves = inputs(1, 10, 5, 4, dtype)
    got = assert_like_reference(scan, reference, leaves)
    assert (
        got["output 0"].dtype == got["gradient of B"].dtype == dtype
        and got["output 1"].dtype == torch.float32
    )


def test_states_clear_at_a_start_however_slow_the_decay():
    """The state is cleared at the start of a document even if the step size is 0 at all positions, so that the state
    would not decay."""
    leaves = inputs(1, 9, 2, 2)
    leaves |= dict(
        seq_idx=torch.tensor([[0] * 5 + [1] * 4]),
        A=torch.full((2, 2), -1e-9),
        dt=torch.full((1, 9, 2), -200.0),
        initial_state=torch.full((1, 2, 2), 1e6),
        z=torch.ones(1, 9, 2),
        D=torch.zeros(2),
        dt_bias=torch.zeros(2),
    )
    y, last = scan(**leaves)
    assert y[:, :5].abs().min() > 1e3 and max(y[:, 5:].abs().max(), last.abs().max()) < 1e-30


def test_rows_that_lie_far_apart(monkeypatch):
    """Elements with an offset of more than 2**31, as in the gate of a long sequence, are read and written correctly."""
    # With this value, the row is divided into three segments, and sweeps with LOCAL compute the states of the segments.
    monkeypatch.setattr(backend, "FILL", 3)
    length, row = 20, 1 << 27
    near = torch.randn(1, length, 19).bfloat16()
    far = torch.empty(length * row, dtype=near.dtype).as_strided(near.shape, (0, row, 1))

    def run(place):
        place.copy_(near)
        u, dt, z, gradient, grad_z = place.split(3, -1)[:5]
        B, C = place[..., 15:].split(2, -1)
        BC = torch.stack([B, C], 2)
        ones = torch.ones(3)
        inputs = backend.Inputs(u, dt, -torch.ones(3, 2), BC, ones, z, ones, None)
        out, last, entries = backend.scan_forward(inputs, None)
        gradients = backend.scan_backward(gradient, None, inputs, entries, grad_z)
        return out, last, *gradients

    for got, expected in zip(run(far), run(near.clone())):
        assert torch.equal(got, expected)


def test_forward_programs_can_have_fewer_channels_than_backward_ones(monkeypatch):
    monkeypatch.setattr(backend, "FORWARD_CHANNELS", 16)
    assert_like_reference(scan, reference, inputs(1, 9, 33, 4))
