"""Gradients of several ranks, bit for bit: what is not finite on one reaches the weights of none, and a first step adds
up as later ones do."""

import math

import pytest
import torch

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.data.loader import Batch
from mamba_fsdp.trainer import loop
from mamba_fsdp.trainer.optimizer import LossScale
from tests.support.ranks import build, run_ranks, tokens, whole

pytestmark = [pytest.mark.slow, pytest.mark.torch22]


def gradients(world, parallel, optimizer, step, scale=1.0, factor=1.0):
    """This rank's losses of a step, times `factor`, and their gradients."""
    mine = tokens(step).view(world.size, 2, -1, 9)[world.rank]
    loop.batch_loss = lambda module, batch: module(batch.tokens, labels=batch.labels) * factor
    batches = [Batch(rows[:, :-1], rows[:, 1:]) for rows in mine]
    return loop.accumulate_gradients(parallel, optimizer, batches, torch.tensor(scale / 192))


def poisoned(world, how, dtype):
    """(whether it was applied, whether weights and moments stayed) of steps of which rank 1's loss is no number in the
    second, infinite in the third, and as large a gradient as overflows in the fourth."""
    parallel, optimizer = build(world, dtype=dtype, **how)
    scale, found = LossScale(TrainState(), world.device, dynamic=dtype == torch.float16), []
    shards = parallel.shards(optimizer)
    for step, factor in enumerate((1.0, math.nan, math.inf, 1e38, 1.0)):
        before = whole(world, shards)
        loss = gradients(
            world, parallel, optimizer, step, float(scale.value), factor if world.rank == 1 else 1.0
        )
        sums = loop.sum_over_ranks(world, loss, parallel.gradient_squares(), 192.0, [])
        loss, norm, multiple = loop.mean_loss_and_norm(sums, 192 / scale.value)
        applied = loop.update_weights(parallel, optimizer, loss, norm, multiple, clip=1.0, lr=0.01)
        scale.update(applied)
        after = whole(world, shards)
        found.append(
            (float(applied), all(torch.equal(before[name], after[name]) for name in before))
        )
    return found, scale.dynamic and float(scale.value)


def each(world, function, *cases):
    return [function(world, *case) for case in cases]


@pytest.mark.parametrize(
    "ranks, hows",
    [
        (2, [{"strategy": "ddp"}, {"strategy": "fsdp"}]),
        (4, [{"strategy": "hsdp", "shard_size": 2}]),
    ],
    ids=["2", "4"],
)
def test_what_is_not_finite_on_one_rank_reaches_the_weights_of_none(ranks, hows):
    cases = [(how, dtype) for how in hows for dtype in (torch.float32, torch.float16)]
    for results in run_ranks(ranks, each, poisoned, *cases):
        for (found, scale), (how, dtype) in zip(results, cases):
            assert found == [(1.0, False), (0.0, True), (0.0, True), (0.0, True), (1.0, False)], (
                how,
                dtype,
            )
            assert scale == (dtype == torch.float16 and 2.0**13)


def first_and_later(world, how):
    """The second step's gradients of a run of two steps, and of one that resumes after the first."""
    parallel, optimizer = build(world, **how)
    for step in range(2):
        weights = [shard.data.clone() for shard in parallel.shards()]
        gradients(world, parallel, optimizer, step)
    later = [
        parameter.grad.clone()
        for parameter in parallel.parameters().values()
        if parameter.grad is not None
    ]
    resumed, optimizer = build(world, **how)
    for shard, data in zip(resumed.shards(), weights):
        shard.data.copy_(data)
    gradients(world, resumed, optimizer, 1)
    first = [
        parameter.grad for parameter in resumed.parameters().values() if parameter.grad is not None
    ]
    return [torch.equal(*pair) for pair in zip(first, later, strict=True)]


def test_the_first_step_of_a_start_adds_up_as_later_ones_do():
    """On three ranks, where the order of a sum matters: DDP's buckets must be those of later steps."""
    for ddp, fsdp in run_ranks(
        3, each, first_and_later, [{"strategy": "ddp"}], [{"strategy": "fsdp"}]
    ):
        assert all(ddp) and all(fsdp)
