"""Kernels that are launched without Triton's launcher."""

import pytest

pytestmark = [pytest.mark.pinned, pytest.mark.slow]


def test_a_launch_has_the_kernel_and_the_arguments_that_triton_would_give_it(start):
    process = start("-m", "tests.support.nullgpu.launching", NULLGPU_DEVICES=2)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
