"""The SSD's kernels beside the reference backend in float64, at odd sizes and at the edges; what they promise to torch."""

import os
from itertools import product

import pytest
import torch
from compare import assert_like_reference

from mamba_fsdp.ops.ssd import ssd, triton_kernels
from mamba_fsdp.ops.ssd.triton import FAR, NEAR, SWEEP, ssd_backward
from tests.support.definitions import ssd_values

BF16 = 2.0**-6  # of sums over whole rows, as dA is
# What passes a position is a difference of sums, and in dA and that of the bias much of it cancels.
FP32 = {"gradient of dt": 5e-6, "gradient of A": 5e-5, "gradient of dt_bias": 5e-5}
ACTIVATIONS = ("x", "dt", "B", "C")


def leaves(length=40, dtype=torch.float32, batch=1, heads=2, headdim=18, groups=1, d_state=17):
    generator = torch.Generator().manual_seed(length + headdim)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    values = ssd_values(randn, batch, length, heads, headdim, groups, d_state)
    values["initial_state"] = randn(batch, heads, headdim, d_state)
    return {
        name: value.to(dtype if name in ACTIVATIONS else torch.float32)
        for name, value in values.items()
    }


def random_documents(length, batch=1):
    return (
        (torch.rand(batch, length, generator=torch.Generator().manual_seed(1)) < 4 / length)
        .int()
        .cumsum(1)
    )


def kernels(**values):
    return ssd(**values, chunk_size=64, return_last_state=True, backend="triton")


def reference(**values):
    return ssd(**values, chunk_size=64, return_last_state=True)


SIZES = [
    dict(length=70, batch=2, heads=4, groups=2, headdim=5, d_state=3),
    dict(length=33, headdim=80, d_state=130),
    dict(length=64, heads=1, headdim=64, d_state=128),
    dict(length=1),
]
CASES = list(zip(SIZES, (True, False, True, False)))
if os.environ.get("KERNEL_GATES") == "all":
    CASES = list(product(SIZES, (False, True)))


@pytest.mark.parametrize("sizes, bounded", CASES, ids=str)
def test_equals_float64(sizes, bounded):
    """Outputs, last state and all gradients, those of A and the bias too, whose terms cancel; blocks full and not,
    several of channels and of states. KERNEL_GATES=all: each with documents and without."""
    values = leaves(**sizes)
    seq_idx = random_documents(values["x"].shape[1], len(values["x"])) if bounded else None
    assert_like_reference(kernels, reference, values, FP32, seq_idx=seq_idx)


def test_bf16():
    dtype = torch.bfloat16
    got = assert_like_reference(
        kernels, reference, leaves(dtype=dtype), BF16, seq_idx=random_documents(40)
    )
    assert (
        {got[f"gradient of {name}"].dtype for name in ACTIVATIONS}
        == {got["output 0"].dtype}
        == {dtype}
    )
    assert got["output 1"].dtype == got["gradient of initial_state"].dtype == torch.float32


def test_only_what_must_be():
    values = leaves(length=20, heads=1)
    del values["initial_state"]
    assert_like_reference(kernels, reference, values, FP32)


def test_segments_of_a_sequence_change_rounding_alone(monkeypatch):
    values = leaves(length=330, heads=1, headdim=16, d_state=16)
    seq_idx = random_documents(330)
    for programs in (1, 6):
        monkeypatch.setitem(SWEEP, (8, 0), {"P": 16, "programs": programs, "num_warps": 1})
        monkeypatch.setitem(NEAR, (8, 0), {"P": 16, "BLOCK": 1, "num_warps": 1})
        monkeypatch.setitem(FAR, (8, 0), {"P": 16, "ROWS": 64, "BLOCK": 1, "num_warps": 1})
        assert_like_reference(kernels, reference, values, FP32, seq_idx=seq_idx)


def test_no_leak_between_documents():
    """Whatever one document holds, the other's outputs and gradients stay the same to the last bit, both ways."""

    def run(changed):
        values = leaves(length=50)
        for name in ACTIVATIONS:
            values[name][:, changed] = 7 * values[name][:, changed].flip(1) + 3
        inputs = [values[name].requires_grad_() for name in ACTIVATIONS]
        y = kernels(**values, seq_idx=seq_idx)[0]
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        weights[:, changed] *= -5
        return y, *torch.autograd.grad((y * weights).sum(), inputs)

    boundary = 20
    seq_idx = (torch.arange(50) >= boundary).int().expand(1, 50)
    first = slice(0, boundary)
    second = slice(boundary, 50)
    before = run(slice(0, 0))
    for changed, kept in ((first, second), (second, first)):
        after = run(changed)
        assert not torch.equal(before[0][:, changed], after[0][:, changed])
        assert all(torch.equal(a[:, kept], b[:, kept]) for a, b in zip(before, after))


def test_extreme_dt():
    """In one head no step at all, in the other steps that forget everything: every gradient is finite and right."""
    values = leaves()
    values["dt_bias"] += torch.tensor([-60.0, 20000.0])
    assert_like_reference(kernels, reference, values, 1e-4)


class Counted:
    """Stands in for a kernel: adds up the bytes of the tensors of its launches, each once."""

    def __init__(self):
        self.bytes = 0

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, **constants):
        self.bytes += sum(each.nbytes for each in arguments if torch.is_tensor(each))


def test_the_backward_pass_moves_no_more_than_that_of_mamba_ssm(monkeypatch):
    """At the sizes of mamba2-2.7b: 180 KB a token, counted in the same way from the kernels that mamba-ssm's calls."""
    launched = {name: Counted() for name in ("add_up", "sweep", "near", "far", "finish")}
    for name, counted in launched.items():
        monkeypatch.setattr(triton_kernels, name, counted)
    tokens = (4, 4096)  # so many that a row has one segment
    x = torch.empty(*tokens, 80, 64, dtype=torch.bfloat16)
    B = torch.empty(*tokens, 1, 128, dtype=torch.bfloat16)
    dt = torch.empty(*tokens, 80, dtype=torch.bfloat16)
    of_head = torch.empty(80)
    grads = ssd_backward(x, None, x, dt, of_head, B, B, of_head, of_head, None, None)
    assert grads[0].shape == x.shape
    moved = sum(counted.bytes for counted in launched.values()) / tokens[0] / tokens[1]
    assert 150e3 < moved < 180e3
