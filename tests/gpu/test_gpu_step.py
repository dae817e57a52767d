"""Tests, on a GPU, that no operation of a training step makes the host wait for the device."""

import pytest
import torch

from mamba_fsdp.parallel.world import World
from mamba_fsdp.trainer import loop, run
from tests.support.tiny import resolved

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_steps_are_dispatched_without_a_wait(tmp_path, monkeypatch, strategy, precision):
    """Only the first step of a run can wait, because it compiles kernels and creates the moments. Step 4 has a loss
    that is not finite; it is skipped and counted without a wait, too."""
    under_way = []
    take_step = loop.take_step
    true_loss = loop.batch_loss

    def watched(context, clock, stop, ahead):
        torch.cuda.set_sync_debug_mode("error" if context.state.step + ahead else "default")
        under_way.append(ahead)
        try:
            return take_step(context, clock, stop, ahead)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def loss(*batch):
        return true_loss(*batch) * (
            float("nan") if len(under_way) == 4 and torch.is_grad_enabled() else 1.0
        )

    monkeypatch.setattr(loop, "take_step", watched)
    monkeypatch.setattr(loop, "batch_loss", loss)
    monkeypatch.setattr(run, "start_world", lambda **_: World.alone(device=torch.device("cuda", 0)))
    settings = resolved(
        use_dummy_dataset=True,
        save_ckpt_path=tmp_path,
        num_steps=9,
        eval_interval=0,
        checkpoint_interval=6,
        sharding_strategy=strategy,
        mixed_precision=precision,
        layers="mamba1,mamba2",
        n_layer=2,
        seq_length=64,
        publish=False,
    )
    run.run_training(settings)
    assert under_way == [0, 1, 1, 1, 1, 1, 0, 1, 1]
    assert '"skipped_steps": 1' in (tmp_path / "metrics.jsonl").read_text()
