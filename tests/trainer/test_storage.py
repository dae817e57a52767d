"""Storage that stays away ends the run with an exit code of its own, so that a cluster starts it again."""

import re

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.errors import StorageError
from mamba_fsdp.storage import patience
from tests.support.disk import Disk


@pytest.mark.parametrize("place", ["lease.json", "00000.doc"])
def test_storage_that_stays_away_ends_the_run_with_a_code_of_its_own(
    train, tmp_path, capsys, monkeypatch, place
):
    """The run folder's, or that of the data."""
    train(tmp_path, num_steps=2)
    monkeypatch.setattr(patience, "SECONDS_OF_TRYING", 0.0)
    Disk(monkeypatch, "/").lose(place)
    with pytest.raises(SystemExit) as end:
        command_line.run(lambda: train(tmp_path, num_steps=4), str, [])
    (error,) = re.findall("^error: .*", capsys.readouterr().err, flags=re.M)
    assert end.value.code == StorageError.exit_code == 74
    for word in (place, "Input/output error", "the same command resumes"):
        assert word in error
