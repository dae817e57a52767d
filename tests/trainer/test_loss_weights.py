"""Loss masks and weights are normalised over the global batch, whichever rank or micro-batch has what."""

from pathlib import Path

import pytest
import torch

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.loader import Loader
from mamba_fsdp.run.records import read
from mamba_fsdp.trainer import run
from tests.support.ranks import run_ranks


def uneven(batch):
    """A fifth of the windows without a label that counts, the others with more and more of them."""
    for row, (_, window) in enumerate(batch.samples):
        drawn = torch.rand(batch.labels.shape[1], generator=torch.Generator().manual_seed(window))
        batch.labels[row, drawn >= window % 5 / 4] = IGNORED_LABEL
    return batch


def entries_of(world, settings):
    """The metrics of a run whose windows are unevenly masked; and this rank's batches without any label."""
    read_step, empty = Loader.step, []

    def step(loader, number):
        batches = [uneven(batch) for batch in read_step(loader, number)]
        empty.extend(batch for batch in batches if not batch.total_weight())
        return batches

    Loader.step, run.start_world = step, lambda **_: world
    run.run_training(settings)
    world.barrier()
    return read(Path(settings.checkpoint.save_ckpt_path, "metrics.jsonl")), len(empty)


@pytest.mark.slow
@pytest.mark.torch22
def test_ranks_and_micro_batches_share_one_mean(settings_of, tmp_path):
    """One rank that takes all at once has the losses and gradients of two with two micro-batches each, some without any
    label."""
    told = []
    for ranks, batch_size in ((1, 4), (2, 1)):
        settings = settings_of(
            save_ckpt_path=tmp_path / f"{ranks}",
            global_batch_size=4,
            batch_size=batch_size,
            position_weighting=True,
            adam_epsilon=0.1,
            num_steps=8,
        )
        entries, empty = run_ranks(ranks, entries_of, settings)[-1]
        names = ("loss", "grad_norm", "val_loss")
        told.append([[entry.get(name, 0.0) for name in names] for entry in entries])
    assert empty
    torch.testing.assert_close(*map(torch.tensor, told), rtol=2e-5, atol=0)
