"""Foreign formats, written by the libraries that own them: read right, or refused by name."""

import json
import os
import pickle
import re

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.train_config import DataConfig
from mamba_fsdp.data.foreign import index, indexed
from mamba_fsdp.data.opening import open_source
from mamba_fsdp.data.selection import batches, training_sources, validation_sources
from mamba_fsdp.errors import UserError
from tests.support.foreign_files import (
    laid_end_to_end,
    write_fms,
    write_layout,
    write_megatron,
    write_nanogpt,
    write_rows,
)

pytestmark = pytest.mark.torch22  # whose stack has other versions of datasets and pyarrow
EOS, BOS = 0, 99
# Empty, only separators, one token, doubled separators at both ends, one within, longer than many windows.
DOCUMENTS = [
    [],
    [7],
    [0],
    [0, 0],
    [1, 2, 3],
    [0, 4, 0, 0],
    [5, 0, 6],
    list(range(1, 98)) * 5,
    [99, 8, 0],
]


def everything(source):
    return source.read(0, source.token_count)


@settings(max_examples=25, deadline=None)
@given(
    files=st.lists(
        st.lists(st.lists(st.integers(0, 6), max_size=9), max_size=6), min_size=1, max_size=4
    ),
    bos=st.sampled_from([None, 5]),
    strip=st.sets(st.integers(1, 4), max_size=2),
    data=st.data(),
)
def test_any_window_of_documents(tmp_path_factory, files, bos, strip, data):
    """read gives that slice of all documents laid end to end, over files, whichever separators they carry: one eos
    behind each, none twice; empty documents leave nothing. Kept indexes and copies in other processes read the same."""
    folder = tmp_path_factory.mktemp("fms") / "a"
    for number, documents in enumerate(files):
        write_fms(folder / f"part{number}" / "x.arrow", documents, stream=bool(number % 2))
    options = DataConfig(
        eos_token="0",
        bos_token="" if bos is None else str(bos),
        strip_tokens=list(map(str, strip)),
        index_dir=data.draw(st.sampled_from(["", str(folder.parent / "index")])),
    )
    tokens, positions = laid_end_to_end(
        [document for documents in files for document in documents], EOS, bos, strip
    )
    if not tokens:
        with pytest.raises(UserError, match="holds no tokens"):
            open_source(folder, options)
        return
    source = pickle.loads(pickle.dumps(open_source(folder, options)))
    assert source.token_count == len(tokens) and source.document_count == positions.count(0)
    start = data.draw(st.integers(0, len(tokens)))
    count = data.draw(st.integers(0, len(tokens) - start))
    window = source.read(start, count)
    assert window.tokens.tolist() == tokens[start : start + count] and window.mask is None
    assert (
        window.positions.tolist() == positions[start : start + count]
        and window.positions.dtype == np.int32
    )
    assert source.identity == open_source(folder, options).identity


def in_pieces(document):
    return [document[:2], document[2:]] if len(document) > 2 else [document]


@pytest.mark.parametrize(
    "write",
    [
        write_fms,
        lambda path, documents: write_rows(path.parent, documents),
        lambda path, documents: write_megatron(
            path.parent / "x", documents, code=4, sequences_of=in_pieces
        ),
    ],
)
def test_hard_documents(tmp_path, write):
    """One eos ends each document, whatever separators it came with; ids may be of any size."""
    documents = [*DOCUMENTS, [70_000]]
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "x.arrow", documents)
    source = open_source(tmp_path / "a", DataConfig(eos_token="0", bos_token="99"))
    tokens, positions = laid_end_to_end(documents, EOS, BOS)
    found = everything(source)
    assert (found.tokens.tolist(), found.positions.tolist()) == (tokens, positions)
    assert not any(a == b == EOS for a, b in zip(tokens, tokens[1:]))


@pytest.mark.parametrize("shards", [1, 3])
def test_blocks_are_laid_end_to_end(tmp_path, shards):
    """Rows of one length, the last shorter: text in blocks. An eos in it ends a document, wherever a window begins."""
    rows = np.random.default_rng(0).integers(0, 30, (40, 16)).tolist() + [[1, 2, 3]]
    write_rows(
        tmp_path / "a",
        rows,
        shards=shards,
        labels=rows,
        attention_mask=[[1] * len(row) for row in rows],
    )
    said = []
    source = open_source(tmp_path / "a", DataConfig(eos_token="0"), said.append)
    flat = [token for row in rows for token in row]
    assert everything(source).tokens.tolist() == flat and everything(source).mask is None
    assert said == [f"reads      {tmp_path}/a: save_to_disk, rows of 16 laid end to end"]
    positions, at = [], 0
    for token in flat:
        positions.append(at)
        at = 0 if token == EOS else at + 1
    for start in range(0, len(flat), 7):
        assert source.read(start, len(flat) - start).positions.tolist() == positions[start:]
    written = open_source(tmp_path / "a", DataConfig(eos_token="0", pack="document"))
    assert everything(written).tokens.tolist() == laid_end_to_end(rows, EOS)[0]


def test_flat_files(tmp_path):
    """A folder of them, in the order of their names, without what is held out, which validation reads; 65,535 is an
    id."""
    tokens = [65_535, 3, EOS, EOS, 4, 5]
    for name in ("text_train_1", "text_train_0", "text_val_0"):
        write_nanogpt(tmp_path / f"{name}.bin", [*tokens, ord(name[-1])])
    source = open_source(tmp_path, DataConfig(eos_token="0"))
    assert everything(source).tokens.tolist() == [*tokens, ord("0"), *tokens, ord("1")]
    assert everything(source).positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 0, 0, 1, 2]
    write_nanogpt(tmp_path / "train.bin", tokens)
    write_nanogpt(tmp_path / "val.bin", [1, 2])
    for path in (tmp_path, tmp_path / "train.bin"):
        data = DataConfig(str(path))
        assert everything(training_sources(data)[0]["train.bin"]).tokens.tolist() == tokens
        assert [everything(source).tokens.tolist() for source in validation_sources(data)] == [
            [1, 2]
        ]


def test_layout_files(tmp_path):
    """Tokens, positions and mask as the bits say, over two files, but that no document's first token counts; a window
    may begin anywhere."""
    documents = [[1, 2, 65_535], [4], list(range(100))]
    write_layout(tmp_path / "b.npy", documents, counted=lambda token: token % 2)
    write_layout(tmp_path / "a.npy", [[9, 8]])
    source = open_source(tmp_path, DataConfig(reset_at_documents=True))
    tokens = [9, 8, *(token for document in documents for token in document)]
    positions = [0, 1, *(position for document in documents for position in range(len(document)))]
    for start in (0, 1, 4, 50):
        window = source.read(start, source.token_count - start)
        assert (
            window.tokens.tolist() == tokens[start:]
            and window.positions.tolist() == positions[start:]
        )
        assert window.mask.tolist() == [
            positions[start + at] > 0 and (start + at < 2 or token % 2 == 1)
            for at, token in enumerate(tokens[start:])
        ]
    assert everything(open_source(tmp_path / "a.npy")).tokens.tolist() == [9, 8]


def test_megatron_by_any_of_its_names(tmp_path):
    write_megatron(tmp_path / "x_document", [[1, 2], [3, 0]])
    for name in ("x_document", "x_document.bin", "x_document.idx", "."):
        assert everything(
            open_source(tmp_path / name, DataConfig(eos_token="0"))
        ).tokens.tolist() == [1, 2, 0, 3, 0]


def test_far_into_a_document_positions_count_from_where_one_stopped_looking(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "LOOK_BACK", 20)
    write_rows(tmp_path / "a", [[1] * 50] * 2)
    for eos in ("0", ""):
        source = open_source(tmp_path / "a", DataConfig(eos_token=eos))
        assert source.read(15, 2).positions.tolist() == [15, 16] and source.read(
            60, 2
        ).positions.tolist() == [20, 21]


def test_labels_that_leave_tokens_out_are_refused(tmp_path):
    """Labels of -100, or a zero in attention_mask: nothing reads them, and to count all would be another training."""
    rows = [[1, 2, 3, 4], [5, 6], [0, 7, 8, 9, 0]]
    write_rows(tmp_path / "a", rows, labels=[[-100, 2, 3, 4], [5, -100], [0, -100, 8, 9, 0]])
    write_rows(tmp_path / "b", rows, attention_mask=[[0, 1, 1, 1], [1, 0], [1, 0, 1, 1, 1]])
    for name, column in (("a", "labels"), ("b", "attention_mask")):
        with pytest.raises(
            UserError, match=f"data-00000-of-00001.arrow: its {column} leave tokens out of the loss"
        ):
            open_source(tmp_path / name, DataConfig(eos_token="0"))


def test_splits_and_mixed_formats(tmp_path):
    """A DatasetDict gives its train split, and validates on its validation split; one dataset_path holds several
    formats."""
    parts = {"train": [[1, 2, 3, 4]] * 9, "validation": [[5, 6, 7, 8]] * 9}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"input_ids": rows}) for name, rows in parts.items()}
    ).save_to_disk(tmp_path / "split")
    write_fms(tmp_path / "tree" / "deep" / "x.arrow", DOCUMENTS)
    data = DataConfig(str(tmp_path), datasets=["split", "tree"], eos_token="0")
    sources, weights = training_sources(data)
    assert everything(sources["split"]).tokens.tolist() == [1, 2, 3, 4] * 9
    assert weights == {"split": 36, "tree": sources["tree"].token_count}
    assert [everything(source).tokens[0] for source in validation_sources(data)] == [5]
    with pytest.raises(
        UserError, match="holds several data sets, such as rows; name which to read: --datasets="
    ):
        write_rows(tmp_path / "rows", [[1, 2]] * 9)
        open_source(tmp_path, DataConfig(eos_token="0"))
    batch = next(batches(tmp_path / "split", seq_length=8, batch_size=2))
    assert batch.tokens.shape == (2, 8)


def test_the_index_is_kept_and_made_again_for_changed_data(tmp_path, monkeypatch):
    """Large data: made by several processes once, beside the data; read-only data needs --index_dir."""
    monkeypatch.setattr(index, "KEPT_FROM", 1)
    monkeypatch.setattr(index, "PROCESSES_FROM", 1)
    for number in range(3):
        write_fms(tmp_path / "a" / f"{number}.arrow", [*DOCUMENTS, [10 + number]])
    said, options = [], DataConfig(eos_token="0")
    first = open_source(tmp_path / "a", options, said.append)
    assert "made once, from 3 files" in said[0]
    (kept,) = (tmp_path / "a").glob("documents-*")
    monkeypatch.setattr(index, "_make", None)
    assert (
        everything(open_source(tmp_path / "a", options)).tokens.tolist()
        == everything(first).tokens.tolist()
    )
    monkeypatch.undo()
    monkeypatch.setattr(index, "KEPT_FROM", 1)
    write_fms(tmp_path / "a" / "1.arrow", [[77, 77]])
    left = kept.with_name(f".{kept.name}.123.partial")
    left.mkdir()
    os.utime(left, (0, 0))
    changed = open_source(tmp_path / "a", options, said.append)
    assert changed.identity != first.identity and 77 in everything(changed).tokens
    assert [path.name for path in (tmp_path / "a").glob("*documents-*")] == [kept.name]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="give a folder for it: --index_dir=FOLDER"):
        open_source(tmp_path / "a", DataConfig(eos_token="0", index_dir=str(tmp_path / "file")))


def counts(path, *lines):
    (path / "meta").mkdir(exist_ok=True)
    (path / "meta" / "our_counts.csv").write_text(
        "\n".join(["dataset/filename,documents,tokens", *lines, ""])
    )


def test_counts(tmp_path):
    """A table that agrees is fine, whatever stands before the dataset's name; one that does not is named."""
    write_fms(tmp_path / "a" / "x.arrow", DOCUMENTS)
    tokens, options = sum(map(len, DOCUMENTS)), DataConfig(eos_token="0")
    counts(tmp_path, f"/old/place/a/x.arrow,{len(DOCUMENTS)},{tokens}", "other/y.arrow,1,1")
    open_source(tmp_path / "a", options)
    for lines, message in [
        ([f"a/x.arrow,{len(DOCUMENTS) + 1},{tokens}"], "x.arrow: holds 9 documents, but .*says 10"),
        ([f"a/x.arrow,{len(DOCUMENTS)},1"], "tokens, but .*says 1;"),
        (["a/y.arrow,1,1"], "y.arrow: missing, which"),
        (["a/x.arrow,many,1"], "no table of"),
    ]:
        counts(tmp_path, *lines)
        with pytest.raises(UserError, match=message):
            open_source(tmp_path / "a", options)


def truncate(path, by):
    os.truncate(path, path.stat().st_size - by)


def compressed(path):
    batch = pyarrow.record_batch([pyarrow.array([[1, 2] * 500])], names=["tokens"])
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_file(
            file, batch.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")
        ) as writer,
    ):
        writer.write(batch)


def nothing_in_it(path):
    for file in path.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    "spoil, options, message",
    [
        (lambda a: truncate(a / "x.arrow", 1), {}, "x.arrow: broken or truncated .*copy it again"),
        (lambda a: truncate(a / "x.arrow", 700), {}, "x.arrow: broken or truncated"),
        (lambda a: os.truncate(a / "x.arrow", 0), {}, "x.arrow: "),
        (
            lambda a: (a / "x.arrow").write_text("no arrow"),
            {},
            "x.arrow: it ends before its end, or is no Arrow file",
        ),
        (
            lambda a: compressed(a / "x.arrow"),
            {},
            "its content is compressed.*\n.*get_dataset.py .*--text_column=tokens",
        ),
        (
            lambda a: None,
            {"eos_token": ""},
            r"a \(fms\): which token ends its documents is not known; give --eos_token=ID",
        ),
        (lambda a: None, {"col_name": "ids"}, "has no column ids; .*--col_name=tokens"),
        (
            lambda a: None,
            {"eos_token": "</s>"},
            "eos_token=</s> is no id, and no --tokenizer is given",
        ),
        (lambda a: nothing_in_it(a), {}, "a: not a token store"),
        (lambda a: write_rows(a, [["some", "text"]]), {}, "column input_ids is .*string"),
        (
            lambda a: datasets.Dataset.from_dict({"text": ["b"]}).save_to_disk(a),
            {},
            "it holds text, to be tokenised first:\n  .venv/bin/python get_dataset.py .*a .*--text_column=text",
        ),
        (lambda a: write_rows(a, [[1, None]]), {}, "places without a token"),
        (
            lambda a: (write_rows(a, [[1]] * 9), truncate(a / "data-00000-of-00001.arrow", 8)),
            {},
            "it ends before its end",
        ),
        (
            lambda a: (write_rows(a, [[1]] * 9), (a / "data-00000-of-00001.arrow").unlink()),
            {},
            "missing, which state.json",
        ),
        (
            lambda a: (write_rows(a, [[1]] * 9), (a / "state.json").write_text("{}")),
            {},
            "can't be read .*; save it again",
        ),
        (
            lambda a: (nothing_in_it(a), (a / "b.jsonl").write_text("{}")),
            {"tokenizer": "toks"},
            r"a: text \(b.jsonl\), .*:\n  .*get_dataset.py .*a data/a --tokenizer=toks\n.*dataset_path=data/a",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, spoil, options, message):
    write_fms(tmp_path / "a" / "x.arrow", DOCUMENTS)
    spoil(tmp_path / "a")
    with pytest.raises(UserError, match=message):
        open_source(tmp_path / "a", DataConfig(**{"eos_token": "0", **options}))


def change(path, at, content):
    path.write_bytes(path.read_bytes()[:at] + content + path.read_bytes()[at + len(content) :])


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda a: truncate(a / "x.bin", 2), "x.bin: .* bytes, but x.idx says"),
        (lambda a: truncate(a / "x.idx", 8), "x.idx: .* bytes, but its header asks for"),
        (lambda a: os.truncate(a / "x.idx", 0), "x.idx: no index of Megatron's"),
        (lambda a: (a / "x.bin").unlink(), "x.bin: missing beside its .idx"),
        (lambda a: change(a / "x.idx", 9, b"\2"), "x.idx: no index of Megatron's of version 1"),
        (lambda a: change(a / "x.idx", 17, b"\7"), "x.idx: .* with whole numbers as tokens"),
        (lambda a: change(a / "x.idx", 34, b"\5"), "x.idx: its documents are not those"),
        (lambda a: truncate(a / "n" / "n.bin", 1), "n.bin: .* no whole number of uint16"),
        (lambda a: write_nanogpt(a / "n" / "n.bin", []), "n.bin .nanoGPT.: holds no tokens"),
        (
            lambda a: write_nanogpt(a / "n" / "n.bin", [1, 2], header=[20240520, 1, 2, *[0] * 253]),
            "n.bin: begins with llm.c's header; take it off: tail -c \\+1025",
        ),
        (lambda a: torch.save({}, a / "n" / "n.bin"), "n.bin: a file, not a token store"),
        (
            lambda a: truncate(a / "l.npy", 4),
            "l.npy: 8 bytes, but l.npy.size says 3 tokens, which are 12",
        ),
        (lambda a: (a / "l.npy.size").unlink(), "l.npy.size: does not say how many"),
        (lambda a: (a / "l.npy.size").write_text("many"), "l.npy.size: does not say how many"),
        (lambda a: np.save(a / "l.npy", np.arange(3)), "l.npy: a NumPy file, not"),
    ],
)
def test_what_is_wrong_with_flat_files_is_named(tmp_path, spoil, message):
    write_megatron(tmp_path / "x", [[1, 2], [3]])
    (tmp_path / "n").mkdir()
    write_nanogpt(tmp_path / "n" / "n.bin", [1, 2, 3])
    write_layout(tmp_path / "l.npy", [[1, 2, 3]])
    spoil(tmp_path)
    place = re.match("[xnl]", message)[0]
    with pytest.raises(UserError, match=message):
        open_source(
            tmp_path / {"x": "x", "n": "n/n.bin", "l": "l.npy"}[place], DataConfig(eos_token="0")
        )


def test_rows_that_are_missing_are_noticed(tmp_path):
    """A copy of a folder whose file is an older one: dataset_info.json knows how many rows there were."""
    write_rows(tmp_path / "a", [[1, 2]] * 9)
    write_rows(tmp_path / "b", [[1, 2]] * 5)
    os.replace(
        tmp_path / "b" / "data-00000-of-00001.arrow", tmp_path / "a" / "data-00000-of-00001.arrow"
    )
    info = json.loads((tmp_path / "a" / "dataset_info.json").read_text())
    info["splits"] = {"train": {"name": "train", "num_examples": 9}}
    (tmp_path / "a" / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="holds 5 rows, but dataset_info.json says 9"):
        open_source(tmp_path / "a", DataConfig())


def test_a_file_that_changes_while_it_is_read(tmp_path):
    write_fms(tmp_path / "a" / "x.arrow", DOCUMENTS)
    source = open_source(tmp_path / "a", DataConfig(eos_token="0"))
    truncate(tmp_path / "a" / "x.arrow", 8)
    with pytest.raises(UserError, match="x.arrow: .*has changed since the run began"):
        source.read(0, 5)


def test_reset_at_documents_needs_to_know_where_they_end(tmp_path):
    write_nanogpt(tmp_path / "a.bin", [1, 2, 3])
    with pytest.raises(UserError, match="reset_at_documents needs to know .*--eos_token=ID"):
        open_source(tmp_path / "a.bin", DataConfig(reset_at_documents=True))


def test_negative_ids_are_refused_where_they_are_read(tmp_path):
    write_rows(tmp_path / "a", [[1, -1]] * 3)
    with pytest.raises(UserError, match="arrow: holds -1 where a token id should stand"):
        open_source(tmp_path / "a", DataConfig(eos_token="0")).read(0, 4)
