"""Fixtures of the operators' tests."""

import pytest

from mamba_fsdp.ops import cpp


@pytest.fixture(params=["reference", "cpp"])
def backend(request):
    """Each backend that runs on a CPU; the C one is skipped where it can't be compiled."""
    reason = cpp.why_unavailable() if request.param == "cpp" else None
    if reason:
        pytest.skip(reason)
    return request.param
