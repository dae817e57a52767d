"""The network itself, spread over ranks in half precision."""

import pytest
import torch

from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.ops.attention import Documents
from mamba_fsdp.parallel.parallelize import parallelize
from mamba_fsdp.parallel.world import start_world
from mamba_fsdp.settings.train_config import ParallelConfig, TrainConfig
from mamba_fsdp.trainer.setup import fill_at_random
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch22
CONFIG = dict(
    d_model=32,
    n_layer=4,
    vocab_size=64,
    layers="mamba1,mamba2,mamba3,attention+mlp",
    d_intermediate=48,
    d_state=8,
    headdim=16,
    n_head=4,
    n_kv_head=2,
)


def parts(mixer):
    """The tensors of a mixer that tell precisions apart, as they are during a forward pass."""
    found = {
        name: getattr(mixer, name) for name in ("A_log", "D", "dt_bias") if hasattr(mixer, name)
    }
    if hasattr(mixer, "dt_proj"):
        found["dt_proj.bias"] = mixer.dt_proj.bias
    return found | {"in_proj": mixer.in_proj.weight}


def step(world, strategy, dtype):
    """One step of the whole model. Returns (loss, gradient norm, dtypes by parameter as each mixer saw them, dtypes of
    weights and gradients)."""
    config = ModelConfig(**CONFIG)
    with torch.device("meta"):
        model = MambaLM(config, compute_dtype=dtype, reset_at_documents=True)
    spread = ParallelConfig(sharding_strategy=strategy, fsdp_activation_checkpointing=True)
    parallel = parallelize(model, spread, world=world, compute_dtype=dtype)
    fill_at_random(TrainConfig(config), parallel)
    seen = {}

    def look(mixer, _):
        for name, tensor in parts(mixer).items():
            seen[f"{type(mixer).__name__} {name}"] = tensor.dtype

    for block in parallel.model.backbone.layers:
        block.mixer.register_forward_pre_hook(look)
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    tokens = tokens.view(world.size, -1, 33)[world.rank]
    seq_idx = (torch.arange(32) >= 13).int().expand(len(tokens), -1)
    loss = parallel.module(
        tokens[:, :-1],
        labels=tokens[:, 1:],
        seq_idx=seq_idx,
        documents=Documents([13, 19] * len(tokens)),
    )
    (loss / 128).backward()
    parallel.reduce_gradients()
    squares = world.all_reduce_sum(parallel.gradient_squares())
    kept = {slot.local.dtype for slot in parallel.slots}
    kept |= {slot.local.grad.dtype for slot in parallel.slots if slot.local.grad is not None}
    return world.all_reduce_sum(float(loss.detach())) / 128, float(squares.sqrt()), seen, kept


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_step_in_bf16_is_near_that_of_one_process_and_its_recurrence_stays_fp32(strategy):
    """On 2 ranks. A_log, D, dt_bias and dt_proj.bias are fp32; projections are bf16 where they were gathered so. What is
    kept is fp32."""
    loss, norm, *_ = step(start_world(), "none", torch.float32)
    for half_loss, half_norm, seen, kept in run_ranks(2, step, strategy, torch.bfloat16):
        assert half_loss == pytest.approx(loss, rel=5e-3)
        assert half_norm == pytest.approx(norm, rel=3e-2)
        assert len(seen) == 12 and kept == {torch.float32}
        for name, dtype in seen.items():
            is_gathered = strategy == "fsdp" and name.endswith("in_proj")
            assert dtype == (torch.bfloat16 if is_gathered else torch.float32), name
