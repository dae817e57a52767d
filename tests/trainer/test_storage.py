"""Storage that stays away ends the run with an exit code of its own, so that a cluster starts it again."""

import builtins
import errno
import io
import os
import re
from pathlib import Path

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.run.lease import new_folder
from mamba_fsdp.run.records import Log
from mamba_fsdp.storage import patience


@pytest.fixture
def lose_file(monkeypatch):
    """lose_file(end): from now on no file whose path ends so can be opened or found."""

    def lose(end):
        def failing(call):
            def function(path, *rest, **named):
                if isinstance(path, (str, Path)) and str(path).endswith(end):
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
                return call(path, *rest, **named)

            return function

        for module, name in ((os, "stat"), (io, "open"), (builtins, "open")):
            monkeypatch.setattr(module, name, failing(getattr(module, name)))

    return lose


@pytest.mark.parametrize(
    "place", ["lease.json", "metrics.jsonl", "rank_00000.safetensors", "00000.doc"]
)
def test_storage_that_stays_away_ends_the_run_with_a_code_of_its_own(
    train, lose_file, tmp_path, capsys, monkeypatch, place
):
    monkeypatch.setattr(patience, "SECONDS_OF_TRYING", 0.1)
    train(tmp_path, num_steps=2)
    monkeypatch.setattr(patience, "LONGEST_PAUSE", 0.0)
    lose_file(place)
    with pytest.raises(SystemExit) as end:
        command_line.run(lambda: train(tmp_path, num_steps=4), str, [])
    (error,) = re.findall("^error: .*", capsys.readouterr().err, flags=re.M)
    assert end.value.code == StorageError.exit_code == 74
    for word in (place, "Input/output error", "the same command resumes"):
        assert word in error


@pytest.mark.parametrize("number, kind", [(errno.EIO, StorageError), (errno.ENOSPC, UserError)])
def test_storage_that_fails_while_a_model_is_published_is_no_mistake(tmp_path, number, kind):
    """A job that it ended as one was not queued again."""
    with (
        pytest.raises(UserError, match="^can't write .*out: ") as end,
        new_folder(tmp_path / "out"),
    ):
        raise OSError(number, os.strerror(number))
    assert end.type is kind


def test_storage_that_still_fails_after_a_warning_is_no_mistake(lose_file, tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "SECONDS_OF_TRYING", 0.0)
    metrics = Log(tmp_path / "metrics.jsonl", 0)
    lose_file("metrics.jsonl")
    metrics.write({"step": 1})
    with pytest.raises(StorageError, match="metrics.jsonl: can't be written .Input/output"):
        metrics.sync()
