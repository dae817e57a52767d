"""Every operator that has kernels, forward and backward, as Triton 2.2 compiles it for A100 and H100: run from its PTX with
all addresses checked, beside the reference backend in float64. Its code is executed nowhere else."""

from functools import partial
from importlib import import_module

import pytest
import torch
from compare import assert_like_reference
from compiled import compiled
from ptx import Launch

from mamba_fsdp.ops.backends import MIXER_PARTS, OPERATORS
from mamba_fsdp.ops.conv import causal_conv_silu
from mamba_fsdp.ops.conv import triton as conv_triton
from mamba_fsdp.ops.norm import add_rms_norm, gated_rms_norm
from mamba_fsdp.ops.scan import selective_scan
from mamba_fsdp.ops.scan import triton as scan_triton
from mamba_fsdp.ops.ssd import ssd
from mamba_fsdp.ops.ssd import triton as ssd_triton

pytestmark = pytest.mark.slow


def documents(length):
    return torch.tensor([[4] * 5 + [5] * 9 + [6] * (length - 14)])


def conv(dtype, length):
    x = torch.randn(1, length, 9, dtype=dtype)[..., 2:]
    weight = torch.randn(7, 1, 4, dtype=dtype)
    bias = torch.randn(7, dtype=dtype)
    seq_idx = documents(length)
    return partial(causal_conv_silu, seq_idx=seq_idx), dict(x=x, weight=weight, bias=bias)


def scan(dtype, length):
    u, z = torch.randn(1, length, 70, dtype=dtype).chunk(2, dim=-1)
    B, C = torch.randn(1, length, 11, dtype=dtype)[..., 3:].chunk(2, dim=-1)
    return (
        partial(selective_scan, seq_idx=documents(length), return_last_state=True),
        dict(
            u=u,
            dt=torch.randn(1, length, 35, dtype=dtype),
            A=-torch.rand(35, 4),
            B=B,
            C=C,
            D=torch.randn(35),
            z=z,
            dt_bias=torch.randn(35),
            initial_state=torch.randn(1, 35, 4),
        ),
    )


def attend(dtype, length=21, heads=3, headdim=16, d_state=16):
    sizes = [heads * headdim, d_state, d_state]
    x, B, C = torch.randn(1, length, sum(sizes), dtype=dtype).split(sizes, dim=-1)
    seq_idx = torch.arange(length).view(1, -1) * 3 // length
    return (
        partial(ssd, seq_idx=seq_idx, chunk_size=16, return_last_state=True),
        dict(
            x=x.unflatten(-1, (heads, headdim)),
            dt=torch.randn(1, length, heads, dtype=dtype),
            A=-torch.rand(heads),
            B=B.unflatten(-1, (1, d_state)),
            C=C.unflatten(-1, (1, d_state)),
            D=torch.randn(heads),
            dt_bias=torch.randn(heads),
            initial_state=torch.randn(1, heads, headdim, d_state),
        ),
    )


def norms(x, residual, weight, z, backend="reference"):
    """A norm behind a sum; then two gated ones, with the gate before and after, in two groups."""
    normed, total = add_rms_norm(x, residual, weight, 1e-5, x.dtype, backend=backend)
    gated = partial(gated_rms_norm, normed, z, weight, 1e-5, len(weight) // 2, backend=backend)
    return total, gated(), gated(norm_first=True)


def norm(dtype, channels=70):
    x = torch.randn(1, 21, channels, dtype=dtype)
    z = torch.randn(1, 21, channels + 16, dtype=dtype)[..., 16:]
    return norms, dict(x=x, residual=torch.randn(x.shape), weight=torch.randn(channels), z=z)


CASES = {"conv": conv, "scan": scan, "ssd": attend, "norm": norm}
MOST = {torch.float32: 2e-6, torch.bfloat16: 0.01}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several chunks of the scan, in two segments, and programs of the convolution that meet."""
    for table in conv_triton.FORWARD, conv_triton.BACKWARD:
        monkeypatch.setitem(table, (8, 0), table[8, 0] | {"ROWS": 16})
    monkeypatch.setattr(scan_triton, "CHUNK", 8)
    monkeypatch.setattr(scan_triton, "FILL", 4)


def check(operator, cc, dtype, *sizes, version="2.2.0"):
    run, leaves = CASES[operator](dtype, *sizes)
    kernels = import_module(f"mamba_fsdp.ops.{operator}.triton_kernels")
    with compiled(version, cc, kernels):
        assert_like_reference(partial(run, backend="triton"), run, leaves, MOST[dtype])


def test_every_operator_with_kernels_is_here():
    whole = set(MIXER_PARTS)  # made of the others
    assert CASES.keys() == {name for name in OPERATORS if "triton" in OPERATORS[name]} - whole


@pytest.mark.parametrize(
    "dtype, cc, length", [(torch.float32, 80, 21), (torch.bfloat16, 90, 32)], ids=str
)
@pytest.mark.parametrize("operator", ["conv", "scan"])
def test_compiled_like_reference(operator, dtype, cc, length):
    """Triton compiles other code for lengths that 16 divides, as most runs' are."""
    check(operator, cc, dtype, length)


@pytest.mark.parametrize(
    "version, cc, dtype, channels",
    [
        ("2.2.0", 80, torch.float32, 70),
        ("2.2.0", 90, torch.bfloat16, 1030),
        ("2.2.0", 90, torch.bfloat16, 1024),
        ("3.6.0", 90, torch.bfloat16, 1030),
        ("3.6.0", 90, torch.bfloat16, 1024),
    ],
    ids=str,
)
def test_compiled_norms_like_reference(version, cc, dtype, channels):
    """In a warp, and over several; single channels, and eight at a time, which pass through shared memory."""
    check("norm", cc, dtype, channels, version=version)


@pytest.mark.parametrize(
    "version, cc, sizes, has_wgmma",
    [
        ("2.2.0", 80, (), False),
        ("2.2.0", 90, (70, 2, 64, 128), True),
        ("2.2.0", 90, (32, 2, 80, 128), True),
        ("3.6.0", 90, (80, 2, 64, 128), True),
        ("2.2.0", 90, (40, 2, 64, 128), False),
    ],
    ids=["sm_80", "sm_90", "80 channels", "sm_90 by Triton 3.6", "sm_90 without wgmma"],
)
def test_compiled_ssd_like_reference(monkeypatch, version, cc, sizes, has_wgmma):
    """At the sizes of mamba2-1.3b's heads Hopper's own matrix instructions carry the states, unless they are to be avoided."""
    executed = []
    factor = Launch.factor
    monkeypatch.setattr(Launch, "factor", lambda *of: executed.append(of) or factor(*of))
    if cc == 90:
        monkeypatch.setattr(ssd_triton, "FAR", {(8, 0): ssd_triton.FAR[9, 0]})
        for table in ("SWEEP", "NEAR"):
            monkeypatch.setattr(ssd_triton, table, {(8, 0): getattr(ssd_triton, table)[8, 0]})
        if not has_wgmma:
            ssd_triton.use_simpler_form()
    check("ssd", cc, torch.bfloat16, *sizes, version=version)
    assert bool(executed) == has_wgmma
