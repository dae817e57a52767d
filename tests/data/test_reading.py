"""Tests mamba_fsdp.importing.reading: every format gives the same documents, and a text file can be divided into
several documents."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os

import pandas
import pyarrow
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mamba_fsdp.errors import UserError
from mamba_fsdp.importing import json_records, text_files
from mamba_fsdp.importing.json_records import find_text_field
from tests.support.corpora import read_input

# These texts are difficult for some formats. One of them contains the characters of the end-of-document token.
ODD_TEXTS = ["naïve 日本語 🙂", "  leading space", "two\nlines", 'quote " and, comma', "NA", "12"]
ODD_TEXTS += ["a page about <|endoftext|> and its use", " \n", ""]


def arrow_stream(rows):
    table = pyarrow.Table.from_pandas(rows)
    stream = io.BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def in_every_format(texts):
    """Returns {file name: content} with the same texts in every format."""
    rows = pandas.DataFrame({"id": 1, "text": texts, "": ""})
    lines = rows.to_json(orient="records", lines=True).encode()
    files = {
        "a.jsonl": lines,
        "bom.jsonl": b"\xef\xbb\xbf" + lines,
        "list.json": b"\n \n" + rows.to_json(orient="records").encode(),
        "a.jsonl.gz": gzip.compress(lines),
        "a.ndjson.zst": zstandard.compress(lines),
        "a.jsonl.bz2": bz2.compress(lines),
        "a.jsonl.xz": lzma.compress(lines),
        "lines_in_gzip.json.xz": gzip.compress(lines),
        "pretty.json": "\n".join(json.dumps({"text": text}, indent=1) for text in texts).encode(),
        "one_line.json": b"".join(lines.splitlines()),
        "cr.json": lines.replace(b"\n", b"\r"),
        "columns.json": json.dumps({"id": [1] * len(texts), "text": texts}).encode(),
        "numbered.json": rows.to_json().encode(),
        "strings.jsonl": "\n".join(map(json.dumps, texts)).encode(),
        "strings.json": json.dumps(texts).encode(),
        "a [1].parquet": rows.to_parquet(row_group_size=2),
        "a::b.parquet": rows.astype({"text": "category"}).to_parquet(),
        "a.arrow": arrow_stream(rows),
    }
    if texts:
        files["within.json"] = json.dumps({"n": 1, "data": rows.to_dict("records")}).encode()
    form = {"index": False, "quoting": csv.QUOTE_ALL}
    for delimiter in ",;\t|":
        files[f"{ord(delimiter)}.csv"] = rows.to_csv(sep=delimiter, **form).encode()
    files["cr.csv"] = rows.to_csv(lineterminator="\r", **form).encode()
    files["comma_ends_rows.csv"] = b"id,text\n" + rows.to_csv(header=False, **form).encode()
    return files


# A CSV file that contains NUL is refused.
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@settings(max_examples=15)
@example(ODD_TEXTS)
@given(st.lists(ANY_TEXT, max_size=6))
def test_every_format_gives_the_same_documents(tmp_path_factory, texts):
    """Files of every format with the same texts give the same documents. A file can be without documents, a document
    of white space is read as an empty one, and a path can contain bytes that are not UTF-8."""
    folder = tmp_path_factory.mktemp("in") / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    expected = ["" if text.isspace() else text for text in texts]
    for name, content in in_every_format(texts).items():
        (folder / name).write_bytes(content)
        assert read_input(folder / name) == expected, name


TEXT = "one\ntwo\r\n\r\n \nthree<sep>four\n\n\n"


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("file", [TEXT]),
        ("lines", ["one", "two", "three<sep>four"]),
        ("blank_line", ["one\ntwo", "three<sep>four"]),
        ("separator:<sep>", ["one\ntwo\r\n\r\n \nthree", "four"]),
    ],
)
def test_the_documents_option_divides_text_files(tmp_path, monkeypatch, documents, expected):
    """--documents divides a text file into documents, whatever the size of a read."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    (tmp_path / "blank.txt").write_text(" \n")
    for block in (1 << 20, 7):
        monkeypatch.setattr(text_files, "BLOCK", block)
        found = read_input(tmp_path, documents=documents)
        assert [document for document in found if document] == expected


@pytest.mark.parametrize("documents", ["file", "lines"])
def test_a_document_too_long_to_encode_is_refused(tmp_path, monkeypatch, documents):
    """A document with more than MAX_TEXT_LENGTH characters is an error with a remedy, whatever the size of a read."""
    monkeypatch.setattr(text_files, "MAX_TEXT_LENGTH", 1000)
    monkeypatch.setattr(text_files, "BLOCK", 7)
    (tmp_path / "a.txt").write_text("x" * 1000)
    assert read_input(tmp_path, documents=documents) == ["x" * 1000]
    (tmp_path / "a.txt").write_text("x" * 1001)
    with pytest.raises(UserError, match='more than 1,000 characters; see "Clean and'):
        read_input(tmp_path, documents=documents)


ENCODED = {  # {content of a file: the text that is read with --encoding=cp1252}
    "José".encode("cp1252"): "José",
    "naïve José".encode() + "José".encode("cp1252"): "naïve JoséJosé",
    "naïve".encode("utf-16"): "naïve",
    "naïve".encode(): "naïve",
}


def test_an_encoding_is_used_only_for_bytes_that_are_not_utf_8(tmp_path):
    for content, text in ENCODED.items():
        (tmp_path / "a.txt").write_bytes(content)
        assert read_input(tmp_path, encoding="cp1252") == [text]
    (tmp_path / "a.txt").write_bytes(b"\x81")
    with pytest.raises(UserError, match="byte 1, on line 1, is 0x81, which is not valid cp1252"):
        read_input(tmp_path, encoding="cp1252")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_a_record_that_is_too_long_is_named_with_its_line(tmp_path, monkeypatch, name):
    monkeypatch.setattr(text_files, "MAX_LINE_LENGTH", 99)
    monkeypatch.setattr(json_records, "MAX_LINE_LENGTH", 99)
    start = {"a.jsonl": '{"text": "a"}\n', "a.csv": "text\n", "a.json": ""}[name]
    (tmp_path / name).write_text(start + '{"text": "' + "b" * 99 + '"}')
    with pytest.raises(UserError, match="(line [12] has|value of) 99 characters or more; see"):
        read_input(tmp_path)


def test_zeros_after_a_gzip_file_are_padding(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text") + bytes(512))
    assert read_input(tmp_path) == ["text"]


def test_fields_next_to_the_text_can_have_any_value(tmp_path):
    """Fields next to the text can change their type and order from record to record. The `datasets` library fails on
    such files."""
    rows = [
        {"text": "one", "meta": None},
        {"text": "two", "meta": "a"},
        {"meta": {"b": [1, "c"]}, "text": "2020-01-01"},
        {"text": None},
    ]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert read_input(tmp_path) == ["one", "two", "2020-01-01", ""]


def test_a_dot_selects_a_field_within_a_field(tmp_path):
    rows = pandas.DataFrame({"doc": [{"text": "inside"}, None]})
    rows.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    rows.to_parquet(tmp_path / "b.parquet")
    assert read_input(tmp_path, text_column="doc.text") == ["inside", "", "inside", ""]


def test_the_suggested_column_is_the_longest_text_or_else_token_ids():
    assert find_text_field({"id": "1", "words": "some text", "ids": [1, 2]}) == "words"
    assert find_text_field({"n": 1, "ids": [1, 2]}) == "ids"
    assert find_text_field({"n": 1}) == ""
