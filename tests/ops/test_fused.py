"""Tests the calls of the fused backends on a CPU. The reference functions of mamba-ssm replace its kernels, and the
layouts and dtypes that the kernels require are asserted.

The tests run in separate processes, with only the Python files of mamba-ssm.
"""

import sys

import pytest

from tests.support.mamba_ssm_install import mamba_ssm_folder, triton_environment
from tests.support.processes import run_program

pytestmark = pytest.mark.slow

CHILD = r'''
import sys, types
from unittest.mock import MagicMock
import torch, torch.nn.functional as F

from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.layers import Mamba1
from mamba_fsdp.ops.conv import causal_conv_silu
from mamba_fsdp.ops.backends import REFERENCE
from mamba_fsdp.ops.norm import add_rms_norm, gated_rms_norm
from mamba_fsdp.ops.scan import selective_scan

folder = sys.argv[1]
sys.path.append(folder)
package = types.ModuleType("mamba_ssm")  # its real __init__ would load all other modules
package.__path__ = [folder + "/mamba_ssm"]
sys.modules["mamba_ssm"] = package
sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")
# the Triton kernels are defined at import, but not called
sys.modules["triton"] = sys.modules["triton.language"] = MagicMock(__version__="3.0")
sys.modules["triton"].Config.return_value.num_warps = 1
calls = []

def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):
    calls.append("conv")
    assert x.stride(2) == 1 or (x.stride(1) == 1 and x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0)
    assert seq_idx is None or (x.stride(1) == 1 and seq_idx.dtype == torch.int32 and seq_idx.is_contiguous())
    assert weight.shape == (x.shape[1], 4) and activation == "silu"
    if seq_idx is None:
        return F.silu(F.conv1d(x, weight[:, None], bias, padding=3, groups=x.shape[1])[..., :x.shape[2]])
    taps = sum(weight[:, 3 - k, None] * F.pad(x, (k, 0))[..., :x.shape[2]] *
               (F.pad(seq_idx, (k, 0), value=-1)[:, :x.shape[2]] == seq_idx)[:, None] for k in range(4))
    return F.silu(taps + bias[:, None])

sys.modules["causal_conv1d"] = types.ModuleType("causal_conv1d")
sys.modules["causal_conv1d"].causal_conv1d_fn = causal_conv1d_fn
import mamba_ssm.ops.selective_scan_interface as interface
import mamba_ssm.ops.triton.layer_norm as layer_norm
import mamba_ssm.ops.triton.layernorm_gated as layernorm_gated

def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
                      return_last_state=False):
    calls.append("scan")
    assert all(t.stride(-1) == 1 for t in (u, delta, B, C, z) if t is not None)
    assert all(t.dtype == torch.float32 for t in (A, D, delta_bias) if t is not None) and delta_softplus
    return interface.selective_scan_ref(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)

def mamba_inner_fn(xz, *arguments, **options):
    calls.append("inner")
    assert xz.stride(-1) == 1 and all(w.dtype == xz.dtype for w in arguments[:5]) and arguments[5] is None
    return interface.mamba_inner_ref(xz, *arguments, **options)

def rms_norm_fn(x, weight, bias, residual=None, eps=1e-6, prenorm=False, residual_in_fp32=False):
    calls.append("norm")
    assert prenorm and residual_in_fp32
    normed, total = layer_norm.rms_norm_ref(x, weight, bias, residual=residual, eps=eps, prenorm=True, upcast=True)
    return normed, total.float()

def rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    calls.append("gated norm")
    return layernorm_gated.rms_norm_ref(x, weight, bias, z=z, eps=eps, group_size=group_size,
                                        norm_before_gate=norm_before_gate, upcast=True)

layernorm_gated.rmsnorm_fn = rmsnorm_fn
interface.selective_scan_fn, interface.mamba_inner_fn = selective_scan_fn, mamba_inner_fn
interface.causal_conv1d_fn, layer_norm.rms_norm_fn = causal_conv1d_fn, rms_norm_fn

generator = torch.Generator().manual_seed(0)
randn = lambda *shape: torch.randn(*shape, generator=generator)
seq_idx = (torch.arange(30) >= 13).long().expand(2, 30)

def same(function, values, expected_calls, **options):
    """Checks that fused and reference agree in outputs and gradients, and that fused makes the expected calls."""
    values = {name: v.requires_grad_() for name, v in values.items()}
    results = []
    for backend in ("reference", "fused"):
        calls.clear()
        outputs = function(**values, backend=backend, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        seeds = [torch.randn(o.shape, generator=torch.Generator().manual_seed(1)) for o in outputs]
        loss = sum((o * s).sum() for o, s in zip(outputs, seeds))
        results.append([*outputs, *torch.autograd.grad(loss, list(values.values()))])
    assert calls == expected_calls, (function.__name__, calls)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

scan = dict(u=randn(2, 30, 16), dt=randn(2, 30, 16), A=-torch.exp(randn(16, 4)), B=randn(2, 30, 4), C=randn(2, 30, 4),
            D=randn(16), z=randn(2, 30, 16), dt_bias=randn(16))
same(selective_scan, scan, ["scan"])
for refused in (dict(seq_idx=seq_idx), dict(return_last_state=True), dict(initial_state=randn(2, 16, 4))):
    try:  # the kernel has no boundaries, no gradient through its last state, no initial state
        selective_scan(**scan, **refused, backend="fused")
    except AssertionError as error:
        assert "mamba-ssm's scan has no" in str(error)
    else:
        raise SystemExit(f"{refused} is taken without a word")
with torch.no_grad():
    calls.clear()
    pairs = [selective_scan(**scan, return_last_state=True, backend=backend) for backend in ("reference", "fused")]
    assert calls == ["scan"]
    for a, b in zip(*pairs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
conv = dict(x=randn(2, 30, 16), weight=randn(16, 1, 4), bias=randn(16))
same(causal_conv_silu, conv, ["conv"])
same(causal_conv_silu, conv, ["conv"], seq_idx=seq_idx)
wide = randn(2, 30, 21)
same(lambda weight, bias, **o: causal_conv_silu(wide[..., :16], weight, bias, **o),
     {n: conv[n] for n in ("weight", "bias")},
     ["conv"], seq_idx=seq_idx)  # 21 elements from position to position: not a multiple of 8

def mixer(backend, seq_idx=None, **values):
    backends = REFERENCE | {"conv": backend}
    if backend == "fused" and seq_idx is None:
        backends |= {"scan": backend, "mamba1": backend}
    module = Mamba1(ModelConfig(d_model=8, d_state=4, dt_rank=2), backends)
    weights = {name.replace("__", "."): value for name, value in values.items() if name != "x"}
    return torch.func.functional_call(module, weights, (values["x"], seq_idx))

inner = dict(x=randn(2, 30, 8), in_proj__weight=randn(32, 8) / 3, conv1d__weight=randn(16, 1, 4),
             conv1d__bias=randn(16), x_proj__weight=randn(10, 16) / 4, dt_proj__weight=randn(16, 2),
             dt_proj__bias=randn(16), A_log=randn(16, 4), D=randn(16), out_proj__weight=randn(8, 16))
same(mixer, inner, ["inner", "conv", "scan"])
same(mixer, inner, ["conv"], seq_idx=seq_idx)
x, residual, weight = randn(2, 5, 8), randn(2, 5, 8), randn(8)
same(add_rms_norm, dict(x=x, residual=residual, weight=weight), ["norm"], eps=1e-5, out_dtype=torch.float32)
same(lambda x, weight, **o: add_rms_norm(x, None, weight, **o), dict(x=x, weight=weight), ["norm"],
     eps=1e-5, out_dtype=torch.float32)
same(gated_rms_norm, dict(x=x, z=residual, weight=weight), ["gated norm"], eps=1e-5, group_size=4)
half = {n: v.detach().bfloat16() if n == "x" else v.detach() for n, v in inner.items()}
assert mixer(**half, backend="fused").dtype == torch.bfloat16
print("all equal")
'''


def test_fused_calls_equal_the_portable_forms(project):
    result = run_program(sys.executable, "-c", CHILD, mamba_ssm_folder(), cwd=project)
    assert result.returncode == 0 and result.stdout.strip() == "all equal", result.stderr


def test_fused_calls_of_mamba_2_equal_the_portable_forms(project):
    program = project / "tests/support/fused_on_cpu.py"
    result = run_program(sys.executable, program, mamba_ssm_folder(), **triton_environment())
    assert result.returncode == 0, result.stdout + result.stderr
