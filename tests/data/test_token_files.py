"""Tests imports of token ids in the formats of other programs: each document is kept, and has exactly one eos."""

import datasets
import numpy as np
import pyarrow
import pytest
from tokenizers import Tokenizer

from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.tokenizer import END_OF_TEXT
from mamba_fsdp.importing import token_files
from tests.support.corpora import documents_of, write_records
from tests.support.foreign_tokens import write_fms, write_layout

pytestmark = pytest.mark.torch22

EOS = 0
BOS = 1
LONG = [3 + number % 50 for number in range(40_000)]
# This vocabulary is the smallest one for which two bytes per token are not enough.
IDS = {"tokenizer": "none", "eos_token": str(EOS), "vocab_size": 65_537}
IDS["strip_tokens"] = [str(BOS)]
# (a document in the input, the document in the store or None if it is left out)
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
# Types of Arrow columns in which each row is a document.
IDS_TYPE = pyarrow.uint16()
LISTS = {
    "lists": pyarrow.list_(IDS_TYPE),
    "list views": pyarrow.list_view(IDS_TYPE),
    "coded": pyarrow.list_(pyarrow.dictionary(pyarrow.int32(), pyarrow.int64())),
}
# {format in which an eos ends each document: (function that writes a file, options that the import needs)}
FLAT = {
    "OLMo": (lambda path, ids: ids.astype("<u4").tofile(path), {"dtype": "uint32"}),
    "NumPy": (np.save, {}),
}


def write_documents(folder, form):
    folder.mkdir()
    if form in FLAT:
        write, _ = FLAT[form]
        write(folder / "a.npy", np.concatenate([[*each, EOS] for each in WRITTEN]))
    elif form == "fms":
        write_fms(folder / "lang=c" / "0.arrow", WRITTEN)
    elif form == "JSON":
        write_records(folder / "a.jsonl", WRITTEN)
    elif form == "save_to_disk":
        all_count = [[1] * len(document) for document in WRITTEN]
        columns = {"input_ids": WRITTEN, "labels": WRITTEN, "attention_mask": all_count}
        datasets.Dataset.from_dict(columns).save_to_disk(folder)
    else:
        null_for_empty = [document or None for document in WRITTEN]
        table = pyarrow.table({"tokens": pyarrow.array(null_for_empty, LISTS[form])})
        with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)


@pytest.mark.parametrize("form", ["fms", "JSON", "save_to_disk", *FLAT, *LISTS])
def test_token_files_of_every_format_give_the_written_documents(
    prepare, tmp_path, monkeypatch, form
):
    """A file of token ids in any format gives the documents that were written, also if a document, its eos or its
    strip_tokens cross the border between two windows, the parts in which the file is read."""
    monkeypatch.setattr(token_files, "WINDOW", 3)
    write_documents(tmp_path / "in", form)
    options = FLAT.get(form, [{}])[-1]
    prepare(tmp_path / "in", tmp_path / "out", **IDS, **options)
    assert documents_of(tmp_path / "out/train") == STORED
    store = TokenStore(tmp_path / "out" / "train")
    assert (store.vocab_size, store.dtype.name) == (65_537, "uint32")
    assert store.read(0, store.token_count).positions.max() == len(LONG)


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("window", [1000, 16_384])
def test_datalayout_documents_longer_than_its_positions(
    prepare, tmp_path, monkeypatch, wraps, window
):
    """A DataLayout document with more tokens than its 14-bit positions can count is read as one document, wherever
    its positions overflow."""
    monkeypatch.setattr(token_files, "WINDOW", window)
    exact = [*([5] * 16_383), EOS]  # 2 ** 14 tokens, as many as there are positions
    documents = [[5, EOS], LONG, exact, [7, 8, EOS], LONG[:16_385]]
    write_layout(tmp_path / "a.npy", documents, wraps)
    prepare(tmp_path / "a.npy", tmp_path / "out", **{**IDS, "vocab_size": 65_536})
    expected = [each if each[-1] == EOS else [*each, EOS] for each in documents]
    assert documents_of(tmp_path / "out/train") == expected
    assert TokenStore(tmp_path / "out" / "train").dtype.name == "uint16"


def test_an_unreadable_rest_of_a_file_ends_its_document(prepare, tmp_path, monkeypatch):
    """With --skip_unreadable, a file is read up to its first invalid window, and the document ends there. The next
    document is the first one of the next file."""
    monkeypatch.setattr(token_files, "WINDOW", 1000)
    (tmp_path / "in").mkdir()
    for name in ("a.npy", "c.npy"):
        write_layout(tmp_path / "in" / name, [LONG[:1500]])
        entries = np.memmap(tmp_path / "in" / name, "<i4", "r+")
        entries[-1] &= ~(1 << 30)  # not counted in the loss
    write_layout(tmp_path / "in" / "b.npy", [[5, 6]])
    prepare(tmp_path / "in", tmp_path / "out", **IDS, skip_unreadable=True)
    whole = [*LONG[:1000], EOS]
    assert documents_of(tmp_path / "out/train") == [whole, [5, 6, EOS], whole]


def test_blocks_can_be_concatenated(prepare, tmp_path):
    rows = np.arange(3, 39).reshape(-1, 6).tolist()
    rows[2][1] = EOS
    write_records(tmp_path / "in.jsonl", rows)
    prepare(tmp_path / "in.jsonl", tmp_path / "out", pack="none", **IDS)
    store = TokenStore(tmp_path / "out" / "train")
    assert store.read(0, store.token_count).tokens.tolist() == sum(rows, [])
    assert store.document_count == 2


def test_an_array_is_divided_at_the_eos_of_the_tokenizer(prepare, tmp_path, tokenizer):
    assert Tokenizer.from_file(tokenizer).token_to_id(END_OF_TEXT) == EOS
    np.save(tmp_path / "a.npy", [5, 6, EOS, 7])
    prepare(tmp_path / "a.npy", tmp_path / "out")
    assert documents_of(tmp_path / "out/train") == [[5, 6, EOS], [7, EOS]]
