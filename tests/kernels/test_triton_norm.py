"""RMSNorm's kernels beside the reference backend in float64: residual or not, gates and groups, odd sizes, bf16."""

import pytest
import torch
from compare import assert_like, assert_like_reference, assert_same_bits, double, evaluate

from mamba_fsdp.ops.norm import add_rms_norm, gated_rms_norm
from mamba_fsdp.ops.norm import triton as backend


def added(backend, dtype=None):
    return lambda x, residual, weight: add_rms_norm(
        x, residual, weight, 1e-5, dtype or x.dtype, backend=backend
    )


def gated(backend, group_size):
    return lambda x, z, weight: gated_rms_norm(x, z, weight, 1e-5, group_size, backend=backend)


def leaves(*shape, second="residual", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    values = {
        "x": randn(*shape).to(dtype),
        second: randn(*shape).to(dtype if second == "z" else torch.float32),
    }
    return values | {"weight": 1 + 0.3 * randn(shape[-1])}


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Sizes that a few rows fill: several tiles a program, several programs."""

    def set_tiles(elements=64, programs=3):
        monkeypatch.setitem(backend.TILES, (8, 0), {"ELEMENTS": elements, "num_warps": 1})
        monkeypatch.setattr(backend, "PROGRAMS", programs)

    set_tiles()
    return set_tiles


@pytest.mark.parametrize("shape", [(2, 9, 19), (1, 1), (2, 1, 130)])
def test_behind_the_sum(shape):
    values = leaves(*shape)
    assert_like_reference(added("triton"), added("reference"), values)
    assert_like_reference(added("triton"), added("reference"), values | {"residual": None})


@pytest.mark.parametrize("group_size", [6, 18])
def test_behind_the_gate(group_size):
    assert_like_reference(
        gated("triton", group_size), gated("reference", group_size), leaves(2, 7, 18, second="z")
    )


def test_half_precision():
    """The stream and the weight's gradient stay in fp32; the norm's dtype may differ from the input's."""
    dtype = torch.bfloat16
    values = leaves(2, 9, 19, dtype=dtype)
    got = assert_like_reference(added("triton"), added("reference"), values)
    single = torch.float32
    assert [got[name].dtype for name in got] == [dtype, single, dtype, single, single]
    wide = evaluate(added("triton", torch.float32), values)
    assert wide["output 0"].dtype == torch.float32 and wide["gradient of x"].dtype == dtype
    assert_like(wide, evaluate(added("reference", torch.float64), double(values)))
    assert_like_reference(
        gated("triton", 6), gated("reference", 6), leaves(2, 7, 18, second="z", dtype=dtype)
    )


def test_empty():
    got = evaluate(added("triton"), leaves(0, 5, 19))
    assert got["output 0"].shape == (0, 5, 19) and not got["gradient of weight"].any()


@pytest.mark.slow
def test_compiled_without_a_break():
    torch._dynamo.reset()
    for function, values in (
        (added("triton"), leaves(3, 19)),
        (gated("triton", 6), leaves(3, 18, second="z")),
    ):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_same_bits(evaluate(function, values), evaluate(compiled, values))
