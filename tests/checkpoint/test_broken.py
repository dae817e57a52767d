"""Tests that mamba_fsdp.checkpoint reports and skips damaged checkpoints, and never loads damaged data."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from mamba_fsdp.checkpoint.contents import BrokenCheckpointError, read_contents, verify_sizes
from mamba_fsdp.checkpoint.restore import find_checkpoint, load
from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.parallel.model import Shard
from tests.support.checkpoints import (
    WORLD,
    assume_verified,
    edit,
    flip,
    make_checkpoints,
    newest,
    open_run,
    problems,
    shards_of,
    steps_in,
)
from tests.support.disk import Disk

RANK_FILE = "rank_00000.safetensors"
OUTSIDE = {"state.json": {"bytes": 1, "xxh3": ""}, "../x": {"bytes": 1, "xxh3": ""}}
DAMAGES = {  # {part of the message: (file, function that damages it, further arguments)}
    f"{RANK_FILE} has 40 bytes, not": (RANK_FILE, os.truncate, 40),
    f"content of {RANK_FILE} has changed": (RANK_FILE, flip),
    "state.json: No such file": ("state.json", os.unlink),
    "COMMIT is damaged": ("COMMIT", Path.write_text, '{"files": '),
    "COMMIT is damaged (": ("COMMIT", partial(edit, files={})),
    "not the name of a file in this folder": ("COMMIT", partial(edit, files=OUTSIDE)),
    "COMMIT is of step 20": ("COMMIT", partial(edit, step=20)),
    "COMMIT is damaged: its format or version": ("COMMIT", partial(edit, version=7)),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_an_older_one_is_used(run, message):
    """A damaged checkpoint is reported with its folder and file, and the run resumes from an older one. If the user
    requests the damaged checkpoint, an error is raised."""
    make_checkpoints(run, [1, 2])
    name, damage, *how = DAMAGES[message]
    damage(run / "checkpoints/step_00000002" / name, *how)
    reports = []
    assert newest(run, reports.append).name == "step_00000001"
    assert len(reports) == 1 and "step_00000002 is broken" in reports[0] and message in reports[0]
    assert message in "".join(problems(run / "checkpoints/step_00000002"))
    with pytest.raises(UserError, match="step_00000002 is broken"):
        find_checkpoint(run / "checkpoints/step_00000002", WORLD)


def test_a_checkpoint_with_the_name_of_another_step_is_skipped(run):
    """A checkpoint in checkpoints/ is skipped if its folder name contains another step than its COMMIT. Otherwise
    each start would resume from the wrong step and remove newer checkpoints.

    A checkpoint that the user has renamed, for example to `best`, is accepted.
    """
    make_checkpoints(run, [1, 2])
    folder = run / "checkpoints"
    (folder / "step_00000001").rename(folder / "step_00000900")
    assert newest(run).name == "step_00000002"
    (folder / "step_00000900").rename(run / "best")
    assert find_checkpoint(run / "best", WORLD).path.name == "best"


def damages(content):
    """Yields (description, damaged content) for many ways to damage the content of a file."""
    for at in range(0, len(content), 29):
        yield f"cut at {at}", content[:at]
    for at in range(0, len(content), 5):
        flipped = bytes([content[at] ^ 1 << at // 5 % 8])
        yield f"flipped at {at}", content[:at] + flipped + content[at + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("file", [RANK_FILE, "state.json", "COMMIT"])
def test_all_damage_is_detected(run, file):
    """If any file of a checkpoint is damaged, the damage is reported and the older checkpoint is loaded.

    COMMIT does not have a checksum. If damage does not change the meaning of COMMIT, for example in white space, the
    newest checkpoint is loaded with its original tensors.
    """
    make_checkpoints(run, [1, 2])
    path = run / "checkpoints/step_00000002" / file
    steps = []
    for how, damaged in damages(path.read_bytes()):
        path.write_bytes(damaged)
        reports = []
        target = shards_of(0)
        found = find_checkpoint(run, WORLD, reports.append, shards=target)
        load(found, target, WORLD)
        step = found.contents.state["step"]
        for filled, saved in zip(target, shards_of(step), strict=True):
            assert torch.equal(filled.data, saved.data), how
        if step == 1:
            assert "step_00000002 is broken" in reports[0], how
        else:
            assert file == "COMMIT" and found.path == path.parent and not reports, how
        steps.append(step)
    assert steps.count(1) > max(50, 2 * steps.count(2))


def parts_of(dtype):
    """Returns two shards of zeros. The first one contains only a part of its tensor."""
    return [
        Shard("a.weight", (10, 10), 30, torch.zeros(50, dtype=dtype)),
        Shard("b", (7,), 0, torch.zeros(7, dtype=dtype)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_loaded_from_a_damaged_checkpoint_are_loaded_again(run, dtype):
    """Verification of a checkpoint also fills the shards. If the checkpoint turns out to be damaged, all elements are
    filled again from the older checkpoint.

    Elements that verification has not filled are read by `load`. The bfloat16 case covers elements that are converted,
    and therefore pass through a buffer in host memory.
    """
    make_checkpoints(run, [1, 2])
    flip(run / "checkpoints/step_00000002" / RANK_FILE)
    verified = parts_of(dtype)
    checkpointer = open_run(run)
    assert checkpointer.resume(verified).contents.state == {"step": 1}
    read = parts_of(dtype)
    # These elements count as loaded during verification, so `load` must not read them again.
    read[0].data[20:30] = 1
    checkpoint = assume_verified(checkpointer.last)
    checkpoint.filled["model/a.weight"] = [(50, 60)]
    load(checkpoint, read, WORLD)
    for target in (verified, read):
        for filled, saved in zip(target, shards_of(1), strict=True):
            part = saved.data[filled.start : filled.start + len(filled.data)]
            assert torch.equal(filled.data, part.to(dtype))


@pytest.mark.parametrize(
    "old, new, message",
    [
        (b"model/b@0", b"model/b@1", "the piece of model/b that starts at 0 is missing"),
        (b"model/b@0", b"model/c@0", "the file is truncated, or its header is damaged"),
        (b"[7]", b"[3]", "the piece of model/b that starts at 0 is missing"),
        (b"[7]", b"{ }", "the file is truncated, or its header is damaged"),
        (b"[400, 428]", b"[900, 928]", "the file is truncated, or its header is damaged"),
    ],
)
def test_a_committed_file_with_an_invalid_header_is_damaged(run, old, new, message):
    path = make_checkpoints(run, [1]).last / RANK_FILE
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(UserError, match=f"{RANK_FILE} is broken: {message}"):
        load(assume_verified(path.parent), shards_of(0), WORLD)


def tensor_b(shape=(7,), dtype="F32", ranges=1):
    return {"model/b": {"shape": list(shape), "dtype": dtype, "ranges": ranges}}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"files": []}, "a piece of model/a.weight is in file 0, but only 0 are listed"),
        ({"tensors": tensor_b(dtype="I8")}, "model/b has an unknown dtype or unknown ranges"),
        ({"tensors": tensor_b(ranges=2)}, "model/b has an unknown dtype or unknown ranges"),
        ({"tensors": tensor_b(shape=[0])}, "the pieces of model/b do not cover the whole tensor"),
        ({"step": 3}, "state.json is of step 3, but"),
    ],
)
def test_committed_contents_that_contradict_each_other_are_damaged(run, changes, message):
    path = make_checkpoints(run, [1]).last
    edit(path / "state.json", **changes)
    with pytest.raises(BrokenCheckpointError, match=f"step_00000001 is broken: .*{message}"):
        read_contents(path)


def test_a_checkpoint_of_another_version_is_an_error_even_if_there_is_an_older_one(run):
    """A checkpoint of another version is an error even if an older checkpoint could be loaded. Such a checkpoint
    does not count as damaged, because its COMMIT and state.json agree. Resuming from the older checkpoint would lose
    steps."""
    make_checkpoints(run, [1, 2])
    path = run / "checkpoints/step_00000002"
    for name in ("state.json", "COMMIT"):
        edit(path / name, format="elsewhere", version=2)
    message = "COMMIT: the file has the format 'elsewhere' of version 2, .* reads 'mamba_fsdp checkpoint' of version 1; use"
    for place in (run, path):
        with pytest.raises(UserError, match=f"step_00000002/{message}"):
            find_checkpoint(place, WORLD)


def test_a_run_does_not_restart_if_all_its_checkpoints_are_damaged(run):
    """If all checkpoints of a run are damaged, an error is raised: the run does not restart at step 0."""
    make_checkpoints(run, [1])
    flip(run / "checkpoints/step_00000001" / RANK_FILE)
    with pytest.raises(UserError, match="none of the checkpoints.*rank_00000"):
        newest(run)
    with pytest.raises(UserError, match="nowhere"):
        find_checkpoint(run / "nowhere", WORLD)


@pytest.mark.parametrize("file", [RANK_FILE, "state.json", "COMMIT"])
def test_a_storage_error_does_not_count_as_damage_of_a_checkpoint(run, monkeypatch, file):
    """A checkpoint that can't be read because of a storage error raises StorageError. Loading an older checkpoint
    would lose steps, although a later start could read the newest one."""
    make_checkpoints(run, [1, 2])
    Disk(monkeypatch, run).lose(f"step_00000002/{file}")
    with pytest.raises(StorageError, match=f"{file}: Input/output error"):
        find_checkpoint(run, WORLD, report=pytest.fail)


def test_a_new_save_replaces_a_damaged_checkpoint_of_the_same_step(run):
    """A new save of the same step replaces a damaged checkpoint. The damaged one does not count towards the number of
    checkpoints to keep."""
    make_checkpoints(run, [1, 2])
    path = run / "checkpoints/step_00000002"
    os.truncate(path / RANK_FILE, 30)
    assert verify_sizes(path) == problems(path) != []
    checkpointer = open_run(run, keep=2)
    assert checkpointer.resume(shards_of(0)).path.name == "step_00000001"
    for step in (2, 3):
        checkpointer.save(step, shards_of(step), {"new": step})
        checkpointer.wait()
    assert steps_in(run) == [2, 3] and problems(path) == verify_sizes(path) == []
    assert read_contents(path).state == {"new": 2}


MANY = {f"c{number}": (2,) for number in range(7)}


@pytest.mark.parametrize(
    "wanted, message",
    [
        ({"a.weight": (10, 10)}, "the model has no model/b. Give"),
        ({"a.weight": (10, 10), "b": (7,), "c": (2,)}, "model/c is missing. Give"),
        ({"a.weight": (10, 10), "b": (8,)}, r"model/b has the shape \(7,\), not \(8,\)"),
        (
            {"a.weight": (10, 10), "b": (7,), "optimizer/b/exp_avg": (7,)},
            "optimizer/b.* is missing",
        ),
        ({"a.weight": (10, 10), "b": (7,), **MANY}, "model/c4 is missing; and 2 more. Give"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(run, wanted, message):
    target = [Shard(name, shape, 0, torch.zeros(shape).view(-1)) for name, shape in wanted.items()]
    with pytest.raises(UserError, match=message):
        load(assume_verified(make_checkpoints(run, [1]).last), target, WORLD)
