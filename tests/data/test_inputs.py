"""What people bring to get_dataset.py beside plain text: lists of JSON, fields within fields, token ids, others'
tokenizers."""

import json
import random
from collections import Counter

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from mamba_fsdp.data.documents import TextBlock, documents
from mamba_fsdp.data.text import open_source

from config.dataset_config import DatasetConfig
from config.train_config import DataConfig
from mamba_fsdp.data import documents as documents_
from mamba_fsdp.data import opening, readers, tokenize, tokenizer, units
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.errors import UserError
from tests.support.corpora import stored_documents

# ---------------------------------------------------------------- files that are one JSON list

# Other tests of this process turn subnormal numbers off.
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_subnormal=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def in_pieces(data, sizes):
    while data:
        size = sizes.randrange(1, 40)
        yield data[:size], 0.5
        data = data[size:]


def elements(data, seed=0):
    """What is read of a list, in pieces of any size."""
    read = [
        element
        for element, _ in readers.list_elements("x.json", in_pieces(data, random.Random(seed)))
    ]
    block = TextBlock("x.json", "json", [b'{"a": %b}' % element for element in read], 1.0, 1)
    return [value for _, value in documents_._json_records(block, DatasetConfig(text_column="a"))]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(VALUES, max_size=20), st.sampled_from([None, 0, 3]), st.booleans(), st.integers(0, 99)
)
def test_a_json_list_gives_its_elements_however_it_is_written_and_read(values, indent, ascii, seed):
    data = (
        "\ufeff".encode()
        + json.dumps(values, indent=indent, ensure_ascii=ascii).encode(errors="replace")
        + b"\n "
    )
    expected = json.loads(data.decode("utf-8-sig"))
    assert elements(data, seed) == expected


@pytest.mark.parametrize(
    "data, said",
    [
        (
            '[{"a": 1}, {"a": tru}, {"a": "' + 100 * "x" + '"}]',
            r"record 2 is no valid JSON \(Expecting value",
        ),
        (
            '[{"a": 1}, {"a": "x',
            r"record 2 is no valid JSON \(the list has no end; is the file truncated",
        ),
        ("[1, 2", "record 2 is no valid JSON .*truncated"),
        ("[1, 2 3]", "record 2 is no valid JSON"),
        ("[1, 2]]", "something stands behind the list's end, after record 2"),
        ("[1, -", "record 2 .*truncated"),
        ("[1 ", "record 1 is no valid JSON .the list has no end"),
        ("[", "record 1"),
        ("[1,]", "record 2 is no valid JSON"),
        ("[1,,2]", "record 2 is no valid JSON .it is empty"),
        ("[1}]", "record 1 is no valid JSON"),
        ("[] 1", "behind the"),
        ("[" + 100_000 * "[", "record 1"),
        ("[" + 100_000 * "[" + 100_001 * "]", "record 1 .*nested too deeply"),
        ("[1, {]", "record 2 .*the list has no end"),
        ('["a\\\\", "b\\", "c"]', "record 2 is no valid JSON"),
    ],
)
def test_what_is_no_json_list_is_said_with_the_record(data, said):
    with pytest.raises(UserError, match="x.json: .*" + said):
        elements(data.encode())


def test_a_wrong_element_is_found_without_reading_on():
    """A file of terabytes is not read to its end for it."""

    def stretches():
        yield b'[{"a": "1"}, {"a" 2}, ' + 100 * b'{"a": "3"}, ', 0.1
        raise AssertionError("read on")

    read = [
        next(found)[0] for found in [readers.list_elements("x.json", stretches())] for _ in range(3)
    ]
    with pytest.raises(UserError, match="record 2 is no valid JSON"):
        list(
            documents(
                TextBlock("x.json", "json", read, 1.0, 1), DatasetConfig(text_column="a"), Counter()
            )
        )


# ---------------------------------------------------------------- fields within fields

NESTED = [
    {"id": 1, "document": {"text": "first", "more": {"text": "a"}}},
    {"id": 2, "document": None},
    {"id": 3, "document": {"text": "third", "more": None}},
]


def write_nested(folder, kind):
    path = folder / f"x.{kind}"
    if kind in ("jsonl", "json"):
        lines = [json.dumps(row) for row in NESTED]
        path.write_text("\n".join(lines) if kind == "jsonl" else f"[{','.join(lines)}]")
    elif kind == "saved":
        datasets.Dataset.from_list(NESTED).save_to_disk(path)
    else:
        table = pyarrow.Table.from_pylist(NESTED)
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)
    return path


def contents(source):
    return [
        content
        for block in source.blocks()
        for content, _ in documents(block, source.options, Counter())
    ]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "saved"])
def test_a_field_within_a_field_is_named_with_dots(kind, tmp_path):
    path = str(write_nested(tmp_path, kind))
    assert contents(open_source(path, DatasetConfig(text_column="document.text"))) == [
        "first",
        "third",
    ]
    assert contents(open_source(path, DatasetConfig(text_column="document.more.text"))) == ["a"]
    for column, said in [
        ("document.txt", "no column '(document.)?txt'; it has: .*text, "),
        ("docs.text", "no column 'docs"),
        ("document.text.x", "'text' is str.*, without a field 'x'|no column 'document.text.x'"),
        ("document", "'document' is (dict|struct.*), not text"),
    ]:
        with pytest.raises(UserError, match=said):
            contents(open_source(path, DatasetConfig(text_column=column)))


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_field_within_a_field_of_a_datasets_name(streaming, tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list(NESTED)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: rows.to_iterable_dataset() if streaming else rows
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = DatasetConfig(text_column="document.text", streaming=streaming)
    assert contents(open_source("some/name", options)) == ["first", "third"]
    with pytest.raises(UserError, match="some/name: .*no column 'document.txt'"):
        contents(
            open_source("some/name", DatasetConfig(text_column="document.txt", streaming=streaming))
        )


def test_a_name_with_a_dot_in_it_is_a_name_first(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a.b": "whole", "a": {"b": "part"}}')
    pyarrow.parquet.write_table(pyarrow.table({"a.b": ["whole"]}), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        assert contents(open_source(str(tmp_path / name), DatasetConfig(text_column="a.b"))) == [
            "whole"
        ]


# ---------------------------------------------------------------- others' tokenizers

TEXT = [
    "Once upon a time  there were 1,234 na\u00efve words;\n\n\tx = f(y)\n",
    " and one \u4f60\u597d \U0001f600, too",
]


@pytest.mark.slow
@pytest.mark.torch22
def test_a_tokenizer_model_is_taken_with_the_file_that_says_what_it_is(tmp_path):
    """Of Llama's kind: transformers makes its fast form, which encodes as sentencepiece does."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(40 * [text.replace("\n", " ") for text in TEXT]),
        vocab_size=320,
        model_type="bpe",
        model_prefix=str(tmp_path / "tokenizer"),
        byte_fallback=True,
        split_digits=True,
        minloglevel=2,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    names = str(tmp_path), str(tmp_path / "tokenizer.model")
    for name in names:
        with pytest.raises(
            UserError,
            match="alone does not say how it is used; put its model's tokenizer_config.json",
        ):
            tokenizer.load(name)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "LlamaTokenizer",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
            }
        )
    )
    found, other = map(tokenizer.load, names)
    original = sentencepiece.SentencePieceProcessor(names[1])
    assert (
        found.eos == original.eos_id()
        and found.vocab_size == 320
        and found.identity == other.identity
    )
    for text in ("Once upon a time  there were 1,234 na\u00efve words;", TEXT[1].strip(), ""):
        assert found.backend.encode(text, add_special_tokens=False).ids == original.encode(text)


@pytest.mark.parametrize("slow", [transformers.ByT5Tokenizer, transformers.CanineTokenizer])
def test_a_tokenizer_without_a_fast_form_is_refused_with_a_way_out(slow, tmp_path):
    slow().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{slow.__name__} has no fast form .*--tokenizer=none"):
        tokenizer.load(str(tmp_path))


# ---------------------------------------------------------------- token ids as they are


def make(path, out, **options):
    options = DatasetConfig(
        **{"text_column": "input_ids", "tokenizer": "none", "workers": 1, **options}
    )
    options.check()
    return tokenize.make_dataset(open_source(str(path), options), out)


def stored(out):
    store = TokenStore(out)
    store.verify()
    return store.read(0, store.token_count).tokens.tolist()


@pytest.fixture
def blocks(tmp_path):
    """A save_to_disk folder of 890 rows of 128 ids, blocks of one long text."""
    ids = np.random.default_rng(0).integers(5, 300, (890, 128))
    datasets.Dataset.from_dict({"input_ids": ids.tolist()}).save_to_disk(tmp_path / "blocks")
    return tmp_path / "blocks", ids.reshape(-1).tolist()


@pytest.mark.slow
@pytest.mark.torch22
def test_blocks_of_token_ids_are_taken_as_they_are(blocks, tmp_path, capsys):
    """890 rows of 128 stay 113,920 tokens, of a vocabulary that is found in them; with an eos they become 114,810."""
    path, ids = blocks
    make(path, tmp_path / "a", pack="none", validation_fraction=0)
    store = TokenStore(tmp_path / "a" / "train")
    assert stored(store.path) == ids and len(ids) == 113_920
    assert (store.eos, store.vocab_size, store.tokenizer, store.document_count) == (-1, 300, "", 1)
    make(
        path,
        tmp_path / "b",
        pack="none",
        validation_fraction=0,
        shard_tokens=10_007,
        vocab_size=70_000,
    )
    store = TokenStore(tmp_path / "b" / "train")
    assert stored(store.path) == ids and (store.vocab_size, store.document_count) == (70_000, 12)
    make(path, tmp_path / "c", pack="none")
    assert stored(tmp_path / "c" / "train") + stored(tmp_path / "c" / "validation") == ids
    make(path, tmp_path / "d", eos_token="0", validation_fraction=0)
    store = TokenStore(tmp_path / "d" / "train")
    assert store.token_count == 114_810 and store.document_count == 890 and store.eos == 0
    assert "reading all token ids" in capsys.readouterr().out
    make(path, tmp_path / "a", pack="none", validation_fraction=0)
    assert "complete already" in capsys.readouterr().out
    with pytest.raises(UserError, match="pack was 'none' and is 'document'"):
        make(path, tmp_path / "a", eos_token="0", validation_fraction=0)


def test_ids_that_hold_their_eos_keep_their_documents(tmp_path):
    """And nothing is added or taken away: no eos at the end, none of two in a row."""
    rows = [[7, 8, 0, 9], [9, 9, 0, 0], [5, 6]]
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"input_ids": row}) + "\n" for row in rows)
    )
    make(tmp_path / "x.jsonl", tmp_path / "out", pack="none", eos_token="0", validation_fraction=0)
    assert [part.tolist() for part in stored_documents(TokenStore(tmp_path / "out" / "train"))] == [
        [7, 8, 0],
        [9, 9, 9, 0],
        [0],
        [5, 6],
    ]


def test_texts_run_together_without_an_end(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n{"text": " two"}\n')
    make(
        tmp_path / "x.jsonl",
        tmp_path / "out",
        pack="none",
        text_column="text",
        tokenizer="train:257",
        validation_fraction=0,
    )
    assert len(stored(tmp_path / "out" / "train")) == 7


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "give the token id that ends documents, as in --eos_token=0, or --pack=none"),
        ({"eos_token": "</s>"}, "give the token id"),
        ({"eos_token": "-1", "pack": "none"}, "give the token id"),
        (
            {"eos_token": "1", "vocab_size": 5},
            "x.jsonl: token ids from 3 to 9, but the vocabulary is 5; give another",
        ),
        (
            {"eos_token": "1", "text_column": "text"},
            "x.jsonl: holds text, and --tokenizer=none is for token ids",
        ),
        ({"tokenizer": "train:300"}, "or take them without: --tokenizer=none"),
        ({"tokenizer": "train:300", "vocab_size": 5}, "--vocab_size=5 is for --tokenizer=none"),
    ],
)
def test_mistakes_with_token_ids_are_said(options, said, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"input_ids": [3, 9], "text": "a"}\n')
    with pytest.raises(UserError, match=said):
        make(tmp_path / "x.jsonl", tmp_path / "out", **options)
    assert not list(tmp_path.rglob("index.json"))


def test_documents_that_are_not_known_are_not_reset_at(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"input_ids": [3, 9]}\n')
    make(tmp_path / "x.jsonl", tmp_path / "out", pack="none", validation_fraction=0)
    with pytest.raises(UserError, match="reset_at_documents needs to know .*--eos_token=ID"):
        opening.open_source(tmp_path / "out" / "train", DataConfig(reset_at_documents=True))


@pytest.mark.slow
def test_ids_taken_as_they_are_survive_a_kill(blocks, tmp_path, monkeypatch):
    """A run that resumes in the middle of what no eos ends writes what an unbroken one does."""
    path, ids = blocks
    monkeypatch.setattr("mamba_fsdp.data.workers.BLOCK_BYTES", 5_000)
    options = DatasetConfig(
        text_column="input_ids", tokenizer="none", pack="none", workers=1, shard_tokens=20_011
    )
    save, left = units.Unit._save, [3]

    def killed(unit):
        save(unit)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(units.Unit, "_save", killed)
    with pytest.raises(KeyboardInterrupt):
        tokenize.make_dataset(open_source(str(path), options), tmp_path / "out", save_seconds=0)
    monkeypatch.setattr(units.Unit, "_save", save)
    tokenize.make_dataset(open_source(str(path), options), tmp_path / "out", save_seconds=0)
    assert stored(tmp_path / "out" / "train") + stored(tmp_path / "out" / "validation") == ids
