"""Official splits: a dataset's own validation and test sets become stores, and numbers on them are comparable."""

import json

import datasets
import pytest

import get_dataset
from config.dataset_config import DatasetConfig
from mamba_fsdp.data import text, tokenize
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.tokenizer import load_words
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import World
from mamba_fsdp.verbs.evaluate import words_and_bytes


def articles(first, count):
    """Rows as WikiText has them: a line each, titles between equals signs, empty ones between."""
    for number in range(first, first + count):
        yield from (
            "",
            f" = Article {number} = \n",
            "",
            f" It is said , that na\u00efve {number} @,@ 000 words ... \n",
            "",
            f" = = Section {number} = = \n",
            "",
            f' And " more " of {"them " * (number % 7)}. \n',
        )


ROWS = {
    "train": list(articles(0, 90)),
    "validation": list(articles(100, 9)),
    "test": list(articles(200, 11)),
}


def wikitext(names=("train", "validation", "test")):
    return datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict({"text": ROWS[store]})
            for name, store in zip(names, ROWS)
        }
    )


def make(name, out, **options):
    options = DatasetConfig(
        **{"splits": "official", "pack": "none", "tokenizer": "train:300", "workers": 1, **options}
    )
    return tokenize.make_dataset(text.open_source(str(name), options), out)


def text_of(store):
    store = TokenStore(store)
    store.verify()
    return load_words(store.tokenizer_path).decode(store.read(0, store.token_count).tokens.tolist())


def saved(folder):
    wikitext().save_to_disk(folder)


def files(folder):
    (folder / "data").mkdir(parents=True)
    for name, rows in zip(("train-00000", "val-00000", "test-00000"), ROWS.values()):
        (folder / "data" / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": row}) + "\n" for row in rows)
        )
    (folder / "trained_on.md").write_text("no split")


@pytest.mark.slow
@pytest.mark.torch22
@pytest.mark.parametrize("write", [saved, files])
def test_each_split_becomes_the_store_of_its_name(write, tmp_path):
    """Whole, as its rows say; words and bytes are those of its text. Nothing is held out of the training split."""
    write(tmp_path / "in")
    done = make(tmp_path / "in", tmp_path / "out")
    assert list(done["stores"]) == ["train", "validation", "test"]
    for name, rows in ROWS.items():
        assert text_of(tmp_path / "out" / name) == "".join(rows)
        store = TokenStore(tmp_path / "out" / name)
        assert words_and_bytes(store, [(0, store.token_count)], World.alone()) == (
            sum(len(row.split()) for row in rows),
            sum(len(row.encode()) for row in rows),
        )
    assert make(tmp_path / "in", tmp_path / "out") == done
    with pytest.raises(UserError, match="splits was 'official' and is 'held_out'"):
        make(tmp_path / "in", tmp_path / "out", splits="held_out", validation_fraction=0)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_the_splits_of_a_datasets_name(streaming, tmp_path, monkeypatch):
    rows = wikitext(("train", "valid", "test"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: list(rows))
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, config, split, streaming: (
            rows[split].to_iterable_dataset() if streaming else rows[split]
        ),
    )
    make("Salesforce/wikitext", tmp_path / "out", streaming=streaming)
    assert all(text_of(tmp_path / "out" / name) == "".join(ROWS[name]) for name in ROWS)


def test_several_splits_of_a_folder_together(tmp_path):
    saved(tmp_path / "in")
    source = text.open_source(str(tmp_path / "in"), DatasetConfig(split="validation+test"))
    assert b"".join(row for block in source.blocks() for row in block.data).decode() == "".join(
        ROWS["validation"] + ROWS["test"]
    )
    with pytest.raises(UserError, match="no split 'tset'; name one of train, validation, test"):
        text.open_source(str(tmp_path / "in"), DatasetConfig(split="train+tset"))


def test_what_has_no_splits_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "train.txt").write_text("a")
    with pytest.raises(
        UserError, match="of the splits train, validation and test it has: train; leave"
    ):
        make(tmp_path / "in", tmp_path / "out")
    with pytest.raises(UserError, match="builtin: of the splits .* it has: "):
        make("builtin", tmp_path / "out")
    with pytest.raises(UserError, match="--config and --streaming are for `datasets` names"):
        make(tmp_path / "in", tmp_path / "out", config="raw")
    for name in ("valid.txt", "dev.txt"):
        (tmp_path / "in" / name).write_text("b")
    with pytest.raises(UserError, match="which split is which. It has valid and dev"):
        make(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "dev.txt").unlink()
    (tmp_path / "in" / "valid.txt").write_text(" ")
    with pytest.raises(UserError, match="the split for .*validation holds no text"):
        make(tmp_path / "in", tmp_path / "out", tokenizer="train:257")
    with pytest.raises(UserError, match="--split=test and --splits=official exclude each other"):
        get_dataset.main(
            str(tmp_path / "in"), "", options=DatasetConfig(split="test", splits="official")
        )

    def unknown(*_):
        raise FileNotFoundError("Dataset 'some/name' doesn't exist")

    monkeypatch.setattr(datasets, "get_dataset_split_names", unknown)
    with pytest.raises(UserError, match="some/name: no local path, and `datasets` can't load it"):
        make("some/name", tmp_path / "out2")
