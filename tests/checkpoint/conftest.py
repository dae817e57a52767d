"""Provides a fixture with the path of a run folder."""

import pytest


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"
