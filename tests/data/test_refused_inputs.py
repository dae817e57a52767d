"""Tests that a mistake in the arguments of get_dataset.py, or in its input, is an error of one line with the location
and a remedy."""

import gzip
import io
import os
import shlex

import datasets
import numpy as np
import pyarrow.parquet
import pytest

from mamba_fsdp.verbs import tokenize as get_dataset
from tests.support.corpora import write_files
from tests.support.foreign_tokens import write_layout

CHATS = [{"messages": [{"role": "user", "content": "it's"}, {"role": "tool", "content": None}]}] * 2


def as_parquet(rows):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


FILES = {
    "texts/a.txt": b"some text",
    "blank/a.txt": b" \n",
    "pair/a.txt": b"good",
    "pair/b.txt": b"bad \xff",
    "bad.txt": "naïve, ".encode() + b"\xff not",
    "latin.txt": "déjà vu, à côté".encode("latin-1"),
    "utf16_unmarked.txt": "plain text".encode("utf-16-le"),
    "hole.txt": b"some text\n" * 9 + bytes(3) + b"more",
    "bad.txt.gz": gzip.compress(b"one\ntwo \xff"),
    "hole.txt.gz": gzip.compress(b"one\n" + bytes(1)),
    "tokens.txt": np.arange(60, dtype=np.uint16).tobytes(),
    "tokens.bin": np.arange(60, dtype=np.uint16).tobytes(),
    "chunks/index.json": b'{"chunks": []}',
    "chunks/a.bin": bytes(4),
    "page.jsonl": b"\n<!DOCTYPE html><html>sign in</html>",
    "rows.json": b"PAR1\x15\0",
    "notes.parquet": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "lists.jsonl": b'{"text": ["a", "b"]}\n' * 2,
    "chat.jsonl": b'{"messages": [{"role": "user", "content": "it\'s"}, {"role": "tool", "content": null}]}\n'
    * 2,
    "chat.parquet": as_parquet(CHATS),
    "no_text.jsonl": b'{"id": 1, "n": 2}\n' * 2,
    "half_text.jsonl": b'{"text": "a"}\n{"text": "b \\ud83d"}\n',
    "utf16.txt": "text".encode("utf-16"),
    "cut.jsonl": b'{"text": "a"}\n{"text": ',
    "nested.jsonl": b"[" * 200_000,
    "other.jsonl": b'{"txt": "a"}',
    "tongues.jsonl": b'{"text": {"en": "a", "de": "b"}}\n' * 2,
    "number.jsonl": b'{"text": 3}',
    "cut.jsonl.gz": gzip.compress(b'{"text": "a"}')[:-9],
    "commas.csv": b"text\nhello, world\n",
    "short.csv": b"id,text\n1,a\nb\n",
    "twice.csv": b"text,text\na,b\n",
    "open.csv": b'id,text\n1,a\n2,"b\n3,c\n',
    "no.parquet": b"no parquet",
    "no.arrow": b"no arrow",
    "alone.npy": b"1234",
    "t.json": b"{}",
    "pdf.txt": b"%PDF-1.7\n",
    "pdf.xyz": b"%PDF-1.7\n",
    "twice.jsonl.gz": gzip.compress(gzip.compress(b"text")),
    "spm/tokenizer.model": b"",
    "tiktoken/a.tiktoken": b"",
}
TABLES = {  # {name: columns} of tables of token ids in the formats of other programs
    "null": {"tokens": [[5, None]]},
    "labels": {"input_ids": [[5, 6], [7]], "labels": [[-100, 6], [7]]},
    "mask": {"input_ids": [[5, 6], [7]], "attention_mask": [[1, 0], [1]]},
    "counts": {"content": ["a"], "tokens": [1]},
    "counts_alone": {"tokens": [1]},
    "large": {"input_ids": [[5, 6], [300, 1, 2]]},
}
IDS = "--tokenizer=none --eos_token=0 --vocab_size=300"
# tests/verbs/test_advice.py contains more mistakes, and tests that the advice in the messages works.
MISTAKES = {  # {arguments of get_dataset.py: part of the message}
    "nowhere.txt out": "error: nowhere.txt: there is no such file or folder",
    "./loop out": "error: ./loop: there is no such file or folder; it is a link to loop",
    "a/b/c out": "error: a/b/c: there is no such file or folder",
    "'' out": "error: : there is no such file or folder",
    "texts bad.txt out": "error: bad.txt: OUT is a folder for the stores; if INPUT is a glob, quote it",
    "texts bad.txt": "error: bad.txt: OUT is a folder for the stores; if INPUT is a glob, quote it",
    "astray out": "astray/a.txt: can't be read as text: No such file or directory",
    "pipe out": "pipe/a.txt is a pipe or a device",
    "empty out": "empty: an empty folder",
    "blank out": "contains no text",
    "texts out --workers=2": "there is no such option",
    "texts out --tokenizer=a/b/c": "error: a/b/c: there is no such file or folder",
    "texts out --tokenizer=notes.parquet": "notes.parquet: a pointer of Git LFS or git-annex in place of the file",
    "texts out --tokenizer=t.json": "tokenizer t.json: t.json can't be read",
    "texts out --tokenizer=spm": "a sentencepiece or tiktoken file needs its model's files too",
    "texts out --tokenizer=tiktoken": "(a.tiktoken), not a tokenizer; name a tokenizer.json",
    "texts out --tokenizer=train:1e12": "at most 16,777,216",
    "texts out --tokenizer=none": "give the token id that ends documents",
    "texts out --tokenizer=none --eos_token=-1": "eos_token '-1' is not a token id; give",
    f"large out {IDS} --eos_token=300": "--eos_token=300 is not below --vocab_size=300",
    f"texts out {IDS}": "the input contains text, but --tokenizer=none is for token ids",
    "large out": "contains token ids; name the tokenizer that made them",
    "texts out --split=test": "texts has no split of this name; accepted: all",
    "bad.txt out": "bad.txt: can't be read as text: byte 9, on line 1, is 0xff, which is not valid utf-8; --encoding=cp1252 would read",
    "latin.txt out": "on line 1, is 0xe9, which is not valid utf-8; --encoding=cp1252 would read 'déjà vu",
    "utf16_unmarked.txt out": "is NUL, as in text in UTF-16; --encoding=utf-16-le reads it",
    "hole.txt out": "byte 91, on line 10, is NUL, but text does not contain NUL; see",
    "bad.txt.gz out": "byte 9, on line 2, is 0xff, which is not valid utf-8; --encoding=",
    "hole.txt.gz out": "byte 5, on line 2, is NUL, and so are all bytes after it: they were lost",
    "tokens.txt out": "byte 1, on line 1, is part of binary data, not text; leave it out, or give",
    "tokens.bin out --format=text": "is part of binary data, not text; leave it out, or give",
    "tokens.bin out": "the file does not name the type of its token ids; give the type, as in --dtype=uint16",
    f"tokens.bin out {IDS} --dtype=uint8": "every second token id is 0, so the ids are wider than uint8; give a wider --dtype",
    f"tokens.bin out {IDS} --dtype=uint32": "the vocabulary has 300 tokens; name the tokenizer that",
    f"bad.txt out {IDS} --format=ids --dtype=uint16": "13 bytes, not a multiple of 2 as --dtype=uint16 requires",
    f"page.jsonl out {IDS} --format=ids --dtype=uint8": "the file is an HTML or XML page",
    f"llm_c.bin out {IDS}": "llm_c.bin: a file of tokens of llm.c, or an index file of Megatron, not text",
    f"cut.npy out {IDS}": "the file is truncated or not a plain array",
    f"floats.npy out {IDS}": "the file contains an array of float64 of shape (1,)",
    f"rows.npy out {IDS}": "the file contains an array of int32 of shape (1000000000, 0)",
    "chunks out": "chunks: a dataset of MosaicML (MDS) or litdata, not",
    "pdf.txt out": "pdf.txt: a PDF, RTF, Office, SQLite, HDF5 or pickle file, not text or token ids to import; see",
    "pdf.xyz out --format=text": "the file is a PDF, RTF, Office",
    "twice.jsonl.gz out": "twice.jsonl.gz: a file that was compressed twice, not text",
    "page.jsonl out": "page.jsonl: an HTML or XML page",
    "rows.json out": "rows.json: a Parquet file, not text or token ids to import;",
    "notes.parquet out": 'notes.parquet: a pointer of Git LFS or git-annex in place of the file, not text or token ids to import; see "Unpack archives and fetch pointers" in docs/data.md\n',
    "lists.jsonl out": "line 1: 'text' is of type list, not text or token ids; see \"Convert documents",
    "chat.jsonl out": "line 1 has no 'text'; most of its text is in the list 'messages'; see \"Convert documents and records",
    "chat.parquet out": "the first row has no 'text'; most of its text is in the list 'messages'; see",
    "no_text.jsonl out": "line 1 has no 'text'; it has: id, n",
    "half_text.jsonl out": "line 2 has half of a surrogate pair, '\\ud83d', in 'text'; --skip_unreadable=true skips records and files",
    "pair out": "pair/b.txt: can't be read",
    "utf16.txt out": "=0.01 holds out 0 of the input's 2 tokens for validation, fewer than 32; start again with --overwrite",
    "cut.jsonl out": "cut.jsonl: can't be read as json: line 2 is not JSON",
    "nested.jsonl out": "is not JSON",
    "other.jsonl out": "record 1 has no 'text'; it has: txt; give --text_column=txt",
    "tongues.jsonl out": "line 1 has no 'text'; it has: text.en, text.de; give --text_column=text.en",
    "number.jsonl out": "'text' is of type int, not text or token ids",
    "cut.jsonl.gz out": "can't be read as json",
    "commas.csv out": "line 2 has more fields than the header",
    "short.csv out": "line 3 has fewer fields than the header",
    "twice.csv out": "the header contains 'text' twice",
    "open.csv out": "after line 2: unexpected end of data",
    "no.parquet out": "can't be read as parquet",
    "no.arrow out": "not an Arrow file",
    "alone.npy out": "the file does not name the type of its token ids",
    f"short.npy out {IDS}": "12 bytes, but short.npy.size specifies 4",
    f"empty.npy out {IDS}": "0 bytes, but empty.npy.size specifies 0",
    f"uncounted.npy out {IDS}": "the file excludes tokens from the loss (bit 30)",
    f"null out {IDS}": "row 1: 'tokens' is of type float64, not text or token ids",
    f"labels out {IDS}": "the column labels excludes tokens from the loss",
    f"mask out {IDS}": "the column attention_mask excludes tokens",
    f"counts out {IDS}": "the first row has no 'text'; it has: content, tokens; give --text_column=content",
    f"counts_alone out {IDS}": "row 1: 'tokens' is of type int64, not text or token ids",
    f"large out {IDS}": "arrow: can't be read as arrow: token ids from 1 to 300, but the vocabulary has 300",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Returns a folder with the files that MISTAKES mention."""
    folder = write_files(tmp_path_factory.mktemp("inputs"), FILES)
    for name in ("empty", "pipe", "astray"):
        (folder / name).mkdir()
    for name, columns in TABLES.items():
        datasets.Dataset.from_dict(columns).save_to_disk(folder / name)
    write_layout(folder / "short.npy", [[5, 6, 7]])
    (folder / "short.npy.size").write_text("4")
    (folder / "empty.npy").touch()
    (folder / "empty.npy.size").write_text("0")
    write_layout(folder / "uncounted.npy", [[5, 6, 7]], counts=False)
    (folder / "llm_c.bin").write_bytes(np.array([20240520, 1, 3], "<i4").tobytes())
    np.save(folder / "cut.npy", [5, 6, 7])
    np.save(folder / "floats.npy", [0.5])
    np.save(folder / "rows.npy", np.zeros((10**9, 0), "<i4"))
    os.truncate(folder / "cut.npy", (folder / "cut.npy").stat().st_size - 2)
    os.mkfifo(folder / "pipe/a.txt")
    (folder / "astray/a.txt").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line(inputs, tmp_path, monkeypatch, answer, arguments):
    monkeypatch.chdir(inputs)
    typed = shlex.split(arguments.replace(" out", f" {tmp_path}/out"))
    code, _, errors = answer(get_dataset, *typed)
    assert code == 2 and MISTAKES[arguments] in errors
    assert errors.count("\n") == 1 and errors.startswith("error: ")
