"""Tests of Triton kernels on a CPU. tests/run.sh runs them in a second call: TRITON_INTERPRET=1 with a Triton on the
path (triton_install.py) must be in the environment before anything imports it; elsewhere they are not collected."""

import os
from importlib import util

import pytest

if os.environ.get("TRITON_INTERPRET") != "1" or util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    """All are slow: the interpreter takes a Python call for each operation of a kernel."""
    for item in items:
        if "tests/kernels/" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)
