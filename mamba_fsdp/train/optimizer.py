"""AdamW with weight decay on matrices only, and the loss scale of fp16."""

from collections.abc import Mapping

import torch

from config.train_config import OptimizerConfig
from mamba_fsdp.model.spec import Parameter
from mamba_fsdp.parallel.compat import has_fused_adamw
from mamba_fsdp.train.state import TrainState


def make_optimizer(parameters: Mapping[str, torch.nn.Parameter], spec: Mapping[str, Parameter],
                   config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the local `parameters` by name; `spec` says which of them decay."""
    groups = [{"params": [parameter for name, parameter in parameters.items() if spec[name].decay == decay],
               "weight_decay": config.weight_decay if decay else 0.0} for decay in (True, False)]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2),
                             eps=config.adam_epsilon, fused=has_fused_adamw(device) or None)


class LossScale:
    """fp16's dynamic scale: halved when a gradient overflows, doubled after 2000 steps without; else fixed at 1.

    Micikevicius et al. 2018, Mixed Precision Training, section 3.2. The train state keeps its numbers.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, state: TrainState, *, dynamic: bool) -> None:
        self.state, self.dynamic = state, dynamic
        if dynamic and not state.loss_scale:
            state.loss_scale = 2.0 ** 16

    @property
    def value(self) -> float:
        return self.state.loss_scale if self.dynamic else 1.0

    def update(self, finite: bool) -> bool:
        """After each step. Returns whether an overflow is due to the scale, so that the samples are not to blame."""
        state, reducible = self.state, self.value > 1.0
        if not self.dynamic:
            return False
        state.loss_scale_good_steps = state.loss_scale_good_steps + 1 if finite else 0
        if not finite:
            state.loss_scale = max(1.0, state.loss_scale / 2)
        elif state.loss_scale_good_steps == self.GROWTH_INTERVAL:
            state.loss_scale, state.loss_scale_good_steps = state.loss_scale * 2, 0
        return reducible and not finite
