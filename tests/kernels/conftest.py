"""Provides fixtures for tests of Triton kernels on a CPU, in Triton's interpreter.

tests/run.sh runs these tests in a second call of pytest with TRITON_INTERPRET=1 and a Triton on the path
(benchmarks/kernels/install.py). Both are needed before Triton is imported; otherwise these tests are not collected.
"""

import os
from importlib import util

import pytest
import torch

HAS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1" and util.find_spec("triton")
if not HAS_INTERPRETER:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    """Marks all tests of this folder as slow, because the interpreter makes a Python call for each operation of a
    kernel."""
    for item in items:
        if "tests/kernels/" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)


def memory_of(tensor):
    """Returns the range of addresses from a tensor's first element to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    length = last + 1 if tensor.numel() else 0
    return range(tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size())


@pytest.fixture(autouse=True)
def launches_are_checked(monkeypatch):
    """Makes the interpreter reject what would fail on a GPU: an access outside of the launch's tensors, and an argument
    that the kernel does not have."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    memories = []
    launch = GridExecutor.__call__

    def checked_launch(executor, *values, **named):
        unknown = named.keys() - {*executor.arg_names, "num_warps", "num_stages"}
        assert not unknown, f"there are no arguments {unknown}"
        given = (*values, *named.values())
        memories[:] = [memory_of(value) for value in given if torch.is_tensor(value)]
        launch(executor, *values, **named)

    def check(pointers, mask):
        """Asserts that all addresses of an access are in the same tensor."""
        addresses = pointers.data[mask.data]
        if not addresses.size:
            return
        first = int(addresses.min())
        end = int(addresses.max()) + pointers.get_element_ty().primitive_bitwidth // 8
        is_inside = any(memory.start <= first and end <= memory.stop for memory in memories)
        assert is_inside, f"an access outside of the tensors {memories}: {first} to {end}"

    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def checked_load(builder, pointers, mask, *rest):
        check(pointers, mask)
        return load(builder, pointers, mask, *rest)

    def checked_store(builder, pointers, value, mask, *rest):
        check(pointers, mask)
        return store(builder, pointers, value, mask, *rest)

    monkeypatch.setattr(GridExecutor, "__call__", checked_launch)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
