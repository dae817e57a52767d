"""Tests `replay`: repeated steps equal those of the run bit for bit, and an error of the run is found at its step."""

import gc
import re
import shutil

import numpy as np
import pytest

import mamba_fsdp
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.run.names import EVENTS, LEASE, STEPS, STOP
from mamba_fsdp.run.records import read_entries
from mamba_fsdp.trainer.replay import DifferenceError, replay
from tests.support import forked
from tests.support.checkpoints import flip
from tests.support.processes import run_program
from tests.support.tiny import HYBRID, TINY, format_arguments

KINDS = {
    "none": (1, 1, {**HYBRID, "optimizer": "muon"}),
    "fsdp": (2, 2, {**HYBRID, "fsdp_activation_checkpointing": True}),
    "hsdp": (4, 2, {"optimizer": "muon"}),
    "ddp": (3, 1, {"layers": "gdn,mamba1", "deterministic": True}),
    "context": (2, 2, {**HYBRID, "sharding_strategy": "fsdp", "context_parallel": 2}),
}


@pytest.mark.slow
@pytest.mark.torch22
@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_of_any_run_repeat(kind, corpus, tmp_path):
    """With the number of ranks of the run, replayed steps are bitwise equal, also on three ranks, where the order of
    a sum matters. With another number of ranks they are equal within a tolerance, which the printed line mentions."""
    ranks, per_node, given = KINDS[kind]
    given = {"sharding_strategy": kind, "num_steps": 4, "dataset_path": corpus, **given}
    arguments = format_arguments({**TINY, **given, "save_ckpt_path": tmp_path})
    printed = forked.run_ranks(ranks, arguments, per_node=per_node)
    assert "Deallocating" not in printed, "torch 2.2 can warn about the views of FSDP"
    program = ("-m", "mamba_fsdp")
    printed = forked.run_ranks(ranks, ["replay", str(tmp_path)], program, per_node=per_node)
    assert f"steps 2 to 4 of {tmp_path} repeat bit for bit (2 losses, 1 checkpoint)\n" in printed
    if ranks > 1:
        printed = forked.run_ranks(1, ["replay", str(tmp_path), "--steps=9"], program)
        assert (
            "repeat within 2% (2 losses, 0 checkpoints); not compared bit for bit, since it ran "
            in printed
        )


@pytest.mark.slow
def test_the_launcher_starts_its_ranks(train, tmp_path, project):
    """1.train.sbatch can start the ranks of a replay. If a step differs, the exit code is 3 and the ranks are not
    restarted. No files remain next to the run."""
    run = tmp_path / "run"
    train(run, num_steps=2, checkpoint_interval=1)
    replays = (project / "1.train.sbatch", "replay", run)
    done = run_program(*replays, PROCESSES_PER_NODE="2")
    assert done.returncode == 0 and "steps 1 to 2 of " in done.stdout, done.stderr
    edit(run / STEPS, '"step": 2, "loss": ', '"step": 2, "loss": 9')
    done = run_program(*replays, PROCESSES_PER_NODE="2")
    assert done.returncode == 3 and "step 2 of " in done.stderr and "restarts" not in done.stdout
    assert [path.name for path in tmp_path.iterdir() if "replay" in path.name] == []


def test_a_flipped_bit_is_found_at_its_step(corpus, tiny_file, tmp_path, last_line):
    """A bit that flips in a weight is found in the loss of the next step, or in the checkpoint that is saved before
    that step."""

    def flip(record):
        if record["step"] in (3, 6) and "loss" in record:
            for model in [each for each in gc.get_objects() if isinstance(each, MambaLM)]:
                next(model.parameters()).data.view(-1)[:1] *= 2  # changes only the exponent

    mamba_fsdp.train(tiny_file, flip, dataset_path=str(corpus), save_ckpt_path=str(tmp_path))
    number = r"\d\.\d+"
    assert re.match(
        f"step 4 of .*: its loss was {number}, and is {number} now$", last_line(tmp_path, 2)
    )
    assert re.match(
        "step 6 of .*: model/backbone.embedding.weight differs from", last_line(tmp_path, 4)
    )


@pytest.fixture
def last_line(capsys):
    """Returns a function last_line(run, first, steps=0), which replays steps and returns the last printed line or the
    error."""

    def replay_and_read(run, first, steps=0):
        try:
            replay(run, first, steps)
        except UserError as error:
            assert isinstance(error, DifferenceError) == (error.exit_code == 3)
            return str(error)
        return capsys.readouterr().out.splitlines()[-1]

    return replay_and_read


def edit(file, old, new):
    text = file.read_text()
    assert re.search(old, text)
    file.write_text(re.sub(old, new, text))


def test_changes_are_reported_and_no_file_of_the_run_is_modified(
    train, corpus, tmp_path, last_line
):
    """A replay reports what has changed since the run, and modifies no file of the run, neither its lease nor its
    STOP file."""
    run = tmp_path / "run"
    common = {"schedule": "constant", "keep_checkpoints": 9}
    train(run, num_steps=4, learning_rate=0.02, **common)
    train(run, num_steps=8, **common)
    (run / LEASE).write_text("{}")
    (run / STOP).touch()
    before = {path: path.stat().st_mtime_ns for path in (run, *run.rglob("*"))}
    assert (
        last_line(run, 2, 5) == f"steps 2 to 4 of {run} repeat bit for bit (2 losses, 1 checkpoint)"
    )
    assert (
        last_line(run, 4, 9)
        == f"steps 4 to 8 of {run} repeat bit for bit (4 losses, 2 checkpoints)"
    )
    assert (
        last_line(run, -1) == f"steps 6 to 8 of {run} repeat bit for bit (2 losses, 1 checkpoint)"
    )
    assert "its run has step_00000002, step" in last_line(
        run, 3
    ) and "no record of a step after" in last_line(run, 8)
    assert before == {path: path.stat().st_mtime_ns for path in (run, *run.rglob("*"))}
    edit(run / EVENTS, '"torch": "[^"]*"', '"torch": "1"')
    assert re.search(r"within 2% .*since it ran with torch 1 \(here .*\)$", last_line(run, 4))
    edit(run / EVENTS, '"code": "[^"]*"', '"code": "other"')
    loss = read_entries(run / STEPS)[4]["loss"]
    edit(run / STEPS, str(loss), str(2 * loss))
    assert re.search(r"^step 5 of .*; the code has changed since then", last_line(run, 4))
    (run / "checkpoints/step_00000002/rank_00000.safetensors").write_bytes(b"")
    assert re.match("checkpoint .*step_00000002 is broken: ", last_line(run, 2))
    edit(run / "config.2.yaml", f"dataset_path: {corpus}", f"dataset_path: {corpus}/other")
    assert "contains other data than when" in last_line(run, 4)
    edit(run / EVENTS, '"code": ', '"no code": ')
    assert "of older versions have none" in last_line(run, 4)


def test_only_recorded_numbers_are_compared(train, tmp_path, last_line):
    """A recorded loss is compared if it is a number, or null, which means that it was not finite. Steps with another
    value, or without an entry, are counted in the printed line. Events that a run can't have written are an error."""
    run = tmp_path / "run"
    train(run, num_steps=6, checkpoint_interval=3, keep_checkpoints=9)
    steps = (run / STEPS).read_text()
    events = (run / EVENTS).read_text()
    for odd in ('""', "[1]", "true", str(10**400)):
        (run / STEPS).write_text(re.sub(r'(: 5, "loss": )[^,]*', rf"\g<1>{odd}", steps))
        assert "bit for bit (2 losses, 1 checkpoint; 1 step without a loss" in last_line(run, 3)
    (run / STEPS).write_text("".join(steps.splitlines(keepends=True)[:5]))
    assert "bit for bit (2 losses, 1 checkpoint; 1 step without a loss" in last_line(run, 3)
    for wrong in ("null", "0"):
        (run / STEPS).write_text(re.sub(r'(: 5, "loss": )[^,]*', rf"\g<1>{wrong}", steps))
        assert re.match("step 5 of .*: its loss was (None|0), and is ", last_line(run, 3))
    (run / STEPS).write_text(steps)
    for changed in ('"ranks": 0', '"ranks": "1"', '"ranks": [1]', f'"ranks": {10**400}'):
        (run / EVENTS).write_text(events.replace('"ranks": 1', changed))
        assert "the event of the start at step 0 is damaged: ranks is" in last_line(run, 3)
    (run / EVENTS).write_text(events)


def test_changes_on_the_disk_are_not_attributed_to_the_device(corpus, train, tmp_path):
    """Before a difference is reported, checkpoints and data are verified, so damaged files are not reported as a
    fault of the device."""
    run = tmp_path / "run"
    data = shutil.copytree(corpus, tmp_path / "data")
    train(run, dataset_path=data, num_steps=4, keep_checkpoints=9)
    compared = run / "checkpoints/step_00000004/rank_00000.safetensors"
    flip(compared)
    with pytest.raises(UserError, match="step_00000004 is broken: the content of rank_0") as error:
        replay(run, 2, 0)
    assert error.value.exit_code == 2
    flip(compared)
    tokens = np.memmap(data / "train/00000.bin", "<u2", "r+")
    tokens[:] = np.where(tokens > 1, tokens ^ 1, tokens)
    tokens.flush()
    with pytest.raises(UserError, match="00000.bin: the content does not match its") as error:
        replay(run, 2, 0)
    assert error.value.exit_code == 2
