"""Tests kernel launches that bypass Triton's launcher, and limits on launches."""

import pytest

pytestmark = [pytest.mark.pinned, pytest.mark.slow]


def test_a_launch_has_the_kernel_and_the_arguments_that_triton_would_give_it(run):
    code, output = run("-m", "tests.support.nullgpu.launching", NULLGPU_DEVICES=2)
    assert code == 0, output


def test_layers_of_the_presets_pass_no_limit_of_a_small_gpu(run):
    """Layers of the largest presets do not exceed the limits of a small GPU for shared memory, blocks and grids. Only
    the memory of the device is that of a large GPU."""
    presets = ("mamba-2.8b", "mamba2-2.7b", "bamba-9b", "nemotron-h-8b")
    small = {"NULLGPU_ARCHITECTURE": 86, "NULLGPU_MEMORY": 80 << 30}
    code, output = run("-m", "tests.support.nullgpu.shapes", *presets, **small)
    assert code == 0, output


@pytest.mark.parametrize("model, most", [("Mamba-1", [15, 9, 13]), ("Mamba-2", [11, 18, 6])])
def test_a_block_launches_no_more_than_it_did(run, model, most):
    """The forward and backward pass of a block makes exactly the recorded numbers of launches by torch and Triton, and
    of calls of cuBLAS."""
    code, output = run("-m", "tests.support.nullgpu.launches", model)
    assert code == 0 and output.splitlines()[-1] == str(most), output
