"""Muon: its step is torch's own, and what a rank sends and holds for it."""

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.simulate import simulate
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import operator_uses, parameters
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.compat import HAS_FSDP2, step_unless
from mamba_fsdp.parallel.parallelize import parallelize
from mamba_fsdp.parallel.world import CPU, World
from mamba_fsdp.planning import roofline
from mamba_fsdp.planning.memory import Workload, expected_memory
from mamba_fsdp.settings.train_config import OptimizerConfig, ParallelConfig, TrainConfig
from mamba_fsdp.trainer import muon as muon_module
from mamba_fsdp.trainer.optimizer import make_optimizer
from tests.support.checkpoints import equal, open_run
from tests.support.ranks import build, run_ranks, train, whole

SIZES = dict(d_model=32, vocab_size=64, d_state=8, headdim=8, n_head=4, n_kv_head=2)
ALL_KINDS = ModelConfig(layers="mamba1,mamba2+mlp,attention", n_layer=3, **SIZES)
RATE = 0.01


@pytest.fixture
def muon():
    """(model with random weights, its spec, its Muon) on one rank, in bf16."""
    spec = parameters(ALL_KINDS)
    dtype = torch.bfloat16
    backends = resolve_backends("reference", "cpu", operator_uses(ALL_KINDS, dtype)).backends
    model = MambaLM(ALL_KINDS, backends=backends, compute_dtype=dtype, reset_at_documents=False)
    alone = ParallelConfig(sharding_strategy="none")
    parallel = parallelize(model, alone, world=World.alone(), compute_dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for shard in parallel.shards():
        shard.data.normal_(0, 0.1, generator=generator)
    config = OptimizerConfig(optimizer="muon", learning_rate=RATE)
    return parallel, spec, make_optimizer(parallel, spec, config, dtype)


def draw_gradients(parallel, step):
    generator = torch.Generator().manual_seed(step)
    for slot in parallel.slots:
        slot.local.grad = torch.randn(slot.shape, generator=generator) * 0.01


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 and newer have Muon")
def test_a_step_is_that_of_torchs_muon_on_each_stacked_matrix(muon):
    """To the rounding of a step to bf16, in which it is sent; and all else steps as with AdamW."""
    parallel, spec, optimizer = muon
    of_muon = {name for name in spec if "_proj.weight" in name or ".fc" in name}
    assert {slot.name for slot in optimizer.rows} == of_muon
    theirs = {}
    for slot in parallel.slots:
        rows = [*spec[slot.name].rows.values()] if slot.name in of_muon else slot.shape[0]
        theirs[slot] = [
            torch.nn.Parameter(part.clone()) for part in slot.local.detach().split(rows)
        ]
    matrices = [part for slot in optimizer.rows for part in theirs[slot]]
    assert len(matrices) == 2 + 3 + 2 + 5 + 1 + 2 + 1 + 3 + 1
    muons = torch.optim.Muon(
        matrices, lr=RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    rest = [slot for slot in parallel.slots if slot.name not in of_muon]
    adams = torch.optim.AdamW(
        [
            {"params": theirs[slot], "weight_decay": 0.1 if spec[slot.name].decay else 0.0}
            for slot in rest
        ],
        lr=RATE,
        betas=(0.9, 0.95),
    )
    for step in range(1, 6):
        draw_gradients(parallel, step)
        for slot, parts in theirs.items():
            for part, gradient in zip(parts, slot.local.grad.split([len(part) for part in parts])):
                part.grad = gradient.clone()
        step_unless(optimizer, torch.tensor(False))
        muons.step()
        adams.step()
        for slot, parts in theirs.items():
            largest = RATE * (1 if slot in rest else 0.2 * 1.3 * math.sqrt(max(slot.shape)))
            torch.testing.assert_close(
                slot.local, torch.cat(parts), rtol=1e-6, atol=1e-6 + step * largest / 2**9
            )


@pytest.mark.torch22
def test_a_refused_step_leaves_weights_and_momenta(muon):
    parallel, _, optimizer = muon
    for step, refused in enumerate((False, True, False)):
        before = [shard.data.clone() for shard in parallel.shards(optimizer)]
        draw_gradients(parallel, step)
        if refused:
            for slot in optimizer.rows:
                slot.local.grad[0, 0] = math.nan
        step_unless(optimizer, torch.tensor(refused))
        after = [shard.data for shard in parallel.shards(optimizer)]
        for old, new in zip(before, after):
            assert new.isfinite().all() and torch.equal(old, new) == refused


def broken_off(world, run, how):
    """The tensors after four steps, and after four of which the last two are those of a resumed run."""
    parallel, optimizer = build(world, muon=True, **how)
    train(world, parallel, optimizer, range(2))
    checkpointer = open_run(run, world)
    checkpointer.save(2, parallel.shards(optimizer), {})
    checkpointer.wait()
    train(world, parallel, optimizer, range(2, 4))
    unbroken = whole(world, parallel.shards(optimizer))

    parallel, optimizer = build(world, muon=True, **how)
    shards = parallel.shards(optimizer)
    open_run(run, world).resume(shards)
    parallel.set_optimizer_steps(optimizer, 2)
    train(world, parallel, optimizer, range(2, 4))
    return unbroken, whole(world, shards)


@pytest.mark.torch22
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(tmp_path):
    for unbroken, resumed in run_ranks(2, broken_off, tmp_path / "run", {"strategy": "fsdp"}):
        assert equal(unbroken, resumed)


def test_another_optimizer_than_the_checkpoints_is_refused(train, tmp_path):
    """In a line, in the same run and as a start from another; its weights alone serve."""
    train(tmp_path / "run", optimizer="muon", num_steps=2)
    for given in (
        {"run": tmp_path / "run"},
        {"run": tmp_path / "other", "load_ckpt_path": tmp_path / "run"},
    ):
        with pytest.raises(
            UserError, match="holds the state of optimizer=muon; .*init_from="
        ) as said:
            train(num_steps=4, **given)
        assert "\n" not in str(said.value)
    train(tmp_path / "run", optimizer="muon", num_steps=4)
    train(tmp_path / "anew", init_from=tmp_path / "run", num_steps=2)


def exchanged(world):
    """{strategy: what a step of Muon exchanges and orthogonalises on this rank}: elements sent by each collective, elements
    received, and matrices."""
    sent = []
    matrices = []

    def all_to_all(received, outgoing, *sizes, exchange=dist.all_to_all_single):
        sent.append(outgoing.numel())
        exchange(received, outgoing, *sizes)

    def step_of(matrix, step_of=muon_module._step_of):
        matrices.append(tuple(matrix.shape))
        return step_of(matrix)

    dist.all_to_all_single = all_to_all
    muon_module._step_of = step_of
    found = {}
    for strategy, shard_size in (("fsdp", 4), ("hsdp", 2), ("ddp", 1)):
        parallel, optimizer = build(world, strategy=strategy, shard_size=shard_size, muon=True)
        held = sum(slot.local.numel() for slot in optimizer.rows)
        sent.clear()
        matrices.clear()
        train(world, parallel, optimizer, range(1))
        found[strategy] = (list(sent), held, [each for each in matrices if each[0] <= each[1]])
    return found


@pytest.mark.slow
@pytest.mark.torch22
def test_each_matrix_is_orthogonalised_once_in_all_and_then_sent():
    """Two collectives. To the owners each element goes once, and from them once to each rank that holds it."""
    ranks = run_ranks(4, exchanged)
    of_a_layer = [(29, 24), (12, 24), (7, 24), (24, 48)]
    elements = 3 * sum(rows * columns for rows, columns in of_a_layer)
    for strategy, replicas in {"fsdp": 1, "hsdp": 2, "ddp": 4}.items():
        sent, held, matrices = zip(*(rank[strategy] for rank in ranks))
        assert [sum(each) for each in zip(*sent)] == [elements, replicas * elements]
        assert sum(held) == replicas * elements
        orthogonalised = [matrix for each in matrices for matrix in each]
        assert Counter(orthogonalised) == {(min(shape), max(shape)): 3 for shape in of_a_layer}


@pytest.mark.skipif(not HAS_FSDP2, reason="the simulation is of FSDP2")
@pytest.mark.parametrize("size", [1, 64])
def test_what_a_rank_holds_sends_and_multiplies_is_what_plan_expects(size, monkeypatch):
    """One momentum; two collectives a step, in bf16, of a share of the matrices and what the rank owns: on many ranks
    that is one parameter. Rank 0 owns the most costly one."""
    multiplied = []

    def counted(matrix, step_of=muon_module._step_of):
        if matrix.shape[0] > matrix.shape[1]:
            return step_of(matrix)  # which calls this with its transpose
        with FlopCounterMode(display=False) as counter:
            step = step_of(matrix)
        multiplied.append(counter.get_total_flops())
        return step

    monkeypatch.setattr(muon_module, "_step_of", counted)
    settings = TrainConfig(ModelConfig(layers="mamba2+mlp", n_layer=2, d_model=512, vocab_size=512))
    settings = settings.changed(
        seq_length=64, batch_size=1, optimizer="muon", mixed_precision="bf16"
    )
    found = simulate(settings, size)
    uses = settings.operator_uses("cuda")
    backends = resolve_backends("auto", "cuda", uses, assumed=("triton",)).backends
    work = Workload(settings, World(0, size, min(8, size), CPU), backends)
    expected = expected_memory(work)
    assert found.peak["moments"] == pytest.approx(expected["moments"], rel=0.01)
    assert sum(multiplied) == pytest.approx(roofline.muon_flops(work), rel=1e-6)
    if size == 1:  # where the step takes more than the backward pass
        assert expected["muon"]
        assert sum(found.peak.values()) == pytest.approx(sum(expected.values()), rel=0.05)
        return
    exchanges = [each for each in found.collectives if each.name.startswith("alltoall")]
    assert [(each.dtype, each.ranks) for each in exchanges] == [(torch.bfloat16, size)] * 2
    owned = work.most_owned([parameter.size for parameter in work.of_muon])
    assert [each.numel for each in exchanges] == pytest.approx([owned] * 2, rel=1e-6)
    reduced = [each.numel * 4 for each in found.collectives if "scatter" in each.name]
    assert sum(each.numel * 2 for each in exchanges) < 0.2 * sum(reduced)
