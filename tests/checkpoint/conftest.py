"""The helpers that run ranks are those of the sharding's tests."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"
