"""Tokens meet only tokens and models of the tokenizer that made them, unless one says that it fits."""

import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import mamba_fsdp
from mamba_fsdp.data.tokenizer import TextTokenizer, identities_in, identity_of
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.run.records import read
from tests.support import corpora
from tests.trainer.conftest import write_store

WORDS = ["<end>", "?", *(f"w{number}" for number in range(62))]
OTHER = [*WORDS[:-2], WORDS[-1], WORDS[-2]]


def words(vocabulary):
    backend = Tokenizer(
        models.WordLevel({word: id for id, word in enumerate(vocabulary)}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([WORDS[0]])
    return backend


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with the stores a and b, which hold the same tokens, of different tokenizers; and unknown, which does not say of which."""
    root = tmp_path_factory.mktemp("data")
    for name, vocabulary in (("a", WORDS), ("b", OTHER), ("unknown", WORDS)):
        tokenizer = TextTokenizer(words(vocabulary), "<end>")
        identity = tokenizer.identity if name != "unknown" else "none"
        for seed, part in enumerate(("train", "validation")):
            write_store(root / name / part, seed, 20, tokenizer=identity)
            if name != "unknown":
                tokenizer.save(root / name / part / "tokenizer")
    return root


def test_tokenizers_that_do_the_same_have_one_identity(tmp_path):
    """Whoever saved them, and whatever they add around a text or do behind the last token."""
    one, same, merged = (
        Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}, merges))
        for merges in ([("a", "b"), ("b", "c")], [("a", "b"), ("b", "c")], [("b", "c"), ("a", "b")])
    )
    same.decoder = decoders.ByteLevel()
    same.post_processor = processors.TemplateProcessing("a $A", special_tokens=[("a", 0)])
    same.enable_padding()
    same.enable_truncation(1)
    assert identity_of(one) == identity_of(same) != identity_of(merged)
    assert identity_of(words(WORDS)) != identity_of(words(OTHER))
    TextTokenizer(words(WORDS), "<end>").save(tmp_path / "one")
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "saved")
    assert {*identities_in(tmp_path / "one"), *identities_in(tmp_path / "saved")} == {
        identity_of(words(WORDS))
    }


REFUSED = r"{} and {} have different tokenizers \(ids:\w{{8}}, ids:\w{{8}}\)"


@pytest.fixture
def run_of(train, data, tmp_path):
    """{name: a model that learnt the tokens of a}."""
    train(tmp_path / "run", dataset_path=data / "a")
    shutil.copytree(tmp_path / "run/checkpoints/step_00000006", tmp_path / "copied")
    write_model(tmp_path / "run", tmp_path / "exported")
    return {
        "run": tmp_path / "run",
        "copied": tmp_path / "copied",
        "exported": tmp_path / "exported",
        "pth": tmp_path / "run/pth/step_00000006/consolidated.00.pth",
    }


def test_a_validation_records_the_bits_per_byte_that_evaluate_finds(train, data, run_of, tmp_path):
    """Of the same windows. Data of an unknown tokenizer has none."""
    last = [entry for entry in read(run_of["run"] / "metrics.jsonl") if "val_loss" in entry][-1]
    model = mamba_fsdp.load(run_of["run"])
    found = mamba_fsdp.evaluate(model, data / "a/validation", seq_length=32, limit=4)
    assert last["val_bits_per_byte"] == pytest.approx(found.bits_per_byte, rel=1e-5)
    train(tmp_path / "unknown", dataset_path=data / "unknown", num_steps=1)
    assert "val_bits_per_byte" not in read(tmp_path / "unknown/metrics.jsonl")[0]


def test_training_refuses_another_tokenizer(train, data, run_of, tmp_path):
    """Data among each other, and the data and the model that a run starts or resumes from."""
    both = {"dataset_path": data, "datasets": "unknown,a,b"}
    validation = {"dataset_path": data / "a", "validation_path": data / "b"}
    cases = [("a/train", "b/train", both), ("a/train", "b/validation", validation)]
    for name, setting, model in [
        ("run", "init_from", "run"),
        ("exported", "init_from", "exported"),
        ("step_00000006", "load_ckpt_path", "run"),
        ("copied", "load_ckpt_path", "copied"),
        ("consolidated.00.pth", "load_ckpt_path", "pth"),
    ]:
        cases.append(("b/train", name, {"dataset_path": data / "b", setting: run_of[model]}))
    for one, other, given in cases:
        with pytest.raises(UserError, match=REFUSED.format(f".*{one}", f".*{other}")):
            train(tmp_path / "new", **given)
    refused = REFUSED.format(".*b/train", ".*run/checkpoints/step_00000006")
    with pytest.raises(UserError, match=refused):
        train(run_of["run"], dataset_path=data, datasets="b", num_steps=9)
    corpora.write_store(tmp_path / "large", [range(99)] * 9, vocab_size=99, eos=0, tokenizer="")
    for run, given, folder in (
        ("run", {}, run_of["run"] / "tokenizer"),
        ("new", {"load_ckpt_path": run_of["copied"]}, "FOLDER"),
        ("new", {"init_from": run_of["exported"]}, run_of["exported"]),
    ):
        with pytest.raises(UserError, match=f"vocabulary of 99.*64; .*--tokenizer={folder}$"):
            train(tmp_path / run, dataset_path=tmp_path / "large", **given)
