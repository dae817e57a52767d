"""Tests mamba_fsdp.trainer.optimizer: which parameters decay, Muon, and the loss scale of fp16."""

import math
from types import SimpleNamespace

import pytest
import torch

from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.compat import step_unless_rejected
from mamba_fsdp.parallel.world import CPU, World
from mamba_fsdp.settings.train_config import NEWTON_SCHULZ_ITERATIONS
from mamba_fsdp.trainer.muon import ADAMW_RMS, COEFFICIENTS, orthogonalize
from mamba_fsdp.trainer.optimizer import LossScale
from tests.support.ranks import build

SIZES = dict(d_model=32, vocab_size=64, d_state=8, headdim=8, n_head=4, n_kv_head=2)
ALL_KINDS = ModelConfig(layers="mamba1,mamba2+mlp,attention", n_layer=3, **SIZES)
RATE = 0.01
NORMS = ("norm.weight", "norm2.weight", "norm_f.weight")


def test_only_matrices_decay():
    for layers in ("mamba1", "mamba2", "attention+mlp"):
        config = ModelConfig(layers=layers, n_layer=1, d_intermediate=32 if "mlp" in layers else 0)
        for name, parameter in parameters(config).items():
            kept = name.endswith((".A_log", ".D", ".dt_bias", ".bias", *NORMS))
            assert parameter.decay != kept, name


@pytest.fixture
def muon():
    """Returns (parallel model, {name: parameter} of its spec, Muon optimizer) on one rank, in bf16."""
    how = {"strategy": "none", "optimizer": "muon", "config": ALL_KINDS}
    parallel, optimizer = build(World.alone(), dtype=torch.bfloat16, **how)
    for group in optimizer.param_groups:
        group["lr"] = RATE
    return parallel, parameters(ALL_KINDS), optimizer


def draw_gradients(parallel, step):
    generator = torch.Generator().manual_seed(step)
    for slot in parallel.slots:
        slot.local.grad = torch.randn(slot.shape, generator=generator) * 0.01


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 and newer have Muon")
def test_a_step_equals_the_muon_of_torch_for_each_stacked_matrix(muon):
    """A step of our Muon equals a step of torch.optim.Muon for each matrix that a parameter consists of, except for
    rounding: our updates are sent between ranks in bf16."""
    parallel, spec, optimizer = muon
    of_muon = {name for name in spec if "_proj.weight" in name or ".fc" in name}
    assert {slot.name for slot in optimizer.rows} == of_muon
    theirs = {}
    for slot in optimizer.rows:
        rows = [*spec[slot.name].rows.values()]
        parts = slot.local.detach().split(rows)
        theirs[slot] = [torch.nn.Parameter(part.clone()) for part in parts]
    matrices = [part for parts in theirs.values() for part in parts]
    assert len(matrices) == 2 + 3 + 2 + 5 + 1 + 2 + 1 + 3 + 1
    muons = torch.optim.Muon(
        matrices, lr=RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(1, 6):
        draw_gradients(parallel, step)
        for slot, parts in theirs.items():
            for part, gradient in zip(parts, slot.local.grad.split([len(part) for part in parts])):
                part.grad = gradient.clone()
        step_unless_rejected(optimizer, torch.tensor(False))
        muons.step()
        for slot, parts in theirs.items():
            largest = RATE * 0.2 * 1.3 * math.sqrt(max(slot.shape))
            torch.testing.assert_close(
                slot.local, torch.cat(parts), rtol=1e-6, atol=1e-6 + step * largest / 2**9
            )


@pytest.mark.parametrize(
    "name, smallest, low, high", [("jordan", 0.0015, 0.67, 1.21), ("minimax", 0.01, 0.72, 1.28)]
)
def test_the_iterations_make_all_singular_values_about_one(name, smallest, low, high):
    coefficients = COEFFICIENTS[name]
    assert len(coefficients) == NEWTON_SCHULZ_ITERATIONS[name]
    columns = 48
    generator = torch.Generator().manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(32, columns, generator=generator), full_matrices=False)
    singular_values = torch.logspace(math.log10(3 * smallest), 0, 32)
    step = orthogonalize((u * singular_values @ vh)[None], coefficients)[0]
    scaled = step / (ADAMW_RMS * math.sqrt(columns))
    found = (u.T @ scaled @ vh.T).diagonal()
    assert low < found.min() and found.max() < high
    torch.testing.assert_close(scaled, u * found @ vh)


def updated(scale, state, applied):
    """Updates the loss scale after a step. Returns (the scale, whether the scale can have caused the overflow)."""
    scale.update(torch.tensor(float(applied), dtype=torch.float64))
    stats = SimpleNamespace(
        loss_scale=float(scale.value), loss_scale_good_steps=float(scale.good_steps)
    )
    excused = scale.record(state, stats)
    return float(scale.value), excused


def test_the_scale_halves_on_overflow_and_explains_it_until_it_is_one():
    state = TrainState()
    scale = LossScale(state, CPU, dynamic=True)
    assert [updated(scale, state, False) for _ in range(20)] == [
        (max(1.0, 2.0 ** (15 - step)), step < 16) for step in range(20)
    ]
    for _ in range(1999):
        assert updated(scale, state, True)[0] == 1.0
    scale = LossScale(state, CPU, dynamic=True)  # as after a restart of the run
    assert (
        updated(scale, state, True)[0] == state.loss_scale == 2.0
        and state.loss_scale_good_steps == 0
    )
