"""Tests, on a GPU, that the check at the start of a run accepts every available backend."""

import pytest
import torch

from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.kernel_selection import KernelSelector

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CONFIGS = {
    "mamba1": ModelConfig(layers="mamba1", d_model=32, dt_rank=4),
    "mamba2": ModelConfig(layers="mamba2", d_model=256, d_state=128),
    "mamba2 in groups": ModelConfig(layers="mamba2", d_model=256, d_state=128, ngroups=2),
    "mamba2, gate last": ModelConfig(layers="mamba2", d_model=256, d_state=128, ssm_norm="before"),
    "mamba3": ModelConfig(layers="mamba3", d_model=256, d_state=128),
    "gdn": ModelConfig(layers="gdn", d_model=256),
    "attention": ModelConfig(layers="attention", d_model=1024, n_kv_head=2),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_available_backend_is_correct(kind, bounded, precision):
    """KernelSelector rejects no available backend, of a single operator or of a whole mixer, with and without document
    boundaries."""
    if precision == "fp32" and kind != "mamba1":
        pytest.skip("mamba-ssm's products in TF32 are skipped")
    settings = TrainConfig(CONFIGS[kind])
    settings = settings.with_values(reset_at_documents=bounded, mixed_precision=precision)
    use = KernelSelector(settings, torch.device("cuda"))
    use.validate_candidates()
    assert use.record.candidates and use.record.rejected() == {}
