"""Defines the statistics of a step: the sums over ranks from its collective, and the values that the host reads
afterwards."""

from dataclasses import dataclass

import torch

from mamba_fsdp.parallel.world import World


@dataclass
class StepSums:
    """The sums over all ranks, as fp64 tensors on the device. All except `host_numbers` are 0-dim."""

    loss: torch.Tensor  # weighted sum of the token losses, in nats
    gradient_squares: torch.Tensor  # sum of the squares of the gradient after the backward passes
    label_weight: torch.Tensor  # sum of the weights of the labels, see Batch.total_weight
    # Shape (n,): the sums of StepStats.pack_host_numbers.
    host_numbers: torch.Tensor


def sum_over_ranks(
    world: World,
    loss_sum: torch.Tensor,
    gradient_squares: torch.Tensor,
    label_weight: float,
    host_numbers: list[float],
) -> StepSums:
    """Sums the statistics of a step over all ranks in a single collective. The host does not wait for the result.

    loss_sum, gradient_squares: 0-dim tensors on the device. label_weight, host_numbers: numbers on the host.
    """
    known_to_host = world.copy_to_device([label_weight, *host_numbers])
    on_device = torch.stack([loss_sum.double(), gradient_squares])
    sums = world.all_reduce_sum(torch.cat([on_device, known_to_host]))
    return StepSums(sums[0], sums[1], sums[2], sums[3:])


@dataclass
class StepStats:
    """The statistics of a step, the same on all ranks, after the host has read them."""

    loss: float  # weighted mean over the labels, in nats
    gradient_norm: float  # the norm before clipping
    applied: bool  # False if the loss or a gradient was not finite: the weights are unchanged
    loss_scale: float  # the loss scale of fp16 after the step
    loss_scale_good_steps: int
    stop_requested: bool  # whether any rank was asked to stop
    is_writing: bool  # whether a rank was still working on the save in progress when the step began
    seconds_per_rank: list[float]  # own seconds of each rank before the step, see Clock

    FIXED = 7  # the number of values before seconds_per_rank

    @staticmethod
    def pack_host_numbers(
        world: World, stop_requested: bool, is_writing: bool, own_seconds: float
    ) -> list[float]:
        """Returns the values that this rank's host contributes to the collective of a step."""
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
        """Combines the statistics into one tensor on the device, so that the host reads them with a single copy.

        host_numbers: the sum of `pack_host_numbers` over all ranks.
        """
        on_device = [loss, gradient_norm, applied, loss_scale, loss_scale_good_steps]
        return torch.cat([torch.stack(on_device), host_numbers])

    @classmethod
    def unpack(cls, numbers: list[float]) -> "StepStats":
        """Parses the statistics that `pack` has combined."""
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
