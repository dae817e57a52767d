"""Stores and checkpoints of older versions are read and resumed: of version 1 as the first releases wrote them (two
ranks, torch 2.13), checkpoints of version 2 too (one rank)."""

import shutil
from pathlib import Path

import pytest

from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.trainer.run import run_training
from tests.support.tiny import TINY, resolved

pytestmark = pytest.mark.torch22
WRITTEN = Path(__file__).parent / "version_1"
LOSSES = [
    4.155062675476074,
    4.142322301864624,
    4.129306793212891,
    4.115520477294922,  # the run in the folder
    4.112984657287598,
    4.120044231414795,
    4.080489635467529,
    4.074158191680908,
]  # resumed by who wrote it


def test_the_store_is_whole():
    store = TokenStore(WRITTEN / "store")
    store.verify()
    assert (store.token_count, store.document_count, store.vocab_size, store.eos) == (
        2441,
        40,
        64,
        0,
    )


@pytest.mark.parametrize(
    "checkpoints", [WRITTEN / "run/checkpoints", WRITTEN.with_name("version_2")], ids=[1, 2]
)
def test_the_run_resumes_as_it_would_have_then(tmp_path, metrics_of, capsys, checkpoints):
    """It says where only the checkpoints tell that an earlier version began it."""
    run = shutil.copytree(WRITTEN / "run", tmp_path / "run", ignore=lambda *_: {"checkpoints"})
    shutil.copytree(checkpoints, run / "checkpoints")
    given = dict(save_ckpt_path=run, dataset_path=WRITTEN / "store", batch_size=2, num_steps=8)
    config = run / "config.yaml"
    is_gone = checkpoints == WRITTEN.with_name("version_2")
    if is_gone:
        config = config.rename(tmp_path / "config.yaml")
    run_training(resolved(config, **given))
    said = capsys.readouterr().out
    assert (f"{run}/config.yaml is gone, and an earlier version may" in said) == is_gone
    assert [entry["step"] for entry in metrics_of(run)] == list(range(1, 9))
    assert [entry["loss"] for entry in metrics_of(run)] == pytest.approx(LOSSES, rel=1e-5)


@pytest.mark.parametrize(
    "schedule, then", [("fms_cosine", "cosine"), ("linear_from_start", "linear")]
)
@pytest.mark.parametrize("words", [(), ("schedule",)])
def test_a_run_of_version_1_trains_on_as_it_did(
    tmp_path, corpus, metrics_of, capsys, schedule, then, words
):
    """Its config.yaml has other names for what it trains with, and it began with other defaults. The
    same command resumes it, again and again, as if nothing had changed."""

    def train(run, **given):
        paths = {"dataset_path": corpus, "save_ckpt_path": run, "checkpoint_interval": 1}
        given = {**TINY, **paths, **given}
        del given["learning_rate"], given["mixed_precision"]
        run_training(resolved(**given))
        return capsys.readouterr().out

    began = {"schedule": schedule, "lr": 0.003, "precision": "fp32"}
    train(tmp_path / "whole", **began)
    run = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    settings = (run / "config.yaml").read_text()
    settings = settings.replace("version: '2'\n", "").replace(f": {schedule}", f": {then}")
    (run / "config.yaml").write_text(settings)
    for steps in (4, 5):
        for checkpoint in (run / "checkpoints").iterdir():
            if int(checkpoint.name[5:]) > steps:
                shutil.rmtree(checkpoint)
        said = train(run, **dict.fromkeys(words, then))
        assert f"resumes    from {run}/checkpoints/step_0000000{steps}" in said
        assert f"an earlier version began the run in {run}" in said
        assert metrics_of(run) == metrics_of(tmp_path / "whole")
