"""Defines the numbers of a step: the sums over ranks from its one collective, and the numbers that the
host reads afterwards."""

from dataclasses import dataclass

import torch

from mamba_fsdp.parallel.world import World


@dataclass
class StepSums:
    """The sums of the ranks' numbers: fp64 on the device, 0-dim except for `host_numbers`."""

    loss: torch.Tensor  # of the labels that count, in nats
    gradient_squares: torch.Tensor  # of the gradient that the backward passes left
    label_weight: torch.Tensor  # labels that count, or the sum of their weights
    # Shape (n,): the sums of StepStats.pack_host_numbers.
    host_numbers: torch.Tensor


def sum_over_ranks(
    world: World,
    loss_sum: torch.Tensor,
    gradient_squares: torch.Tensor,
    label_weight: float,
    host_numbers: list[float],
) -> StepSums:
    """Returns the sums from the one small collective of a step, which all ranks call. The host knows
    the numbers `label_weight` and `host_numbers`; the tensors are on the device. The host does not wait."""
    known_to_host = world.copy_to_device([label_weight, *host_numbers])
    on_device = torch.stack([loss_sum.double(), gradient_squares])
    sums = world.all_reduce_sum(torch.cat([on_device, known_to_host]))
    return StepSums(sums[0], sums[1], sums[2], sums[3:])


@dataclass
class StepStats:
    """The numbers of a step that every rank's host knows once it has read them."""

    loss: float  # mean over the labels that count, in nats
    gradient_norm: float  # before clipping
    applied: bool  # False if the loss or a gradient was not finite: the weights are unchanged
    loss_scale: float  # of fp16, after the step
    loss_scale_good_steps: int
    stop_requested: bool  # by any rank
    is_writing: bool  # whether a rank still wrote the checkpoint under way when the step began
    seconds_per_rank: list[float]  # each rank's own work since the last step

    FIXED = 7  # numbers before seconds_per_rank

    @staticmethod
    def pack_host_numbers(
        world: World, stop_requested: bool, is_writing: bool, own_seconds: float
    ) -> list[float]:
        """Returns the numbers that this rank's host adds to the step's collective."""
        seconds_per_rank = [0.0] * world.size
        seconds_per_rank[world.rank] = own_seconds
        return [stop_requested, is_writing, *seconds_per_rank]

    @staticmethod
    def pack(
        loss: torch.Tensor,
        gradient_norm: torch.Tensor,
        applied: torch.Tensor,
        loss_scale: torch.Tensor,
        loss_scale_good_steps: torch.Tensor,
        host_numbers: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the numbers as one tensor on the device. host_numbers: the sums over ranks of
        `pack_host_numbers`."""
        on_device = [loss, gradient_norm, applied, loss_scale, loss_scale_good_steps]
        return torch.cat([torch.stack(on_device), host_numbers])

    @classmethod
    def unpack(cls, numbers: list[float]) -> "StepStats":
        loss, gradient_norm, applied, scale, good_steps, stops, writers = numbers[: cls.FIXED]
        return cls(
            loss=loss,
            gradient_norm=gradient_norm,
            applied=bool(applied),
            loss_scale=scale,
            loss_scale_good_steps=int(good_steps),
            stop_requested=stops > 0,
            is_writing=writers > 0,
            seconds_per_rank=numbers[cls.FIXED :],
        )
