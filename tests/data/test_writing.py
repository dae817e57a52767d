"""What `convert` writes is what the programs that own the formats read: the same documents, positions and loss mask."""

import csv
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.train_config import DataConfig, ReadingConfig
from mamba_fsdp.data import writing
from mamba_fsdp.data.opening import open_source
from mamba_fsdp.data.store import StoreWriter, TokenStore
from mamba_fsdp.errors import UserError
from mamba_fsdp.verbs.convert import main
from tests.support.corpora import write_store
from tests.support.foreign_files import write_layout, write_rows

EOS = 3
DOCUMENTS = [[5, 6, 7], [9], [], [8] * 50, [11, 3000, 12], list(range(20, 400))]


def make_store(path, documents=DOCUMENTS, vocab_size=4000, shard_tokens=100):
    return write_store(
        path, documents, vocab_size=vocab_size, eos=EOS, tokenizer="", shard_tokens=shard_tokens
    )


@pytest.fixture
def store(tmp_path):
    make_store(tmp_path / "web")
    (tmp_path / "web" / "tokenizer").mkdir()
    (tmp_path / "web" / "tokenizer" / "tokenizer.json").write_text("{}")
    return tmp_path / "web"


@pytest.fixture(params=[1 << 20, 7])
def piece(request, monkeypatch):
    """Read in one piece, and in pieces that end within documents."""
    monkeypatch.setattr(writing, "PIECE", request.param)


def everything(source):
    return [None if part is None else part.tolist() for part in source.read(0, source.token_count)]


def test_fms_reads_each_document_as_a_record_batch(store, tmp_path, piece, capsys):
    main(str(store), str(tmp_path / "out"), "fms")
    wanted = [document for document in DOCUMENTS if document]
    with pyarrow.memory_map(
        str(tmp_path / "out" / "web" / "00000.arrow")
    ) as file:  # as its ArrowHandler does
        reader = pyarrow.ipc.open_file(file)
        found = [reader.get_batch(number)["tokens"] for number in range(reader.num_record_batches)]
        assert (
            found[0].type == pyarrow.uint32() and [column.to_pylist() for column in found] == wanted
        )
    with open(tmp_path / "out" / "meta" / "counts.csv", newline="") as table:
        (row,) = csv.DictReader(table)
    path = row["dataset/filename"]  # fms looks for the dataset's name behind a slash
    assert path[path.find("/web") + 1 :] == "web/00000.arrow"
    assert (int(row["documents"]), int(row["tokens"])) == (len(wanted), sum(map(len, wanted)))
    assert "1 empty documents were left out" in capsys.readouterr().out
    back = open_source(tmp_path / "out" / "web", DataConfig(eos_token=str(EOS)))
    assert everything(back)[0] == [token for document in wanted for token in [*document, EOS]]


def test_fms_files_are_cut_between_documents(store, tmp_path):
    (tmp_path / "out").mkdir()
    writing.write_fms(writing.Copy(TokenStore(store), tmp_path / "out", shard_tokens=40), "web")
    with open(tmp_path / "out" / "meta" / "counts.csv", newline="") as table:
        rows = [tuple(row.values()) for row in csv.DictReader(table)]
    assert rows == [("/web/00000.arrow", "3", "54"), ("/web/00001.arrow", "2", "383")]


def test_datasets_loads_what_save_to_disk_would_have_saved(store, tmp_path, piece):
    main(str(store), str(tmp_path / "out"), "save_to_disk")
    loaded = datasets.load_from_disk(tmp_path / "out")
    assert loaded.column_names == ["input_ids"] and loaded["input_ids"][:] == [
        [*d, EOS] for d in DOCUMENTS
    ]
    loaded.map(
        lambda row: {"length": len(row["input_ids"])}, cache_file_name=str(tmp_path / "cache.arrow")
    )
    main(str(store), str(tmp_path / "blocks"), "save_to_disk", block=64)
    rows = datasets.load_from_disk(tmp_path / "blocks")["input_ids"][:]
    assert [len(row) for row in rows[:-1]] == [64] * (len(rows) - 1)
    assert sum(rows, []) == everything(TokenStore(store))[0]
    back = open_source(tmp_path / "blocks", DataConfig(eos_token=str(EOS)))
    assert everything(back) == everything(TokenStore(store))


def test_a_datalayout_file_says_token_position_and_loss(store, tmp_path, piece):
    main(str(store), str(tmp_path / "out"), "datalayout")
    values = np.fromfile(tmp_path / "out" / "web.npy", "<i4")
    assert int(Path(tmp_path / "out" / "web.npy.size").read_text()) == len(values)
    tokens, positions, _ = everything(TokenStore(store))
    assert (values & 0xFFFF).tolist() == tokens and (values >> 16 & 0x3FFF).tolist() == positions
    assert (values >> 30).tolist() == [1] * len(tokens)
    assert everything(open_source(tmp_path / "out"))[:2] == [tokens, positions]


def test_positions_beyond_datalayouts_bits_stay_at_its_last(tmp_path, capsys):
    make_store(tmp_path / "web", [[5] * 20_000, [6]])
    main(str(tmp_path / "web"), str(tmp_path / "out"), "datalayout")
    positions = np.fromfile(tmp_path / "out" / "web.npy", "<i4") >> 16 & 0x3FFF
    assert (
        positions[:20_001].tolist() == [*range(16_383), *[16_383] * 3_618]
        and positions[20_001] == 0
    )
    assert "3,617 positions from 16383 on are said as that" in capsys.readouterr().out


def test_a_loss_mask_goes_along_or_is_refused(tmp_path, piece):
    write_layout(
        tmp_path / "some.npy", [[5, 6, EOS], [7, 8, 9, EOS]], counted=lambda token: token % 2
    )
    for format in ("store", "fms", "save_to_disk"):
        with pytest.raises(
            UserError, match="don't count in the loss, for which this format has no place"
        ):
            main(
                str(tmp_path / "some.npy"),
                str(tmp_path / "out"),
                format,
                reading=ReadingConfig(eos_token=str(EOS)),
            )
        assert sorted(os.listdir(tmp_path)) == ["some.npy", "some.npy.size"]
    main(str(tmp_path / "some.npy"), str(tmp_path / "same"), "datalayout")
    assert (tmp_path / "same" / "some.npy").read_bytes() == (tmp_path / "some.npy").read_bytes()


def test_documents_without_an_eos_get_one_in_a_store(tmp_path, piece, capsys):
    write_layout(tmp_path / "some.npy", [[5, 6], [7, EOS, 8, EOS], [9]])
    main(
        str(tmp_path / "some.npy"),
        str(tmp_path / "store"),
        "store",
        reading=ReadingConfig(eos_token=str(EOS)),
    )
    assert everything(TokenStore(tmp_path / "store"))[0] == [5, 6, EOS, 7, EOS, 8, EOS, 9, EOS]
    said = capsys.readouterr().out
    assert (
        "2 documents without an eos got one" in said
        and "1 documents were cut at an eos inside" in said
    )
    assert "3 first tokens of documents did not count in the loss" in said  # which in a store do


DRAWN = st.lists(
    st.lists(st.sampled_from([1, 2, 4, 300, 65_000]), max_size=30), min_size=1, max_size=12
).filter(any)


@settings(max_examples=8, deadline=None)
@given(DRAWN, st.integers(1, 50), st.sampled_from(["fms", "datalayout", "save_to_disk"]))
def test_there_and_back_is_the_same_store(tmp_path_factory, documents, piece, format):
    """Byte for byte, but for empty documents, which fms' readers can't hold."""
    folder = tmp_path_factory.mktemp("round")
    documents = [document for document in documents if document]
    make_store(folder / "web", documents, vocab_size=65_001)
    whole, writing.PIECE = writing.PIECE, piece
    try:
        main(str(folder / "web"), str(folder / "there"), format)
        main(
            str(folder / "there"),
            str(folder / "back"),
            "store",
            reading=ReadingConfig(eos_token=str(EOS)),
        )
    finally:
        writing.PIECE = whole
    assert everything(TokenStore(folder / "back")) == everything(TokenStore(folder / "web"))


def test_splits_and_tokenizers_go_along(store, tmp_path):
    (tmp_path / "mine").mkdir()
    store.rename(tmp_path / "mine" / "train")
    make_store(tmp_path / "mine" / "validation", [[5, 6]])
    for format in ("store", "fms", "datalayout", "save_to_disk"):
        main(str(tmp_path / "mine"), str(tmp_path / format), format)
        assert (tmp_path / format / "train" / "tokenizer" / "tokenizer.json").is_file()
        assert (tmp_path / format / "validation").is_dir() and not (
            tmp_path / format / "validation/tokenizer"
        ).exists()
        for split, count in (
            ("train", len(everything(TokenStore(tmp_path / "mine/train"))[0])),
            ("validation", 3),
        ):
            found = open_source(tmp_path / format / split, DataConfig(eos_token=str(EOS)))
            assert found.token_count == count - (
                format in ("fms", "save_to_disk") and split == "train"
            )
    for name in ("index.json", "00000.bin"):
        assert (tmp_path / "store/validation" / name).read_bytes() == (
            tmp_path / "mine/validation" / name
        ).read_bytes()


def test_what_can_not_be_written_is_refused_and_leaves_nothing(store, tmp_path):
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UserError, match="web exists already; name a new folder"):
        main(str(store), str(store), "fms")
    with pytest.raises(UserError, match="--block: only rows of --format=save_to_disk"):
        main(str(store), str(tmp_path / "out"), "fms", block=3)
    write_rows(tmp_path / "rows", [[1, 2], [4, 70_000]])
    with pytest.raises(
        UserError, match="which token ends its documents is not known; give --eos_token"
    ):
        main(str(tmp_path / "rows"), str(tmp_path / "out"), "store")
    with pytest.raises(
        UserError, match="rows holds the token 70000, for which DataLayout's 16 bits do not suffice"
    ):
        main(str(tmp_path / "rows"), str(tmp_path / "out"), "datalayout")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "rows"])


@pytest.mark.parametrize("format", ["store", "fms", "datalayout", "save_to_disk"])
def test_a_disk_that_fills_up_leaves_nothing(format, tmp_path):
    make_store(tmp_path / "web", [[5] * 3000] * 30)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(UserError, match="can't write .*out: .*File too large"):
            main(str(tmp_path / "web"), str(tmp_path / "out"), format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == ["web"]


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_that_is_taken_for_whole(tmp_path, project):
    make_store(tmp_path / "web", [[5] * 300] * 5000, shard_tokens=1 << 28)
    program = (
        "import os, signal, sys; from mamba_fsdp.data import writing\n"
        "from mamba_fsdp.verbs.convert import main\n"
        "def tell(copy, what, count, read=[]):\n"
        "    read.append(count)\n"
        "    len(read) < 4000 or os.kill(os.getpid(), signal.SIGKILL)\n"
        "writing.Copy.tell = tell; main(*sys.argv[1:])"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "web", tmp_path / "out", "fms"], cwd=project
    )
    assert killed.returncode == -signal.SIGKILL
    assert (
        not (tmp_path / "out").exists()
        and len(list(tmp_path.glob(".out.*.partial/web/*.arrow"))) == 1
    )
    main(str(tmp_path / "web"), str(tmp_path / "out"), "fms")
    assert open_source(tmp_path / "out", DataConfig(eos_token=str(EOS))).token_count == 301 * 5000
    assert sorted(os.listdir(tmp_path)) == ["out", "web"]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fms", "save_to_disk"])
def test_memory_does_not_grow_with_the_data(format, tmp_path, project):
    """Own memory, without mapped files, over a source and one ten times as long."""
    peaks = []
    for times in (1, 10):
        writer = StoreWriter(tmp_path / f"web{times}", vocab_size=4000, eos=EOS, tokenizer="")
        for _ in range(times):
            writer.append(np.tile(np.array([5] * 999 + [EOS], np.uint16), 4000))
        writer.finish()
        program = (
            "import sys, threading, time; from mamba_fsdp.verbs.convert import main\n"
            "def watch():\n  while True:\n"
            "    with open('/proc/self/status') as status:\n"
            "      own = next(int(line.split()[1]) for line in status if line.startswith('RssAnon'))\n"
            "    peak[0] = max(peak[0], own); time.sleep(0.005)\n"
            "peak = [0]\n"
            "threading.Thread(target=watch, daemon=True).start()\n"
            "main(*sys.argv[1:]); print('peak', peak[0] // 1024)"
        )
        command = [
            sys.executable,
            "-c",
            program,
            tmp_path / f"web{times}",
            tmp_path / f"out{times}",
            format,
        ]
        said = subprocess.run(
            command, cwd=project, check=True, capture_output=True, text=True
        ).stdout
        peaks.append(int(said.split()[-1]))
    assert peaks[1] < peaks[0] + 50, peaks  # of 72 and more
