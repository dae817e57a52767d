"""Takes a training step of this program outside of a run, with the functions that a run uses."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.loader import Batch
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.world import World
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.loop import (
    accumulate_gradients,
    mean_loss_and_norm,
    sum_over_ranks,
    update_weights,
)
from mamba_fsdp.trainer.optimizer import make_optimizer
from mamba_fsdp.trainer.setup import build_model, initialize_weights


def our_step(
    settings: TrainConfig,
    device: torch.device,
    weights: Mapping[str, torch.Tensor] = {},
    preferred: str = "",
    **others: Any,
) -> Callable[[torch.Tensor], float]:
    """Returns a function that takes a step (forward, loss, backward, clipping, AdamW) on tokens (batch, length + 1) and
    returns the loss.

    weights: {name: initial value}; if it is empty, the values are drawn, as at the start of a run. preferred: the backend that
    each operator uses if it can, or "" for the usual choice. others: settings that replace those in `settings`.
    """
    settings = settings.with_values(**others)
    options = settings.optimizer
    dtype = DTYPES[settings.training.precision(device.type)]
    uses = settings.operator_uses(device.type)
    first = {}
    if preferred:
        first = dict.fromkeys(uses, preferred)
    choice = resolve_backends(settings.training.kernels, device.type, uses, preferred=first)
    cpp.tune_process(device.type)
    world = World.alone(device=device)
    parallel = build_model(settings, world, choice.backends)
    if weights:
        for name, parameter in parallel.parameters().items():
            parameter.data.copy_(weights[name])
    else:
        initialize_weights(settings, parallel)
    optimizer = make_optimizer(parallel, parameters(settings.model), options, dtype)

    def step(tokens: torch.Tensor) -> float:
        batch = Batch(tokens[:, :-1], labels=tokens[:, 1:])
        counted = batch.labels.numel()
        multiple = torch.full((), counted, dtype=torch.float64, device=device)
        loss_sum = accumulate_gradients(parallel, optimizer, [batch], 1 / multiple)
        sums = sum_over_ranks(world, loss_sum, parallel.gradient_squares(), counted, [])
        mean_loss, norm, factor = mean_loss_and_norm(sums, multiple)
        update_weights(
            parallel,
            optimizer,
            mean_loss,
            norm,
            factor,
            clip=options.grad_clip_thresh,
            lr=options.learning_rate,
        )
        return float(mean_loss)

    return step
