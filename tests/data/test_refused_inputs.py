"""A mistake on the command line of get_dataset.py, or in its input, is one line that names the place and says what to do."""

import gzip
import os
import shlex

import datasets
import pytest

from mamba_fsdp.verbs import tokenize as get_dataset
from tests.support.others_tokens import write_layout

FILES = {
    "texts/a.txt": b"some text",
    "blank/a.txt": b" \n",
    "pair/a.txt": b"good",
    "pair/b.txt": b"bad \xff",
    "bad.txt": b"fine, \xff not",
    "utf16.txt": "text".encode("utf-16"),
    "cut.jsonl": b'{"text": "a"}\n{"text": ',
    "nested.jsonl": b"[" * 200_000,
    "other.jsonl": b'{"txt": "a"}',
    "number.jsonl": b'{"text": 3}',
    "half.jsonl": b'{"text": "\\ud800"}',
    "cut.jsonl.gz": gzip.compress(b'{"text": "a"}')[:-9],
    "words.csv": b"id,words\n1,a\n",
    "commas.csv": b"text\nhello, world\n",
    "short.csv": b"id,text\n1,a\nb\n",
    "twice.csv": b"text,text\na,b\n",
    "carets.csv": b"id^text\n1^a\n",
    "open.csv": b'id,text\n1,a\n2,"b\n3,c\n',
    "no.parquet": b"no parquet",
    "no.arrow": b"no arrow",
    "alone.npy": b"1234",
    "t.json": b"{}",
}
TABLES = {  # tables of others' tokens, as `datasets` saves them
    "null": {"tokens": [[5, None]]},
    "floats": {"tokens": [[0.5]]},
    "labels": {"input_ids": [[5, 6], [7]], "labels": [[-100, 6], [7]]},
    "mask": {"input_ids": [[5, 6], [7]], "attention_mask": [[1, 0], [1]]},
    "counts": {"content": ["a"], "tokens": [1]},
    "counts_alone": {"tokens": [1]},
    "numbers": {"text": [1.5]},
    "large": {"input_ids": [[5, 6], [300, 1, 2]]},
}
IDS = "--tokenizer=none --eos_token=0 --vocab_size=300"
MISTAKES = {  # words of the command: what is said
    "nowhere.txt out": "error: nowhere.txt: there is no such file or folder",
    "texts/b.txt out": "no such file or folder; did you mean a.txt?",
    "./loop out": "error: ./loop: there is no such file or folder; it is a link to loop",
    "a/b/c out": "error: a/b/c: there is no such file or folder",
    "'' out": "error: : there is no such file or folder",
    "'texts/*'": "error: texts/*: give OUT too, the folder for the stores",
    "astray out": "astray/a.txt: can't be read as text (No such file or directory)",
    "pipe out": "pipe/a.txt: is a pipe or a device",
    "texts texts": "not empty and not made by this program",
    "empty out": "empty: an empty folder",
    "blank out": "holds no text",
    "texts out --workers=2": "there is no such option",
    "texts out --tokenizer=a/b/c": "error: a/b/c: there is no such file or folder",
    "texts out --tokenizer=t.json": "tokenizer t.json: t.json can't be read",
    "texts out --tokenizer=train:9": "at least 257",
    "texts out --tokenizer=train:many": "at least 257",
    "texts out --tokenizer=train:1e12": "at most 16,777,216",
    "texts out --tokenizer=none": "give the token id that ends documents",
    f"texts out {IDS}": "the input holds text, but --tokenizer=none is for token ids",
    "large out": "holds token ids; name the tokenizer that made them",
    "texts out --documents=pages": "write file, lines",
    "texts out --part=2/2": "--part=2/2",
    "texts out --split=test": "no split of that name",
    "texts out --splits=official": "not all named after the splits train, validation and test",
    "bad.txt out": "bad.txt: can't be read as text (its text is not UTF-8; convert it: iconv -f ISO",
    "pair out": "; --skip_unreadable skips them",
    "utf16.txt out": "not UTF-8; convert it: iconv -f UTF-16 -t",
    "cut.jsonl out": "cut.jsonl: can't be read as json (line 2 is not JSON",
    "nested.jsonl out": "is not JSON",
    "other.jsonl out": "line 1 has no 'text'; it has: txt; name one with --text_column",
    "number.jsonl out": "'text' is int, not text or token ids",
    "half.jsonl out": "surrogates not allowed",
    "cut.jsonl.gz out": "can't be read as json",
    "words.csv out": "line 2 has no 'text'; it has: id, words; name one",
    "commas.csv out": "line 2 has more fields than the header",
    "short.csv out": "line 3 has fewer fields than the header",
    "twice.csv out": "its header has 'text' twice",
    "carets.csv out": "one field, 'id^text': if it should be several, name their",
    "open.csv out": "after line 2: unexpected end of data",
    "no.parquet out": "can't be read as parquet",
    "no.arrow out": "not an Arrow file",
    "alone.npy out": "alone.npy.size, which says how many tokens it holds, is missing; copy it too",
    f"short.npy out {IDS}": "12 bytes, but short.npy.size says 4",
    f"empty.npy out {IDS}": "0 bytes, but empty.npy.size says 0",
    f"uncounted.npy out {IDS}": "out of the loss",
    f"null out {IDS}": "null in place of a token",
    f"floats out {IDS}": "lists of double, not token ids",
    f"labels out {IDS}": "its labels leave tokens out of the loss",
    f"mask out {IDS}": "its attention_mask leave tokens out",
    f"counts out {IDS}": "there is no column 'text'; it has: content, tokens; name one",
    f"counts.parquet out {IDS}": "there is no column 'text'; it has: content, tokens",
    f"counts_alone out {IDS}": "the column holds int64, not text or lists of token ids",
    "numbers out": "the column holds double, not text",
    f"large out {IDS}": "token ids from 0 to 300, but the vocabulary has 300",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with all that the mistakes are about."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("texts", "blank", "pair", "empty", "pipe", "astray"):
        (folder / name).mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name, columns in TABLES.items():
        datasets.Dataset.from_dict(columns).save_to_disk(folder / name)
    datasets.Dataset.from_dict(TABLES["counts"]).to_parquet(folder / "counts.parquet")
    write_layout(folder / "short.npy", [[5, 6, 7]])
    (folder / "short.npy.size").write_text("4")
    (folder / "empty.npy").touch()
    (folder / "empty.npy.size").write_text("0")
    write_layout(folder / "uncounted.npy", [[5, 6, 7]], counts=False)
    os.mkfifo(folder / "pipe/a.txt")
    (folder / "astray/a.txt").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(inputs, tmp_path, monkeypatch, answer, words):
    monkeypatch.chdir(inputs)
    typed = shlex.split(words.replace(" out", f" {tmp_path}/out"))
    code, _, told = answer(get_dataset, *typed)
    assert code == 2 and MISTAKES[words] in told
    assert told.count("\n") == 1 and told.startswith("error: ")
