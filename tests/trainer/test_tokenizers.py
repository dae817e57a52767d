"""Tokens meet only tokens and models of the tokenizer that made them, unless one says that it fits."""

import shutil

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.convert import write_model
from tests.support import corpora

REFUSED = r"{} and {} have different tokenizers \(ids:\w{{8}}, ids:\w{{8}}\)"


@pytest.fixture
def run_of(train, texts, tmp_path):
    """{name: a model that learnt the tokens of a}."""
    train(tmp_path / "run", dataset_path=texts / "a", num_steps=1, eval_interval=0)
    shutil.copytree(tmp_path / "run/checkpoints/step_00000001", tmp_path / "copied")
    write_model(tmp_path / "run", tmp_path / "exported")
    return {
        "run": tmp_path / "run",
        "copied": tmp_path / "copied",
        "exported": tmp_path / "exported",
        "pth": tmp_path / "run/pth/step_00000001/consolidated.00.pth",
    }


def test_training_refuses_another_tokenizer(train, texts, run_of, tmp_path):
    """Data among each other, and the data and the model that a run starts or resumes from."""
    both = {"dataset_path": texts, "datasets": "unknown,a,b"}
    validation = {"dataset_path": texts / "a", "validation_path": texts / "b"}
    cases = [("a/train", "b/train", both), ("a/train", "b/validation", validation)]
    for name, setting, model in [
        ("run", "init_from", "run"),
        ("exported", "init_from", "exported"),
        ("step_00000001", "load_ckpt_path", "run"),
        ("copied", "load_ckpt_path", "copied"),
        ("consolidated.00.pth", "load_ckpt_path", "pth"),
    ]:
        cases.append(("b/train", name, {"dataset_path": texts / "b", setting: run_of[model]}))
    for one, other, given in cases:
        with pytest.raises(UserError, match=REFUSED.format(f".*{one}", f".*{other}")):
            train(tmp_path / "new", **given)
    refused = REFUSED.format(".*b/train", ".*run/checkpoints/step_00000001")
    with pytest.raises(UserError, match=refused):
        train(run_of["run"], dataset_path=texts, datasets="b", num_steps=9)
    corpora.write_store(tmp_path / "large", [range(99)] * 9, vocab_size=99, eos=0, tokenizer="")
    for run, given, folder in (
        ("run", {}, run_of["run"] / "tokenizer"),
        ("new", {"load_ckpt_path": run_of["copied"]}, "FOLDER"),
        ("new", {"init_from": run_of["exported"]}, run_of["exported"]),
    ):
        with pytest.raises(UserError, match=f"vocabulary of 99.*64; .*--tokenizer={folder}$"):
            train(tmp_path / run, dataset_path=tmp_path / "large", **given)
