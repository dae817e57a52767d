"""Tests that the data and the model of a run must have the same tokenizer."""

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.convert import write_model
from tests.support import corpora

REFUSED = r"{} and {} have different tokenizers \(ids:\w{{8}}, ids:\w{{8}}\)"


@pytest.fixture
def model(train, texts, tmp_path):
    """Trains a model on the tokens of a. Returns {name: path} of the model as a run, a checkpoint, an export and a
    .pth file."""
    train(tmp_path / "run", dataset_path=texts / "a", num_steps=1, eval_interval=0)
    write_model(tmp_path / "run", tmp_path / "exported")
    return {
        "run": tmp_path / "run",
        "step_00000001": tmp_path / "run/checkpoints/step_00000001",
        "exported": tmp_path / "exported",
        "consolidated.00.pth": tmp_path / "run/pth/step_00000001/consolidated.00.pth",
    }


def test_training_refuses_another_tokenizer(train, texts, model, tmp_path):
    """All data of a run, and the model that it starts or resumes from, must have the same tokenizer. The vocabulary
    of the data must not be larger than that of the model."""
    cases = [
        ("a/train", "b/validation", {"dataset_path": texts / "a", "validation_path": texts / "b"})
    ]
    for name, setting in [
        ("run", "init_from"),
        ("exported", "init_from"),
        ("step_00000001", "load_ckpt_path"),
        ("consolidated.00.pth", "load_ckpt_path"),
        ("step_00000001", "save_ckpt_path"),
    ]:
        path = model["run" if setting == "save_ckpt_path" else name]
        cases.append(("b/train", name, {"dataset_path": texts / "b", setting: path}))
    for one, other, given in cases:
        with pytest.raises(UserError, match=REFUSED.format(f".*{one}", f".*{other}")):
            train(tmp_path / "new", num_steps=9, **given)
    corpora.write_store(tmp_path / "large", [range(99)] * 9, vocab_size=99, eos=0, tokenizer="")
    exported = model["exported"]
    with pytest.raises(UserError, match=f"vocabulary of 99.*64; .*--tokenizer={exported}$"):
        train(tmp_path / "new", dataset_path=tmp_path / "large", init_from=exported)
