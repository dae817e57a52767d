"""AdamW with weight decay on matrices only, and the loss scale of fp16."""

from collections.abc import Mapping

import torch

from config.train_config import OptimizerConfig
from mamba_fsdp.model.spec import Parameter
from mamba_fsdp.parallel.compat import has_fused_adamw
from mamba_fsdp.train.state import TrainState
from mamba_fsdp.train.step_stats import StepStats


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    spec: Mapping[str, Parameter],
    config: OptimizerConfig,
    device: torch.device,
) -> torch.optim.AdamW:
    """AdamW over the local `parameters` by name; `spec` says which of them decay."""
    decayed = [parameter for name, parameter in parameters.items() if spec[name].decay]
    others = [parameter for name, parameter in parameters.items() if not spec[name].decay]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_epsilon,
        fused=has_fused_adamw(device) or None,
    )


class LossScale:
    """fp16's dynamic scale: halved when a gradient overflows, doubled after 2000 steps without;
    else fixed at 1.

    Micikevicius et al. 2018, Mixed Precision Training, section 3.2. It lives on the device, where
    the next step finds it before the host does: `value` and `good_steps`, 0-dim fp64. The train
    state keeps both."""

    GROWTH_INTERVAL = 2000

    def __init__(self, state: TrainState, device: torch.device, *, dynamic: bool) -> None:
        self.dynamic = dynamic
        if dynamic and not state.loss_scale:
            state.loss_scale = 2.0**16
        known = (1.0, 0)
        if dynamic:
            known = (state.loss_scale, state.loss_scale_good_steps)
        self.value, self.good_steps = torch.tensor(known, dtype=torch.float64, device=device)

    def update(self, applied: torch.Tensor) -> None:
        """After each step. applied: 0-dim; 0 where a gradient was not finite."""
        if not self.dynamic:
            return
        good_steps = (self.good_steps + 1) * applied
        grown = good_steps == self.GROWTH_INTERVAL
        self.value = torch.where(
            applied > 0, self.value * (1 + grown.double()), (self.value / 2).clamp(min=1.0)
        )
        self.good_steps = good_steps * ~grown

    def record(self, state: TrainState, stats: StepStats) -> bool:
        """Puts into the state what they are after a step. Returns whether an overflow in it would
        be due to the scale, so that the samples are not to blame."""
        if not self.dynamic:
            return False
        was_reducible = state.loss_scale > 1.0
        state.loss_scale = stats.loss_scale
        state.loss_scale_good_steps = stats.loss_scale_good_steps
        return was_reducible
