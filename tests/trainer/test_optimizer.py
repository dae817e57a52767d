"""Which parameters decay, a step that is refused, and the loss scale of fp16."""

from types import SimpleNamespace

import pytest
import torch

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.compat import has_fused_adamw, step_unless
from mamba_fsdp.trainer.optimizer import LossScale

NORMS = ("norm.weight", "norm2.weight", "norm_f.weight")


def test_only_matrices_decay():
    for layers in ("mamba1", "mamba2", "attention+mlp"):
        config = ModelConfig(layers=layers, n_layer=1, d_intermediate=32 if "mlp" in layers else 0)
        for name, parameter in parameters(config).items():
            kept = name.endswith((".A_log", ".D", ".dt_bias", ".bias", *NORMS))
            assert parameter.decay != kept, name


CPU = torch.device("cpu")


@pytest.mark.torch22
def test_a_refused_step_leaves_weights_moments_and_their_count():
    """Whether it is the first, which makes the moments, or a later one; an accepted one is a usual step to the bit."""
    ours, usual = (torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0])) for _ in range(2))
    optimizers = [
        torch.optim.AdamW([parameter], lr=0.1, fused=has_fused_adamw(CPU) or None)
        for parameter in (ours, usual)
    ]
    for refused in (True, False, False, True, False):
        gradient = [float("nan"), 1.0, float("inf")] if refused else [0.5, 0.1, -1.0]
        ours.grad = torch.tensor(gradient)
        usual.grad = ours.grad.clone()
        step_unless(optimizers[0], torch.tensor(refused))
        if not refused:
            optimizers[1].step()
        assert torch.equal(ours, usual)
    for name, expected in optimizers[1].state[usual].items():
        assert torch.equal(optimizers[0].state[ours][name], expected), name


def updated(scale, state, applied):
    """After a step: (the scale, whether an overflow in it would be excused)."""
    scale.update(torch.tensor(float(applied), dtype=torch.float64))
    stats = SimpleNamespace(
        loss_scale=float(scale.value), loss_scale_good_steps=float(scale.good_steps)
    )
    excused = scale.record(state, stats)
    return float(scale.value), excused


def test_the_scale_halves_on_overflow_and_explains_it_until_it_is_one():
    state = TrainState()
    scale = LossScale(state, CPU, dynamic=True)
    assert [updated(scale, state, False) for _ in range(20)] == [
        (max(1.0, 2.0 ** (15 - step)), step < 16) for step in range(20)
    ]
    for _ in range(LossScale.GROWTH_INTERVAL - 1):
        assert updated(scale, state, True)[0] == 1.0
    scale = LossScale(state, CPU, dynamic=True)  # as a run that resumes here has it
    assert (
        updated(scale, state, True)[0] == state.loss_scale == 2.0
        and state.loss_scale_good_steps == 0
    )
