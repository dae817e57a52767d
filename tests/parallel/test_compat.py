"""Tests mamba_fsdp.parallel.compat, which hides differences between versions of torch."""

import os

import pytest
import torch

from mamba_fsdp.parallel import compat


@pytest.mark.torch22
def test_deterministic_algorithms_exclude_flash_attention_of_torch_2_2(monkeypatch):
    """deterministic_algorithms(True) disables flash attention only with torch 2.2, where its backward pass uses atomic
    additions. Uninitialized memory is not filled, and an existing CUBLAS_WORKSPACE_CONFIG is kept."""
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
