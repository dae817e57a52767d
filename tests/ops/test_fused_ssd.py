"""How the fused forms of Mamba-2 are called, without a GPU."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from mamba_fsdp.ops.ssd import mamba2_inner, ssd


@pytest.mark.slow
def test_calls_fit_the_kernels_and_mean_the_same(mamba_ssm_folder):
    """What we hand to mamba-ssm's kernels, handed to its own reference functions, gives the portable form's results."""
    done = subprocess.run([sys.executable, Path(__file__).with_name("fused_on_cpu.py"), mamba_ssm_folder],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def recorded(monkeypatch):
    """Stand-ins for the two kernels that record what they are called with."""
    calls = []
    module = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")
    module.mamba_chunk_scan_combined = lambda x, *a, **k: calls.append(("scan", a, k)) or x
    module.mamba_split_conv1d_scan_combined = lambda zxbcdt, *a, **k: calls.append(("mixer", a, k)) or zxbcdt
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def mixer(channels_off=0):
    """Arguments in bf16 with float32 parameters; channels_off moves the convolution away from a multiple of 8."""
    d_state = 8 + channels_off
    channels = 16 + 2 * d_state
    return dict(zxbcdt=torch.randn(1, 5, 16 + channels + 4, dtype=torch.bfloat16),
                conv_weight=torch.randn(channels, 1, 4), conv_bias=torch.randn(channels), dt_bias=torch.randn(4),
                A=-torch.rand(4), D=torch.randn(4), norm_weight=torch.randn(16), norm_eps=1e-5,
                out_proj_weight=torch.randn(6, 16), headdim=4, ngroups=1, d_state=d_state, chunk_size=16)


def test_fused_mixer_casts_what_multiplies_and_nothing_else(recorded):
    """Weights arrive in the activations' dtype, A, D and dt_bias in float32, documents as int32 from 0, gate first."""
    documents = torch.tensor([[3, 3, 3, 4, 4]])
    mamba2_inner(**mixer(), documents=documents, kernels="fused")
    (name, (conv_weight, conv_bias, dt_bias, A, D, chunk_size), rest), = recorded
    assert name == "mixer" and chunk_size == 16 and not rest["norm_before_gate"]
    assert conv_weight.dtype == conv_bias.dtype == rest["outproj_weight"].dtype == torch.bfloat16
    assert dt_bias.dtype == A.dtype == D.dtype == torch.float32
    assert rest["seq_idx"].dtype == torch.int32 and rest["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]


def test_fused_mixer_without_the_whole_block_form(recorded):
    """Where the whole block can't take the number of channels, its parts run, the scan still fused."""
    mamba2_inner(**mixer(channels_off=1), kernels="fused")
    assert [name for name, *_ in recorded] == ["scan"]


def test_portable_needs_no_library(monkeypatch):
    """The portable form runs where mamba-ssm is not installed."""
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    arguments = mixer()
    assert mamba2_inner(**arguments, kernels="portable").shape == (1, 5, 6)
    with pytest.raises(ImportError):
        mamba2_inner(**arguments, kernels="fused")
    with pytest.raises(ImportError):
        ssd(torch.randn(1, 5, 4, 4), torch.randn(1, 5, 4), -torch.rand(4), torch.randn(1, 5, 1, 8),
            torch.randn(1, 5, 1, 8), chunk_size=16, kernels="fused")
