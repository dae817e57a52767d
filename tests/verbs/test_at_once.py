"""What needs no torch is answered without it: it takes seconds to import, and far longer on a busy machine."""

import os
import sys

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.launch.plan import check_folder
from mamba_fsdp.run import lease
from mamba_fsdp.run.lease import Lease
from tests.support.processes import run_program
from tests.support.tiny import resolved

SLOW = ("torch", "datasets", "transformers")
VERB = ["-m", "mamba_fsdp"]


@pytest.fixture
def ask(project, tmp_path):
    """ask(*words) -> (exit code, what was said), of a Python in which no slow library can be imported."""
    for name in SLOW:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported {name}')\n")
    (tmp_path / "training.py").symlink_to(project / "training.py")

    def ask(*words):
        done = run_program(sys.executable, *words, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{project}")
        return done.returncode, done.stdout + done.stderr

    return ask


MISTAKES = {
    "-m mamba_fsdp plan --instance=p9": "--instance=p9: not known",
    "-m mamba_fsdp plan --tokens=few": "--tokens=few: expected a whole number",
    "-m mamba_fsdp evaluate nothing data": "nothing: there is no such file or folder",
    "-m mamba_fsdp evaluate run data": "run is neither a committed checkpoint nor",
    "-m mamba_fsdp generate empty": "empty holds no model",
    "-m mamba_fsdp export nothing out --format=gguf": "--format=gguf: must be one of hf",
    "-m mamba_fsdp export nothing out --dtype=int8": "--dtype=int8: must be one of fp32",
    "-m mamba_fsdp export nothing out": "nothing: there is no such file or folder",
    "training.py --dataset_path=nothing": "nothing: no such folder",
    "training.py --use_dummy_dataset --init_from=empty": "empty holds no model",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(ask, tmp_path, words):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    code, told = ask(*words.split())
    assert code == 2 and told.startswith(f"error: {MISTAKES[words]}")
    assert len(told.splitlines()) == 1


def test_a_run_folder_that_can_not_take_the_run(ask, tmp_path, monkeypatch):
    """In use, read-only, or on a full disk; but what does not exist is told first."""
    train = ["training.py", "--save_ckpt_path=run"]
    there = [*train, "--use_dummy_dataset=true"]
    monkeypatch.setattr(lease, "SECONDS_BETWEEN_RENEWALS", 0.1)
    (tmp_path / "run").mkdir()
    holder = Lease(tmp_path / "run/lease.json")
    holder.take(print, "")
    code, told = ask(*there)
    assert code == 2 and "run is in use by process" in told and len(told.splitlines()) == 1
    code, told = ask(*train, "--dataset_path=nothing")
    assert code == 2 and told.startswith("error: nothing: no such folder")
    holder.close()
    code, told = ask(*there, "--d_model=10M")
    assert code == 2 and "but the checkpoints to come need 1 x" in told
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="save_ckpt_path: can't write to .*/run"):
        check_folder(resolved(save_ckpt_path=tmp_path / "run"))


def test_a_listing_of_checkpoints(ask, used):
    code, told = ask(*VERB, "checkpoints", used / "runs/demo")
    assert code == 0 and len(told.splitlines()) == 3


def test_a_store_that_is_not_there_is_told_before_the_model_is_read(ask, used):
    code, told = ask(*VERB, "evaluate", used / "runs/demo", "a.txt")
    assert code == 2 and "a.txt: there is no such file or folder" in told


def test_dtypes_of_checkpoints_are_those_that_torch_reads():
    from mamba_fsdp.checkpoint.contents import DTYPES
    from mamba_fsdp.conventions import SAFETENSORS_DTYPES

    assert DTYPES == SAFETENSORS_DTYPES.keys()
