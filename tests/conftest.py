"""Fixtures that all tests share."""

import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))


@pytest.fixture
def project():
    """The checkout under test."""
    return PROJECT
