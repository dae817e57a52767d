import functools
import math

import pytest
import torch
import torch.distributed as dist

from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.compat import HAS_FSDP2
from mamba_fsdp.parallel.world import start_world
from tests.support.ranks import build, gradient_norm, run_ranks, train, whole

pytestmark = pytest.mark.torch22
FP32 = (".A_log", ".D")


def trajectory(world, how, grad_accumulation_steps, dtype=torch.float32):
    parallel, optimizer = build(world, dtype=dtype, **how)
    records = train(world, parallel, optimizer, range(4), grad_accumulation_steps)
    return records, whole(world, parallel.shards(optimizer))


@functools.cache
def one_process(muon=False):
    return trajectory(start_world(), {"strategy": "none", "muon": muon}, 2)


RECOMPUTING = {"fsdp_activation_checkpointing": True}
FAST = [
    (2, {"strategy": "ddp"}, 4),
    (2, {"strategy": "fsdp"}, 4),
    (2, {"strategy": "hsdp"}, 2),
    (2, {"strategy": "fsdp", "muon": True}, 2),
]
SLOW = [
    (2, {"strategy": "ddp", **RECOMPUTING}, 1),
    (2, {"strategy": "fsdp", "accumulate_unsharded": True}, 4),
    (2, {"strategy": "fsdp", **RECOMPUTING, "selective_checkpointing": "1/2"}, 2),
    (2, {"strategy": "ddp", "muon": True}, 2),
    (4, {"strategy": "fsdp", "muon": True}, 2),
    (4, {"strategy": "hsdp", "shard_size": 2, "muon": True}, 3),
    (4, {"strategy": "hsdp", "shard_size": 2, "accumulate_unsharded": True}, 3),
    (2, {"strategy": "fsdp", "use_torch_compile": True, **RECOMPUTING}, 2),
]


@pytest.mark.parametrize(
    "ranks, how, grad_accumulation_steps",
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_every_strategy_trains_as_one_process_does(ranks, how, grad_accumulation_steps):
    """Losses, gradient norms, weights and optimiser state don't depend on ranks, strategy or micro-batches."""
    expected, expected_tensors = one_process(how.get("muon", False))
    for records, tensors in run_ranks(ranks, trajectory, how, grad_accumulation_steps):
        torch.testing.assert_close(records, expected, rtol=2e-5, atol=2e-5)
        assert tensors.keys() == expected_tensors.keys()
        for name, tensor in expected_tensors.items():
            torch.testing.assert_close(
                tensors[name],
                tensor,
                rtol=1e-3,
                atol=2e-5,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def low_precision(world, how, dtype):
    parallel, optimizer = build(world, dtype=dtype, **how)
    records = train(world, parallel, optimizer, range(4), 4)
    copies = {shard.name: shard.data for shard in parallel.shards() if shard.name.endswith(FP32)}
    seen = set().union(
        *(module.seen for module in parallel.model.modules() if hasattr(module, "seen"))
    )
    everywhere = {shard.data.dtype for shard in parallel.shards()}
    everywhere |= {
        parameter.grad.dtype
        for parameter in parallel.parameters().values()
        if parameter.grad is not None
    }
    return records, seen, everywhere, copies


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, dtype",
    [
        ({"strategy": "ddp"}, torch.bfloat16),
        ({"strategy": "fsdp"}, torch.float16),
        ({"strategy": "hsdp", "shard_size": 1}, torch.bfloat16),
    ],
    ids=str,
)
def test_sensitive_parameters_stay_fp32_under_low_precision(how, dtype):
    """A_log and D are fp32 while blocks compute in half precision, and equal on all ranks after steps."""
    (records, seen, everywhere, copies), (_, _, _, others) = run_ranks(2, low_precision, how, dtype)
    assert seen == {(torch.float32, torch.float32)}
    assert everywhere == {torch.float32}
    assert len(copies) == 6 and all(torch.equal(copies[name], others[name]) for name in copies)
    torch.testing.assert_close(records, one_process()[0], rtol=1e-2, atol=1e-2)


def layout(world, how):
    parallel, _ = build(world, **how)
    kept = sum(shard.data.numel() for shard in parallel.shards() if shard.name.endswith(FP32))
    held = sum(shard.data.numel() for shard in parallel.shards())
    total = sum(math.prod(shard.shape) for shard in parallel.shards())
    shards = [
        (
            shard.name,
            shard.start,
            shard.data.numel(),
            shard.replicas,
            shard.replica_index,
        )
        for shard in parallel.shards()
    ]
    tied = parallel.model.lm_head.weight is parallel.model.backbone.embedding.weight
    parallel.shards()[0].data.fill_(3.0)
    written = parallel.parameters()[shards[0][0]].detach().eq(3.0).all().item()
    return kept, held, total, shards, tied, written


@pytest.mark.parametrize(
    "ranks, shard_size, how",
    [
        (3, 3, {"strategy": "fsdp"}),
        (4, 2, {"strategy": "hsdp", "shard_size": 2}),
        (2, 1, {"strategy": "ddp"}),
    ],
    ids=str,
)
def test_shards_tell_who_holds_what(ranks, shard_size, how):
    """Shards of one group tile each parameter, replicas are numbered, tied weights stay tied, writing goes through."""
    results = run_ranks(ranks, layout, how)
    for rank, (kept, held, total, shards, tied, written) in enumerate(results):
        assert tied and written
        assert held - kept <= (total - kept) / shard_size + 24 * len(
            shards
        )  # rows don't divide evenly
        for name, _, _, replicas, replica_index in shards:
            replicated = name.endswith(FP32)
            expected = (ranks, rank) if replicated else (ranks // shard_size, rank // shard_size)
            assert (replicas, replica_index) == expected
    for index, (name, *_) in enumerate(results[0][3]):
        ends = {(rank[3][index][1], rank[3][index][1] + rank[3][index][2]) for rank in results}
        if not name.endswith(FP32):
            position = 0
            for start, end in sorted(end for end in ends if end[0] != end[1]):
                assert start == position
                position = end


def infinite(world):
    parallel, optimizer = build(world, strategy="fsdp")
    train(world, parallel, optimizer, range(1))
    name = "backbone.layers.1.mixer.in_proj.weight"
    norms = []
    for value in (math.inf, math.nan):
        if world.rank == 1:
            parallel.parameters()[name].grad.view(-1)[0] = value
        norms.append(gradient_norm(world, parallel))
    return norms


def test_one_bad_element_on_one_rank_reaches_every_norm():
    """The gradient norm is inf or nan on all ranks when one element of one shard is."""
    for of_rank in run_ranks(2, infinite):
        assert not any(map(math.isfinite, of_rank))


def gradients_sent(world, how):
    """How many collectives for gradients each of three micro-batches issues, as [(reduce-scatters, all-reduces)]."""
    parallel, _ = build(world, **how)
    calls = {"scatter": 0, "all": 0}

    def counting(original, kind):
        def count(*arguments, **named):
            calls[kind] += 1
            return original(*arguments, **named)

        return count

    for name in dir(dist):
        if "reduce_scatter" in name:
            setattr(dist, name, counting(getattr(dist, name), "scatter"))
    dist.all_reduce = counting(dist.all_reduce, "all")
    seen = []
    batch = torch.zeros(1, 4, dtype=torch.long)
    for index in range(3):
        calls.update(scatter=0, all=0)
        with parallel.accumulate(last=index == 2):
            parallel.module(batch, labels=batch).backward()
        seen.append((calls["scatter"], calls["all"]))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, how, at_once",
    [
        (2, {"strategy": "fsdp"}, True),
        (4, {"strategy": "hsdp", "shard_size": 2}, True),
        (2, {"strategy": "ddp"}, False),
        (4, {"strategy": "hsdp", "shard_size": 2, "accumulate_unsharded": True}, False),
    ],
    ids=str,
)
def test_gradients_travel_when_they_should(ranks, how, at_once):
    """Each micro-batch's at once over the shard group, so that only a share waits; or all with the last one."""
    for first, second, last in run_ranks(ranks, gradients_sent, how):
        assert first == second and sum(last) > 0
        assert (first[0] > 0) == at_once
        if HAS_FSDP2 or not at_once:
            assert first[1] == 0


def recomputed(world, share):
    parallel, _ = build(
        world,
        layers=6,
        strategy="none",
        fsdp_activation_checkpointing=True,
        selective_checkpointing=share,
    )
    calls = []
    for index, block in enumerate(parallel.model.backbone.layers):
        block.mixer.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    batch = torch.zeros(2, 5, dtype=torch.long)
    parallel.module(batch, labels=batch).backward()
    trained = [calls.count(index) - 1 for index in range(6)]
    with torch.no_grad():
        parallel.module(batch, labels=batch)
    return trained, len(calls)


@pytest.mark.parametrize(
    "share, expected",
    [("1", [1, 1, 1, 1, 1, 1]), ("1/2", [1, 0, 1, 0, 1, 0]), ("1/3", [0, 1, 0, 0, 1, 0])],
)
def test_the_chosen_share_of_blocks_recomputes(share, expected):
    """Block i (from 1) recomputes when i * share reaches 0.5, 1.5, 2.5, ...; nothing recomputes without gradients."""
    trained, calls = recomputed(start_world(), share)
    assert trained == expected
    assert calls == 6 + sum(expected) + 6


def refusal(world, how):
    try:
        build(world, **how)
    except UserError as error:
        return str(error)


LOW_AND_UNSHARDED = {"strategy": "fsdp", "accumulate_unsharded": True, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "how, word",
    [
        ({"strategy": "none"}, "choose ddp"),
        ({"strategy": "hsdp", "shard_size": 3}, "groups of 3"),
        pytest.param(
            LOW_AND_UNSHARDED,
            "leave out accumulate_unsharded",
            marks=pytest.mark.skipif(HAS_FSDP2, reason="FSDP2 sums in fp32"),
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(how, word):
    assert all(word in message for message in run_ranks(2, refusal, how))


def test_fsdp_needs_no_launcher():
    """One process that no torchrun has started can shard, and trains as without."""
    [(records, _)] = run_ranks(1, trajectory, {"strategy": "fsdp"}, 2, launched=False)
    torch.testing.assert_close(records, one_process()[0], rtol=2e-5, atol=2e-5)
