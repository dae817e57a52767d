"""What every sharding strategy offers to the loop: one small interface, over its part of each parameter.

Gradients are sums: the caller scales its loss so that the sum over ranks of the gradients is the one it wants. Every
strategy reduces them in fp32 and divides by nothing.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import nn

from mamba_fsdp.parallel.shards import Shard


@dataclass(eq=False)
class ParameterSlot:
    """Where a parameter sits in the model. Sharding replaces the parameter; its owners (several when tied) stay."""

    owners: list  # of (module, attribute)
    names: list  # one per owner; the first is the parameter's name
    shape: tuple

    @property
    def name(self):
        return self.names[0]

    @property
    def parameter(self):
        module, attribute = self.owners[0]
        return getattr(module, attribute)

    def materialize(self, device):
        """Put the whole parameter on the device, with undefined content if it had no storage. Ties stay."""
        old = self.parameter
        value = torch.empty_like(old, device=device) if old.is_meta else old.detach().to(device)
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        for module, attribute in self.owners:
            setattr(module, attribute, new)


def find_slots(model):
    """The ParameterSlot of every parameter, in the order of `model.named_parameters()`."""
    assert not list(model.buffers()), "a model without storage can't bring buffers: nobody would fill them"
    slots = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            slot = slots.setdefault(id(parameter), ParameterSlot([], [], tuple(parameter.shape)))
            slot.owners.append((module, attribute))
            slot.names.append(f"{prefix}.{attribute}" if prefix else attribute)
    return list(slots.values())


@dataclass
class LocalParameter:
    """This rank's part of one parameter, as the optimiser sees it: a plain tensor that shares the model's storage."""

    slot: ParameterSlot
    parameter: nn.Parameter
    start: int = 0
    replicas: int = 1
    replica_index: int = 0

    def shard(self, name, data):
        return Shard(name, self.slot.shape, self.start, data.detach().view(-1), self.replicas, self.replica_index)


class ParallelModel:
    """A model spread over the world. `module` is what to call, `model` the bare model inside.

    Strategies override `accumulate` and `reduce_gradients`. parts: slot -> (this rank's part, where it starts in the
    flattened parameter), of each parameter that is cut over groups of `shard_size` neighbouring ranks; `sharded` are
    these as local parameters. The others, `whole`, are on every rank. `local_parameters`: all, in the model's order.
    """

    def __init__(self, model, module, world, slots, *, parts, shard_size=1):
        self.model, self.module, self.world = model, module, world
        replicas, index = world.size // shard_size, world.rank // shard_size
        self.sharded = [LocalParameter(slot, part, start, replicas, index) for slot, (part, start) in parts.items()]
        self.whole = [LocalParameter(slot, slot.parameter, 0, world.size, world.rank)
                      for slot in slots if slot not in parts]
        local = {local.slot: local for local in self.sharded + self.whole}
        self.local_parameters = [local[slot] for slot in slots]

    def parameters(self):
        """Name -> what the optimiser updates: this rank's part of each parameter. Maybe empty, or flat."""
        return {local.slot.name: local.parameter for local in self.local_parameters}

    def shards(self):
        """A Shard for every parameter."""
        shards = [local.shard(local.slot.name, local.parameter) for local in self.local_parameters]
        for shard, local in zip(shards, self.local_parameters):
            shard.tied = tuple(local.slot.names[1:])
        return shards

    def accumulate(self, last):
        """Context for one micro-batch's forward and backward. No gradient travels before the `last` one."""
        return contextlib.nullcontext()

    def reduce_gradients(self):
        """After the last backward: every gradient becomes its sum over ranks. Here: those that are whole."""
        gradients = [local.parameter.grad for local in self.whole]
        if gradients and self.world.size > 1:
            total = self.world.all_reduce_sum(torch.cat([gradient.view(-1) for gradient in gradients]))
            parts = total.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_([gradient.view(-1) for gradient in gradients], list(parts))

    def gradient_norm(self):
        """2-norm of the whole gradient, a 0-dim fp32 tensor, the same on every rank; inf and nan come through.

        Each element is counted once: of replicas, only the first counts.
        """
        gradients = [local.parameter.grad for local in self.local_parameters if local.replica_index == 0]
        gradients = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
        squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if gradients:
            squares += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        return self.world.all_reduce_sum(squares).sqrt().float()

    def scale_gradients(self, factor):
        """Multiply every gradient by a number."""
        gradients = [local.parameter.grad for local in self.local_parameters]
        torch._foreach_mul_([gradient for gradient in gradients if gradient is not None], factor)

    def optimizer_shards(self, optimizer):
        """Shards optimizer/<parameter>/exp_avg and .../exp_avg_sq of an AdamW over `parameters()`; zeros at first."""
        shards = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    on_device = group["fused"] or group["capturable"]
                    optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu"),
                        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format)}
        for local in self.local_parameters:
            state = optimizer.state[local.parameter]
            shards += [local.shard(f"optimizer/{local.slot.name}/{name}", state[name])
                       for name in ("exp_avg", "exp_avg_sq")]
        return shards

    def set_optimizer_steps(self, optimizer, steps):
        """Let AdamW's bias correction go on as after `steps` updates. Call after `optimizer_shards`."""
        for state in optimizer.state.values():
            state["step"].fill_(steps)
