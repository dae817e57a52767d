"""Tests the verb `checkpoints`, which lists the checkpoints of a run and detects damaged ones."""

import shutil

import pytest

from mamba_fsdp.checkpoint import restore
from mamba_fsdp.verbs import checkpoints


@pytest.fixture
def run(user_folder, tmp_path):
    """Makes a copy of a run with the checkpoints of steps 2 and 4, and with its published model."""
    return shutil.copytree(user_folder / "runs/demo", tmp_path / "run")


def test_a_checkpoint_that_is_pruned_during_verification_is_not_broken(run, call, monkeypatch):
    def pruned_first(*given, _verify=restore.verify):
        shutil.rmtree(run / "checkpoints/step_00000002", ignore_errors=True)
        return _verify(*given)

    monkeypatch.setattr(restore, "verify", pruned_first)
    code, output = call(checkpoints, run, "--verify")
    assert code == 0 and len(output.splitlines()) == 2 and output.endswith("  whole\n")
