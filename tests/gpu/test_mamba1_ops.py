"""The fused Mamba-1 operators against the reference ones on a CUDA device: outputs and gradients."""

import pytest
import torch

from config.model_config import ModelConfig
from mamba_fsdp.model.layers import Mamba1
from mamba_fsdp.model.spec import operator_uses
from mamba_fsdp.ops.backends import resolve_backends, why_unavailable
from mamba_fsdp.ops.conv import causal_conv_silu
from mamba_fsdp.ops.norm import add_rms_norm
from mamba_fsdp.ops.scan import selective_scan


@pytest.fixture(autouse=True)
def fused():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    reason = why_unavailable("mamba1", "fused")
    if reason:
        pytest.skip(reason)


def make(dtype=torch.float32, **shapes):
    generator = torch.Generator().manual_seed(0)
    parameters = ("A", "A_log", "D", "dt_bias", "dt_proj__bias", "weight", "bias", "residual")
    values = {}
    for name, shape in shapes.items():
        value = torch.randn(*shape, generator=generator)
        if name == "A":
            value = -value.exp()
        if name.endswith("proj__weight"):
            value = value / shape[1] ** 0.5
        values[name] = value.to(
            "cuda", torch.float32 if name in parameters else dtype
        ).requires_grad_()
    return values


def agree(function, values, tolerance, **options):
    results = []
    for backend in ("reference", "fused"):
        outputs = function(**values, backend=backend, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum(o.float().square().sum() for o in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, list(values.values()))])
    for name, a, b in zip(["out"] * len(outputs) + list(values), *results):
        error = (a.float() - b.float()).abs().max().item()
        scale = a.float().abs().max().item()
        assert error <= tolerance * scale, f"{name}: error {error:.2e} at magnitude {scale:.2e}"


PRECISIONS = pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-4), (torch.bfloat16, 3e-2)]
)
SCAN = dict(
    u=(2, 300, 64),
    dt=(2, 300, 64),
    A=(64, 16),
    B=(2, 300, 16),
    C=(2, 300, 16),
    D=(64,),
    z=(2, 300, 64),
    dt_bias=(64,),
)
CONV = dict(x=(2, 300, 64), weight=(64, 1, 4), bias=(64,))
MIXER = dict(
    x=(2, 300, 32),
    in_proj__weight=(128, 32),
    conv1d__weight=(64, 1, 4),
    conv1d__bias=(64,),
    x_proj__weight=(36, 64),
    dt_proj__weight=(64, 4),
    dt_proj__bias=(64,),
    A_log=(64, 16),
    D=(64,),
    out_proj__weight=(32, 64),
)


def mixer(backend, x, seq_idx=None, **weights):
    """A Mamba-1 layer in the reference backends, or in those that auto takes: all in one call, but with documents."""
    config = ModelConfig(layers="mamba1", d_model=32, dt_rank=4)
    uses = operator_uses(config, x.dtype, seq_idx is not None)
    backends = resolve_backends("auto" if backend == "fused" else backend, "cuda", uses).backends
    assert ("mamba1" in backends) == (backend == "fused" and seq_idx is None)
    weights = {name.replace("__", "."): value for name, value in weights.items()}
    return torch.func.functional_call(Mamba1(config, backends), weights, (x, seq_idx))


def seq_idx():
    return (torch.arange(300, device="cuda") // 77).expand(2, 300)


@PRECISIONS
def test_scan(dtype, tolerance):
    agree(selective_scan, make(dtype, **SCAN), tolerance)


@PRECISIONS
@pytest.mark.parametrize("bounded", [False, True])
def test_convolution(dtype, tolerance, bounded):
    agree(causal_conv_silu, make(dtype, **CONV), tolerance, seq_idx=seq_idx() if bounded else None)


@PRECISIONS
@pytest.mark.parametrize("bounded", [False, True])
def test_whole_mixer(dtype, tolerance, bounded):
    agree(mixer, make(dtype, **MIXER), tolerance, seq_idx=seq_idx() if bounded else None)


@PRECISIONS
def test_norm(dtype, tolerance):
    values = make(dtype, x=(2, 300, 64), residual=(2, 300, 64), weight=(64,))
    agree(add_rms_norm, values, tolerance, eps=1e-5, out_dtype=dtype)


def test_one_document_never_changes_another():
    values = {name: v.detach() for name, v in make(**MIXER).items()}
    before = mixer(**values, seq_idx=seq_idx(), backend="fused")
    values["x"] = values["x"].clone()
    values["x"][:, :77] += 1
    after = mixer(**values, seq_idx=seq_idx(), backend="fused")
    assert torch.equal(before[:, 77:], after[:, 77:]) and not torch.equal(
        before[:, :77], after[:, :77]
    )
