"""A run folder, and an end to what its checkpoints' readers hold."""

import pytest

from mamba_fsdp.checkpoint.retention import until_the_end


@pytest.fixture(autouse=True)
def nothing_held():
    """What a test reads is not renewed when it has ended."""
    yield
    until_the_end.close()


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"
