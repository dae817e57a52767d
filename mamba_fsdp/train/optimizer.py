"""AdamW with weight decay on matrices only, and the loss scale of fp16."""

import torch


def make_optimizer(parameters, spec, config, *, fused):
    """AdamW over `parameters` (dict: name -> this rank's part of it; `spec`: name -> spec.Parameter)."""
    groups = {True: [], False: []}
    for name, parameter in parameters.items():
        groups[spec[name].decay].append(parameter)
    return torch.optim.AdamW([{"params": groups[True], "weight_decay": config.weight_decay},
                              {"params": groups[False], "weight_decay": 0.0}],
                             lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.adam_epsilon,
                             fused=fused or None)


class LossScale:
    """fp16's dynamic scale: halved when a gradient overflows, doubled after 2000 steps without; 1 and fixed otherwise.

    Micikevicius et al. 2018, Mixed Precision Training, section 3.2.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, dynamic, value=None, good_steps=0):
        self.dynamic = dynamic
        self.value = (value or 2.0 ** 16) if dynamic else 1.0
        self.good_steps = good_steps

    def update(self, finite):
        """After a step. True when the overflow is explained by the scale, so that the samples are not to blame."""
        if not self.dynamic:
            return False
        if finite:
            self.good_steps += 1
            if self.good_steps == self.GROWTH_INTERVAL:
                self.value, self.good_steps = self.value * 2, 0
            return False
        explained, self.good_steps = self.value > 1.0, 0
        self.value = max(1.0, self.value / 2)
        return explained
