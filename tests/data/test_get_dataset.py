"""Tests get_dataset.py on text: records that can't be read, the tokens that are held out, and imports in several
parts, or that are killed and resumed."""

import gzip
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_fsdp.data.tokenizer import END_OF_TEXT, load_for_prompts
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing import make_dataset, text_files
from mamba_fsdp.importing.holding_out import Holdout
from mamba_fsdp.run import lease
from tests.support.corpora import (
    content,
    documents_of,
    make_texts,
    read_back,
    write_files,
    write_records,
)
from tests.support.processes import wait_until
from tests.support.projects import PROJECT

pytestmark = pytest.mark.torch22


def test_skipped_and_irregular_input_is_counted_at_the_end(prepare, tmp_path, capsys):
    """At its end, an import prints how many files and records it left out, with the reason, and which irregularities
    it kept. Files and records that can't be read are an error unless --skip_unreadable is set."""
    files = {
        "a.jsonl": '{"text": "a"}\n{"no": "b"}\n{"text": "a"}\n{\n{"text": "\\r\\n"}',
        "b.txt": b"\xef\xbb\xbfone\r\ntwo",
        "c.txt": b"\xff",
        "notes.xyz": "",
        ".hidden": "",
    }
    folder = write_files(tmp_path / "in", files)
    (folder / "d.jsonl").symlink_to("nowhere")
    refused = "c.txt: .*0xff|a.jsonl: .*line 2 has no 'text'; .*; --skip_unreadable=true skips"
    with pytest.raises(UserError, match=refused):
        prepare(folder, tmp_path / "out", tokenizer="train:300", eos_token="")
    assert not list((tmp_path / "out").rglob("tokenizer.json")), "it was found at once"
    assert prepare(folder, tmp_path / "out", skip_unreadable=True)
    assert read_back(tmp_path / "out" / "train") == ["a", "a", "one\r\ntwo"]
    output = capsys.readouterr().out
    for line in (
        "left out: 1 hidden: ",
        "left out: 1 of an unknown format: ",
        "left out: 2 that can't be read, from the first error on: ",
        f"left out: 2 records that can't be read: {folder}/a.jsonl: line 2 has no 'text'",
        "left out: 1 empty documents\n",
        "kept as they are: 1 exact duplicates, 1 line ends in CRLF; see",
    ):
        assert line in output, output
    assert len(json.loads((tmp_path / "out/dataset.json").read_text())["unreadable"]) == 2


# ---------------------------------------------------------------- validation


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=300),
    st.sampled_from([0.01, 0.1, 0.5]),
    st.integers(0, 3),
)
def test_the_held_out_share_is_of_tokens_and_does_not_depend_on_batches(lengths, fraction, cuts):
    """Holdout.choose holds out the same tokens for any division of the input into batches. For documents of any
    length, the fraction of held-out tokens is within a factor of two of the requested one if the input has several
    spans."""
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    holdout = Holdout(fraction, {"bytes": 4 * total}, 0)

    def held_out(edges):
        """Returns, for each token, whether it is held out if the batches end at these positions."""
        parts = []
        start = open_tokens = 0
        for edge in edges:
            inside = ends[(ends > start) & (ends < edge)] - start
            starts, chosen = holdout.choose(np.append(inside, edge - start), start, open_tokens)
            parts.append(np.repeat(chosen, np.diff([*np.maximum(starts, 0), edge - start])))
            last = ends[ends <= edge].max(initial=0)
            open_tokens = edge - last
            start = edge
        return np.concatenate(parts)

    whole = held_out([total])
    edges = sorted({*np.linspace(1, total, cuts + 2).astype(int).tolist(), total})
    assert (held_out(edges) == whole).all()
    if total * fraction >= 4 * holdout.span:
        assert fraction / 2 <= whole.mean() <= fraction * 2


def test_parts_of_a_long_document_are_held_out(prepare, tmp_path, texts):
    """A long document is divided between training and validation. Each part ends with an eos, and together the parts
    are the document."""
    (tmp_path / "a.txt").write_text("\n".join(texts))
    prepare(tmp_path / "a.txt", tmp_path / "out", validation_fraction=0.1)
    prepare(tmp_path / "a.txt", tmp_path / "whole")
    (whole,) = documents_of(tmp_path / "whole/train")
    train = documents_of(tmp_path / "out/train")
    held_out = documents_of(tmp_path / "out/validation")
    count = sum(map(len, held_out))
    assert len(whole) / 20 <= count <= len(whole) / 5
    assert sum(map(len, train)) + count == len(whole) + len(train) + len(held_out) - 1
    assert all(document[-1] == whole[-1] for document in train + held_out)


def test_too_little_text_for_a_validation_is_refused(prepare, tmp_path):
    (tmp_path / "a.txt").write_text("a few words")
    with pytest.raises(
        UserError,
        match="fraction=0.01 holds out 0 of the .*fewer than 32; .*--overwrite --validation_fr",
    ):
        prepare(tmp_path / "a.txt", tmp_path / "out", validation_fraction=0.01)


# ---------------------------------------------------------------- killed, interrupted, in parts


class Killed(BaseException):
    """Simulates a kill -9. No code of the library catches this exception."""


def dies_after(writes, fsync=os.fsync):
    """Returns a replacement of os.fsync that raises Killed after this number of calls."""
    calls = itertools.count(1)

    def dying(file):
        if next(calls) > writes:
            raise Killed
        fsync(file)

    return dying


@pytest.mark.parametrize(
    "how", [{"documents": "lines"}, {"tokenizer": "train:300", "eos_token": ""}]
)
def test_an_import_that_is_killed_at_any_write_resumes_to_the_same_bytes(
    prepare, tmp_path, monkeypatch, capsys, how
):
    """An import that is killed several times, also during a merge, and then resumed writes the bytes of an
    uninterrupted import. No temporary files remain."""
    monkeypatch.setattr(make_dataset, "BATCH_SIZE", 300)
    monkeypatch.setattr(make_dataset, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(text_files, "BLOCK", 200)
    for number in range(3):
        write_records(tmp_path / f"in/{number}.jsonl", make_texts(12, seed=10 + number))
        (tmp_path / f"in/{number}.txt").write_text("\n".join(make_texts(12, seed=number)))
    how = {**how, "validation_fraction": 0.2, "shard_tokens": 300}
    prepare(tmp_path / "in", tmp_path / "whole", **how)
    lives = random.Random(0)
    out = tmp_path / "killed"
    kills = 0
    while not (out / "dataset.json").exists():
        monkeypatch.setattr(os, "fsync", dies_after(lives.randint(1, 30)))
        try:
            prepare(tmp_path / "in", out, **how)
        except Killed:
            kills += 1
            (out / ".dataset.json.0a.tmp").touch()
    assert kills > 4 and content(out) == content(tmp_path / "whole")
    assert "\nresuming after " in capsys.readouterr().out
    assert not list(out.rglob(".*"))


# A program that blocks while it trains the tokenizer. During this time it does not handle signals. Python does not
# handle them either while a library computes.
HELD = """
import hashlib
from pathlib import Path
from mamba_fsdp import command_line
from mamba_fsdp.data import tokenizer
from mamba_fsdp.verbs import tokenize as get_dataset

def hold(*_):
    Path("held").touch()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

tokenizer.train = hold
command_line.run(get_dataset.main, get_dataset.page)
"""


@pytest.mark.slow
def test_ctrl_c_ends_an_import_at_once_and_the_same_command_resumes(prepare, tmp_path, texts):
    write_records(tmp_path / "a.jsonl", texts)
    arguments = ["a.jsonl", "out", "--tokenizer=train:300"]
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((tmp_path / "held").exists)
    process.send_signal(signal.SIGINT)
    errors = process.communicate()[1]
    assert process.returncode == 130 and "Traceback" not in errors
    assert "out is unfinished; the same command resumes from here" in errors
    assert prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="train:300", eos_token="")


@pytest.mark.parametrize(("files", "held_out"), [(1, 0.1), (7, 0.0)])
def test_merged_parts_contain_the_documents_of_a_single_process(prepare, tmp_path, files, held_out):
    """The merged store of several parts contains the same tokens as the store of a single process. If no document is
    held out, the documents of the merged store are in the order of the input."""
    for number in range(files):
        write_records(tmp_path / f"in/{number}.jsonl", make_texts(20, number))
    how = {"tokenizer": "train:300", "eos_token": "<end>"}
    prepare(tmp_path / "in", tmp_path / "whole", **how)
    out = tmp_path / "parts"
    how["validation_fraction"] = held_out
    for part in (2, 0, 1):
        done = prepare(tmp_path / "in", out, part=f"{part}/3", **how)
        assert done == (part == 1)
    # If data is held out, documents can be split, and each piece has its own eos. Eos tokens are not counted.
    if held_out:
        stores = [tmp_path / "whole/train", out / "train", out / "validation"]
        whole, *parts = [sum(len(d) - 1 for d in documents_of(store)) for store in stores]
        assert sum(parts) == whole
    else:
        assert read_back(out / "train") == read_back(tmp_path / "whole/train")
    assert load_for_prompts(out / "train/tokenizer").eos_token == "<end>"
    assert not (out / ".progress").exists()


def test_during_a_merge_other_parts_wait_and_overwriting_is_refused(prepare, tmp_path, monkeypatch):
    """While one process merges the parts, a process that starts another part waits until the merge has finished, and
    --overwrite is an error."""
    write_records(tmp_path / "a.jsonl", make_texts(20))
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.05)
    out = tmp_path / "out"
    waiting = []

    def part(number):
        return prepare(tmp_path / "a.jsonl", out, part=f"{number}/2")

    def slow_fsync(file, fsync=os.fsync):
        if (out / ".progress/merge.lease").exists() and not waiting:
            waiting.append(threads.submit(part, 0))
            with pytest.raises(UserError, match="is in use by process .* wait for it"):
                prepare(tmp_path / "a.jsonl", out, overwrite=True)
            time.sleep(0.5)
            assert not waiting[0].done()
        fsync(file)

    assert not part(0)
    monkeypatch.setattr(os, "fsync", slow_fsync)
    with ThreadPoolExecutor() as threads:
        assert part(1) and waiting[0].result()
    assert not (out / ".progress").exists()


def test_an_import_reports_a_full_disk_and_resumes(prepare, tmp_path, monkeypatch, texts):
    write_records(tmp_path / "a.jsonl", texts)

    def full(_):
        raise OSError(28, "No space left on device", "hidden")

    message = (
        "^[^ ]*/out: can't be written .No space left.*fix this, then run the same command to resume"
    )
    with monkeypatch.context() as patched, pytest.raises(UserError, match=message):
        patched.setattr(os, "fsync", full)
        prepare(tmp_path / "a.jsonl", tmp_path / "out")
    prepare(tmp_path / "a.jsonl", tmp_path / "out")
    assert read_back(tmp_path / "out/train") == texts


def test_a_full_disk_while_the_tokenizer_is_saved_is_reported(prepare, tmp_path, tokenizer):
    """If the disk is full while the tokenizer is saved, the error has one line, although the library that
    transformers uses for this raises a plain Exception."""
    (tmp_path / "a.txt").write_text("text")
    settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT})
    (tmp_path / "tokenizer_config.json").write_text(settings)
    shutil.copy(tokenizer, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = os.path.getsize(tokenizer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))
    try:
        with pytest.raises(UserError, match="out: can't be written .File too large"):
            prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_of_this_program_are_never_read_as_text(prepare, tmp_path, capsys):
    (tmp_path / "a.md").write_text("text")
    prepare(tmp_path, tmp_path / "out")
    for out in ("out", "out", "other"):
        prepare(tmp_path, tmp_path / out)
    assert read_back(tmp_path / "other/train") == ["text"]
    assert f"left out: 1 made by this program: {tmp_path}/out\n" in capsys.readouterr().out


CHANGES = {  # {command that changes the input: the reported difference}
    "printf 'other text' > a.txt": "bytes was 9 and is 10, last change was .*",
    "printf 'same size' > a.txt": "last change was 20.* and is 20.*",
    "mv a.txt b.txt": "place was .*a.txt and is .*b.txt",
}


@pytest.mark.parametrize("done", CHANGES)
def test_another_input_than_before_is_refused(prepare, tmp_path, done):
    (tmp_path / "a.txt").write_text("some text")
    prepare(tmp_path / "*.txt", tmp_path / "out")
    subprocess.run(done, shell=True, cwd=tmp_path)
    with pytest.raises(UserError, match=f"input: {CHANGES[done]}; choose.*--overwrite"):
        prepare(tmp_path / "*.txt", tmp_path / "out")
    assert prepare(tmp_path / "*.txt", tmp_path / "out", overwrite=True)


def test_an_unfinished_import_refuses_other_settings(prepare, tmp_path, monkeypatch):
    """An unfinished import can be resumed only with the same settings. If it failed before anything was recorded, the
    settings can be changed."""
    (tmp_path / "a.jsonl").write_text('{"text": "a", "words": "b"}\n{"text": 3, "words": "c"}')
    with pytest.raises(UserError, match="'text' is of type int"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(os, "fsync", dies_after(5))
        prepare(tmp_path / "a.jsonl", tmp_path / "out", text_column="words")
    refused = "shard_tokens was .* that began it resumes it .*remove .*out, or give"
    with pytest.raises(UserError, match=refused):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", text_column="words", shard_tokens=9)
    prepare(tmp_path / "a.jsonl", tmp_path / "out", text_column="words")
    assert read_back(tmp_path / "out/train") == ["b", "c"]


def test_an_input_and_a_tokenizer_are_identified_by_their_resolved_paths(
    prepare, tmp_path, monkeypatch, tokenizer, capsys
):
    """An import is complete for every spelling of the paths of its input and its tokenizer: relative, absolute or
    through a symbolic link."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("some text")
    (tmp_path / "link").symlink_to("in")
    (tmp_path / "t.json").symlink_to(tokenizer)
    prepare(tmp_path / "in/a.txt", tmp_path / "out")
    monkeypatch.chdir(tmp_path / "in")
    for spelled in ("a.txt", "../link/a.txt"):
        prepare(spelled, tmp_path / "out", tokenizer="../t.json")
        assert "complete already" in capsys.readouterr().out


# ---------------------------------------------------------------- progress


def test_progress_grows_to_100_percent_and_estimates_the_time_left(
    prepare, tmp_path, monkeypatch, capsys
):
    """The progress of a compressed file grows monotonically to 100 %, with an estimate of the remaining time."""
    monkeypatch.setattr(make_dataset, "BATCH_SIZE", 1 << 14)
    monkeypatch.setattr(text_files, "BLOCK", 1 << 14)
    monkeypatch.setattr(make_dataset, "SAVE_SECONDS", 0.0)
    letters = random.Random(0).choices("abcdefgh \n", k=1 << 19)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("".join(letters).encode(), 1))
    prepare(tmp_path / "a.txt.gz", tmp_path / "out", documents="lines")
    output = capsys.readouterr().out
    shares = re.findall(r"file 1 of 1: .* (\d+)% of .* kB, left 0:0\d:\d\d", output)
    assert shares == sorted(shares, key=int) and shares[-1] == "100"
