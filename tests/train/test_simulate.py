"""A whole step on a GPU that is none, in a process group of up to 1,024 ranks that is none either."""

import pytest
import torch

from benchmarks.simulate import simulate
from config.model_config import ModelConfig
from config.train_config import TrainConfig
from mamba_fsdp.model.spec import operator_uses
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.world import CPU, World
from mamba_fsdp.planning.memory import expected_memory

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "size, layers, recompute",
    [
        (8, "mamba1", ""),
        (1024, "mamba2", ""),
        (8, "mamba2", "1"),
        (1, "attention+mlp", "1"),
        (1024, "2*mamba1,mamba2+mlp,mamba2,attention,mamba2", "1/2"),
    ],
)
def test_what_a_device_holds_is_what_was_expected(size, layers, recompute):
    """Weights, gradients and moments within 5 %; what comes and goes (of it most are activations) within 15 %. Two
    micro-batches: the gradients of the first are there while the second has its activations."""
    settings = TrainConfig()
    settings.model = ModelConfig(
        layers=layers,
        n_layer=6,
        d_model=512,
        vocab_size=4096,
        n_head=8,
        n_kv_head=4,
        d_state=16 if layers == "mamba1" else 128,
    )
    settings.data.seq_length = 2048
    settings.training.batch_size = 8
    settings.training.global_batch_size = 16 * size
    if recompute:
        settings.parallel.fsdp_activation_checkpointing = True
        settings.parallel.selective_checkpointing = recompute
    found = simulate(settings, size, inside=True).peak
    uses = operator_uses(settings.model, torch.bfloat16)
    backends = resolve_backends("auto", "cuda", uses, assumed=("triton",)).backends
    expected = expected_memory(settings, World(0, size, 0, min(8, size), CPU), backends)
    for part in ("weights", "gradients", "moments"):
        assert found[part] == pytest.approx(expected[part], rel=0.05), part
    passing = expected["gathered"] + expected["activations"] + expected["loss"]
    assert passing == pytest.approx(found["passing"], rel=0.15)
