"""Every operator that has kernels, forward and backward, as Triton 2.2 compiles it: run from its PTX with all
addresses checked, small odd sizes, beside the reference backend in float64. Its code is executed nowhere else."""

from functools import partial
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch
from compare import assert_like_reference
from compiled import compiled

from mamba_fsdp import ops
from mamba_fsdp.ops.backends import OPERATORS
from mamba_fsdp.ops.conv import causal_conv_silu
from mamba_fsdp.ops.scan import selective_scan
from mamba_fsdp.ops.ssd import ssd

pytestmark = pytest.mark.slow
DOCUMENTS = torch.tensor([[4] * 5 + [5] * 9 + [6] * 7])


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def conv(dtype):
    x = random(1, 21, 9, dtype=dtype)[..., 2:]
    return (
        partial(causal_conv_silu, seq_idx=DOCUMENTS),
        dict(x=x, weight=random(7, 1, 4, dtype=dtype), bias=random(7, dtype=dtype)),
    )


def scan(dtype):
    u, z = random(1, 21, 70, dtype=dtype).chunk(2, dim=-1)
    B, C = random(1, 21, 11, dtype=dtype)[..., 3:].chunk(2, dim=-1)
    return (
        partial(selective_scan, seq_idx=DOCUMENTS, return_last_state=True),
        dict(
            u=u,
            dt=random(1, 21, 35, dtype=dtype),
            A=-torch.rand(35, 4),
            B=B,
            C=C,
            D=random(35),
            z=z,
            dt_bias=random(35),
            initial_state=random(1, 35, 4),
        ),
    )


def attend(dtype):
    x, B, C = random(1, 21, 3 * 16 + 2 * 16, dtype=dtype).split([48, 16, 16], dim=-1)
    return (
        partial(ssd, seq_idx=DOCUMENTS, chunk_size=16, return_last_state=True),
        dict(
            x=x.unflatten(-1, (3, 16)),
            dt=random(1, 21, 3, dtype=dtype),
            A=-torch.rand(3),
            B=B.unflatten(-1, (1, 16)),
            C=C.unflatten(-1, (1, 16)),
            D=random(3),
            dt_bias=random(3),
            initial_state=random(1, 3, 16, 16),
        ),
    )


CASES = {"conv": conv, "scan": scan, "ssd": attend}
WITH_KERNELS = [operator for operator in CASES if "triton" in OPERATORS[operator]]
MOST = {torch.float32: 2e-6, torch.bfloat16: 0.01}


def modules_of(operator):
    """Its modules that hold kernels."""
    package = import_module(f"{ops.__name__}.{operator}")
    return [
        import_module(f"{package.__name__}.{found.name}")
        for found in iter_modules(package.__path__)
        if found.name.startswith("triton_")
    ]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    torch.manual_seed(0)
    if "scan" in WITH_KERNELS:  # several chunks, in two segments
        backend = import_module("mamba_fsdp.ops.scan.triton")
        monkeypatch.setattr(backend, "CHUNK", 8)
        monkeypatch.setattr(backend, "FILL", 4)


@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize("operator", WITH_KERNELS)
def test_compiled_like_reference(operator, dtype):
    run, leaves = CASES[operator](dtype)
    with compiled("2.2.0", 80, *modules_of(operator)):
        assert_like_reference(partial(run, backend="triton"), run, leaves, MOST[dtype])
