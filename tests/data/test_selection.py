"""Tests mamba_fsdp.data.selection: the stores that a run reads, which must have the same tokenizer, and the built-in
data, which is imported if it is missing."""

import itertools
from dataclasses import replace

import pytest

import mamba_fsdp
from mamba_fsdp.data.selection import (
    check_tokenizers_agree,
    representative_source,
    training_sources,
    validation_sources,
)
from mamba_fsdp.data.store import StoreWriter
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.builtin import missing_builtin
from mamba_fsdp.settings.train_config import DataConfig
from tests.support.corpora import write_store

DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7]]


def make(path, vocab_size=9, eos=0, tokenizer="", documents=DOCUMENTS):
    how = {"vocab_size": vocab_size, "eos": eos, "tokenizer": tokenizer}
    return write_store(path, documents, **how)


def make_without_eos(path):
    writer = StoreWriter(path, vocab_size=9, eos=-1, tokenizer="", whole=False)
    writer.append(range(1, 8))
    return writer.finish()


@pytest.mark.parametrize("validation", ["validation", "valid", "val", "dev"])
def test_training_accepts_each_name_of_a_store(tmp_path, validation):
    for name in ("train", validation, "test"):
        make(tmp_path / name)
    data = DataConfig(str(tmp_path))
    sources, weights = training_sources(data)
    assert [source.path for source in sources.values()] == [tmp_path / "train"]
    assert weights == {"train": 9}
    assert [source.path for source in validation_sources(data).values()] == [tmp_path / validation]
    assert validation_sources(DataConfig(str(tmp_path / validation))) == {}


def test_datasets_are_mixed_by_their_weights_or_sizes(tmp_path):
    for name, documents in (("a", DOCUMENTS), ("b", DOCUMENTS * 2)):
        make(tmp_path / name / "train", documents=documents)
        make(tmp_path / name / "validation")
    make(tmp_path / "b" / "dev")
    data = DataConfig(str(tmp_path), datasets=["a", "b"])
    assert training_sources(data)[1] == {"a": 9, "b": 18}
    assert list(validation_sources(data)) == ["a", "b", "b/dev"]
    weighted = replace(data, weights=[0.5, 2.0], validation_path=str(tmp_path / "a"))
    assert training_sources(weighted)[1] == {"a": 0.5, "b": 2.0}
    (validation,) = validation_sources(weighted).values()
    assert validation.path == tmp_path / "a/validation"
    assert validation_sources(replace(data, validation_path="none")) == {}
    with pytest.raises(UserError, match="datasets=a,a lists a dataset twice"):
        training_sources(DataConfig(str(tmp_path), datasets=["a", "a"]))


def test_the_stores_of_a_run_must_have_the_same_tokenizer(tmp_path):
    """Stores of a run with different tokenizers, vocabularies or eos tokens are an error. A store without a known
    tokenizer or eos is accepted."""
    one = make(tmp_path / "one", tokenizer="ids:1")
    unknown = make_without_eos(tmp_path / "unknown")
    check_tokenizers_agree([unknown, one, unknown])
    assert (
        representative_source([unknown, one]) is one and representative_source([unknown]) is unknown
    )
    others = {
        "have different tokenizers": {"tokenizer": "ids:2"},
        "vocabulary 10, eos 0": {"vocab_size": 10},
        "vocabulary 9, eos 8": {"eos": 8},
    }
    for message, other in others.items():
        with pytest.raises(UserError, match=message):
            check_tokenizers_agree([one, make(tmp_path / "other", **other)])


def test_batches_are_endless_and_equal_those_of_training(tmp_path):
    make(tmp_path / "train", documents=[range(1, 9)])
    first, again = itertools.islice(mamba_fsdp.batches(tmp_path, seq_length=8, batch_size=1), 2)
    assert first.tokens.tolist() == again.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert first.labels.tolist() == [[2, 3, 4, 5, 6, 7, 8, 0]]


def test_only_missing_default_data_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("data/mine", "builtin"):
        assert missing_builtin(DataConfig(path)) is None
    assert missing_builtin(DataConfig("data/builtin", use_dummy_dataset=True)) is None
    store = tmp_path / "data/builtin"
    (store / "train").mkdir(parents=True)
    assert missing_builtin(DataConfig("data/builtin/")) == store, "an empty folder"
    (store / "train/index.json").touch()
    assert missing_builtin(DataConfig("data/builtin")) is None
    (store / ".progress").mkdir()
    assert missing_builtin(DataConfig("data/builtin")) == store, "a part of it"
