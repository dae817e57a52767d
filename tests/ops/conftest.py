"""Fixtures of the operators' tests."""

import pytest

from mamba_fsdp.ops import native


@pytest.fixture(params=["portable", "native"])
def form(request):
    """Each form that runs on a CPU; the C one is skipped where it can't be compiled."""
    reason = native.why_unavailable() if request.param == "native" else None
    if reason:
        pytest.skip(reason)
    return request.param
