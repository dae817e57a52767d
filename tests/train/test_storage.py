"""A file system that stumbles: what fails for a moment is done again, what goes on failing ends the run so that a
cluster starts it again, and what no patience mends is told at once."""

import builtins
import errno
import io
import os
import re
import threading
from pathlib import Path

import pytest

from mamba_fsdp import command_line, storage
from mamba_fsdp.errors import StorageError

CALLS = {
    os: ("stat", "listdir", "mkdir", "unlink", "rename", "replace"),
    io: ("open",),
    builtins: ("open",),
}


@pytest.fixture
def quick(monkeypatch):
    """No pause between attempts."""
    monkeypatch.setattr(storage, "LONGEST_PAUSE", 0.0)


@pytest.fixture
def stumble(monkeypatch, quick):
    """stumble(applies, times=1, number=EIO) -> {(call, path): how often it failed}.

    Each call on each path for which applies(call, path) holds fails `times` times, then works; random names count as
    one.
    """

    def start(applies, times=1, number=errno.EIO):
        failed, lock = {}, threading.Lock()

        def stumbling(call, real):
            def function(path, *rest, **named):
                text = (
                    re.sub(r"[0-9a-f]{12,}", "*", str(path))
                    if isinstance(path, (str, Path))
                    else ""
                )
                if text and threading.current_thread().name != "lease" and applies(call, text):
                    with lock:
                        fails = failed.get((call, text), 0) < times
                        failed[call, text] = failed.get((call, text), 0) + fails
                    if fails:
                        raise OSError(number, os.strerror(number), str(path))
                return real(path, *rest, **named)

            return function

        for module, names in CALLS.items():
            for name in names:
                monkeypatch.setattr(module, name, stumbling(name, getattr(module, name)))
        return failed

    return start


def below(*folders):
    """Of what a run reads and writes there; the tokenizer and the published model are others' affair."""
    wanted = r"/\.?(lease\.json|metrics\.jsonl|status\.json|config\.yaml|STOP|checkpoints|index\.json|\d+\.(bin|doc))\b"
    # A lease that can't be removed at the end stays: the next start sees that its holder has ended.
    return lambda call, path: (
        any(path.startswith(f"{folder}/") for folder in folders)
        and re.search(wanted, path)
        and not (call == "unlink" and path.endswith("lease.json"))
    )


@pytest.mark.slow
def test_each_call_may_fail_for_a_moment_and_the_run_is_the_same(
    train, stumble, corpus, tmp_path, metrics_of, weights_of, monkeypatch
):
    """Also while it resumes. Each kind of call on each file fails twice; the log says when it begins and ends."""
    for steps in (4, 6):
        train(tmp_path / "whole", num_steps=steps)
    failed = stumble(below(tmp_path / "stumbling", corpus), times=2)
    told = []
    monkeypatch.setattr(storage, "_print_line", told.append)
    for steps in (4, 6):
        train(tmp_path / "stumbling", num_steps=steps)
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "stumbling")
    first, second = weights_of(tmp_path / "whole"), weights_of(tmp_path / "stumbling")
    assert all(first[name].equal(second[name]) for name in first)
    names = " ".join(f"{call} {path}" for call, path in failed)
    for part in (
        "lease.json",
        "metrics.jsonl",
        "status.json",
        "STOP",
        "state.json",
        "COMMIT",
        "rank_00000.safetensors",
        "train/index.json",
        "train/00000.bin",
        "rename .*step_00000002",
        "mkdir .*checkpoints",
    ):
        assert re.search(part, names), f"{part}: nothing failed there"
    begun, ended = (
        [line for line in told if words in line]
        for words in ("; trying again for a minute", "went well")
    )
    assert len(told) == len(begun) + len(ended) and len(begun) >= len(ended) > 20


@pytest.mark.parametrize(
    "place", ["lease.json", "metrics.jsonl", "rank_00000.safetensors", "00000.doc"]
)
def test_storage_that_stays_away_ends_the_run_with_a_code_of_its_own(
    train, stumble, corpus, tmp_path, capsys, monkeypatch, place
):
    monkeypatch.setattr(storage, "SECONDS_OF_TRYING", 0.1)
    train(tmp_path, num_steps=2)
    stumble(lambda call, path: path.endswith(place) and call in ("open", "stat"), times=10**9)
    with pytest.raises(SystemExit) as end:
        command_line.run(lambda: train(tmp_path, num_steps=4), str, [])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert end.value.code == StorageError.exit_code == 74 and len(errors) == 1
    assert (
        place in errors[0]
        and "Input/output error" in errors[0]
        and "the same command resumes" in errors[0]
    )
