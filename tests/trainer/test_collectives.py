"""What the ranks tell each other in a step besides weights and gradients: one small collective."""

import itertools
import threading

import pytest
import torch
import torch.distributed as dist

from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.data.loader import Batch, Loader
from mamba_fsdp.parallel.compat import HAS_FSDP2
from mamba_fsdp.report.records import read
from mamba_fsdp.trainer import clock, run
from mamba_fsdp.trainer.stopping import StopRequest
from tests.support.checkpoints import steps_in
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.torch22]
COLLECTIVES = {
    name: getattr(dist, name)
    for name in (
        "all_reduce",
        "all_gather",
        "all_gather_object",
        "broadcast",
        "broadcast_object_list",
        "barrier",
        "reduce",
    )
}
READS = ("__int__", "__float__", "__bool__", "__index__", "item", "tolist")


def small(arguments):
    """Whether it is neither weights nor gradients that travel: these are fp32 here."""
    return not any(
        isinstance(argument, torch.Tensor) and argument.dtype == torch.float32
        for argument in arguments
    )


def steps_of(world, settings):
    """A whole run; for each of its steps the small collectives, and the reads of what comes of labels that moved."""
    steps, go_on_writing, write = [], threading.Event(), Checkpointer._write

    class Moved(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), named=None):
            if function.__name__ in READS:
                steps[-1].append("read")
            return super().__torch_function__(function, types, arguments, named or {})

    def step(loader, number, read=Loader.step):
        steps.append([])
        if number == 5:
            go_on_writing.set()
        return read(loader, number)

    def write_late(checkpointer, save, copies, packed):
        copied = copies()
        go_on_writing.wait()
        return write(checkpointer, save, lambda: copied, packed)

    for name, call in COLLECTIVES.items():

        def noted(*arguments, name=name, call=call, **named):
            if steps and small(arguments):
                steps[-1].append(name)
            return call(*arguments, **named)

        setattr(dist, name, noted)
    Loader.step, Checkpointer._write = step, write_late
    StopRequest.look = lambda request: world.rank == 1 and len(steps) == 8
    Batch.to = lambda batch, device: batch._replace(labels=batch.labels.as_subclass(Moved))
    clock.Clock.own_seconds = lambda self: 1.0 + world.rank
    run.start_world = lambda **_: world
    run.run_training(settings)
    return steps


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_step_has_one_small_collective(settings_of, tmp_path, strategy):
    """Step 2 reports; 3 saves; 4 and 5 find the save pending. Labels are counted before they move: the host reads only
    what was summed. That tells of a slow rank too, and that one was asked to stop in step 8."""
    settings = settings_of(
        sharding_strategy=strategy,
        num_steps=9,
        global_batch_size=8,
        checkpoint_interval=3,
        report_interval=2,
        eval_interval=0,
    )
    # AdamW is not fused on torch 2.2's CPU: whether it may step is read beforehand.
    reads = 1 if HAS_FSDP2 else 2
    for steps in run_ranks(2, steps_of, settings):
        assert len(steps) == 8
        assert [steps[number] for number in (0, 1, 3, 4)] == [["all_reduce"] + ["read"] * reads] * 4
    assert steps_in(tmp_path / "run") == [3, 6, 8]
    for entry in read(tmp_path / "run/metrics.jsonl"):
        assert [
            entry[key] for key in ("slowest_rank", "slowest_rank_seconds", "median_rank_seconds")
        ] == [1, 2.0, 1.5]


def stopped_at(world, look, settings):
    """A run of which only rank 1 hears that it should stop, at its look of this number."""
    looks = itertools.count(1)
    StopRequest.look = lambda request: world.rank == 1 and next(looks) >= look
    run.start_world = lambda **_: world
    run.run_training(settings)


def test_ranks_stop_at_the_same_batch_of_a_validation(settings_of, tmp_path):
    """Look 2 is within the validation at the start, 6 at the first batch of that of step 2; the last run has them."""
    settings = settings_of(sharding_strategy="fsdp", num_steps=4, batch_size=1, eval_interval=2)
    for look, validated in ((2, set()), (6, {0}), (99, {0, 2, 4})):
        run_ranks(2, stopped_at, look, settings)
        entries = read(tmp_path / "run/metrics.jsonl")
        assert {entry["step"] for entry in entries if "val_loss" in entry} == validated
