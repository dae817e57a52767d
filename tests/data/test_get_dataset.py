"""get_dataset.py on text: what is held out, what can't be read, and that a run which was killed and resumed gives the bytes
of one that was not."""

import gzip
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_fsdp.data import reading, tokenize
from mamba_fsdp.data.tokenize import for_validation
from mamba_fsdp.data.tokenizer import load_words
from mamba_fsdp.errors import UserError
from mamba_fsdp.run import lease
from tests.support.corpora import content, documents_of, make_texts, read_back, write_records
from tests.support.processes import wait_until
from tests.support.projects import PROJECT

pytestmark = pytest.mark.torch22


def test_bad_files_are_named_together_or_skipped(prepare, tmp_path, monkeypatch, capsys):
    """Also those that are bad after a good beginning."""
    monkeypatch.setattr(reading, "MOST_NAMED", 2)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}')
    (folder / "b.jsonl").write_text('{"text": "b"}\n{')
    (folder / "c.jsonl").write_text('{"no": "c"}')
    (folder / "d.jsonl").symlink_to("nowhere")
    named = r"b.jsonl: .*line 2 is not JSON.*; nor can [^,]*c.jsonl; --skip_unreadable"
    for how in ({}, {"tokenizer": "train:300", "eos_token": ""}):
        with pytest.raises(UserError, match=named):
            prepare(folder, tmp_path / "out", **how)
    assert not list((tmp_path / "out").rglob("tokenizer.json")), "they were found at once"
    assert prepare(folder, tmp_path / "out", skip_unreadable=True)
    assert read_back(tmp_path / "out" / "train") == ["a", "b"]
    told = capsys.readouterr().out
    assert "3 files can't be read and are left out from the first fault on:\n" in told
    assert "c.jsonl: can't be read as json: record 1 has no 'text'" in told
    assert len(json.loads((tmp_path / "out/dataset.json").read_text())["unreadable"]) == 3


# ---------------------------------------------------------------- validation


@given(st.integers(1, 400), st.sampled_from([0.01, 0.1, 1 / 3, 0.5, 0.9]), st.integers(0, 3))
def test_the_share_held_out_is_exact_and_does_not_depend_on_batches(count, fraction, cuts):
    numbers = np.arange(count)
    whole = for_validation(numbers, fraction)
    parts = [for_validation(part, fraction) for part in np.array_split(numbers, cuts + 1)]
    assert (np.concatenate(parts) == whole).all() and not whole[0]
    assert abs(whole.sum() - count * fraction) <= 1


def test_whole_documents_are_held_out_and_told_if_they_are_far_more_than_their_share(
    prepare, tmp_path, capsys
):
    chosen = for_validation(np.arange(60), 0.1)
    write_records(tmp_path / "a.jsonl", ["a b " * 2000 if each else "a b" for each in chosen])
    prepare(tmp_path / "a.jsonl", tmp_path / "out", validation_fraction=0.1)
    assert read_back(tmp_path / "out/validation") == ["a b " * 2000] * 6
    assert read_back(tmp_path / "out/train") == ["a b"] * 54
    assert "validation has more than twice its share" in capsys.readouterr().out


def test_of_one_document_the_end_is_held_out(prepare, tmp_path, texts, capsys):
    (tmp_path / "a.txt").write_text("\n".join(texts))
    prepare(tmp_path / "a.txt", tmp_path / "out", validation_fraction=0.1)
    told = capsys.readouterr().out
    assert "tokens, since the documents are too few to hold a whole one out\n" in told
    assert told.count(" tokens in 1 document\n") == 2
    prepare(tmp_path / "a.txt", tmp_path / "whole")
    (whole,) = documents_of(tmp_path / "whole/train")
    (train,) = documents_of(tmp_path / "out/train")
    (held_out,) = documents_of(tmp_path / "out/validation")
    assert train[:-1] + held_out == whole and len(held_out) == round(0.1 * len(whole))


# ---------------------------------------------------------------- killed, interrupted, in parts


class Killed(BaseException):
    """A kill -9: nothing of ours catches it."""


def dies_after(writes, fsync=os.fsync):
    """os.fsync of a process that is killed after so many calls."""
    calls = itertools.count(1)

    def dying(file):
        if next(calls) > writes:
            raise Killed
        fsync(file)

    return dying


@pytest.mark.parametrize(
    "how", [{"documents": "lines"}, {"tokenizer": "train:300", "eos_token": ""}]
)
def test_killed_at_any_write_and_started_again_the_bytes_are_the_same(
    prepare, tmp_path, monkeypatch, capsys, how
):
    """However often, also while parts are put together. Nothing else is left."""
    monkeypatch.setattr(tokenize, "BATCH_SIZE", 300)
    monkeypatch.setattr(tokenize, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(reading, "BLOCK", 200)
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


# Stands still while it trains the tokenizer, as deaf as Python is while a library computes.
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
def test_ctrl_c_ends_it_at_once_and_the_same_command_resumes(prepare, tmp_path, texts):
    write_records(tmp_path / "a.jsonl", texts)
    words = ["a.jsonl", "out", "--tokenizer=train:300"]
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((tmp_path / "held").exists)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130 and "Traceback" not in said
    assert "out is unfinished; the same command resumes from here" in said
    assert prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="train:300", eos_token="")


@pytest.mark.parametrize(("files", "held_out"), [(1, 0.1), (7, 0.0)])
def test_parts_merged_hold_the_documents_of_one_process(prepare, tmp_path, files, held_out):
    """In the order of the input if each part has files of its own."""
    for number in range(files):
        write_records(tmp_path / f"in/{number}.jsonl", make_texts(20, number))
    how = {"tokenizer": "train:300", "eos_token": "<end>"}
    prepare(tmp_path / "in", tmp_path / "whole", **how)
    out = tmp_path / "parts"
    how["validation_fraction"] = held_out
    for part in (2, 0, 1):
        done = prepare(tmp_path / "in", out, part=f"{part}/3", **how)
        assert done == (part == 1)
    expected = read_back(tmp_path / "whole/train")
    if held_out:
        found = read_back(out / "train") + read_back(out / "validation")
        assert sorted(found) == sorted(expected)
    else:
        assert read_back(out / "train") == expected
    assert load_words(out / "train/tokenizer").eos_token == "<end>"
    assert not (out / ".progress").exists()


def test_while_a_part_puts_all_together_others_wait_and_overwriting_is_refused(
    prepare, tmp_path, monkeypatch
):
    """However long it takes. It removes the folder in which the lease of a part that waits would lie."""
    write_records(tmp_path / "a.jsonl", make_texts(20))
    monkeypatch.setattr(lease, "SECONDS_BETWEEN_RENEWALS", 0.05)
    monkeypatch.setattr(lease, "SECONDS_BETWEEN_LOOKS", 0.05)
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


def test_a_full_disk_is_told_and_resumed_from(prepare, tmp_path, monkeypatch, texts):
    write_records(tmp_path / "a.jsonl", texts)

    def full(_):
        raise OSError(28, "No space left on device", "hidden")

    told = "^[^ ]*/out: can't be written .No space left.*fix that, then the same command resumes"
    with monkeypatch.context() as patched, pytest.raises(UserError, match=told):
        patched.setattr(os, "fsync", full)
        prepare(tmp_path / "a.jsonl", tmp_path / "out")
    prepare(tmp_path / "a.jsonl", tmp_path / "out")
    assert read_back(tmp_path / "out/train") == texts


CHANGES = {  # what is done to the input: what differs
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


def test_an_unfinished_import_is_kept_from_other_settings(prepare, tmp_path, monkeypatch):
    """Unless it has failed before anything was recorded: then the command may be corrected."""
    (tmp_path / "a.jsonl").write_text('{"text": "a", "words": "b"}\n{"text": 3, "words": "c"}')
    with pytest.raises(UserError, match="'text' is int"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(os, "fsync", dies_after(1))
        prepare(tmp_path / "a.jsonl", tmp_path / "out", text_column="words")
    refused = "shard_tokens was .* --text_column=words .*resumes it .*remove .*out, or give"
    with pytest.raises(UserError, match=refused):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", text_column="words", shard_tokens=9)
    prepare(tmp_path / "a.jsonl", tmp_path / "out", text_column="words")
    assert read_back(tmp_path / "out/train") == ["b", "c"]


def test_an_input_and_a_tokenizer_are_known_by_their_places(
    prepare, tmp_path, monkeypatch, tokenizer, capsys
):
    """However their paths are spelled."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("some text")
    (tmp_path / "link").symlink_to("in")
    (tmp_path / "t.json").symlink_to(tokenizer)
    prepare(tmp_path / "in/a.txt", tmp_path / "out")
    monkeypatch.chdir(tmp_path / "in")
    for spelled in ("a.txt", "../link/a.txt"):
        prepare(spelled, tmp_path / "out", tokenizer="../t.json")
        assert "complete already" in capsys.readouterr().out


# ---------------------------------------------------------------- what is said meanwhile


def test_the_share_that_is_read_grows_to_all_and_the_time_left_is_said(
    prepare, tmp_path, monkeypatch, capsys
):
    """Of a compressed file too."""
    monkeypatch.setattr(tokenize, "BATCH_SIZE", 1 << 14)
    monkeypatch.setattr(reading, "BLOCK", 1 << 14)
    monkeypatch.setattr(tokenize, "SAVE_SECONDS", 0.0)
    letters = random.Random(0).choices("abcdefgh \n", k=1 << 19)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("".join(letters).encode(), 1))
    prepare(tmp_path / "a.txt.gz", tmp_path / "out", documents="lines")
    told = capsys.readouterr().out
    shares = re.findall(r"file 1 of 1: .* (\d+)% of .* kB, left 0:0\d:\d\d", told)
    assert shares == sorted(shares, key=int) and shares[-1] == "100"
