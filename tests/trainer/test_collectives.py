"""What the ranks tell each other in a step besides weights and gradients: one small collective."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mamba_fsdp.data.loader import Loader
from mamba_fsdp.run.records import read
from mamba_fsdp.trainer import clock, run
from mamba_fsdp.trainer.stopping import StopRequest
from tests.support.checkpoints import steps_in
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.torch22]


class SmallCollectives(TorchDispatchMode):
    """Notes by step the collectives that carry neither weights nor gradients, which are fp32 here."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        leaves, _ = torch.utils._pytree.tree_flatten(args)
        dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if self.steps and function.namespace == "c10d" and torch.float32 not in dtypes:
            self.steps[-1].append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def steps_of(world, settings):
    """The small collectives of each step of a whole run, which rank 1 is asked to stop in step 5."""
    collectives = SmallCollectives()
    read_batches = Loader.step

    def step(loader, number):
        collectives.steps.append([])
        return read_batches(loader, number)

    Loader.step = step
    StopRequest.look = lambda request: world.rank == 1 and len(collectives.steps) == 5
    clock.Clock.own_seconds = lambda self: 1.0 + world.rank
    run.start_world = lambda **_: world
    with collectives:
        run.run_training(settings)
    return collectives.steps


def test_a_step_has_one_small_collective(settings_of, tmp_path):
    """It tells the loss, a slow rank, and that one was asked to stop. Step 2 reports; the last one saves."""
    settings = settings_of(
        sharding_strategy="fsdp",
        global_batch_size=8,
        checkpoint_interval=9,
        report_interval=2,
        eval_interval=0,
    )
    for steps in run_ranks(2, steps_of, settings):
        assert steps[:4] == [["allreduce_"]] * 4 and len(steps) == 5
    assert steps_in(tmp_path / "run") == [5]
    for entry in read(tmp_path / "run/metrics.jsonl"):
        assert (entry["delaying_rank"], entry["largest_delay_seconds"]) == (1, 2.0)
        assert entry["median_delay_seconds"] == 1.5


def stopped_at(world, look, settings):
    """A run of which only rank 1 hears that it should stop, at its look of this number."""
    looks = itertools.count(1)
    StopRequest.look = lambda request: world.rank == 1 and next(looks) >= look
    run.start_world = lambda **_: world
    run.run_training(settings)


def test_ranks_stop_at_the_same_batch_of_a_validation(settings_of, tmp_path):
    """Look 6 is at the first batch of that of step 2; the next run has it."""
    settings = settings_of(sharding_strategy="fsdp", num_steps=2, batch_size=1, eval_interval=2)
    for look, validated in ((6, {0}), (99, {0, 2})):
        run_ranks(2, stopped_at, look, settings)
        entries = read(tmp_path / "run/metrics.jsonl")
        assert {entry["step"] for entry in entries if "val_loss" in entry} == validated
