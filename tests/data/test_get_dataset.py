"""get_dataset.py on text: what becomes a document, what is refused, and that a killed run's bytes are those of one that
was left alone."""

import csv
import gzip
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mamba_fsdp.data import corpus, merging, reading, tokenize
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.tokenize import for_validation
from mamba_fsdp.data.tokenizer import load_words
from mamba_fsdp.errors import UserError
from mamba_fsdp.run import lease
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.verbs import tokenize as get_dataset
from tests.support.corpora import content, make_texts, read_back, stored_documents
from tests.support.processes import run_program, wait_until
from tests.support.projects import PROJECT

pytestmark = pytest.mark.torch22

# One spells the token that ends documents.
ODD_TEXTS = ["naïve 日本語 🙂", "  leading space", "two\nlines", 'quote " and, comma', "NA", "12"]
ODD_TEXTS += ["a page about <|endoftext|> and its use"]


CSV_FORMS = {
    "a": {},
    "cr": {"lineterminator": "\r", "quoting": csv.QUOTE_ALL},
    "semicolons": {"sep": ";"},
    "tabs": {"sep": "\t"},
    "bars": {"sep": "|"},
}


def as_json_lines(texts):
    return "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts))


def write_formats(folder, texts):
    """The same rows in every format; {name of the file: how it is read}."""
    folder.mkdir()
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    lines = as_json_lines(texts).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "list.json").write_text("\n \n" + json.dumps([{"text": text} for text in texts]))
    (folder / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.ndjson.zst").write_bytes(zstandard.compress(lines))
    rows = pandas.DataFrame({"id": 1, "text": texts, "": ""})
    for name, form in CSV_FORMS.items():
        rows.to_csv(folder / f"{name}.csv", index=False, **form)
    (folder / "carets.csv").write_bytes(rows.to_csv(index=False, sep="^").encode())
    with open(folder / "comma_at_the_end_of_rows.csv", "w") as file:
        file.write("id,text\n" + rows.to_csv(index=False, header=False))
    pyarrow.parquet.write_table(table, folder / "a [1].parquet", row_group_size=2)
    pyarrow.parquet.write_table(table, folder / "a::b.parquet")
    with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    coded = pyarrow.table({"text": table["text"].combine_chunks().dictionary_encode()})
    pyarrow.parquet.write_table(coded, folder / "coded.parquet")
    return sorted(path.name for path in folder.iterdir())


def test_every_format_gives_the_same_documents(prepare, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")  # no UTF-8
    for name in write_formats(tmp_path / "in", ODD_TEXTS):
        (tmp_path / "in").rename(folder)
        prepare(folder / name, tmp_path / name, delimiter="^" if name == "carets.csv" else "")
        assert read_back(tmp_path / name / "train") == ODD_TEXTS, name
        folder.rename(tmp_path / "in")
    datasets.Dataset.from_dict({"text": ODD_TEXTS}).save_to_disk(tmp_path / "saved")
    prepare(tmp_path / "saved", tmp_path / "of_saved")
    assert read_back(tmp_path / "of_saved" / "train") == ODD_TEXTS


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
@pytest.mark.parametrize("block", [1 << 20, 7])
def test_what_a_document_of_a_text_file_is(
    prepare, tmp_path, monkeypatch, documents, expected, block
):
    """However little is read at once."""
    monkeypatch.setattr(reading, "BLOCK", block)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    (tmp_path / "empty.txt").write_text(" \n")
    prepare(tmp_path / "*.txt", tmp_path / "out", documents=documents)
    assert read_back(tmp_path / "out" / "train") == expected


WORDS = ["".join(random.Random(n).choices("abcdefgh", k=40)) for n in range(50)]
TRAINING = {"special_tokens": ["<end>", "[UNK]"], "show_progress": False}
BPE = (models.BPE(), trainers.BpeTrainer(**TRAINING))
WORD_PIECE = (models.WordPiece(), trainers.WordPieceTrainer(**TRAINING))
UNIGRAM = (models.Unigram(), trainers.UnigramTrainer(**TRAINING, unk_token="[UNK]"))
LOOK_BACK = {  # at what stands before a word
    "Metaspace": (*BPE, pre_tokenizers.Metaspace()),
    "ByteLevel": (*BPE, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "Bert": (*WORD_PIECE, pre_tokenizers.BertPreTokenizer()),
    "Unigram": (*UNIGRAM, pre_tokenizers.Metaspace()),
}


@pytest.mark.parametrize("name", LOOK_BACK)
def test_a_long_document_has_the_tokens_of_the_whole(prepare, tmp_path, name):
    model, trainer, pre_tokenizer = LOOK_BACK[name]
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(WORDS, trainer)
    saved = str(tmp_path / "t.json")
    tokenizer.save(saved)
    text = " ".join(WORDS * 1500)[:3_000_000]
    (tmp_path / "a.txt").write_text(text)
    prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer=saved, eos_token="<end>")
    (found,) = stored_documents(TokenStore(tmp_path / "out" / "train"))
    assert found.tolist() == [*tokenizer.encode(text).ids, tokenizer.token_to_id("<end>")]


@pytest.mark.parametrize("documents", ["file", "lines"])
def test_a_document_too_long_to_encode_is_refused(prepare, tmp_path, monkeypatch, documents):
    """However little of it is read at once, and with a way to import it."""
    monkeypatch.setattr(reading, "LONGEST_TEXT", 1000)
    monkeypatch.setattr(reading, "BLOCK", 7)
    (tmp_path / "a.txt").write_text("x" * 999 + "\n" + "y" * 1001)
    with pytest.raises(
        UserError, match="a.txt: .* more than 1,000 characters.*--documents, or.*split"
    ):
        prepare(tmp_path / "a.txt", tmp_path / "out", documents=documents)


def test_a_long_line_is_read_in_linear_time(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 10)
    (tmp_path / "a.txt").write_text("x" * 200_000)
    began = time.process_time()
    file = corpus.InputFile(str(tmp_path / "a.txt"), "text")
    (document,) = reading.READERS["text"](file, DatasetConfig(documents="lines"))
    assert len(document.content) == 200_000 and time.process_time() - began < 2


def test_fields_beside_the_text_may_be_anything(prepare, tmp_path):
    """They change type and name from line to line; `datasets` alone fails on such files."""
    rows = [
        {"text": "one", "meta": None},
        {"text": "two", "meta": "a"},
        {"meta": {"b": [1, "c"]}, "text": "2020-01-01"},
        {"text": None},
        {"doc": 1, "text": ""},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare(tmp_path / "a.jsonl", tmp_path / "out")
    assert read_back(tmp_path / "out" / "train") == ["one", "two", "2020-01-01"]


def test_a_file_without_rows_is_no_fault(prepare, tmp_path):
    one = pyarrow.table({"text": ["one"]})
    pyarrow.parquet.write_table(one[:0], tmp_path / "0.parquet")
    pyarrow.parquet.write_table(one, tmp_path / "1.parquet")
    pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), one.schema).close()
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "saved")
    for name in ("a.jsonl", "a.csv", "a.txt", "b.csv"):
        (tmp_path / name).write_text("id,text\n" if name == "b.csv" else "")
    prepare(tmp_path, tmp_path / "out")
    assert read_back(tmp_path / "out" / "train") == ["one"]


def test_text_within_a_field(prepare, tmp_path):
    rows = [{"doc": {"text": "inside"}}, {"doc": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    prepare(tmp_path / "*", tmp_path / "out", text_column="doc.text")
    assert read_back(tmp_path / "out" / "train") == ["inside", "inside"]


def test_a_trained_tokenizer_has_the_eos_that_is_named(prepare, tmp_path):
    (tmp_path / "a.txt").write_text("some words")
    prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer="train:300", eos_token="<end>")
    store = TokenStore(tmp_path / "out/train")
    assert load_words(store.tokenizer_path).eos_token == "<end>"
    assert store.read(0, store.token_count).tokens[-1] == store.eos


def test_a_folder_is_walked_links_and_odd_names_too(prepare, tmp_path, capsys):
    root = tmp_path / "in"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.txt").write_text("linked")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "linked" / "back").symlink_to(root)
    (root / "again.txt").symlink_to(root / "linked" / "c.txt")
    (root / ".hidden.txt").write_text("hidden")
    (root / "sub" / "notes.xyz").write_text("unknown")
    with open(os.fsencode(root) + b"/caf\xe9.txt", "w") as file:
        file.write("odd name")
    prepare(root, tmp_path / "out")
    assert sorted(read_back(tmp_path / "out" / "train")) == ["linked", "odd name"]
    told = capsys.readouterr().out
    assert "left out: 1 file without an ending that tells a format, such as 'notes.xyz'" in told
    assert "left out: 1 file named twice or linked to another, such as '/" in told


REFUSED = {  # file: (content, what is said of it)
    "a.txt": (b"fine, \xff not", "not UTF-8; convert it: iconv"),
    "utf16.txt": ("text".encode("utf-16"), "not UTF-8; convert it: iconv -f UTF-16 -t"),
    "c.jsonl": (b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
    "d.jsonl": (b'{"txt": "a"}', "line 1 has no 'text'"),
    "e.jsonl": (b'{"text": 3}', "'text' is int, not text or token ids"),
    "f.jsonl": (b'{"text": "\\ud800"}', "surrogates not allowed"),
    "g.csv": (b"id,words\n1,a\n", "line 2 has no 'text'; it has: id, words; name one"),
    "commas.csv": (b"text\nhello, world\n", "line 2 has more fields than the header"),
    "short.csv": (b"id,text\n1,a\nb\n", "line 3 has fewer fields than the header"),
    "twice.csv": (b"text,text\na,b\n", "its header has 'text' twice"),
    "carets.csv": (b"id^text\n1^a\n", "one field, 'id^text': if it should be several, name their"),
    "open.csv": (b'id,text\n1,a\n2,"b\n3,c\n', "after line 2: unexpected end of data"),
    "h.parquet": (b"no parquet", "can't be read as parquet"),
    "i.arrow": (b"no arrow", "not an Arrow file"),
    "j.jsonl.gz": (gzip.compress(b'{"text": "a"}')[:-9], "can't be read as json"),
    "l.npy": (b"1234", "is missing; copy it too"),
    "m.jsonl": (b"[" * 200_000, "is not JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cant_be_read_is_named_in_one_line(prepare, tmp_path, name):
    data, reason = REFUSED[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"0{name[1:].removesuffix('.gz')}").write_text(
        '{"text": "good"}' if ".json" in name else "good"
    )
    (tmp_path / "in" / name).write_bytes(data)
    paths = tmp_path / "in" / (name if name[-3:] in ("uet", "row", "npy", "csv") else "*")
    with pytest.raises(UserError) as said:
        prepare(paths, tmp_path / "out")
    message = str(said.value)
    assert str(tmp_path / "in" / name) in message and reason in message and "\n" not in message


@pytest.mark.parametrize("how", [{}, {"tokenizer": "train:300", "eos_token": ""}])
def test_bad_files_are_named_together_or_skipped(prepare, tmp_path, monkeypatch, capsys, how):
    """Also those that are bad behind a good beginning, and those that a tokenizer is trained on."""
    monkeypatch.setattr(tokenize, "TRAINING_SAMPLE", 1)  # from each file
    folder = tmp_path / "in"
    folder.mkdir()
    bad = ['{"text": "b"}\n{', '{"no": "c"}', '{"text": "e"}\n{"text": 3}']
    lines = {"a": '{"text": "a"}', "b": bad[0], "c": bad[1], "d": '{"text": "d"}', "e": bad[2]}
    for name, text in lines.items():
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "f.jsonl").symlink_to("nowhere")
    named = r"b.jsonl: .*line 2 is not JSON.*; nor can .*c.jsonl, .*e.jsonl, .*f.jsonl; --skip_unr"
    with pytest.raises(UserError, match=named):
        prepare(folder, tmp_path / "out", **how)
    assert prepare(folder, tmp_path / "out", skip_unreadable=True, **how)
    assert read_back(tmp_path / "out" / "train") == ["a", "b", "d", "e"]
    told = capsys.readouterr().out
    assert "4 files can't be read and are left out from the first fault on:\n" in told
    assert "c.jsonl: can't be read as json (line 1 has no 'text'" in told
    assert len(json.loads((tmp_path / "out/dataset.json").read_text())["unreadable"]) == 4


WRONG_COMMANDS = {
    "nowhere.txt out": "error: nowhere.txt: there is no such file or folder",
    "bad/b.jsonl out": "no such file or folder; did you mean a.jsonl?",
    "./nowhere out": "error: ./nowhere: there is no such file or folder",
    "./loop out": "error: ./loop: there is no such file or folder; it is a link to loop",
    "a/b/c out": "error: a/b/c: there is no such file or folder",
    "bad out": "error: bad/a.jsonl: can't be read as json",
    "astray out": "astray/a.txt: can't be read as text (No such file or directory)",
    "in out --tokenizer=a/b/c": "error: a/b/c: there is no such file or folder",
    "in out --split=test": "no split of that name",
    "in out --tokenizer=none": "give the token id that ends documents",
    "in out --documents=pages": "write file, lines",
    "in out --part=2/2": "--part=2/2",
    "in out --tokenizer=train:9": "at least 257",
    "in out --tokenizer=train:1e12": "at most 16,777,216",
    "pipe out": "pipe/a.txt: is a pipe or a device",
    "'' out": "error: : there is no such file or folder",
    "in out --workers=2": "there is no such option",
    "in out --splits=official": "not all named after the splits train, validation and test",
    "in in": "not empty and not made by this program",
    "empty out": "no file named",
    "blank out": "holds no text",
}


@pytest.mark.parametrize("words", WRONG_COMMANDS)
def test_a_wrong_command_is_told_in_one_line(tmp_path, monkeypatch, answer, words):
    monkeypatch.chdir(tmp_path)
    for name in ("in", "blank", "empty", "bad", "pipe", "astray"):
        (tmp_path / name).mkdir()
    (tmp_path / "in/a.txt").write_text("some text")
    (tmp_path / "blank/a.txt").write_text(" \n")
    (tmp_path / "bad/a.jsonl").write_text("{")
    os.mkfifo(tmp_path / "pipe/a.txt")
    (tmp_path / "astray/a.txt").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    code, _, told = answer(get_dataset, *shlex.split(words))
    assert code == 2 and WRONG_COMMANDS[words] in told
    assert told.count("\n") == 1 and told.startswith("error: ")


def test_what_may_not_be_read_is_not_called_missing(monkeypatch):
    """A folder above it forbids; root, who may read all, runs the tests."""

    stat = os.stat

    def refuse(path, **how):
        if str(path) == "a/b.txt":
            raise PermissionError(13, "Permission denied", path)
        return stat(path, **how)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(PermissionError):
        corpus.is_local("a/b.txt")


def no_route(place):
    raise OSError(101, "Network is unreachable")


def no_answer(place):
    time.sleep(60)
    no_route(place)


@pytest.mark.parametrize("connect", [no_route, no_answer])
def test_a_mistyped_name_is_told_at_once_and_the_hub_is_not_waited_for(
    tmp_path, monkeypatch, answer, connect
):
    """By libraries imported later: they are told not to ask it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(corpus, "getproxies", dict)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setattr(corpus.socket, "create_connection", connect)
    monkeypatch.setattr(corpus, "HUB_SECONDS", 0.1)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: 1 / 0)
    corpus.prepare_hub.cache_clear()
    (tmp_path / "mytexts").mkdir()
    _, _, told = answer(get_dataset, "mytxts", "out")
    first, second, last = told.splitlines()
    assert first.startswith("asking the Hugging Face Hub for mytxts: no file or folder")
    assert "cache" in second and last.startswith("error: mytxts: no file or folder here")
    assert first.endswith("did you mean mytexts?") and last.endswith("did you mean mytexts?")
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_official_splits_become_stores(prepare, tmp_path, monkeypatch):
    """Of a saved dataset, of files named after them (one of these a list of records), and of a name on the Hub."""
    texts = {"train": ["a", "b"], "validation": ["c"], "test": ["d"]}
    saved = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in texts.items()}
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "saved")
    files = tmp_path / "files"
    (files / "valid").mkdir(parents=True)
    (files / "wiki.train.json").write_text(json.dumps([{"text": text} for text in texts["train"]]))
    (files / "valid" / "x.jsonl").write_text(as_json_lines(texts["validation"]))
    (files / "wiki.test.jsonl").write_text(as_json_lines(texts["test"]))
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: list(texts))
    load = datasets.load_dataset

    def load_saved(name, *words, split, **more):
        if name == "some/corpus":
            return saved[split].to_iterable_dataset()
        return load(name, *words, split=split, **more)

    monkeypatch.setattr(datasets, "load_dataset", load_saved)
    for source in (tmp_path / "saved", files, "some/corpus"):
        out = tmp_path / f"of_{Path(source).name}"
        prepare(source, out, splits="official", validation_fraction=0.5)
        assert {name: read_back(out / name) for name in texts} == texts
        assert sorted(path.parent.name for path in out.glob("*/index.json")) == sorted(texts)
    (files / "wiki.train.json").unlink()
    with pytest.raises(UserError, match="not all named after"):
        prepare(files, tmp_path / "none", splits="official")


def test_a_name_on_the_hub_is_streamed_and_its_other_splits_left_out(
    prepare, tmp_path, monkeypatch, capsys
):
    asked = []
    splits = ["train", "validation"]

    def load(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        return datasets.Dataset.from_dict({"text": ODD_TEXTS}).to_iterable_dataset(num_shards=3)

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: splits)
    monkeypatch.setattr(datasets, "load_dataset", load)
    prepare("some/corpus", tmp_path / "out", config="de")
    assert read_back(tmp_path / "out" / "train") == ODD_TEXTS
    assert set(asked) == {("some/corpus", "de", "train", True)}
    assert "left out: validation (1 of 2 files)" in capsys.readouterr().out
    with pytest.raises(UserError, match="--split=dev: some/corpus has no split of that name"):
        prepare("some/corpus", tmp_path / "none", split="dev")
    with pytest.raises(UserError, match="config was de and is fr"):
        prepare("some/corpus", tmp_path / "out", config="fr")


# ---------------------------------------------------------------- validation


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 400), st.sampled_from([0.01, 0.1, 1 / 3, 0.5, 0.9]), st.integers(0, 3))
def test_the_share_held_out_is_exact_and_does_not_depend_on_batches(count, fraction, cuts):
    import numpy as np

    numbers = np.arange(count)
    whole = for_validation(numbers, fraction)
    parts = [for_validation(part, fraction) for part in np.array_split(numbers, cuts + 1)]
    assert (np.concatenate(parts) == whole).all() and not whole[0]
    assert abs(whole.sum() - count * fraction) <= 1


def test_documents_are_held_out_and_lost_to_neither_store(prepare, tmp_path, texts):
    (tmp_path / "a.jsonl").write_text(as_json_lines(texts))
    prepare(tmp_path / "a.jsonl", tmp_path / "out", validation_fraction=0.1)
    train, held_out = (read_back(tmp_path / "out" / name) for name in ("train", "validation"))
    assert len(held_out) == 6 and sorted(train + held_out) == sorted(texts)


def test_of_one_document_the_end_is_held_out(prepare, tmp_path, texts, capsys):
    (tmp_path / "a.txt").write_text("\n".join(texts))
    prepare(tmp_path / "a.txt", tmp_path / "out", validation_fraction=0.1)
    told = capsys.readouterr().out
    assert "tokens, since the documents are too few to hold a whole one out\n" in told
    assert told.count(" tokens in 1 document\n") == 2
    prepare(tmp_path / "a.txt", tmp_path / "whole")
    train, held_out, whole = (
        stored_documents(TokenStore(tmp_path / name))[0].tolist()
        for name in ("out/train", "out/validation", "whole/train")
    )
    assert train[:-1] + held_out == whole and len(train) > 8 * len(held_out) > 0


# ---------------------------------------------------------------- killed, interrupted, in parts


class Stop(BaseException):
    """A kill -9: nothing of ours catches it."""


@pytest.mark.parametrize(
    "how", [{"documents": "lines"}, {"tokenizer": "train:300", "eos_token": ""}]
)
def test_killed_at_any_write_and_started_again_the_bytes_are_the_same(
    prepare, tmp_path, monkeypatch, how
):
    """Each start writes one batch more than the one before it, and dies."""
    monkeypatch.setattr(tokenize, "BATCH_SIZE", 300)
    monkeypatch.setattr(tokenize, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(reading, "BLOCK", 200)
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text("\n".join(make_texts(12, seed=number)))
        (folder / f"{number}.jsonl").write_text(as_json_lines(make_texts(12, seed=10 + number)))
    how = {**how, "validation_fraction": 0.2, "shard_tokens": 300}
    prepare(folder, tmp_path / "whole", **how)
    real = tokenize._Part._write
    starts = 0

    def dies(self, *written):
        real(self, *written)
        left[0] -= 1
        if left[0] == 0:
            raise Stop

    while not (tmp_path / "killed" / "dataset.json").exists():
        starts += 1
        left = [starts]
        monkeypatch.setattr(tokenize._Part, "_write", dies)
        try:
            prepare(folder, tmp_path / "killed", **how)
        except Stop:
            pass
    assert starts > 4 and content(tmp_path / "killed") == content(tmp_path / "whole")


STANDS = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from mamba_fsdp.verbs import tokenize as get_dataset
from mamba_fsdp import command_line
from mamba_fsdp.data import tokenize
save = tokenize._Part._save
def stands(part, lease):
    save(part, lease)
    Path("saved").touch()
    time.sleep(600)
tokenize._Part._save = stands
tokenize.BATCH_SIZE = 1000
tokenize.SAVE_SECONDS = 0.0
command_line.run(get_dataset.main, get_dataset.page)
"""


# Python hears nothing while a library computes.
DEAF = """
import hashlib, sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from mamba_fsdp.verbs import tokenize as get_dataset
from mamba_fsdp import command_line
from mamba_fsdp.data import tokenizer
def train(*_):
    Path("training").touch()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
tokenizer.train = train
command_line.run(get_dataset.main, get_dataset.page)
"""


def stopped_by(number, folder, program, words, sign):
    """The exit code and what is said of a program that gets a signal when it has written the file `sign`."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, PROJECT, *words],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: (folder / sign).exists() or process.poll() is not None)
    process.send_signal(number)
    said = process.communicate()[1]
    (folder / sign).unlink()
    return process.returncode, said


def test_ctrl_c_is_heard_while_a_tokenizer_is_trained(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    code, said = stopped_by(signal.SIGINT, tmp_path, DEAF, ["a.txt", "out"], "training")
    assert code == 130 and "same command resumes" in said


@pytest.mark.slow
def test_kill_9_and_ctrl_c_resume_to_the_bytes_of_one_run(prepare, tmp_path, tokenizer, capsys):
    """Each process stands when it has saved one batch more than the one before it."""
    (tmp_path / "a.jsonl").write_text(as_json_lines(make_texts(100)))
    prepare(tmp_path / "a.jsonl", tmp_path / "whole", validation_fraction=0.01)
    words = ["a.jsonl", "out", f"--tokenizer={tokenizer}", "--eos_token=<|endoftext|>"]
    for number, expected in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        code, said = stopped_by(number, tmp_path, STANDS, words, "saved")
        assert code == expected and "Traceback" not in said
        assert ("out is unfinished; the same command resumes from here" in said) == (code == 130)
    last = run_program(sys.executable, PROJECT / "get_dataset.py", *words, cwd=tmp_path)
    assert last.returncode == 0 and re.search("^resuming after [1-9]", last.stdout, re.MULTILINE)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    prepare(tmp_path / "a.jsonl", tmp_path / "out", validation_fraction=0.01)
    assert "complete already" in capsys.readouterr().out
    with pytest.raises(UserError, match="shard_tokens was 268435456 and is 9"):
        prepare(tmp_path / "a.jsonl", tmp_path / "whole", validation_fraction=0.01, shard_tokens=9)


@pytest.mark.parametrize("files", [1, 7])
def test_parts_merged_hold_the_documents_of_one_process(prepare, tmp_path, files):
    """In the order of the input where each part has files of its own."""
    (tmp_path / "in").mkdir()
    for number in range(files):
        (tmp_path / "in" / f"{number}.jsonl").write_text(as_json_lines(make_texts(20, number)))
    how = {"tokenizer": "train:300", "eos_token": ""}
    prepare(tmp_path / "in", tmp_path / "whole", **how)
    (tmp_path / "parts/.progress").mkdir(parents=True)
    (tmp_path / "parts/.progress/9-of-3.lease").touch()  # of a part that is at work meanwhile
    for part in (2, 0, 1):
        done = prepare(tmp_path / "in", tmp_path / "parts", part=f"{part}/3", **how)
        assert done == (part == 1)
    found, expected = (read_back(tmp_path / name / "train") for name in ("parts", "whole"))
    if files == 1:
        found, expected = sorted(found), sorted(expected)
    assert found == expected
    assert not (tmp_path / "parts" / ".progress").exists()
    with pytest.raises(UserError, match="parts was 2 and is 3"):
        prepare(tmp_path / "in", tmp_path / "others", part="0/2", **how)
        prepare(tmp_path / "in", tmp_path / "others", part="0/3", **how)


def test_a_part_that_ends_while_another_puts_all_together_waits_for_that(
    prepare, tmp_path, monkeypatch
):
    """However long it takes. Another then removes the folder in which its lease would lie."""
    (tmp_path / "a.jsonl").write_text(as_json_lines(make_texts(20)))
    is_merging, may_end = threading.Event(), threading.Event()

    def slow_merge(*arguments):
        is_merging.set()
        may_end.wait()
        return merging.merge(*arguments)

    def part(number):
        return prepare(tmp_path / "a.jsonl", tmp_path / "out", part=f"{number}/2")

    monkeypatch.setattr(tokenize, "merge", slow_merge)
    monkeypatch.setattr(lease, "SECONDS_BETWEEN_RENEWALS", 0.05)
    monkeypatch.setattr(lease, "SECONDS_BETWEEN_LOOKS", 0.05)
    assert not part(0)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(part, 1)
        is_merging.wait()
        second = threads.submit(part, 0)
        time.sleep(1)  # many renewals
        waited = not second.done()
        may_end.set()
        assert waited and first.result() and second.result()
    assert not (tmp_path / "out/.progress").exists()


def test_overwriting_spares_an_import_that_runs(prepare, tmp_path, monkeypatch, texts):
    """Also another part's."""
    (tmp_path / "a.jsonl").write_text(as_json_lines(texts))
    monkeypatch.setattr(lease, "SECONDS_BETWEEN_RENEWALS", 0.05)
    monkeypatch.setattr(lease, "SECONDS_BETWEEN_LOOKS", 0.05)
    real = tokenize._Part._tokenize

    def meanwhile(*arguments):
        with pytest.raises(UserError, match="is in use by process .* wait for it"):
            prepare(tmp_path / "a.jsonl", tmp_path / "out", overwrite=True)
        real(*arguments)

    prepare(tmp_path / "a.jsonl", tmp_path / "out", part="0/2")
    with monkeypatch.context() as patched:
        patched.setattr(tokenize._Part, "_tokenize", meanwhile)
        assert prepare(tmp_path / "a.jsonl", tmp_path / "out", part="1/2")
    assert sorted(read_back(tmp_path / "out" / "train")) == sorted(texts)
    prepare(tmp_path / "a.jsonl", tmp_path / "out", overwrite=True)
    assert read_back(tmp_path / "out" / "train") == texts


def test_a_full_disk_is_told_and_resumed_from(prepare, tmp_path, monkeypatch, texts):
    (tmp_path / "a.jsonl").write_text(as_json_lines(texts))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(
            UserError, match="No space left.*fix that, then the same command resumes"
        ):
            prepare(tmp_path / "a.jsonl", tmp_path / "out")
    prepare(tmp_path / "a.jsonl", tmp_path / "out")
    assert read_back(tmp_path / "out/train") == texts


def test_what_a_kill_left_in_the_stores_is_removed(prepare, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text")
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(merging, "write_settings", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(tmp_path / "a.txt", out)
    (out / ".dataset.json.0a.tmp").touch()
    (out / "train/tokenizer/.tokenizer.json.0a.tmp").touch()
    prepare(tmp_path / "a.txt", out)
    assert read_back(out / "train") == ["some text"] and not [*out.rglob(".*")]


def test_input_that_changed_is_refused(prepare, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    prepare(tmp_path / "a.txt", tmp_path / "out")
    for text, change in (
        ("other text", "1 files, 9 bytes and is 1 files, 10 bytes; choose"),
        ("same size", "1 files, 9 bytes and is 1 files, 9 bytes with other paths or times; choose"),
        ("another text", "1 files, 9 bytes and is 1 files, 12 bytes; choose"),
    ):
        (tmp_path / "a.txt").write_text(text)
        with pytest.raises(UserError, match=f"input was {change} .*--overwrite"):
            prepare(tmp_path / "a.txt", tmp_path / "out")
    prepare(tmp_path / "a.txt", tmp_path / "out", overwrite=True)
    assert read_back(tmp_path / "out" / "train") == ["another text"]
