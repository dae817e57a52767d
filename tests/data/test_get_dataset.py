"""get_dataset.py: every kind of input, round trip; every mistake, by name; the same bytes whatever happens on the
way."""

import collections
import contextlib
import csv
import dataclasses
import gzip
import io
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from fractions import Fraction

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from mamba_fsdp.data.documents import documents
from tokenizers import processors

import get_dataset
from config.dataset_config import DatasetConfig
from mamba_fsdp import command_line
from mamba_fsdp import lease as lease_
from mamba_fsdp.data import readers, text, tokenize, units, workers
from mamba_fsdp.data import tokenizer as tokenizers_
from mamba_fsdp.data.store import StoreWriter, TokenStore
from mamba_fsdp.errors import UserError
from tests.support.corpora import ROOT, command, content, make_texts, read_back, stored_documents

# ---------------------------------------------------------------- every kind of input


def json_lines(texts, key="text"):
    return "".join(
        json.dumps({"id": i, key: text}, ensure_ascii=i % 2) + "\n" for i, text in enumerate(texts)
    ).encode()


def csv_lines(texts):
    file = io.StringIO()
    csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    return b"\xef\xbb\xbf" + file.getvalue().encode()  # as spreadsheets write it


def write_arrow(path, table, opener):
    with opener(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def table(texts):
    return pyarrow.table({"id": range(len(texts)), "text": texts})


def save_to_disk(path, texts):
    import datasets

    datasets.Dataset.from_dict({"text": texts}).save_to_disk(path, num_shards=3)


def save_splits(path, texts):
    import datasets

    datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_dict({"text": texts}),
            "test": datasets.Dataset.from_dict({"text": ["another split"]}),
        }
    ).save_to_disk(path)


def text_folder(path, texts):
    (path / "sub" / ".hidden").mkdir(parents=True)
    (path / "sub" / ".hidden" / "no.txt").write_text("hidden")
    (path / "README").write_text("no text of the corpus")
    for i, document in enumerate(texts):
        (path / ("sub" if i >= 30 else ".") / f"{i:03d}.{'md' if i % 2 else 'txt'}").write_text(
            document
        )


KINDS = {
    "x.jsonl": lambda path, texts: path.write_bytes(json_lines(texts)),
    "x.jsonl.gz": lambda path, texts: path.write_bytes(
        b"".join(gzip.compress(json_lines(part)) for part in (texts[:20], texts[20:]))
    ),
    "x.jsonl.zst": lambda path, texts: path.write_bytes(
        b"".join(zstandard.compress(json_lines(part)) for part in (texts[:9], texts[9:]))
    ),
    "x.ndjson": lambda path, texts: path.write_bytes(
        b"\xef\xbb\xbf" + json_lines(texts).replace(b"\n", b"\r\n")
    ),
    "x.csv": lambda path, texts: path.write_bytes(csv_lines(texts)),
    "x.csv.gz": lambda path, texts: path.write_bytes(gzip.compress(csv_lines(texts))),
    "x.json": lambda path, texts: path.write_text(
        json.dumps([{"text": text} for text in texts], indent=1)
    ),
    "x.parquet": lambda path, texts: pyarrow.parquet.write_table(
        table(texts), path, row_group_size=11
    ),
    "x.arrow": lambda path, texts: write_arrow(path, table(texts), pyarrow.ipc.new_stream),
    "file.arrow": lambda path, texts: write_arrow(path, table(texts), pyarrow.ipc.new_file),
    "saved": save_to_disk,
    "splits": save_splits,
    "folder": text_folder,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_input_comes_back_as_it_was(name, texts, tmp_path, prepare):
    """Text -> store -> text gives every document, whole and in order."""
    KINDS[name](tmp_path / name, texts)
    prepare(tmp_path / name, tmp_path / "out")
    assert read_back(tmp_path / "out" / "train") == texts
    TokenStore(tmp_path / "out" / "train").verify()


@pytest.mark.parametrize("name", ["saved", "splits"])
def test_globs_take_files_and_folders_in_order(name, texts, tmp_path, prepare):
    """A glob is the sorted list of what it matches, files and folders alike."""
    KINDS[name](tmp_path / "in" / "b", texts[:10])
    (tmp_path / "in" / "a.txt").write_text("first")
    (tmp_path / "in" / "c.jsonl").write_bytes(json_lines(["last"]))
    prepare(tmp_path / "in" / "*", tmp_path / "out")
    assert read_back(tmp_path / "out" / "train") == ["first", *texts[:10], "last"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "documents, joined",
    [
        ("lines", "\n"),
        ("lines", "\r\n"),
        ("blank_line", "\n \t\n\n"),
        ("separator:<|cut|>", "\n<|cut|>\n"),
    ],
)
def test_text_files_are_cut_into_documents_as_asked(
    documents, joined, texts, tmp_path, prepare, monkeypatch
):
    """Whatever the blocks' size, the documents are what stands between separators."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 999)
    texts = [part.replace("\n", " ") for part in texts]
    (tmp_path / "x.txt").write_bytes(joined.join(texts).encode() + joined.encode())
    prepare(tmp_path / "x.txt", tmp_path / "out", documents=documents)
    assert read_back(tmp_path / "out" / "train") == texts


def test_a_file_larger_than_a_block_is_one_document(tmp_path, prepare, texts, monkeypatch):
    """A document has no largest size, with one eos at its end and the tokens of an uncut one, with or without
    compression."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1000)
    whole = "\n".join(texts)
    for name, data in {"a.txt": whole.encode(), "b.txt.gz": gzip.compress(whole.encode())}.items():
        (tmp_path / name).write_bytes(data)
    prepare(tmp_path / "*.txt*", tmp_path / "out")
    assert read_back(tmp_path / "out" / "train") == [whole, whole]
    store = TokenStore(tmp_path / "out" / "train")
    backend = tokenizers_.Tokenizer.from_file(str(store.tokenizer_path / "tokenizer.json"))
    assert next(stored_documents(store))[:-1].tolist() == backend.encode(whole).ids


@pytest.mark.slow
def test_a_long_record_is_tokenised_in_parts(prepare, texts, tmp_path, monkeypatch):
    """A record longer than a block comes back whole, also where no space or line break offers a cut."""
    long = ["日本" * 100_000 + "a", "\n".join(texts * 60)]
    (tmp_path / "x.jsonl").write_bytes(json_lines(long))
    prepare(tmp_path / "x.jsonl", tmp_path / "out")
    assert read_back(tmp_path / "out" / "train") == long


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab \n日🙂", min_size=20, max_size=60), st.sampled_from([None, b"\n", b"\n\n"])
)
def test_cuts_part_no_character_and_lose_nothing(tmp_path_factory, content, separator):
    """Every block is valid UTF-8, and the blocks of a file are the file."""
    path = tmp_path_factory.mktemp("cut") / "x.txt"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK_BYTES", 9)
        blocks = list(readers.cut_blocks(str(path), "text", separator and re.compile(separator)))
        assert b"".join(block.data for block in blocks) == content.encode()
        assert (
            all(block.data.decode() is not None for block in blocks)
            and max(map(len, (p.data for p in blocks))) <= 9
        )
        for before, after in zip(blocks, blocks[1:]):
            assert before.open == after.inside and before.offset + before.size == after.offset


@pytest.mark.slow
def test_eos_in_the_text_ends_a_document(tmp_path, prepare):
    """A document is what stands between two eos; none is empty, and no separator is doubled."""
    eos = tokenizers_.END_OF_TEXT
    (tmp_path / "x.jsonl").write_bytes(
        json_lines([f"one{eos}two{eos}{eos}", f"{eos}three", eos, "four"])
    )
    prepare(tmp_path / "x.jsonl", tmp_path / "out")
    assert read_back(tmp_path / "out" / "train") == ["one", "two", "three", "four"]


@pytest.mark.slow
def test_token_ids_are_taken_as_they_are(tmp_path, prepare):
    """Rows of input_ids become documents of these ids; ids that the tokenizer lacks are refused by file."""
    pyarrow.parquet.write_table(
        pyarrow.table({"input_ids": [[5, 6], [7, 0, 8, 0], [], [299]]}), tmp_path / "x.parquet"
    )
    prepare(tmp_path / "x.parquet", tmp_path / "out", text_column="input_ids")
    assert [d.tolist() for d in stored_documents(TokenStore(tmp_path / "out" / "train"))] == [
        [5, 6, 0],
        [7, 0],
        [8, 0],
        [299, 0],
    ]
    (tmp_path / "x.jsonl").write_text('{"input_ids": [1, 300]}\n')
    with pytest.raises(
        UserError, match="x.jsonl: token ids from 1 to 300, but the tokenizer knows 300"
    ):
        prepare(tmp_path / "x.jsonl", tmp_path / "out2", text_column="input_ids")
    with pytest.raises(UserError, match="holds token ids; name the tokenizer"):
        prepare(
            tmp_path / "x.parquet",
            tmp_path / "out3",
            text_column="input_ids",
            tokenizer="train:300",
        )


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_datasets_name_streamed_or_not(streaming, texts, tmp_path, prepare, monkeypatch):
    """What datasets.load_dataset gives comes back as it was."""
    import datasets

    (tmp_path / "x.jsonl").write_bytes(json_lines(texts))
    real = datasets.load_dataset

    def load(name, config, split, streaming):
        assert (name, config, split) == ("some/name", "a_config", "train")
        return real(
            "json",
            data_files=str(tmp_path / "x.jsonl"),
            split=split,
            streaming=streaming,
            cache_dir=str(tmp_path / "cache"),
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(text, "ROWS", 7)
    prepare("some/name", tmp_path / "out", config="a_config", streaming=streaming)
    assert read_back(tmp_path / "out" / "train") == texts
    with pytest.raises(UserError, match="no column 'body'; it has: id, text"):
        prepare(
            "some/name",
            tmp_path / "out2",
            config="a_config",
            streaming=streaming,
            text_column="body",
        )


@pytest.mark.parametrize("streaming", [False, True])
def test_a_datasets_name_is_cut_into_units_too(streaming, texts, tmp_path, prepare, monkeypatch):
    """By its rows, or where it is streamed by its shards; read again, it gives the same blocks."""
    import datasets

    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, file in enumerate(files):
        file.write_bytes(json_lines(texts[number * 20 : number * 20 + 20]))
    real = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, config, split, streaming: real(
            "json",
            data_files=list(map(str, files)),
            split=split,
            streaming=streaming,
            cache_dir=str(tmp_path / "cache"),
        ),
    )
    monkeypatch.setattr(text, "ROWS", 7)
    monkeypatch.setattr(text, "UNIT_ROWS", 13)
    source = text.open_source("some/name", DatasetConfig(streaming=streaming))
    assert source.unit_count == (3 if streaming else 5)
    units = [list(source.blocks(unit)) for unit in range(source.unit_count)]
    assert [row.decode() for unit in units for block in unit for row in block.data] == texts
    assert list(source.blocks(1)) == units[1] and len(units[1]) > 1
    prepare("some/name", tmp_path / "out", streaming=streaming)
    assert read_back(tmp_path / "out" / "train") == texts


@pytest.mark.parametrize("name", KINDS)
def test_a_file_gives_the_same_blocks_whenever_it_is_read(name, texts, tmp_path, monkeypatch):
    """So that their number says where a process resumes that begins anew; how much is read is told on the way."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 500)
    monkeypatch.setattr(readers, "ROWS", 4)
    KINDS[name](tmp_path / name, texts)
    source = text.open_source(str(tmp_path / name), DatasetConfig())
    blocks = list(source.blocks())
    assert len(blocks) > 4 and list(source.blocks()) == blocks
    assert blocks[-1].done == pytest.approx(source.total, rel=0.35)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["x.txt", "x.jsonl", "x.jsonl.zst", "x.json", "x.csv", "x.parquet"]
)
def test_reading_takes_the_same_memory_whatever_the_size(name, tmp_path):
    """The reader holds a few blocks at a time, never the file."""
    texts = [random.Random(i).randbytes(25_000).hex() for i in range(600)]
    if name == "x.parquet":
        pyarrow.parquet.write_table(table(texts), tmp_path / name, row_group_size=20)
    else:
        data = {
            "x.txt": " ".join(texts).encode(),
            "x.csv": csv_lines(texts),
            "x.json": json.dumps([{"text": text} for text in texts]).encode(),
        }.get(name) or json_lines(texts)
        (tmp_path / name).write_bytes(zstandard.compress(data) if name.endswith("zst") else data)
    source = text.open_source(str(tmp_path / name), DatasetConfig())
    tracemalloc.start()
    total = sum(block.size for chunk in workers._chunks(source.blocks()) for block in chunk)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 29_000_000 and peak < 16_000_000


def documents_of(source, unit):
    """What a unit holds, where its documents' parts are put together again."""
    together, begins = [], True
    for block in source.blocks(unit):
        for part, ends in documents(block, source.options, {"empty": 0}):
            together = [*together, part] if begins else [*together[:-1], together[-1] + part]
            begins = ends
    return together


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [150, 700, 5000])
def test_units_share_the_documents_out(name, size, texts, tmp_path, monkeypatch):
    """Whatever their size, the documents of all units one after the other are those of the input; what can be cut is in
    several."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 500)
    monkeypatch.setattr(readers, "ROWS", 4)
    KINDS[name](tmp_path / name, texts)
    whole = documents_of(text.open_source(str(tmp_path / name), DatasetConfig()), 0)
    monkeypatch.setattr(text, "UNIT_BYTES", size)
    source = text.open_source(str(tmp_path / name), DatasetConfig())
    units = [documents_of(source, unit) for unit in range(source.unit_count)]
    assert [document for unit in units for document in unit] == whole == texts
    if (
        name in ("x.jsonl", "x.ndjson", "x.parquet", "x.arrow", "file.arrow", "folder", "saved")
        and size < 5000
    ):
        assert sum(map(bool, units)) > 2


# ---------------------------------------------------------------- what is left out, and what is refused


def test_empty_documents_are_left_out_and_counted(tmp_path, prepare, capsys):
    """No document of nothing but its eos gets into a store."""
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text(" \n\t ")
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n\n{"text": null}\n{"text": "x"}\n')
    assert prepare(tmp_path / "*.*", tmp_path / "out")["counts"]["empty"] == 4
    assert read_back(tmp_path / "out" / "train") == ["x"]
    assert "4 empty documents" in capsys.readouterr().out


def test_a_reader_that_has_gone_stops_nothing(tmp_path, prepare, monkeypatch):
    class Gone(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(sys, "stdout", Gone())
    prepare(tmp_path / "a.txt", tmp_path / "out")
    assert read_back(tmp_path / "out" / "train") == ["x"]


@pytest.mark.slow
def test_invalid_utf8_is_named_or_replaced(tmp_path, prepare):
    """The default refuses with file and byte, in text, JSON and tables alike."""
    (tmp_path / "a.txt").write_bytes(b"good \xff bad")
    (tmp_path / "b.jsonl").write_bytes(
        b'{"text": "fine"}\n{"text": "a\xff"}\n{"text": "half \\ud800"}\n'
    )
    array = pyarrow.Array.from_buffers(
        pyarrow.string(),
        2,
        [None, pyarrow.py_buffer(np.array([0, 2, 4], np.int32)), pyarrow.py_buffer(b"ok\xff\xfe")],
    )
    write_arrow(tmp_path / "c.arrow", pyarrow.table({"text": array}), pyarrow.ipc.new_stream)
    for name, message in {
        "a.txt": "a.txt: invalid UTF-8 at byte 5;",
        "b.jsonl": "b.jsonl: invalid UTF-8 at byte 11 of record 2;",
        "c.arrow": "c.arrow: invalid UTF-8 at byte 0 of record 2;",
    }.items():
        with pytest.raises(UserError, match=message):
            prepare(tmp_path / name, tmp_path / "error" / name)
        assert not (tmp_path / "error" / name / "train" / "index.json").exists()
    prepare(tmp_path / "[abc].*", tmp_path / "replace", invalid_utf8="replace")
    assert read_back(tmp_path / "replace" / "train") == [
        "good � bad",
        "fine",
        "a�",
        "half ���",
        "ok",
        "��",
    ]


@pytest.mark.parametrize(
    "name, written, encoding, said",
    [
        ("a.txt", "naïve", "utf-16", "looks like UTF-16"),
        ("a.txt", "naive", "utf-16-le", "looks like UTF-16"),
        ("c.jsonl", '{"text": "naive"}', "utf-16-be", "looks like UTF-16"),
        ("a.txt", "naïve", "utf-32", "looks like UTF-16"),
        ("b.csv", "text\nnaïve\n", "utf-16", "first line is no valid"),
        ("a.txt", "naïve", "latin-1", "invalid UTF-8 at byte 2"),
        ("b.csv", "text\nnaïve\n", "latin-1", "byte 2 of record 1"),
        ("b.csv", "prénom,text\nx,y\n", "latin-1", "first line is no valid UTF-8"),
        ("d.txt.gz", "naïve", "utf-16", "looks like"),
    ],
)
def test_other_encodings_are_refused_with_the_remedy(name, written, encoding, said, tmp_path):
    compress = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(compress(written.encode(encoding)))
    with pytest.raises(UserError, match=rf"{name}: .*{said}.*converted with iconv -f"):
        for block in text.open_source(str(tmp_path / name), DatasetConfig()).blocks():
            list(documents(block, DatasetConfig(), {}))


def damage_gzip(path):
    path.write_bytes(gzip.compress(json_lines(make_texts(40)))[:-30])


def damage_offsets(path, column):
    """Of row 2: it ends far behind its column, which begins and ends within it."""
    with pyarrow.ipc.new_stream(str(path), pyarrow.schema({"text": column.type})) as writer:
        writer.write_batch(pyarrow.record_batch([column], ["text"]))
    good, bad = (np.array([1, end, 6], np.int32).tobytes() for end in (5, 1 << 28))
    content = path.read_bytes()
    assert content.count(good) == 1
    path.write_bytes(content.replace(good, bad))


def damage_zstd(path):
    path.write_bytes(zstandard.compress(json_lines(make_texts(40)))[:-3])


@pytest.mark.parametrize(
    "name, write, message",
    [
        (
            "x.jsonl",
            lambda p: p.write_text('{"text": "a"}\n{"text": \n'),
            "x.jsonl: record 2 is no valid JSON",
        ),
        ("x.jsonl", lambda p: p.write_text("[1]\n"), "x.jsonl: record 1 is int, not an object"),
        (
            "x.jsonl",
            lambda p: p.write_text('{"a": 1}\n[1]\n'),
            "record 1: there is no column 'text'; it has: a; name one with --text_column",
        ),
        (
            "x.jsonl",
            lambda p: p.write_text('{"input_ids": [1]}\n'),
            "--text_column=input_ids takes its token ids",
        ),
        ("x.jsonl", lambda p: p.write_text('{"text": 7}\n'), "record 1: 'text' is int, not text"),
        (
            "x.jsonl",
            lambda p: p.write_text('{"text": ["a"]}\n'),
            "record 1: 'text' is a list of other things than token ids",
        ),
        (
            "x.json",
            lambda p: p.write_text('[{"text": "a"}'),
            r"x.json: record 1 is no valid JSON \(the list has no end",
        ),
        ("x.jsonl.gz", damage_gzip, "x.jsonl.gz: broken, or no json file .Truncated"),
        ("x.jsonl.zst", damage_zstd, "x.jsonl.zst: broken, or no json file .Truncated"),
        ("x.txt.gz", lambda p: p.write_bytes(b"no archive"), "x.txt.gz: broken, or no text file"),
        (
            "x.parquet",
            lambda p: p.write_bytes(b"no table"),
            "x.parquet: broken, or no parquet file",
        ),
        (
            "x.arrow",
            lambda p: p.write_bytes(b"no table"),
            "x.arrow: it ends before its end, or is no Arrow file",
        ),
        ("x.arrow", lambda p: p.write_bytes(b""), "x.arrow: "),
        (
            "x.arrow",
            lambda p: damage_offsets(p, pyarrow.array(["a", "text", "b"])),
            r"x.arrow: column text is damaged \(.*\); copy it again$",
        ),
        (
            "x.arrow",
            lambda p: damage_offsets(p, pyarrow.array([[1], [2] * 4, [3]])),
            "x.arrow: column text is damaged",
        ),
        (
            "x.arrow",
            lambda p: damage_offsets(p, pyarrow.array(["a", "text", "b"]).dictionary_encode()),
            "x.arrow: column text is damaged",
        ),
        (
            "x.parquet",
            lambda p: pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), p),
            "no column 'text'; it has: body",
        ),
        (
            "x.parquet",
            lambda p: pyarrow.parquet.write_table(pyarrow.table({"text": [1.5]}), p),
            "column 'text' is double",
        ),
        (
            "x.csv",
            lambda p: p.write_text("id,body\n1,a\n"),
            "x.csv: there is no column 'text'; it has: id, body;",
        ),
        (
            "x.csv",
            lambda p: p.write_text("id,text\n1,a,b\n"),
            "x.csv: broken, or no csv file .*Expected 2 columns, got 3",
        ),
        ("x.txt", lambda p: p.symlink_to("nowhere"), "x.txt: can't be read"),
        ("x.txt", lambda p: p.write_text(" "), "the input holds no text .*1 empty document"),
        ("x.bin", lambda p: p.write_text("a"), "x.bin: can't tell its format"),
        ("x", lambda p: p.mkdir(), "x: no file named .txt"),
        ("x.txt", lambda p: None, "x.txt: no such file or folder"),
        ("x*.txt", lambda p: None, "no file matches"),
        ("some/name", lambda p: None, "no such file or folder"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(name, write, message, tmp_path, prepare):
    """The message names file, record and fault, and no store is left that looks whole."""
    write(tmp_path / name)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out" / "train" / "index.json").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tokeniser=x"], "--tokeniser: there is no such option; did you mean --tokenizer?"),
        (["out", "stray"], "too many positional"),
        (["--workers=two"], "--workers=two: expected a whole number"),
        (["--workers=-1"], "--workers=-1: must be at least 0"),
        (["--shard_tokens=0"], "--shard_tokens=0: must be at least 1"),
        (
            ["--tokenizer=/nowhere/tokenizer"],
            "tokenizer /nowhere/tokenizer: there is no such file or folder",
        ),
        (["--validation_fraction=1"], "--validation_fraction=1: must be below 1"),
        (["--documents=line"], "write file, lines, blank_line or separator"),
        (["--invalid_utf8=drop"], "must be one of error, replace"),
        (["--format=xml"], "must be one of auto, text, json"),
        (["--split=train"], "has no splits"),
        (["--streaming"], "are for `datasets` names"),
        (["--part=4/4"], "--part=4/4: write I/N; the parts of 4 are 0/4 to 3/4"),
        (["--part=1"], "--part=1: write I/N; the parts of 4 are"),
        (
            ["--part=0/2", "--overwrite"],
            "would remove what other parts have done; remove OUT by hand",
        ),
        (["--tokenizer=train:100"], "at least 257"),
        (["--tokenizer=train:big"], "write train:SIZE"),
        (["--tokenizer=no/such/tokenizer"], "can't be loaded"),
    ],
)
def test_mistakes_on_the_command_line_are_two_lines(
    arguments, message, tmp_path, monkeypatch, capsys
):
    """Every mistake is one message without a traceback, exit code 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "x.txt").write_text("some text")
    with pytest.raises(SystemExit) as exit:
        command_line.run(get_dataset.main, lambda: "", ["x.txt", *arguments])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and message in error and len(error.strip().splitlines()) <= 2
    assert not list(tmp_path.rglob("index.json"))


def test_a_dataset_name_that_is_nowhere(prepare, tmp_path, monkeypatch):
    """A name that neither the disk nor `datasets` knows says both."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    def no_network(*_, **__):
        raise ConnectionError("not reached\nmore")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    said = r"nowhere: no local path, and `datasets` can't load it \(not reached; no network: HF_HUB_OFFLINE is set\)"
    with pytest.raises(UserError, match=said):
        prepare("nowhere", tmp_path / "out")


@pytest.mark.parametrize(
    "name, where, killed_before",
    [
        ("x.txt", tokenize, "_hold_out_end"),
        ("y.jsonl", StoreWriter, "finish"),
        ("z.txt", TokenStore, "__init__"),
    ],
)
def test_the_end_of_too_few_documents_is_held_out(
    name, where, killed_before, prepare, tmp_path, texts, capsys, monkeypatch
):
    """One long document, or a few: validation gets the last tokens, cut where a character ends, and both together
    are the input. Killed before or after the cut, it resumes."""
    wanted = texts[:5] if name == "y.jsonl" else ["日🙂 ".join(texts)]
    (tmp_path / name).write_bytes(json_lines(wanted) if name == "y.jsonl" else wanted[0].encode())
    settings = dict(validation_fraction=0.01, shard_tokens=100)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(where, killed_before, lambda *_: (_ for _ in ()).throw(Killed))
        prepare(tmp_path / name, tmp_path / "out", **settings)
    assert not (tmp_path / "out" / "dataset.json").exists()
    stores = prepare(tmp_path / name, tmp_path / "out", **settings)["stores"]
    count = stores["validation"]["tokens"]
    assert f"held out for validation: the last {count} tokens" in capsys.readouterr().out
    assert 2 <= count <= 0.01 * (stores["train"]["tokens"] + count) + 1
    train, validation = (read_back(tmp_path / "out" / part) for part in ("train", "validation"))
    assert [*train[:-1], train[-1] + validation[0], *validation[1:]] == wanted
    for part in ("train", "validation"):
        TokenStore(tmp_path / "out" / part).verify()
        shards = json.loads((tmp_path / "out" / part / "index.json").read_text())["shards"]
        assert {path.stem for path in (tmp_path / "out" / part).glob("[0-9]*")} == {
            shard["name"] for shard in shards
        }
    prepare(tmp_path / name, tmp_path / "unbroken", **settings)
    assert content(tmp_path / "out") == content(tmp_path / "unbroken")


def test_too_little_text_to_hold_some_out(prepare, tmp_path, capsys):
    """Nor for the tokenizer that was asked for, which is said."""
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(
        UserError,
        match="2 tokens are too few to hold some out; use --overwrite --validation_fr.*=0",
    ):
        prepare(tmp_path / "x.txt", tmp_path / "out", validation_fraction=0.5)
    assert prepare(tmp_path / "x.txt", tmp_path / "out", overwrite=True, tokenizer="train:300")[
        "stores"
    ] == {"train": {"tokens": 2, "documents": 1}}
    assert (
        "training a tokenizer of 300 tokens\nit has 257 tokens only: no more pairs repeat"
        in capsys.readouterr().out
    )


def test_files_of_a_folder_that_are_not_read_are_told(prepare, tmp_path, capsys):
    """How many and which, in the first line; nothing where all are read."""
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "README", "b.docx", "c.bin", "d.pdf", ".hidden"):
        (tmp_path / "in" / name).write_text("text")
    prepare(tmp_path / "in", tmp_path / "out")
    assert capsys.readouterr().out.splitlines()[0] == (
        "left out: 4 files whose names don't tell a format (README, b.docx, c.bin, ...); --format=text takes all as "
        "text"
    )
    prepare(tmp_path / "in", tmp_path / "all", format="text")
    assert "left out" not in capsys.readouterr().out


# ---------------------------------------------------------------- train and validation


@settings(max_examples=100, deadline=None)
@given(
    st.fractions(Fraction(1, 1000), Fraction(99, 100), max_denominator=1000), st.integers(0, 10**9)
)
def test_the_held_out_share_is_exact(fraction, start):
    """However many documents, those held out are their share to within one, wherever one starts to count."""
    chosen = units.for_validation(np.arange(start, start + 5000), fraction)
    assert abs(int(chosen.sum()) - 5000 * float(fraction)) <= 2
    together = np.concatenate(
        [
            units.for_validation(np.arange(start, start + 1234), fraction),
            units.for_validation(np.arange(start + 1234, start + 5000), fraction),
        ]
    )
    assert (chosen == together).all()


def test_every_document_is_in_one_of_the_two_stores(prepare, texts, tmp_path):
    """Train and validation together are the input, nothing twice; both hold the tokenizer."""
    (tmp_path / "x.jsonl").write_bytes(json_lines(texts))
    prepare(tmp_path / "x.jsonl", tmp_path / "out", validation_fraction=0.1)
    train, validation = (read_back(tmp_path / "out" / name) for name in ("train", "validation"))
    assert len(validation) == 6 and sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in train]
    assert (
        TokenStore(tmp_path / "out" / "train").tokenizer
        == TokenStore(tmp_path / "out" / "validation").tokenizer
    )


# ---------------------------------------------------------------- the same bytes whatever happens on the way


@pytest.fixture(scope="session")
def large_input(tmp_path_factory):
    """Several files of several kinds, larger than a few blocks together."""
    folder = tmp_path_factory.mktemp("large")
    texts = make_texts(12000, seed=1)
    (folder / "a.jsonl").write_bytes(json_lines(texts[:5000]))
    (folder / "b.txt").write_text("\n".join(texts[5000:9000]))
    pyarrow.parquet.write_table(table(texts[9000:]), folder / "c.parquet", row_group_size=500)
    return folder


@pytest.fixture(scope="session")
def unbroken(large_input, tokenizer, tmp_path_factory):
    """What one worker makes of it in one go."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    options = DatasetConfig(
        tokenizer=tokenizer,
        eos_token=tokenizers_.END_OF_TEXT,
        workers=1,
        shard_tokens=100_000,
        validation_fraction=0.1,
    )
    tokenize.make_dataset(text.open_source(str(large_input), options), out)
    return content(out)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    workers, large_input, prepare, unbroken, tmp_path
):
    """1, 2 and 3 workers write equal stores, of several shards each."""
    prepare(
        large_input,
        tmp_path / "out",
        workers=workers,
        shard_tokens=100_000,
        validation_fraction=0.1,
    )
    assert content(tmp_path / "out") == unbroken
    assert "train/00002.bin" in unbroken and "validation/00000.doc" in unbroken


RESUMABLE = """
import sys
from config.dataset_config import DatasetConfig
from mamba_fsdp import lease as lease_
from mamba_fsdp.data import text, tokenize, units, workers
if __name__ == "__main__":
    source, out, tokenizer, eos = sys.argv[1:]
    options = DatasetConfig(tokenizer=tokenizer, eos_token=eos, workers=2, shard_tokens=100_000,
                            validation_fraction=0.1)
    tokenize.make_dataset(text.open_source(source, options), out, save_seconds=0)
"""


STORMS = int(os.environ.get("KILL_STORMS", 1))  # each with other moments


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(STORMS))
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(
    seed, large_input, tokenizer, unbroken, tmp_path
):
    """SIGKILL again and again, at random moments: the last run leaves what an unbroken one does, and no process lives
    on."""
    program, out, chooser = tmp_path / "program.py", tmp_path / "out", random.Random(seed)
    program.write_text(RESUMABLE)
    for attempt in range(100):
        process = subprocess.Popen(
            [sys.executable, program, large_input, out, tokenizer, tokenizers_.END_OF_TEXT],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            _, error = process.communicate(
                timeout=chooser.uniform(0.3, 2.5) if attempt < 12 else 600
            )
        except subprocess.TimeoutExpired:
            assert not (out / "dataset.json").exists() or (out / "train" / "index.json").exists()
            process.kill()
            process.communicate(
                timeout=300
            )  # returns when the workers, which hold the pipe too, are gone
            continue
        assert process.returncode == 0, error
        break
    assert content(out) == unbroken


SMALL_UNITS = 200_000  # bytes: `large_input` has some twenty of them


@pytest.fixture(scope="session")
def unbroken_units(large_input, tmp_path_factory):
    """What one process makes of it, cut into SMALL_UNITS, in one go."""
    out = tmp_path_factory.mktemp("unbroken_units") / "out"
    options = DatasetConfig(
        tokenizer="train:300", workers=1, shard_tokens=100_000, validation_fraction=0.1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "UNIT_BYTES", SMALL_UNITS)
        tokenize.make_dataset(text.open_source(str(large_input), options), out)
    return content(out)


ONE_OF_SEVERAL = """
import sys
from config.dataset_config import DatasetConfig
from mamba_fsdp.data import text, tokenize
if __name__ == "__main__":
    source, out, part, text.UNIT_BYTES = *sys.argv[1:-1], int(sys.argv[-1])
    options = DatasetConfig(tokenizer="train:300", workers=1, shard_tokens=100_000, validation_fraction=0.1, part=part)
    tokenize.make_dataset(text.open_source(source, options), out, save_seconds=0)
"""


@pytest.fixture
def start_part(tmp_path, large_input):
    """start_part("0/3") -> a process that does this part of tmp_path / "out", in small units."""
    program, processes = tmp_path / "part.py", []
    program.write_text(ONE_OF_SEVERAL)

    def start(part):
        processes.append(
            subprocess.Popen(
                [sys.executable, program, large_input, tmp_path / "out", part, str(SMALL_UNITS)],
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", [["0/3", "1/3", "2/3"], ["0/2", "0/2", "1/2"]], ids=["each its own", "two the same"]
)
def test_parts_at_once_make_the_bytes_of_one_process(parts, start_part, unbroken_units, tmp_path):
    """Whichever parts they are given, one of them says that it is complete, and each ends well."""
    said = [process.communicate(timeout=600)[0] for process in list(map(start_part, parts))]
    assert content(tmp_path / "out") == unbroken_units, said
    assert sum("a part" in text for text in said) == 1, said


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(STORMS))
def test_parts_killed_at_any_moment_make_the_same_bytes(seed, start_part, unbroken_units, tmp_path):
    """Three at once, SIGKILL at random moments: whoever lives on takes over what the dead one was at."""
    chooser = random.Random(seed)
    running, kills = [start_part(f"{number}/3") for number in range(3)], 0
    while not (tmp_path / "out" / "dataset.json").exists():
        time.sleep(chooser.uniform(0.05, 0.7))
        number = chooser.randrange(3)
        if kills < 25:
            running[number].kill()
            kills += 1
        if running[number].poll() is not None:
            running[number] = start_part(f"{number}/3")
    for process in running:
        assert process.wait(timeout=600) in (0, -signal.SIGKILL), process.communicate()
    assert content(tmp_path / "out") == unbroken_units


def test_what_another_part_is_at_keeps_the_dataset_unfinished(
    prepare, texts, at_work, tmp_path, monkeypatch, capsys
):
    """A part does all that nobody is at, says what is left and in whose hands; when that is free, any part does it."""
    (tmp_path / "x.jsonl").write_bytes(json_lines(texts))
    monkeypatch.setattr(text, "UNIT_BYTES", 2000)
    leases = [at_work(name) for name in ("00001", "00003")]
    assert prepare(tmp_path / "x.jsonl", tmp_path / "out", part="0/2") is None
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"part 0 of 2: \d+ of \d+ units, then what others leave", said[0])
    assert re.fullmatch(
        rf".*out is unfinished \(00001, 00003\), in the hands of process {os.getpid()} on .*; the last "
        "to end completes it. If they are stopped, the same command does, with any part",
        said[1],
    )
    assert not list((tmp_path / "out").rglob("index.json"))
    with pytest.raises(UserError, match="holds other data: validation_fraction was 0.0 and is 0.5"):
        prepare(tmp_path / "x.jsonl", tmp_path / "out", part="1/2", validation_fraction=0.5)
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="out: begun by another version of this prog"),
    ):
        patch.setattr(text, "UNIT_BYTES", 4000)
        prepare(tmp_path / "x.jsonl", tmp_path / "out", part="1/2")
    for lease in leases:
        lease.give_back()
    lease = at_work("merge")
    assert prepare(tmp_path / "x.jsonl", tmp_path / "out", part="1/2") is None
    assert re.search(r"out is unfinished \(merge\), in the hands of", capsys.readouterr().out)
    lease.give_back()
    prepare(tmp_path / "x.jsonl", tmp_path / "out", part="7/9")
    prepare(tmp_path / "x.jsonl", tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_unit_that_was_taken_over_is_left_to_the_other(
    prepare, texts, tmp_path, monkeypatch, fast_leases
):
    """A process that stood still finds at its next save that its lease is gone, writes no word more about the unit, and
    resumes it where the other has died, too."""
    (tmp_path / "x.jsonl").write_bytes(json_lines(texts))
    for module in (readers, workers):
        monkeypatch.setattr(module, "BLOCK_BYTES", 500)
    real, stolen = units.Unit._write, []

    def write(unit, *result):
        real(unit, *result)
        if unit.progress["written"] > 30 and not stolen:
            file = unit.path.with_suffix(".lease")
            file.write_text(
                json.dumps({**json.loads(file.read_text()), "token": "another", "pid": 2**22})
            )
        if stolen or unit.progress["written"] > 30:
            stolen.append(unit.progress["written"])

    monkeypatch.setattr(units.Unit, "_write", write)
    prepare(
        tmp_path / "x.jsonl",
        tmp_path / "out",
        shard_tokens=1000,
        validation_fraction=0.1,
        save_seconds=0,
    )
    assert stolen[1] == stolen[0], "it resumes from what was saved before it lost its lease"
    prepare(tmp_path / "x.jsonl", tmp_path / "whole", shard_tokens=1000, validation_fraction=0.1)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_few_documents_in_many_units_are_held_out_as_often(prepare, tmp_path, monkeypatch):
    """Also where no unit has enough of them for one to be due."""
    (tmp_path / "x.jsonl").write_bytes(
        json_lines([f"document {number:04d}" for number in range(1500)])
    )
    monkeypatch.setattr(text, "UNIT_BYTES", 1000)
    stores = prepare(tmp_path / "x.jsonl", tmp_path / "out", validation_fraction=0.02)["stores"]
    assert 15 <= stores["validation"]["documents"] <= 50
    assert sum(store["documents"] for store in stores.values()) == 1500


def test_a_mistake_in_a_later_unit_is_named_by_its_place(prepare, tmp_path, texts, monkeypatch):
    """Its records are counted from where the unit begins, which is said."""
    lines = json_lines(texts)
    (tmp_path / "x.jsonl").write_bytes(lines + b'{"text": 7}\n')
    monkeypatch.setattr(text, "UNIT_BYTES", 3000)
    with pytest.raises(
        UserError, match="x.jsonl: record (\\d+) after byte (\\d+): 'text' is int, not text"
    ) as error:
        prepare(tmp_path / "x.jsonl", tmp_path / "out")
    record, offset = map(
        int, re.search(r"record (\d+) after byte (\d+)", str(error.value)).groups()
    )
    assert offset > 3000 and lines[offset:].count(b"\n") == record - 1


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_going_on_from_every_saved_point_gives_the_same_bytes(
    large_input, prepare, unbroken, tmp_path, monkeypatch
):
    """Stopped after every other save, with more written behind it: the next run drops that and ends with equal bytes,
    although the blocks are smaller, too."""
    real, saves = units.Unit._write, 0

    def stop(run, tokens, counts):
        nonlocal saves
        if saves == 2:
            saves = 0
            real(run, tokens, counts)  # written, never saved
            raise Killed
        saves += 1
        real(run, tokens, counts)

    monkeypatch.setattr(units.Unit, "_write", stop)
    for module in (readers, workers):
        monkeypatch.setattr(module, "BLOCK_BYTES", 200_000)
    settings = dict(shard_tokens=100_000, validation_fraction=0.1, save_seconds=0)
    stops = 0
    for _ in range(50):
        try:
            prepare(large_input, tmp_path / "out", **settings)
            break
        except Killed:
            assert not list((tmp_path / "out").rglob("index.json"))
            stops += 1
    assert stops >= 3
    assert content(tmp_path / "out") == unbroken


def test_a_trained_tokenizer_survives_a_stop(tmp_path, texts, prepare, monkeypatch):
    """A run that resumes takes the tokenizer that was trained, and training it twice gives the same one."""
    (tmp_path / "x.jsonl").write_bytes(json_lines(texts))
    prepare(tmp_path / "x.jsonl", tmp_path / "whole", tokenizer="train:300", eos_token=None)
    with monkeypatch.context() as patch:
        patch.setattr(units.Unit, "_finish", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            prepare(tmp_path / "x.jsonl", tmp_path / "out", tokenizer="train:300", eos_token=None)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers_, "train", None)
        prepare(tmp_path / "x.jsonl", tmp_path / "out", tokenizer="train:300", eos_token=None)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert read_back(tmp_path / "out" / "train") == texts


def test_complete_it_says_so_changed_it_refuses(prepare, tmp_path, texts, capsys):
    """Same again: nothing is done. Other settings or another input: refused with what changed; --overwrite replaces."""
    source, out = tmp_path / "x.jsonl", tmp_path / "out"
    source.write_bytes(json_lines(texts))
    prepare(source, out)
    before = (out / "train" / "index.json").stat().st_mtime_ns
    prepare(source, out, workers=2)
    assert (
        "complete already" in capsys.readouterr().out
        and (out / "train" / "index.json").stat().st_mtime_ns == before
    )
    with pytest.raises(
        UserError,
        match="documents was 'file' and is 'lines'. Choose another folder, or --overwrite",
    ):
        prepare(source, out, documents="lines")
    source.write_bytes(json_lines(texts[:3]))
    with pytest.raises(UserError, match="the input changed"):
        prepare(source, out)
    prepare(source, out, overwrite=True)
    assert read_back(out / "train") == texts[:3]
    (out / "train" / "00000.bin").unlink()
    with pytest.raises(UserError, match="00000.bin: can't be read"):
        prepare(source, out)


@pytest.mark.parametrize("name", ["dataset.json", ".progress/settings.json"])
def test_what_another_version_wrote_is_refused_and_what_has_no_version_is_read(
    name, prepare, tmp_path, texts, monkeypatch
):
    """Datasets from before these files said what they are resume and are complete as they were."""
    source, out = tmp_path / "x.jsonl", tmp_path / "out"
    source.write_bytes(json_lines(texts))
    with monkeypatch.context() as patch:
        if name != "dataset.json":
            patch.setattr(units.Unit, "_finish", lambda *_: (_ for _ in ()).throw(Killed))
        with contextlib.suppress(Killed):
            prepare(source, out)
    content = json.loads((out / name).read_text())
    for changes, said in (
        ({"version": 2}, "a mamba_fsdp dataset of version 2, which a newer version"),
        (
            {"format": "elsewhere"},
            "written as 'elsewhere'; this program reads 'mamba_fsdp dataset'",
        ),
    ):
        (out / name).write_text(json.dumps({**content, **changes}))
        with pytest.raises(UserError, match=f"{name}: {said}"):
            prepare(source, out)
    del content["format"], content["version"]
    (out / name).write_text(json.dumps(content))
    prepare(source, out)
    assert read_back(out / "train") == texts


def test_a_mistake_can_be_mended_without_ceremony(prepare, tmp_path, texts):
    """What failed before anything was written binds nobody: the right command simply works, in the same folder."""
    (tmp_path / "x.jsonl").write_bytes(json_lines(texts, "body"))
    with pytest.raises(UserError, match="no column 'text'"):
        prepare(tmp_path / "x.jsonl", tmp_path / "out")
    with pytest.raises(UserError, match="not in its vocabulary"):
        prepare(tmp_path / "x.jsonl", tmp_path / "out", text_column="body", eos_token="</s>")
    prepare(tmp_path / "x.jsonl", tmp_path / "out", text_column="body")
    assert read_back(tmp_path / "out" / "train") == texts


def test_an_input_that_changes_meanwhile_is_refused(prepare, tmp_path, texts, monkeypatch):
    """A store never mixes two states of its input."""
    source = tmp_path / "x.jsonl"
    source.write_bytes(json_lines(texts))
    real = units.Unit._finish
    monkeypatch.setattr(
        units.Unit, "_finish", lambda unit, lease: (source.write_text("{}"), real(unit, lease))[1]
    )
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(source, tmp_path / "out")


def test_a_folder_of_someone_else_is_left_alone(prepare, tmp_path, texts):
    """Neither with nor without --overwrite is a file touched that this program did not write."""
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "out" / "train").mkdir(parents=True)
    (tmp_path / "out" / "train" / "thesis.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(
            UserError, match="not empty and not made by this program .it holds train"
        ):
            prepare(tmp_path / "x.txt", tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out" / "train" / "thesis.txt").read_text() == "precious"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]
    with pytest.raises(UserError, match="x.txt: is a file; name a folder"):
        prepare(tmp_path / "x.txt", tmp_path / "x.txt")


def test_a_note_beside_a_dataset_and_torn_state_files_are_no_obstacle(prepare, tmp_path):
    """What a kill leaves of a file being written is hidden; a dataset's folder is this program's, whatever lies in it
    too."""
    (tmp_path / "x.txt").write_text("one\n\ntwo")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".dataset.json.0123.tmp").write_text("{")
    options = dict(documents="blank_line", validation_fraction=0.5)
    prepare(tmp_path / "x.txt", tmp_path / "out", **options)
    (tmp_path / "out" / "note.txt").write_text("keep")
    prepare(tmp_path / "x.txt", tmp_path / "out", **options, overwrite=True)
    assert (tmp_path / "out" / "note.txt").read_text() == "keep" and (
        tmp_path / "out" / "dataset.json"
    ).exists()


@pytest.fixture
def fast_leases(monkeypatch):
    monkeypatch.setattr(lease_, "SECONDS_BETWEEN_RENEWALS", 0.02)
    monkeypatch.setattr(lease_, "SECONDS_BETWEEN_LOOKS", 0.02)


@pytest.fixture
def at_work(tmp_path, fast_leases):
    """at_work(name) -> the lease of a living process on that unit of out, or on another step."""
    leases = []

    def start(name):
        (tmp_path / "out" / ".progress").mkdir(parents=True, exist_ok=True)
        leases.append(lease_.Lease(tmp_path / "out" / ".progress" / f"{name}.lease"))
        assert leases[-1].try_take()
        return leases[-1]

    yield start
    for lease in leases:
        lease.give_back()


def test_what_another_process_is_at_is_left_to_it(prepare, tmp_path, at_work):
    """Without --part the command is refused, and --overwrite too, until it ends."""
    (tmp_path / "x.txt").write_text("text")
    lease = at_work("00000")
    with pytest.raises(
        UserError, match=f"out: another process is writing here .process {os.getpid()} on "
    ):
        prepare(tmp_path / "x.txt", tmp_path / "out")
    with pytest.raises(
        UserError, match=f"out: process {os.getpid()} on .* is writing here; wait for it"
    ):
        prepare(tmp_path / "x.txt", tmp_path / "out", overwrite=True)
    lease.give_back()
    prepare(tmp_path / "x.txt", tmp_path / "out")


@contextlib.contextmanager
def largest_file(size):
    """Writes beyond `size` bytes fail, as on a full disk."""
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.slow
def test_a_full_disk_is_said_and_then_gone_on_from(large_input, prepare, unbroken, tmp_path):
    """No store looks whole; with space again, the same command ends with the same bytes."""
    settings = dict(shard_tokens=100_000, validation_fraction=0.1, save_seconds=0)
    said = "can't be written .*free some space, then the same command resumes"
    with largest_file(150_000), pytest.raises(UserError, match=said):
        prepare(large_input, tmp_path / "out", **settings)
    assert not list((tmp_path / "out").rglob("index.json"))
    prepare(large_input, tmp_path / "out", **settings)
    assert content(tmp_path / "out") == unbroken


def test_a_worker_that_dies_is_an_error(prepare, tmp_path, monkeypatch):
    """The loss of a worker ends the run with a reason; it never hangs."""
    (tmp_path / "x.txt").write_text("text")
    # Sent by name: the worker calls os._exit with a list, and dies of it.
    monkeypatch.setattr(workers, "_tokenize", os._exit)
    real = workers._chunks
    monkeypatch.setattr(workers, "_chunks", lambda blocks: [3 for _ in real(blocks)])
    with pytest.raises(UserError, match="a worker process was killed"):
        prepare(tmp_path / "x.txt", tmp_path / "out")


# ---------------------------------------------------------------- tokenizers


def test_a_saved_tokenizer_loads_in_transformers(prepare, tmp_path, texts):
    """The store's tokenizer folder is one of transformers', with the store's ids, eos and no truncation; and it can be
    named."""
    from transformers import AutoTokenizer

    (tmp_path / "x.jsonl").write_bytes(json_lines(texts))
    prepare(tmp_path / "x.jsonl", tmp_path / "out")
    store = TokenStore(tmp_path / "out" / "train")
    theirs = AutoTokenizer.from_pretrained(store.tokenizer_path)
    assert theirs.eos_token_id == store.eos and len(theirs) == store.vocab_size
    assert (
        theirs(texts[0], add_special_tokens=False)["input_ids"]
        == next(stored_documents(store))[:-1].tolist()
    )
    prepare(
        tmp_path / "x.jsonl",
        tmp_path / "again",
        tokenizer=str(store.tokenizer_path),
        eos_token=None,
    )
    again = TokenStore(tmp_path / "again" / "train")
    assert [d.tolist() for d in stored_documents(again)] == [
        d.tolist() for d in stored_documents(store)
    ]
    assert AutoTokenizer.from_pretrained(again.tokenizer_path).eos_token_id == store.eos


def test_truncation_and_padding_in_a_tokenizer_cut_no_document(prepare, tmp_path, texts, tokenizer):
    """A tokenizer saved with a largest length, padding and added special tokens stores whole documents all the same."""
    backend = tokenizers_.Tokenizer.from_file(tokenizer)
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(tmp_path / "short.json"))
    (tmp_path / "x.jsonl").write_bytes(json_lines(texts))
    prepare(tmp_path / "x.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "short.json"))
    assert read_back(tmp_path / "out" / "train") == texts


def test_a_tokenizer_without_an_eos_asks_for_one(prepare, tmp_path, tokenizer):
    """No eos, or one that the vocabulary lacks, is an error that names the option."""
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(
        UserError, match=r"give one with --eos_token \(its special tokens: <\|endoftext\|>\)"
    ):
        prepare(tmp_path / "x.txt", tmp_path / "out", eos_token=None)
    with pytest.raises(UserError, match="eos_token '</s>' is not in its vocabulary"):
        prepare(tmp_path / "x.txt", tmp_path / "out2", eos_token="</s>")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match="bad.json can't be read"):
        prepare(tmp_path / "x.txt", tmp_path / "out3", tokenizer=str(tmp_path / "bad.json"))


def test_training_a_tokenizer_reads_no_more_than_its_sample(tmp_path, texts):
    """Whatever the input's size, the sample is bounded, and comes from the breadth of the files."""
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text("x" * 1000)
    source = text.open_source(str(tmp_path), DatasetConfig())
    with pytest.MonkeyPatch.context() as patch:
        for module in (readers, text):
            patch.setattr(module, "BLOCK_BYTES", 100)
        blocks = list(source.sample(4000))
    assert sum(block.size for block in blocks) <= 5000
    assert len({block.name for block in blocks}) > 30
    assert sum(block.size for block in source.sample(10**6)) == 40_000


# ---------------------------------------------------------------- the built-in corpus, the verb


@pytest.mark.slow
def test_the_built_in_corpus_is_the_standard_library():
    """Sorted, readable, without installed packages."""
    files = text.corpus_files()
    assert any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in path.parts for path in files)
    assert files == text.corpus_files() and sum(path.stat().st_size for path in files) > 5_000_000


def test_default_folder():
    """OUT is named after the input where that has a name."""
    names = ("builtin", "a/b.jsonl.gz", "roneneldan/TinyStories", "c/")
    assert [str(get_dataset.default_folder(name)) for name in names] == [
        "data/builtin",
        "data/b",
        "data/TinyStories",
        "data/c",
    ]
    with pytest.raises(UserError, match="give OUT too"):
        get_dataset.default_folder("corpus/*.txt")


def test_help_lists_every_option_and_imports_nothing_heavy(tmp_path):
    """--help names each option with its true default, and answers before anything slow is imported."""
    page = command("--help", cwd=tmp_path).stdout
    for leaf in dataclasses.fields(DatasetConfig):
        default = "false" if leaf.default is False else leaf.default
        line = next(line for line in page.splitlines() if line.startswith(f"  --{leaf.name}="))
        assert line.split()[0] == f"--{leaf.name}={default}", line
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", ROOT / "get_dataset.py", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    ).stderr
    assert not any(
        f" {name}\n" in loaded
        for name in ("torch", "transformers", "datasets", "tokenizers", "pyarrow", "numpy")
    )


def test_as_its_users_run_it(tmp_path, texts):
    """Plain lines without a terminal, what was written, exit 0; the second time at once; a mistake exits 2."""
    (tmp_path / "mine.jsonl").write_bytes(json_lines(texts))
    first = command(
        "mine.jsonl", "--tokenizer=train:300", "--validation_fraction=0.1", cwd=tmp_path
    )
    assert first.returncode == 0 and first.stderr == "", first.stderr
    assert "data/mine/train: " in first.stdout and "tokens in 54 documents" in first.stdout
    again = command(
        "mine.jsonl", "--tokenizer=train:300", "--validation_fraction=0.1", cwd=tmp_path
    )
    assert (
        again.returncode == 0 and again.stdout == "data/mine is complete already; nothing to do\n"
    )
    assert command("mine.jsonl", cwd=tmp_path).returncode == 2


WAITS = {  # what every process runs first
    "a worker imports": """
import sys, time
if "spawn_main" in " ".join(sys.orig_argv):
    open("waits", "w")
    time.sleep(1)
""",
    "tokens are written": """
import sys, time
if "get_dataset.py" in sys.orig_argv[1]:
    sys.path.insert(0, sys.orig_argv[1].rpartition("/")[0])
    from mamba_fsdp.data import units
    real = units.Unit._write
    units.Unit._write = lambda *given: (real(*given), open("waits", "w"), time.sleep(600))
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", WAITS)
def test_ctrl_c_says_how_to_go_on(moment, tmp_path, large_input, tokenizer):
    """Ctrl-C ends with one hint, exit 130 and no traceback, though the whole terminal's processes get it."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first/sitecustomize.py").write_text(WAITS[moment])
    process = subprocess.Popen(
        [
            sys.executable,
            ROOT / "get_dataset.py",
            large_input,
            "out",
            f"--tokenizer={tokenizer}",
            f"--eos_token={tokenizers_.END_OF_TEXT}",
            "--workers=2",
        ],
        cwd=tmp_path,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "first")},
    )
    while not (tmp_path / "waits").exists() and process.poll() is None:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 130, error
    assert "the same command resumes from here" in error and "Traceback" not in error, error


@pytest.mark.parametrize(
    "moment, then", [("reads", "ended"), ("has read the last", "ended"), ("merges", "merges")]
)
def test_ctrl_c_is_heard_while_a_tokenizer_is_trained(moment, then, monkeypatch):
    """The library that trains it looks for no signal, so it works in a thread beside the one that does; and that thread
    ends first where it is still reading, for Python aborts otherwise."""
    state, end, awaited = [], threading.Event(), threading.Event()

    class Awaited(threading.Thread):
        def join(self, timeout=None):
            awaited.set()
            super().join(timeout)

    def texts():
        yield "a text"
        if moment != "merges":
            os.kill(os.getpid(), signal.SIGINT)
        while moment == "reads":
            yield "reads until it is stopped"
        assert moment == "merges" or awaited.wait(60)

    class Deaf:
        def train_from_iterator(self, texts, _):
            try:
                collections.deque(texts, 0)
                state.append("merges")
                os.kill(os.getpid(), signal.SIGINT)
                end.wait(60)
            except KeyboardInterrupt:
                state.append("ended")
                raise

    monkeypatch.setattr(tokenizers_.threading, "Thread", Awaited)
    with pytest.raises(KeyboardInterrupt):
        tokenizers_._train(Deaf(), texts(), None)
    assert state == [then]
    end.set()
