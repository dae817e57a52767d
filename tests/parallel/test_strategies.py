"""Tests that every sharding strategy trains like one process, and that precision, stored shards and recomputation are
as configured."""

import dataclasses
import functools
import math
from fractions import Fraction

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.ops import fused
from mamba_fsdp.parallel import compat
from mamba_fsdp.parallel.compat import HAS_FSDP2
from mamba_fsdp.parallel.parallelize import choose_strategy, compile_blocks, select_recomputed
from mamba_fsdp.parallel.world import CPU, World, start_world
from mamba_fsdp.settings.train_config import ParallelConfig
from tests.support.compare import equal
from tests.support.ranks import SMALL, build, run_ranks, train, whole

pytestmark = pytest.mark.torch22

DDP = {"strategy": "ddp"}
FSDP = {"strategy": "fsdp"}
HSDP = {"strategy": "hsdp", "shard_size": 2}
MUON = {"optimizer": "muon"}
ONE_LAYER = dataclasses.replace(SMALL, n_layer=1)
RECOMPUTING = {"fsdp_activation_checkpointing": True}
UNSHARDED = {"accumulate_unsharded": True}
WHOLE = (".A_log", ".D", ".dt_proj.bias")  # suffixes of the parameters that every rank stores whole


def each(world, function, *cases):
    return [function(world, *case) for case in cases]


def trajectory(world, how, micro_batches):
    parallel, optimizer = build(world, **how)
    records = train(world, parallel, optimizer, range(4), micro_batches)
    return records, whole(world, parallel.shards(optimizer))


def trajectories(world, has_fsdp2, cases):
    compat.HAS_FSDP2 = has_fsdp2
    return each(world, trajectory, *cases)


@functools.cache
def one_process(optimizer="adamw", config=SMALL):
    how = {"strategy": "none", "optimizer": optimizer, "config": config}
    return trajectory(start_world(), how, 2)


# Cases for two ranks and for four: (settings of `build`, number of micro-batches).
TWO = [
    (DDP, 4),
    (FSDP, 4),
    ({"strategy": "hsdp"}, 2),
    (FSDP | MUON, 2),
    (DDP | MUON, 2),
    (DDP | RECOMPUTING, 1),
    (FSDP | UNSHARDED, 4),
    (FSDP | RECOMPUTING | {"selective_checkpointing": "1/2"}, 2),
]
FOUR = [(FSDP | MUON, 2), (HSDP | MUON, 3), (HSDP | UNSHARDED, 3)]
COMPILED = [(FSDP | RECOMPUTING | {"use_torch_compile": True, "config": ONE_LAYER}, 2)]


@pytest.mark.parametrize(
    "ranks, has_fsdp2, cases",
    [
        (2, HAS_FSDP2, TWO),
        pytest.param(4, HAS_FSDP2, FOUR, marks=pytest.mark.slow),
        # With torch 2.2, which has only FSDP1, this case equals "4 ranks".
        pytest.param(4, False, FOUR, marks=pytest.mark.slow),
        pytest.param(2, HAS_FSDP2, COMPILED, marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "4 ranks", "FSDP1", "compiled"],
)
def test_every_strategy_trains_as_one_process_does(ranks, has_fsdp2, cases):
    """Losses, gradient norms, weights and optimizer state do not depend on the strategy, the number of ranks or the
    number of micro-batches."""
    for results in run_ranks(ranks, trajectories, has_fsdp2, cases):
        for (how, _), (records, tensors) in zip(cases, results):
            like = {name: how[name] for name in ("optimizer", "config") if name in how}
            expected, expected_tensors = one_process(**like)
            torch.testing.assert_close(records, expected, rtol=2e-5, atol=2e-5, msg=str(how))
            torch.testing.assert_close(
                tensors, expected_tensors, rtol=1e-3, atol=2e-5, msg=str(how)
            )


def step_in_half_precision(world, how):
    """Takes a step in bf16. Returns (loss, gradient norm, {name: dtype in the forward pass} of a mixer's weights, set
    of the dtypes of stored weights and gradients)."""
    parallel, optimizer = build(world, dtype=torch.bfloat16, **how)
    gathered = {}

    def note_dtypes(mixer, _):
        gathered.update((name, weight.dtype) for name, weight in mixer.named_parameters())

    parallel.model.backbone.layers[0].mixer.register_forward_pre_hook(note_dtypes)
    ((loss, norm, _),) = train(world, parallel, optimizer, [0])
    stored = {slot.local.dtype for slot in parallel.slots}
    stored |= {slot.local.grad.dtype for slot in parallel.slots if slot.local.grad is not None}
    return loss, norm, gathered, stored


@pytest.mark.slow
@pytest.mark.parametrize("how, gathered", [(DDP, torch.float32), (FSDP, torch.bfloat16)], ids=str)
def test_a_step_in_bf16_is_close_to_fp32_and_its_recurrence_stays_fp32(how, gathered):
    """A step in bf16 has nearly the loss and gradient norm of fp32. The parameters of the recurrence, stored weights
    and stored gradients are fp32. With FSDP, other weights are gathered in bf16."""
    (loss, norm, _), *_ = one_process()[0]
    for half_loss, half_norm, dtypes, stored in run_ranks(2, step_in_half_precision, how):
        assert half_loss == pytest.approx(loss, rel=5e-3)
        assert half_norm == pytest.approx(norm, rel=3e-2)
        of_recurrence = dict.fromkeys(("A_log", "D", "dt_proj.bias"), torch.float32)
        assert dtypes == dict.fromkeys(dtypes, gathered) | of_recurrence
        assert stored == {torch.float32}


def train_with_bad_losses(world, how, dtype):
    """Takes five steps. On rank 1, the loss of the second step is NaN, the loss of the third step is infinite, and the
    gradient norm of the fourth step is infinite.

    Returns [(whether the step was applied, whether weights and moments are unchanged)].
    """
    parallel, optimizer = build(world, dtype=dtype, **how)
    shards = parallel.shards(optimizer)
    found = []
    for step, factor in enumerate((1.0, math.nan, math.inf, 1e35, 1.0)):
        before = whole(world, shards)
        if world.rank == 1:
            parallel.model.loss_factor = factor
        ((_, _, applied),) = train(world, parallel, optimizer, [step])
        found.append((applied, equal(before, whole(world, shards))))
    return found


@pytest.mark.slow
def test_a_non_finite_loss_on_one_rank_changes_the_weights_of_no_rank():
    cases = [(DDP, torch.float32), (FSDP, torch.float32), (HSDP | MUON, torch.float32)]
    cases.append((FSDP, torch.float16))
    for results in run_ranks(4, each, train_with_bad_losses, *cases):
        for found, case in zip(results, cases):
            refused = [(False, True)] * 3
            assert found == [(True, False), *refused, (True, False)], case


def stored_fraction(world, how):
    """Returns the fraction of the elements of all sharded tensors that this rank stores."""
    parallel, _ = build(world, **how)
    cut = [shard for shard in parallel.shards() if not shard.name.endswith(WHOLE)]
    held = sum(shard.data.numel() for shard in cut)
    return held / sum(math.prod(shard.shape) for shard in cut)


@pytest.mark.parametrize("ranks, how, parts", [(3, FSDP, 3), (4, HSDP, 2)], ids=["fsdp", "hsdp"])
def test_each_rank_stores_its_shard_only(ranks, how, parts):
    for share in run_ranks(ranks, stored_fraction, how):
        assert share == pytest.approx(1 / parts, rel=0.1)


@pytest.mark.parametrize(
    "share, expected",
    [("1", [1, 1, 1, 1, 1, 1]), ("1/2", [1, 0, 1, 0, 1, 0]), ("1/3", [0, 1, 0, 0, 1, 0])],
)
def test_which_blocks_recompute(share, expected):
    """Block i, counted from 1, recomputes its activations if one of 0.5, 1.5, 2.5, ... is above (i - 1) * share and at
    most i * share."""
    assert select_recomputed(6, Fraction(share)) == expected


def test_kernels_of_libraries_are_not_compiled(monkeypatch):
    """compile_blocks excludes the kernels of other libraries from compilation, because tracing their autograd functions
    would fail or break the graph."""
    for name in fused.FUNCTIONS:
        monkeypatch.setattr(fused, name, getattr(fused, name))  # it is restored after the test
    compile_blocks([])
    assert all(getattr(fused, name)._torchdynamo_disable for name in fused.FUNCTIONS)


@pytest.mark.parametrize(
    "configured, ranks, of_a_node, chosen",
    [
        ("auto", 1, 1, "none"),
        ("auto", 2, 2, "fsdp"),
        ("none", 1, 1, "none"),
        ("hsdp", 4, 2, "hsdp"),
        ("hsdp", 4, 1, "ddp"),
    ],
)
def test_choose_strategy(configured, ranks, of_a_node, chosen):
    world = World(0, ranks, of_a_node, CPU)
    assert choose_strategy(ParallelConfig(sharding_strategy=configured), world) == chosen


def refusal(world, how):
    try:
        build(world, **how)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    "how, word",
    [
        ({"strategy": "none"}, "choose ddp"),
        ({"strategy": "hsdp", "shard_size": 3}, "groups of 3"),
        pytest.param(
            FSDP | UNSHARDED | {"dtype": torch.bfloat16},
            "leave out accumulate_unsharded",
            marks=pytest.mark.skipif(HAS_FSDP2, reason="FSDP2 sums in fp32"),
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_errors(how, word):
    assert all(word in message for message in run_ranks(2, refusal, how))


def test_fsdp_needs_no_launcher():
    """A single process that was not started by torchrun can use FSDP, and trains as it does without sharding."""
    [(records, _)] = run_ranks(1, trajectory, FSDP, 2, launched=False)
    torch.testing.assert_close(records, one_process()[0], rtol=2e-5, atol=2e-5)
