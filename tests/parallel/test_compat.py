"""What differs between the stacks, as a run meets it."""

import os

import pytest
import torch

from mamba_fsdp.parallel import compat


@pytest.mark.torch22
def test_a_deterministic_gpu_runs_no_attention_that_varies(monkeypatch):
    """torch 2.2's flash attention adds with atomics; newer ones have a form that does not. Nor is scratch filled."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with compat.deterministic_algorithms(True):
        assert torch.backends.cuda.flash_sdp_enabled() == compat.HAS_FSDP2
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert torch.backends.cuda.flash_sdp_enabled()
    with compat.deterministic_algorithms(False):
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.are_deterministic_algorithms_enabled()
