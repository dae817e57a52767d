"""Kernels as three Tritons compile them, run on a CPU: rounding, masks, addresses."""

import pytest
import torch
import toy
from compare import relative_error
from compiled import compiled
from ptx import Fault

PAIRS = [("2.2.0", 80), ("2.2.0", 90), ("3.6.0", 90), ("3.9.0", 100)]


def scaled_sum(version, cc, dtype=torch.float32, n=19, masked=True, warps=1):
    torch.manual_seed(0)
    x = torch.randn(5, n).to(dtype)
    y = torch.randn(n).to(dtype)
    out = torch.zeros_like(y)
    with compiled(version, cc, toy):
        toy.scaled_sum[(2,)](x, y, out, 0.5, n, 5, BLOCK=16, MASKED=masked, num_warps=warps)
    return out, 0.5 * x.double().sum(0) + y.double()


@pytest.mark.parametrize("version, cc", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_rounded_to_nearest(version, cc, dtype):
    out, expected = scaled_sum(version, cc, dtype)
    assert relative_error(out, expected.float().to(dtype)) <= (
        1e-6 if dtype == torch.float32 else 0
    )
    assert torch.equal(scaled_sum(version, cc, dtype, warps=4)[0], out)


@pytest.mark.parametrize("version, cc", PAIRS)
def test_a_missing_mask_is_noticed(version, cc):
    out, expected = scaled_sum(version, cc, n=32, masked=False)
    assert relative_error(out, expected) < 1e-6
    with pytest.raises(Fault, match="threads outside of tensor"):
        scaled_sum(version, cc, masked=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "version, cc", [("2.2.0", 80), ("3.6.0", 80), ("3.9.0", 89), ("3.9.0", 120)]
)
@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensor_cores_shared_memory_and_sums(version, cc, warps, dtype):
    torch.manual_seed(0)
    x = torch.randn(32, 64).to(dtype)
    y = torch.randn(64, 16).to(dtype)
    out = torch.zeros(32, 16)
    sums = torch.zeros(32)
    with compiled(version, cc, toy):
        toy.product[(1,)](x, y, out, sums, 64, M=32, N=16, BLOCK=32, TF32=False, num_warps=warps)
    expected = x.double() @ y.double()
    assert relative_error(out, expected) < 1e-6 and relative_error(sums, expected.sum(1)) < 1e-6
    if dtype == torch.float32:
        with compiled(version, cc, toy):
            toy.product[(1,)](x, y, out, sums, 64, M=32, N=16, BLOCK=32, TF32=True, num_warps=warps)
        assert 1e-5 < relative_error(out, expected) < 1e-3
