"""Differences between versions of torch that change how a run behaves."""

import os

import pytest
import torch

from mamba_fsdp.parallel import compat


@pytest.mark.torch22
def test_deterministic_algorithms_exclude_flash_attention_of_torch_2_2(monkeypatch):
    """The flash attention of torch 2.2 uses atomic additions; newer versions have a deterministic form. Empty tensors
    are not filled either."""
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
