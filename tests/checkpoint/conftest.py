"""The helpers that run ranks are those of the sharding's tests."""

import os

import pytest

from mamba_fsdp.checkpoint.retention import until_the_end

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def nothing_held():
    """What a test reads is not renewed when it has ended."""
    yield
    until_the_end.close()


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"
