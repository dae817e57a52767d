"""Compares the Triton kernels of SSD with the reference backend in float64, at odd sizes and extreme values."""

import os
from functools import partial
from itertools import product

import pytest
import torch

from mamba_fsdp.ops.ssd import ssd, triton
from tests.support.compare import assert_like_reference
from tests.support.definitions import random_documents, ssd_values

# A bound above the default, because some results are sums over whole rows, such as the gradient of A.
BF16 = 2.0**-6
# Bounds above the default: the gradient of dt is a difference of sums, and many of its terms cancel in the gradients of A
# and dt_bias.
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


kernels, reference = (
    partial(ssd, chunk_size=64, return_last_state=True, backend=name)
    for name in ("triton", "reference")
)
SIZES = [
    dict(length=70, heads=4, groups=2, headdim=5, d_state=3),
    dict(length=33, headdim=80, d_state=130),
    dict(length=64, batch=2, heads=2, headdim=64, d_state=128),
    dict(length=1),
]
CASES = list(zip(SIZES, (True, False, True, False)))
if os.environ.get("KERNEL_GATES") == "all":
    CASES = list(product(SIZES, (False, True)))


@pytest.mark.parametrize("sizes, bounded", CASES, ids=str)
def test_equals_float64(sizes, bounded):
    """Outputs, last states and all gradients agree with float64, with full and partial blocks of channels and states.

    KERNEL_GATES=all tests each size with and without documents.
    """
    values = leaves(**sizes)
    seq_idx = random_documents(*values["x"].shape[:2]) if bounded else None
    assert_like_reference(kernels, reference, values, FP32, seq_idx=seq_idx)


def test_bf16():
    dtype = torch.bfloat16
    values = leaves(dtype=dtype)
    got = assert_like_reference(kernels, reference, values, BF16, seq_idx=random_documents(1, 40))
    of_activations = {got[f"gradient of {name}"].dtype for name in ACTIVATIONS}
    assert of_activations == {got["output 0"].dtype} == {dtype}
    assert got["output 1"].dtype == got["gradient of initial_state"].dtype == torch.float32


def test_segments_of_a_sequence(monkeypatch):
    """A sequence in three segments gives the same results. A first sweep over two of the segments computes the states
    with which the later segments begin."""
    monkeypatch.setattr(triton, "CHUNKS", 2)
    values = leaves(length=150, heads=1, headdim=16, d_state=16)
    seq_idx = random_documents(1, 150)
    assert_like_reference(kernels, reference, values, FP32, seq_idx=seq_idx)


def test_extreme_dt():
    """All gradients are finite and right if the steps of one head are 0 and those of the other forget everything."""
    values = leaves()
    values["dt_bias"] += torch.tensor([-60.0, 20000.0])
    assert_like_reference(kernels, reference, values, 1e-4)
