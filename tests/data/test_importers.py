"""Others' tokens become token stores: each document as its owner meant it, with one eos of ours."""

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mamba_fsdp.data import importers
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.errors import UserError
from tests.support.corpora import stored_documents
from tests.support.others_tokens import write_fms, write_layout

pytestmark = pytest.mark.torch22

EOS, BOS, OTHER = 0, 1, 2
LONG = [3 + number % 50 for number in range(40_000)]
# Of the first vocabulary that two bytes a token do not suffice for.
IDS = {"tokenizer": "none", "eos_token": str(EOS), "vocab_size": 65_537}
IDS["strip_tokens"] = [str(BOS)]
# As written, and what is stored of each.
DOCUMENTS = [
    ([BOS, 5, 6, EOS], [5, 6]),
    ([7], [7]),
    ([], None),
    ([EOS], None),
    ([BOS, EOS, EOS], None),
    ([EOS, EOS, 8, BOS, 9], [8, BOS, 9]),
    (LONG, LONG),
    ([10], [10]),
]
WRITTEN = [written for written, _ in DOCUMENTS]
STORED = [[*stored, EOS] for _, stored in DOCUMENTS if stored]


def documents_of(path):
    return [document.tolist() for document in stored_documents(TokenStore(path / "train"))]


def save_rows(folder, columns):
    datasets.Dataset.from_dict(columns).save_to_disk(folder)


def write_rows(folder, documents):
    save_rows(folder, {"input_ids": documents})


def write_parquet(folder, columns):
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")


def write_lists(path, documents, kind):
    """An Arrow file whose rows are documents, in lists of a kind."""
    path.parent.mkdir()
    table = pyarrow.table({"tokens": pyarrow.array(documents, kind)})
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


IDS_TYPE = pyarrow.uint16()
WRITERS = {
    "fms": lambda folder: write_fms(folder / "lang=c" / "0.arrow", WRITTEN),
    "list views": lambda folder: write_lists(
        folder / "a.arrow", WRITTEN, pyarrow.list_view(IDS_TYPE)
    ),
    "coded": lambda folder: write_lists(
        folder / "a.arrow",
        WRITTEN,
        pyarrow.list_(pyarrow.dictionary(pyarrow.int32(), pyarrow.int64())),
    ),
    "null rows": lambda folder: write_lists(
        folder / "a.arrow", [each or None for each in WRITTEN], pyarrow.list_(IDS_TYPE)
    ),
    "save_to_disk": lambda folder: write_rows(folder, WRITTEN),
}


@pytest.mark.parametrize("name", WRITERS)
def test_documents_are_those_that_were_written(prepare, tmp_path, name):
    WRITERS[name](tmp_path / "in")
    prepare(tmp_path / "in", tmp_path / "out", **IDS)
    assert documents_of(tmp_path / "out") == STORED
    store = TokenStore(tmp_path / "out" / "train")
    assert (store.vocab_size, store.dtype.name) == (65_537, "uint32")
    assert store.read(0, store.token_count).positions.max() == len(LONG)


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("window", [1000, 16_384])
def test_datalayout_documents_longer_than_its_positions(
    prepare, tmp_path, monkeypatch, wraps, window
):
    """Behind the 14 bits of a position neither each token nor each window is a document of its own."""
    monkeypatch.setattr(importers, "WINDOW", window)
    exact = [*([5] * 16_383), EOS]  # ends where positions do
    documents = [[5, EOS], LONG, exact, [7, 8, EOS], LONG[:16_385]]
    (tmp_path / "in").mkdir()
    write_layout(tmp_path / "in" / "a.npy", documents, wraps)
    prepare(tmp_path / "in", tmp_path / "out", **{**IDS, "vocab_size": 65_536})
    expected = [each if each[-1] == EOS else [*each, EOS] for each in documents]
    assert documents_of(tmp_path / "out") == expected
    assert TokenStore(tmp_path / "out" / "train").dtype.name == "uint16"


def test_a_document_that_breaks_off_ends_there(prepare, tmp_path, monkeypatch):
    """Where its file's rest is skipped, another file's document or the end of the input follows."""
    monkeypatch.setattr(importers, "WINDOW", 1000)
    (tmp_path / "in").mkdir()
    for name in ("a.npy", "c.npy"):
        write_layout(tmp_path / "in" / name, [LONG[:1500]])
        entries = np.memmap(tmp_path / "in" / name, "<i4", "r+")
        entries[-1] &= ~(1 << 30)  # not counted in the loss
    write_layout(tmp_path / "in" / "b.npy", [[5, 6]])
    prepare(tmp_path / "in", tmp_path / "out", **IDS, skip_unreadable=True)
    whole = [*LONG[:1000], EOS]
    assert documents_of(tmp_path / "out") == [whole, [5, 6, EOS], whole]


def test_blocks_of_one_length_are_laid_end_to_end(prepare, tmp_path, capsys):
    """Where one asks for that, and who does not is told."""
    rows = np.arange(3, 39).reshape(-1, 6).tolist()
    rows[2][1] = EOS
    write_rows(tmp_path / "in", rows)
    prepare(tmp_path / "in", tmp_path / "out", pack="none", **IDS)
    store = TokenStore(tmp_path / "out" / "train")
    assert store.read(0, store.token_count).tokens.tolist() == sum(rows, [])
    assert store.document_count == 2
    hint = "every row has 6 tokens"
    assert hint not in capsys.readouterr().out
    prepare(tmp_path / "in", tmp_path / "documents", **IDS)
    assert hint in capsys.readouterr().out


def test_a_tokenizer_names_its_ids_and_their_bounds(prepare, tmp_path, tokenizer):
    write_rows(tmp_path / "in", [[5, 6], [299]])
    prepare(tmp_path / "in", tmp_path / "out")
    assert TokenStore(tmp_path / "out" / "train").tokenizer_path.is_dir()
    write_rows(tmp_path / "other", [[5, 6], [300, 1, 2]])
    with pytest.raises(UserError, match="token ids from 0 to 300, but the vocabulary has 300"):
        prepare(tmp_path / "other", tmp_path / "none")


def broken_layout(folder, count=3, counts=True):
    folder.mkdir()
    write_layout(folder / "a.npy", [[5, 6, 7]], counts=counts)
    (folder / "a.npy.size").write_text(str(count))


def rows_with(folder, **columns):
    save_rows(folder, {"input_ids": [[5, 6], [7]], **columns})


REFUSED = {
    "a null among tokens": (
        lambda folder: write_lists(folder / "a.arrow", [[5, None]], pyarrow.list_(IDS_TYPE)),
        "null in place of a token",
    ),
    "numbers that are none": (
        lambda folder: write_lists(folder / "a.arrow", [[0.5]], pyarrow.list_(pyarrow.float32())),
        "lists of float, not token ids",
    ),
    "another size": (
        lambda folder: broken_layout(folder, 4),
        "12 bytes, but a.npy.size says 4",
    ),
    "out of the loss": (lambda folder: broken_layout(folder, 3, False), "out of the loss"),
    "labels": (
        lambda folder: rows_with(folder, labels=[[-100, 6], [7]]),
        "its labels leave tokens out of the loss",
    ),
    "padding": (
        lambda folder: rows_with(folder, attention_mask=[[1, 0], [1]]),
        "its attention_mask leave tokens out",
    ),
    "counts of tokens": (
        lambda folder: save_rows(folder, {"content": ["a"], "tokens": [1]}),
        "there is no column 'text'; it has: content, tokens",
    ),
    "counts of tokens alone": (
        lambda folder: save_rows(folder, {"tokens": [1]}),
        "the column holds int64, not text or lists of token ids",
    ),
    "counts of tokens in Parquet": (
        lambda folder: write_parquet(folder, {"content": ["a"], "tokens": [1]}),
        "there is no column 'text'; it has: content, tokens",
    ),
    "numbers for text in Parquet": (
        lambda folder: write_parquet(folder, {"text": [1.5]}),
        "the column holds double, not text",
    ),
    "another column": (
        lambda folder: save_rows(folder, {"a": [[1]]}),
        "there is no column 'text'; it has: a",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_store_cant_say_is_refused_in_one_line(prepare, tmp_path, name):
    make, reason = REFUSED[name]
    make(tmp_path / "in")
    with pytest.raises(UserError) as said:
        prepare(tmp_path / "in", tmp_path / "out", **IDS)
    assert reason in str(said.value) and "\n" not in str(said.value)
    assert str(tmp_path / "in") in str(said.value)


def test_training_names_the_command_that_imports_others_tokens(tmp_path):
    WRITERS["fms"](tmp_path / "in")
    with pytest.raises(UserError, match=f"not a token store.* get_dataset.py {tmp_path}/in OUT"):
        TokenStore(tmp_path / "in")
