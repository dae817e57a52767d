"""Broken checkpoints: named, passed over, and never taken for whole ones."""

import json
import os
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from mamba_fsdp.checkpoint import files
from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.checkpoint.folder import Reader
from mamba_fsdp.checkpoint.restore import find_checkpoint, load
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.model import Shard
from tests.support.checkpoints import (
    WORLD,
    as_whole,
    edit,
    flip,
    make_checkpoints,
    newest,
    open_run,
    problems,
    shards_of,
    steps_in,
)

OTHERS_FILE = {"state.json": {"bytes": 1, "xxh3": ""}, "../../x": {"bytes": 1, "xxh3": ""}}
DAMAGES = {  # what is said: what was done to which file
    "rank_00000.safetensors has 40 bytes": ("rank_00000.safetensors", os.truncate, 40),
    "content of rank_00000.safetensors has changed": ("rank_00000.safetensors", flip),
    "state.json: No such file": ("state.json", os.unlink),
    "state.json has": ("state.json", Path.write_text, "{}"),
    "COMMIT is not what was written": ("COMMIT", Path.write_text, '{"files": '),
    "COMMIT is not what was": ("COMMIT", partial(edit, files={})),
    "COMMIT is not what": ("COMMIT", partial(edit, files=OTHERS_FILE)),
    "COMMIT is of step 20": ("COMMIT", partial(edit, step=20)),
    "COMMIT is damaged": ("COMMIT", partial(edit, version=7)),
    "COMMIT is damaged: its format or version": ("COMMIT", partial(edit, format="mamba_fsdq")),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_broken_checkpoint_is_named_and_an_older_one_used(run, words):
    """Any damage to any file is noticed; the older whole one is chosen; the report names folder and file."""
    make_checkpoints(run, [1, 2])
    name, damage, *how = DAMAGES[words]
    damage(run / "checkpoints/step_00000002" / name, *how)
    said = []
    assert newest(run, said.append).name == "step_00000001"
    assert len(said) == 1 and "step_00000002 is broken" in said[0] and words in said[0]
    with pytest.raises(UserError, match="step_00000002 is broken"):
        find_checkpoint(run / "checkpoints/step_00000002", WORLD)
    assert find_checkpoint(run, WORLD, report=said.append).path.name == "step_00000001"


def test_a_checkpoint_under_another_steps_name_is_passed_over(run):
    """Believed, each start would return to its step and remove the newer ones. A name of one's own is nobody's step."""
    make_checkpoints(run, [1, 2])
    folder = run / "checkpoints"
    (folder / "step_00000001").rename(folder / "step_00000900")
    assert newest(run).name == "step_00000002"
    (folder / "step_00000900").rename(run / "best")
    assert find_checkpoint(run / "best", WORLD).path.name == "best"


def damages(content, other):
    """(how, damaged content, None: deleted) of a file; `other` is that of another step."""
    yield "deleted", None
    yield "another step's", other
    yield "longer", content + b"\0"
    for at in range(0, len(content), 7):
        yield f"cut at {at}", content[:at]
        yield f"zeros from {at}", content[:at] + bytes(len(content) - at)
    for at in range(0, len(content), 2):
        flipped = bytes([content[at] ^ 1 << at // 2 % 8])
        exchanged = content[at + 1 : at + 2] + content[at : at + 1]
        yield f"flipped at {at}", content[:at] + flipped + content[at + 1 :]
        yield f"exchanged at {at}", content[:at] + exchanged + content[at + 2 :]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["rank_00000.safetensors", "state.json", "COMMIT"])
def test_no_damage_goes_unnoticed(run, file):
    """At every place of every file: the older checkpoint is taken, with a line. COMMIT has no checksum of its own:
    where only what means nothing is damaged, such as a space, the newest is read as it was saved."""
    make_checkpoints(run, [1, 2])
    older, newest = (run / f"checkpoints/step_0000000{step}" for step in (1, 2))
    content = (newest / file).read_bytes()
    outcomes = Counter()
    for how, damaged in damages(content, (older / file).read_bytes()):
        if damaged == content:
            continue
        (newest / file).unlink() if damaged is None else (newest / file).write_bytes(damaged)
        said = []
        target = shards_of(0)
        found = find_checkpoint(run, WORLD, said.append, shards=target)
        load(found, target, WORLD)
        outcomes[found.path.name] += 1
        step = found.contents.state["step"]
        for filled, saved in zip(target, shards_of(step), strict=True):
            assert torch.equal(filled.data, saved.data), how
        if found.path == newest:
            assert file == "COMMIT" and step == 2 and not said, how
        else:
            uncommitted = file == "COMMIT" and damaged is None
            assert uncommitted or "step_00000002 is broken" in said[0], how
        (newest / file).write_bytes(content)
    assert outcomes[older.name] > 250
    assert outcomes[newest.name] < outcomes[older.name] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_broken_checkpoint_has_filled_is_filled_anew(run, dtype, monkeypatch):
    """From the older one, while that is verified: nothing is read a second time. What has not the dtype that was saved,
    or lies on a GPU, comes through host memory."""
    make_checkpoints(run, [1, 2])
    flip(run / "checkpoints/step_00000002/rank_00000.safetensors")
    target = [
        Shard("a.weight", (10, 10), 30, torch.zeros(50, dtype=dtype)),
        Shard("b", (7,), 0, torch.zeros(7, dtype=dtype)),
    ]
    checkpointer = open_run(run)
    with monkeypatch.context() as patched:
        patched.setattr(Reader, "read", None)
        assert checkpointer.resume(target).contents.state == {"step": 1}
    for again in (False, True):
        if again:  # what may have changed since is read
            target[0].data.zero_()
            load(as_whole(checkpointer.last), target, WORLD)
        for filled, saved in zip(target, shards_of(1), strict=True):
            part = saved.data[filled.start : filled.start + len(filled.data)]
            assert torch.equal(filled.data, part.to(dtype))


@pytest.mark.parametrize(
    "changes",
    [{"data_offsets": [100.0, 128]}, {"data_offsets": []}, {"shape": [7.0]}, {"dtype": []}, None],
    ids=str,
)
def test_what_can_t_be_a_header_fills_nothing_and_is_broken(run, monkeypatch, changes):
    """Not even where it has the checksum that was committed. None: the length of it is more than a header's can be."""
    path = make_checkpoints(run, [1]).last / "rank_00000.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["model/b@0"] |= changes or {}
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[start:])
    if changes is None:
        monkeypatch.setattr(files, "LONGEST_HEADER", len(header) - 1)
    target = {f"model/{shard.name}": shard for shard in shards_of(0)}
    assert not files.hash_file(path, path.stat().st_size, target).filled
    with pytest.raises(UserError, match="rank_00000.safetensors is broken"):
        load(as_whole(path.parent), shards_of(0), WORLD)


def test_a_checkpoint_of_another_version_is_refused_and_no_older_one_taken(run):
    """Nothing is wrong with it, COMMIT and state.json agree: to resume from the one before would throw steps away."""
    make_checkpoints(run, [1, 2])
    path = run / "checkpoints/step_00000002"
    for field, value, said in (
        ("version", 2, "of version 2; .* of version 1 here"),
        ("version", None, "of version None; "),
        ("format", "elsewhere", "'elsewhere' of version 1; .* reads 'mamba_fsdp checkpoint' of"),
    ):
        before = [(path / name).read_text() for name in ("state.json", "COMMIT")]
        edit(path / "state.json", **{field: value})
        edit(path / "COMMIT", **{field: value})
        for place in (run, path):
            with pytest.raises(UserError, match=f"step_00000002/COMMIT: .*{said}"):
                find_checkpoint(place, WORLD)
        (path / "state.json").write_text(before[0])
        (path / "COMMIT").write_text(before[1])


def test_no_whole_checkpoint_is_no_reason_to_start_anew(run):
    """A run never restarts at step 0 by itself because all its checkpoints are broken."""
    make_checkpoints(run, [1])
    flip(run / "checkpoints/step_00000001/rank_00000.safetensors")
    with pytest.raises(UserError, match="none of the checkpoints.*rank_00000"):
        newest(run)
    with pytest.raises(UserError, match="nowhere"):
        find_checkpoint(run / "nowhere", WORLD)


def test_a_broken_checkpoint_is_replaced_by_a_whole_one_of_its_step(run):
    """And never counts among those that are kept."""
    make_checkpoints(run, [1, 2])
    os.truncate(run / "checkpoints/step_00000002/rank_00000.safetensors", 30)
    checkpointer = open_run(run, keep=2)
    assert checkpointer.resume(shards_of(0)).path.name == "step_00000001"
    for step in (2, 3):
        checkpointer.save(step, shards_of(step), {"new": step})
        checkpointer.wait()
    assert steps_in(run) == [2, 3] and not problems(run / "checkpoints/step_00000002")
    assert read_contents(run / "checkpoints/step_00000002").state == {"new": 2}


@pytest.mark.parametrize(
    "wanted, words",
    [
        ({"a.weight": (10, 10)}, "the model has no model/b"),
        ({"a.weight": (10, 10), "b": (7,), "c": (2,)}, "it lacks model/c"),
        ({"a.weight": (10, 10), "b": (8,)}, r"model/b is \(7,\), not \(8,\)"),
        ({"a.weight": (10, 10), "b": (7,), "optimizer/b/exp_avg": (7,)}, "it lacks optimizer/b"),
    ],
    ids=str,
)
def test_tensors_that_don_t_fit_are_refused_by_name(run, wanted, words):
    target = [Shard(name, shape, 0, torch.zeros(shape).view(-1)) for name, shape in wanted.items()]
    with pytest.raises(UserError, match=words):
        load(as_whole(make_checkpoints(run, [1]).last), target, WORLD)
