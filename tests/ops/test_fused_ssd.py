"""How the fused backends of Mamba-2 are called, without a GPU."""

import sys
import types

import pytest
import torch

from mamba_fsdp.ops.mamba2 import mamba2_mixer
from tests.support.mamba_ssm_install import mamba_ssm_folder, with_triton
from tests.support.processes import run_program


@pytest.mark.slow
def test_calls_fit_the_kernels_and_mean_the_same(project):
    """What we hand to mamba-ssm's kernels, handed to its own reference functions, gives the reference backend's results."""
    program = project / "tests/support/fused_on_cpu.py"
    done = run_program(sys.executable, program, mamba_ssm_folder(), **with_triton())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def recorded(monkeypatch):
    """Stand-ins for the two kernels that record what they are called with."""
    calls = []
    module = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")
    module.mamba_chunk_scan_combined = lambda x, *a, **k: calls.append(("scan", a, k)) or x
    module.mamba_split_conv1d_scan_combined = lambda zxbcdt, *a, **k: (
        calls.append(("mixer", a, k)) or zxbcdt
    )
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def mixer():
    """Arguments in bf16 with float32 parameters."""
    d_state = 8
    channels = 32
    return dict(
        zxbcdt=torch.randn(1, 5, 16 + channels + 4, dtype=torch.bfloat16),
        conv_weight=torch.randn(channels, 1, 4),
        conv_bias=torch.randn(channels),
        dt_bias=torch.randn(4),
        A=-torch.rand(4),
        D=torch.randn(4),
        norm_weight=torch.randn(16),
        out_proj_weight=torch.randn(6, 16),
        seq_idx=torch.tensor([[3, 3, 3, 4, 4]]),
        norm_eps=1e-5,
        ngroups=1,
        headdim=4,
        chunk_size=2 * d_state,
    )


def test_fused_mixer_casts_what_multiplies_and_nothing_else(recorded):
    """Weights arrive in the activations' dtype, A, D and dt_bias in float32, documents as int32 from 0, gate first."""
    mamba2_mixer(*mixer().values(), backend="fused")
    ((name, (conv_weight, conv_bias, dt_bias, A, D, chunk_size), rest),) = recorded
    assert name == "mixer" and chunk_size == 16 and not rest["norm_before_gate"]
    assert conv_weight.dtype == conv_bias.dtype == rest["outproj_weight"].dtype == torch.bfloat16
    assert dt_bias.dtype == A.dtype == D.dtype == torch.float32
    assert rest["seq_idx"].dtype == torch.int32 and rest["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]
