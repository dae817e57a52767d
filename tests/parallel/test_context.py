"""Tests that context parallelism gives the losses and gradients of one process with whole sequences.

The families in CASES contain all mixers that support context parallelism.
"""

from functools import partial

import pytest
import torch

from mamba_fsdp.data.loader import Batch, split_step
from mamba_fsdp.ops.attention import reference
from mamba_fsdp.parallel.context import ContextGroup
from mamba_fsdp.parallel.parallelize import checkpoint_blocks, compile_blocks
from mamba_fsdp.settings.train_config import TrainConfig
from tests.support.models import small_model, some_tokens
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch22

# {length: positions at which documents start in each of two rows}. Documents start at the boundary between two ranks,
# directly after it, and elsewhere. In one row no document starts.
STARTS = {2: ([1], [5]), 37: ([10, 13, 19, 36], [27]), 64: ([16, 32, 47], [99])}
# {number of ranks: [(family, sequence length, whether documents are reset, how blocks run)]}. Recomputed and compiled
# cases must come last, because they change modules of the process.
CASES = {
    3: [(family, 37, False, "eager") for family in ("everything", "mamba3", "hybrids")]
    + [(family, 37, True, "eager") for family in ("everything", "mamba3", "hybrids")]
    + [("hybrid", 37, True, "recomputed")],
    4: [(family, 2, True, "eager") for family in ("everything", "mamba3")],
}
COMPILED = [("hybrid", 64, True, "compiled")]  # only the first block is compiled


def whole_batch(length, documents):
    tokens = some_tokens(2, length + 1)
    places = torch.arange(length)
    generator = torch.Generator().manual_seed(1)
    seq_idx = None
    if documents:
        rows = [(places[:, None] >= torch.tensor(row)).sum(1) for row in STARTS[length]]
        seq_idx = torch.stack(rows).int()
    return Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        seq_idx,
        weights=torch.rand(2, length, dtype=torch.float64, generator=generator),
    )


def double_model(family, documents):
    model = small_model(family, reset_at_documents=documents, compute_dtype=torch.float64)
    return model.double()


def loss_and_gradients(model, batch):
    loss = model(
        batch.tokens,
        labels=batch.labels,
        seq_idx=batch.seq_idx,
        weights=batch.weights,
        documents=batch.documents,
    )
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def errors(world, cases):
    """Compares each case with one process. Returns {case: the largest relative error of its loss and gradients}."""
    settings = TrainConfig()
    settings = settings.with_values(context_parallel=world.size)
    context = ContextGroup.create(world, world.size)
    error_of = {}
    for case in cases:
        family, length, documents, how = case
        settings = settings.with_values(seq_length=length)
        batch = whole_batch(length, documents)
        whole_model = double_model(family, documents)
        model = double_model(family, documents)
        if how == "compiled":
            del whole_model.backbone.layers[1:], model.backbone.layers[1:]
        expected = loss_and_gradients(whole_model, batch)
        model.enable_context_parallel(context)
        if how == "recomputed":
            checkpoint_blocks(model.backbone.layers, 1)
            reference.MASK_ELEMENTS = 100
        if how == "compiled":
            torch.compile = partial(torch.compile, backend="eager")
            compile_blocks(model.backbone.layers)
        sequence_slice = split_step(settings, world.rank, world.size).sequence_slice
        results = loss_and_gradients(model, sequence_slice.of(batch))
        error = 0.0
        for mine, whole in zip(results, expected):
            total = world.all_reduce_sum(mine.clone())
            error = max(error, float((total - whole).norm() / whole.norm()))
        error_of[case] = error
    return error_of


@pytest.mark.parametrize(
    "size, cases",
    [
        (3, CASES[3]),
        pytest.param(4, CASES[4], marks=pytest.mark.slow),
        pytest.param(2, COMPILED, marks=[pytest.mark.slow, pytest.mark.pinned]),
    ],
    ids=["3 ranks", "4 ranks", "compiled"],
)
def test_shared_sequences_give_the_loss_and_gradients_of_whole_ones(size, cases):
    """Ranks that share sequences compute the loss and gradients of whole sequences, also if the number of ranks does
    not divide the length, if there are fewer positions than ranks, and wherever documents start."""
    for error_of in run_ranks(size, errors, cases):
        for case, error in error_of.items():
            assert error < 1e-12, case
