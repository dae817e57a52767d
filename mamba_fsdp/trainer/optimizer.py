"""Creates the optimizer, AdamW or Muon, and implements the dynamic loss scale of fp16."""

from collections.abc import Mapping
from typing import Any

import torch

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.model.spec import Parameter
from mamba_fsdp.parallel.compat import has_fused_adamw
from mamba_fsdp.parallel.model import ParallelModel
from mamba_fsdp.settings.train_config import OptimizerConfig
from mamba_fsdp.trainer.muon import COEFFICIENTS, Muon
from mamba_fsdp.trainer.step_stats import StepStats


def make_optimizer(
    parallel: ParallelModel,
    spec: Mapping[str, Parameter],
    config: OptimizerConfig,
    compute_dtype: torch.dtype,
) -> torch.optim.AdamW:
    """Creates the optimizer for this rank's parts of the parameters.

    spec: {parameter name: Parameter}; it determines which parameters decay, and which ones Muon updates. compute_dtype:
    the dtype of the model's computation. If it is fp16 or bf16, Muon orthogonalizes in bf16, because small momenta
    would underflow in fp16.
    """
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
    coefficients = COEFFICIENTS[config.muon_coefficients]
    momentum = config.muon_momentum
    return Muon(groups, rows, parallel.world, dtype, momentum, coefficients, **adamw)


class LossScale:
    """The dynamic loss scale of fp16.

    It is halved if a gradient overflows, but not below 1, and doubled after 2000 steps without overflow.

    See Micikevicius et al. 2018, Mixed Precision Training, section 3.2. `value` is the scale, and `good_steps` counts
    the steps since the last overflow or doubling. Both are 0-dim fp64 tensors on the device, so that the next step does
    not wait for the host. The train state stores both.

    dynamic: whether to adapt the scale. In other precisions than fp16 it is fixed at 1.
    """

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
        """Adapts the scale after a step.

        applied: a 0-dim tensor, 1 if the step was applied, 0 if a gradient overflowed.
        """
        if not self.dynamic:
            return
        good_steps = (self.good_steps + 1) * applied
        grown = good_steps == self.GROWTH_INTERVAL
        self.value = torch.where(
            applied > 0, self.value * (1 + grown.double()), (self.value / 2).clamp(min=1.0)
        )
        self.good_steps = good_steps * ~grown

    def record(self, state: TrainState, stats: StepStats) -> bool:
        """Stores the scale in the train state. Returns whether an overflow in this step can be caused by the scale.

        Otherwise the samples caused the overflow.
        """
        if not self.dynamic:
            return False
        was_reducible = state.loss_scale > 1.0
        state.loss_scale = stats.loss_scale
        state.loss_scale_good_steps = stats.loss_scale_good_steps
        return was_reducible
