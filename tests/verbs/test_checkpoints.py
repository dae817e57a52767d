"""The verb `checkpoints`: what there is and whether it is whole."""

import shutil
import subprocess

import pytest

from mamba_fsdp.checkpoint import restore
from mamba_fsdp.verbs import checkpoints, inspect


@pytest.fixture
def run(user_folder, tmp_path):
    """A run with the checkpoints of steps 2 and 4, and its published model."""
    return shutil.copytree(user_folder / "runs/demo", tmp_path / "run")


DAMAGES = {
    "truncate -s 50 rank_00000.safetensors": "rank_00000.safetensors has 50 bytes",
    "sed -i s/step/stop/ state.json": "the content of state.json has changed",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_broken_ones_are_told_with_the_reason_and_an_exit_code(run, call, damage):
    """A content that has changed is found by reading all of it, the rest at once."""
    path = run / "checkpoints/step_00000002"
    subprocess.run(damage, shell=True, check=True, cwd=path)
    code, said = call(checkpoints, run, "--verify")
    assert code == 1 and "broken: " in said.splitlines()[1]
    assert DAMAGES[damage] in " ".join(said.split())
    assert said.splitlines()[-1].endswith("  whole") and "Traceback" not in said
    code, said = call(checkpoints, run)
    assert code == 1 and DAMAGES[damage] in " ".join(said.split()) or "content" in DAMAGES[damage]
    code, said = call(inspect, path, "--verify")
    assert code == 1 and DAMAGES[damage] in " ".join(said.split())


def test_what_its_run_prunes_meanwhile_is_not_broken(run, call, monkeypatch):
    def pruned_first(*given, _verify=restore.verify):
        shutil.rmtree(run / "checkpoints/step_00000002", ignore_errors=True)
        return _verify(*given)

    monkeypatch.setattr(restore, "verify", pruned_first)
    code, said = call(checkpoints, run, "--verify")
    assert code == 0 and len(said.splitlines()) == 2 and said.endswith("  whole\n")
