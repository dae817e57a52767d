"""What deterministic=true does to the backends of a run's operators."""

import pytest
import torch

from mamba_fsdp.parallel import compat


@pytest.mark.torch22
def test_a_deterministic_gpu_runs_no_attention_that_varies(monkeypatch):
    """torch 2.2's flash attention adds with atomics even then; newer ones have a form that does not. Nor is scratch filled.
    What was there before comes back."""
    told = []
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "enable_flash_sdp", told.append)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda asked, **_: None)
    had_flash = torch.backends.cuda.flash_sdp_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with compat.deterministic_algorithms(False):
        assert told == []
    told.clear()
    with compat.deterministic_algorithms(True):
        assert told == ([] if compat.HAS_FSDP2 else [False])
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert told[-1] == had_flash and torch.utils.deterministic.fill_uninitialized_memory
