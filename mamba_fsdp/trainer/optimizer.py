"""Makes the optimiser, AdamW or Muon with weight decay on matrices only, and keeps the loss scale of fp16."""

from collections.abc import Mapping
from typing import Any

import torch

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.model.spec import Parameter
from mamba_fsdp.parallel.compat import has_fused_adamw
from mamba_fsdp.parallel.model import ParallelModel
from mamba_fsdp.settings.train_config import OptimizerConfig
from mamba_fsdp.trainer.muon import Muon
from mamba_fsdp.trainer.step_stats import StepStats


def make_optimizer(
    parallel: ParallelModel,
    spec: Mapping[str, Parameter],
    config: OptimizerConfig,
    compute_dtype: torch.dtype,
) -> torch.optim.AdamW:
    """Returns the optimiser of this rank's parts of the parameters. `spec` says which parameters
    decay. If the model computes in half precision, Muon orthogonalises in bf16: fp16 would lose
    small momenta."""
    decayed = []
    others = []
    rows = {}
    for slot in parallel.slots:
        parameter = spec[slot.name]
        if config.optimizer == "muon" and parameter.rows:
            rows[slot] = list(parameter.rows.values())
        elif parameter.decay:
            decayed.append(slot.local)
        else:
            others.append(slot.local)
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    adamw: dict[str, Any] = dict(
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=has_fused_adamw(parallel.world.device) or None,
    )
    if not rows:
        return torch.optim.AdamW(groups, **adamw)
    dtype = torch.float32 if compute_dtype == torch.float32 else torch.bfloat16
    return Muon(groups, rows, parallel.world, dtype, **adamw)


class LossScale:
    """The loss scale of fp16: halved when a gradient overflows, doubled after 2000 steps without an
    overflow. In other precisions it is fixed at 1.

    Micikevicius et al. 2018, Mixed Precision Training, section 3.2. `value` and `good_steps`, 0-dim
    fp64, are on the device, so that the next step need not wait for the host. The train state keeps
    both."""

    GROWTH_INTERVAL = 2000

    def __init__(self, state: TrainState, device: torch.device, *, dynamic: bool) -> None:
        self.dynamic = dynamic
        value_and_steps = (1.0, 0)
        if dynamic:
            state.loss_scale = state.loss_scale or 2.0**16
            value_and_steps = (state.loss_scale, state.loss_scale_good_steps)
        self.value, self.good_steps = torch.tensor(
            value_and_steps, dtype=torch.float64, device=device
        )

    def update(self, applied: torch.Tensor) -> None:
        """Adapts the scale after a step. applied: 0-dim; 0 if a gradient was not finite."""
        if not self.dynamic:
            return
        good_steps = (self.good_steps + 1) * applied
        grown = good_steps == self.GROWTH_INTERVAL
        self.value = torch.where(
            applied > 0, self.value * (1 + grown.double()), (self.value / 2).clamp(min=1.0)
        )
        self.good_steps = good_steps * ~grown

    def record(self, state: TrainState, stats: StepStats) -> bool:
        """Returns whether an overflow in this step may be due to the scale rather than to the
        samples. Puts the scale and its good steps into the train state."""
        if not self.dynamic:
            return False
        was_reducible = state.loss_scale > 1.0
        state.loss_scale = stats.loss_scale
        state.loss_scale_good_steps = stats.loss_scale_good_steps
        return was_reducible
