"""On a GPU: every backend that is there passes a run's first minute; and attention in bf16."""

from functools import partial

import pytest
import torch

from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.ops.attention import Documents, attention
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.first_use import FirstUse

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CONFIGS = {
    "mamba1": ModelConfig(layers="mamba1", d_model=32, dt_rank=4),
    "mamba2": ModelConfig(layers="mamba2", d_model=256, d_state=128),
    "mamba2 in groups": ModelConfig(layers="mamba2", d_model=256, d_state=128, ngroups=2),
    "mamba2, gate last": ModelConfig(layers="mamba2", d_model=256, d_state=128, ssm_norm="before"),
}
BOUNDED = pytest.mark.parametrize("bounded", [False, True])


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@BOUNDED
@pytest.mark.parametrize("kind", CONFIGS)
def test_all_that_is_there_is_right(kind, bounded, precision):
    """Part by part and mixers in one call: layout, norm groups, document boundaries; gradients of everything."""
    if precision == "fp32" and kind != "mamba1":
        pytest.skip("mamba-ssm's products in TF32 are skipped")
    settings = TrainConfig(CONFIGS[kind])
    settings = settings.changed(reset_at_documents=bounded, mixed_precision=precision)
    use = FirstUse(settings, torch.device("cuda"))
    use.prove()
    assert use.record.candidates and use.record.passed_over() == {}


@pytest.mark.parametrize("backend", ["reference", "flash"])
@BOUNDED
def test_attention_on_the_gpu(bounded, backend):
    """Attention in bf16, grouped-query, is the float64 result up to bf16's rounding; documents don't leak."""
    torch.manual_seed(0)
    starts = torch.zeros(2, 300, dtype=torch.int32, device="cuda")
    starts[0, [40, 41, 128, 250]] = 1
    starts[1, [200]] = 1
    documents = Documents.of(starts.cumsum(1).int() + 3) if bounded else None
    q, k, v = (
        torch.randn(2, 300, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    attend = partial(attention, documents=documents, backend=backend)
    out = attend(q, k, v)
    exact = attention(q.double(), k.double(), v.double(), documents=documents)
    assert (out - exact).norm() <= 1e-2 * exact.norm()
    if bounded:
        v[0, :250] += 5
        assert torch.equal(attend(q, k, v)[0, 250:], out[0, 250:])
