import contextlib
import dataclasses
import json
import os
import resource
import shutil
import threading
import time
import zlib
from collections import Counter

import pytest
import torch

from mamba_fsdp import storage
from mamba_fsdp.checkpoint import checkpointer as module
from mamba_fsdp.checkpoint import files
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.files import checksum
from mamba_fsdp.checkpoint.folder import Reader, find_checkpoint, load, newest_whole, problems
from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import start_world
from mamba_fsdp.report.records import read_events
from tests.support.ranks import build, run_ranks

pytestmark = pytest.mark.torch22


@pytest.fixture
def world(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    return start_world()


def shards(value, elements=100):
    return [
        Shard("a.weight", (elements // 10, 10), 0, torch.full((elements,), float(value))),
        Shard("b", (7,), 0, torch.arange(7.0)),
    ]


def make(run, world, steps, **how):
    checkpointer = Checkpointer(run, world, **how)
    for step in steps:
        checkpointer.save(step, shards(step), {"step": step})
    checkpointer.wait()
    return checkpointer


def names(run):
    return sorted(os.listdir(run / "checkpoints"))


# What a save leaves


def test_a_checkpoint_is_there_when_it_is_committed_and_not_before(run, world):
    """Between save and the wait that commits nothing can be chosen; afterwards it can, and nothing hidden is left."""
    checkpointer = Checkpointer(run, world)
    assert checkpointer.newest() is None
    checkpointer.save(3, shards(3), {"step": 3})
    assert not [name for name in names(run) if name.startswith("step")]
    checkpointer.pending.outcome.result()
    assert not checkpointer.is_writing()
    checkpointer.wait()
    assert names(run) == ["step_00000003"]
    assert (
        checkpointer.newest()
        == run / "checkpoints" / "step_00000003"
        == Checkpointer(run, world).newest()
    )
    assert Reader(checkpointer.newest()).state == {"step": 3}


def test_events_tell_how_long_a_save_took_and_held_training_up(run, world):
    """All of it, or what did not pass beside training, whenever the metrics asked for what they tell."""
    make(run, world, [1], asynchronous=False)
    checkpointer = Checkpointer(run, world)
    checkpointer.save(2, shards(2), {})
    assert checkpointer.stall_seconds() > 0
    time.sleep(0.2)
    checkpointer.wait()
    alone, beside = read_events(run)
    assert alone["stall_seconds"] >= alone["seconds"] > 0
    assert 0 < beside["stall_seconds"] <= beside["seconds"] - 0.1


def test_other_programs_can_read_the_files(run, world):
    """A rank's file is plain safetensors, with pieces named <tensor>@<start>."""
    from safetensors.torch import load_file

    path = make(run, world, [1]).newest()
    content = load_file(path / "rank_00000.safetensors")
    assert content.keys() == {"model/a.weight@0", "model/b@0"}
    assert torch.equal(content["model/a.weight@0"], torch.full((100,), 1.0))


def test_an_asynchronous_save_holds_the_moment_of_the_call(run, world):
    """What happens to the state after save() returns, and to the weights after wait_for_copies(), is not in it; nor
    are the copies of the save before, which lie in the same memory."""
    checkpointer = Checkpointer(run, world, asynchronous=True)
    checkpointer.save(0, shards(5), {})
    checkpointer.wait()
    kept = [buffer.data_ptr() for buffer in checkpointer.buffers]
    held, state = shards(1), {"list": [1]}
    checkpointer.save(1, held, state)
    state["list"].append(2)
    checkpointer.wait_for_copies()
    held[0].data.fill_(9)
    checkpointer.wait()
    assert kept and kept == [buffer.data_ptr() for buffer in checkpointer.buffers]
    target = shards(0)
    assert load(checkpointer.newest(), target, world) == {"list": [1]}
    assert torch.equal(target[0].data, torch.full((100,), 1.0))


def test_on_a_gpu_a_stream_of_its_own_copies_and_the_device_waits(run, world, monkeypatch):
    """The copies begin after what training has asked for so far; no thread but the writing one waits for them."""
    calls, copy, empty = [], torch._foreach_copy_, torch.empty

    def note(what, result=None):
        calls.append((what, threading.current_thread() is threading.main_thread()))
        return result

    class Event:
        record, wait, synchronize = (
            lambda _, what=what: note(what) for what in ("record", "wait", "synchronize")
        )

    class Stream:
        wait_stream = staticmethod(lambda other: note(f"after {other}"))

    for name, fake in {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda: "training",
        "set_device": id,
        "stream": lambda stream: contextlib.nullcontext(note("aside")),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    pinned = []
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *shape, pin_memory=False, **how: pinned.append(pin_memory) or empty(*shape, **how),
    )
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *both, non_blocking: note(non_blocking, copy(*both))
    )
    checkpointer = Checkpointer(run, dataclasses.replace(world, device=torch.device("cuda", 0)))
    checkpointer.save(1, shards(1), {})
    checkpointer.wait_for_copies()
    checkpointer.wait()
    assert [what for what, in_training in calls if in_training] == [
        "after training",
        "aside",
        True,
        "record",
        "wait",
    ]
    assert (
        [what for what, in_training in calls if not in_training] == ["synchronize"]
        and all(pinned)
        and pinned
    )
    target = shards(0)
    load(checkpointer.newest(), target, world)
    assert torch.equal(target[0].data, torch.full((100,), 1.0))


def test_only_the_newest_k_stay(run, world):
    make(run, world, [1, 2, 3, 4, 5], keep=2)
    assert names(run) == ["step_00000004", "step_00000005"]


def test_a_commit_is_told_when_it_has_happened(run, world):
    said = []
    checkpointer = Checkpointer(run, world, report=lambda text: said.append((text, names(run))))
    checkpointer.save(1, shards(1), {})
    assert not said
    checkpointer.wait()
    assert said == [("checkpoint step_00000001 is committed", ["step_00000001"])]


def test_broken_and_uncommitted_ones_don_t_count_among_the_kept(run, world):
    """A newer but broken checkpoint never pushes out the whole one that the run started from."""
    make(run, world, [1, 2], keep=5)
    (run / "checkpoints/step_00000002/state.json").write_text("{}")
    (run / "checkpoints/step_00000009").mkdir()
    checkpointer = Checkpointer(run, world, keep=2, report=lambda text: None)
    assert checkpointer.newest().name == "step_00000001"
    checkpointer.save(3, shards(3), {})
    checkpointer.wait()
    assert {"step_00000001", "step_00000003"} <= set(names(run))
    again = Checkpointer(run, world, keep=1, report=lambda text: None)
    assert again.newest().name == "step_00000003"


def test_a_broken_checkpoint_is_replaced_by_a_whole_one_of_its_step(run, world):
    make(run, world, [1, 2])
    os.truncate(run / "checkpoints/step_00000002/rank_00000.safetensors", 30)
    checkpointer = Checkpointer(run, world, report=lambda text: None)
    assert checkpointer.newest().name == "step_00000001"
    checkpointer.save(2, shards(20), {"new": 1})
    checkpointer.wait()
    assert not problems(run / "checkpoints/step_00000002", world)
    assert Reader(run / "checkpoints/step_00000002").state == {"new": 1}
    assert names(run) == ["step_00000001", "step_00000002"]


def test_what_a_dead_run_left_is_removed(run, world):
    make(run, world, [1])
    (run / "checkpoints/.step_00000002.abc.partial").mkdir()
    (run / "checkpoints/.step_00000002.abc.partial/rank_00000.safetensors").write_text("half")
    Checkpointer(run, world)
    assert names(run) == ["step_00000001"]


# Broken checkpoints


def damage_flip(path):
    file = path / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "rank_00000.safetensors has changed": damage_flip,
    "rank_00000.safetensors has 40 bytes": lambda path: os.truncate(
        path / "rank_00000.safetensors", 40
    ),
    "rank_00000.safetensors: No such file": lambda path: (path / "rank_00000.safetensors").unlink(),
    "state.json: No such file": lambda path: (path / "state.json").unlink(),
    "state.json has": lambda path: (path / "state.json").write_text("{}"),
    "COMMIT is no list of files": lambda path: (path / "COMMIT").write_text('{"files": '),
    "COMMIT is no list": lambda path: (path / "COMMIT").write_text('{"files": {}}'),
    "COMMIT is no list of": lambda path: (path / "COMMIT").write_text(
        json.dumps(
            {"files": {"state.json": {"bytes": 1, "xxh3": ""}, "../../x": {"bytes": 1, "xxh3": ""}}}
        )
    ),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_broken_checkpoint_is_named_and_an_older_one_used(run, world, words):
    """Any damage to any file is noticed; the older whole one is chosen; the report names folder and file."""
    make(run, world, [1, 2])
    DAMAGES[words](run / "checkpoints/step_00000002")
    said = []
    assert Checkpointer(run, world, report=said.append).newest().name == "step_00000001"
    assert len(said) == 1 and "step_00000002 is broken" in said[0] and words.split()[0] in said[0]
    with pytest.raises(UserError, match="step_00000002 is broken"):
        find_checkpoint(run / "checkpoints/step_00000002", world)
    assert find_checkpoint(run, world, report=said.append).name == "step_00000001"


def damages(content, other):
    """(how, damaged content, None: deleted) of a file; `other` is that of another step."""
    yield "deleted", None
    yield "another step's", other
    yield "longer", content + b"\0"
    yield "longer", content + content[-7:]
    for at in range(0, len(content), 7):
        yield f"cut at {at}", content[:at]
        yield f"zeros from {at}", content[:at] + bytes(len(content) - at)
    for at in range(0, len(content), 2):
        yield (
            f"flipped at {at}",
            content[:at] + bytes([content[at] ^ 1 << at // 2 % 8]) + content[at + 1 :],
        )
        yield (
            f"exchanged at {at}",
            content[:at] + content[at + 1 : at + 2] + content[at : at + 1] + content[at + 2 :],
        )


@pytest.mark.slow
@pytest.mark.parametrize("file", ["rank_00000.safetensors", "state.json", "COMMIT"])
def test_no_damage_goes_unnoticed(run, world, file):
    """At every place of every file: the older checkpoint is taken, with a line. COMMIT has no checksum of its own:
    where only what means nothing is damaged, such as a space, the newest is read as it was saved; where it seems to
    be another version's, a line says so."""
    make(run, world, [1, 2])
    older, newest = (run / f"checkpoints/step_0000000{step}" for step in (1, 2))
    content, outcomes = (newest / file).read_bytes(), Counter()
    for how, damaged in damages(content, (older / file).read_bytes()):
        if damaged == content:
            continue
        (newest / file).unlink() if damaged is None else (newest / file).write_bytes(damaged)
        said, target = [], shards(0)
        try:
            found, _ = newest_whole(run / "checkpoints", world, said.append, shards=target)
        except UserError as error:
            assert file == "COMMIT" and str(error).startswith(str(newest / file)), how
            outcomes["refused"] += 1
        else:
            step = load(found, target, world)["step"]
            assert all(
                torch.equal(one.data, other.data) for one, other in zip(target, shards(step))
            ), how
            if found == newest:
                assert file == "COMMIT" and step == 2 and not said, how
                outcomes["meant nothing"] += 1
            else:
                uncommitted = file == "COMMIT" and damaged is None
                assert found == older and (uncommitted or "step_00000002 is broken" in said[0]), how
                outcomes["older"] += 1
        (newest / file).write_bytes(content)
    assert outcomes["older"] > 250 and sum(outcomes.values()) < 1.5 * outcomes["older"], outcomes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_broken_checkpoint_has_filled_is_filled_anew(run, world, dtype, monkeypatch):
    """From the older one, while that is verified: nothing is read a second time. What has not the dtype that was saved,
    or lies on a GPU, comes through host memory."""
    make(run, world, [1, 2])
    damage_flip(run / "checkpoints/step_00000002")
    target = [
        Shard("a.weight", (10, 10), 30, torch.zeros(50, dtype=dtype)),
        Shard("b", (7,), 0, torch.zeros(7, dtype=dtype)),
    ]
    newest = Checkpointer(run, world, report=lambda text: None).newest(target)
    with monkeypatch.context() as patched:
        patched.setattr(files.PieceReader, "read", None)
        assert newest.name == "step_00000001" and load(newest, target, world) == {"step": 1}
    for again in (False, True):
        if again:  # with what may have changed since
            target[0].data.zero_()
            load(newest, target, world)
        for filled, saved in zip(target, shards(1)):
            assert torch.equal(
                filled.data, saved.data[filled.start : filled.start + len(filled.data)].to(dtype)
            )


@pytest.mark.parametrize(
    "changes",
    [{"data_offsets": [100.0, 128]}, {"data_offsets": []}, {"shape": [7.0]}, {"dtype": []}, None],
    ids=str,
)
def test_what_can_t_be_a_header_fills_nothing_and_is_broken(run, world, monkeypatch, changes):
    """Not even where it has the checksum that was committed. None: the length of it is more than a header's can be."""
    make(run, world, [1])
    path = run / "checkpoints/step_00000001/rank_00000.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["model/b@0"] |= changes or {}
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[start:])
    monkeypatch.setattr(files, "LONGEST_HEADER", len(header) - (not changes))
    target = shards(0)
    files.checksum(path, wanted={f"model/{shard.name}": shard for shard in target})
    assert not any(shard.filled for shard in target)
    with pytest.raises(UserError, match="rank_00000.safetensors is broken"):
        load(path.parent, target, world)


def edit(file, **changes):
    """Other fields in a JSON file, whose new size and checksum COMMIT then has; None takes one away."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    if file.name != "COMMIT":
        commit = json.loads((file.parent / "COMMIT").read_text())
        edit(file.parent / "COMMIT", files={**commit["files"], file.name: checksum(file)})


@pytest.mark.parametrize("file", ["COMMIT", "state.json"])
@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"version": 4},
            "a mamba_fsdp checkpoint of version 4, which a newer version of this program wrote; this one "
            "reads version 1 to 3",
        ),
        ({"version": 0}, "of version 0, which another version of this program wrote"),
        (
            {"format": "elsewhere"},
            "written as 'elsewhere'; this program reads 'mamba_fsdp checkpoint' here",
        ),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_and_no_older_one_taken(
    run, world, file, changes, said
):
    """Nothing is wrong with it: to resume from the one before would throw steps away."""
    make(run, world, [1, 2])
    edit(run / "checkpoints/step_00000002" / file, **changes)
    for attempt in (
        lambda: load(Checkpointer(run, world).newest(), shards(0), world),
        lambda: Reader(find_checkpoint(run / "checkpoints/step_00000002", world)).state,
    ):
        with pytest.raises(UserError, match=f"step_00000002/{file}: .*{said}"):
            attempt()


def test_checkpoints_from_before_commits_had_a_version_are_read(run, world):
    """They say nothing of a file's first part either."""
    make(run, world, [1, 2])
    path = run / "checkpoints/step_00000002"
    commit = json.loads((path / "COMMIT").read_text())
    files = {
        name: {"bytes": entry["bytes"], "crc32": f"{zlib.crc32((path / name).read_bytes()):08x}"}
        for name, entry in commit["files"].items()
    }
    edit(run / "checkpoints/step_00000002/COMMIT", format=None, version=None, files=files)
    assert find_checkpoint(run, world, part="model").name == "step_00000002"
    assert load(Checkpointer(run, world).newest(), shards(0), world) == {"step": 2}


def test_no_whole_checkpoint_is_no_reason_to_start_anew(run, world):
    """A run never restarts at step 0 by itself because all its checkpoints are broken."""
    make(run, world, [1])
    damage_flip(run / "checkpoints/step_00000001")
    with pytest.raises(UserError, match="none of the 1 checkpoints.*rank_00000"):
        Checkpointer(run, world, report=lambda text: None).newest()


def test_a_folder_without_checkpoint_is_refused_by_name(tmp_path, world):
    with pytest.raises(UserError, match="nowhere"):
        find_checkpoint(tmp_path / "nowhere", world)


@pytest.mark.parametrize(
    "wanted, words",
    [
        ([("a.weight", (10, 10))], "the model has no model/b"),
        ([("a.weight", (10, 10)), ("b", (7,)), ("c", (2,))], "it lacks model/c"),
        ([("a.weight", (10, 10)), ("b", (8,))], r"model/b is \(7,\), not \(8,\)"),
        (
            [("a.weight", (10, 10)), ("b", (7,)), ("optimizer/b/exp_avg", (7,))],
            "it lacks optimizer/b/exp_avg",
        ),
    ],
    ids=str,
)
def test_tensors_that_don_t_fit_are_refused_by_name(run, world, wanted, words):
    path = make(run, world, [1]).newest()
    target = [
        Shard(name, shape, 0, torch.zeros(torch.Size(shape).numel())) for name, shape in wanted
    ]
    with pytest.raises(UserError, match=words):
        load(path, target, world)


def test_a_check_may_refuse_before_anything_is_loaded(run, world):
    def refuse(state, path):
        raise UserError(f"no {state['step']}")

    target = shards(0)
    with pytest.raises(UserError, match="no 1"):
        load(make(run, world, [1]).newest(), target, world, check=refuse)
    assert not target[0].data.any()


# Failing to save


def test_too_little_space_is_refused_before_anything_is_written(run, world, monkeypatch):
    checkpointer = make(run, world, [1])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 600, 400))
    with pytest.raises(UserError, match="step 2 needs 0.000 GB, but .*checkpoints has only"):
        checkpointer.save(2, shards(2), {})
    assert names(run) == ["step_00000001"]


def overflow(world, run, asynchronous):
    """Rank 1's disk is full in mid-file; every rank tells what it was told, and what is left."""
    torch_shards = build(world, strategy="fsdp")[0].shards()
    checkpointer = Checkpointer(run, world, asynchronous=asynchronous)
    checkpointer.save(1, torch_shards, {})
    checkpointer.wait()
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
    try:
        checkpointer.save(2, torch_shards, {})
        while True:
            if not world.all_reduce_sum(float(checkpointer.is_writing())):
                checkpointer.wait()
            time.sleep(0.01)
    except UserError as error:
        return str(error), sorted(os.listdir(run / "checkpoints"))


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_on_one_rank_is_loud_on_all(run, asynchronous):
    """Every rank raises at the same step, naming rank, file and reason; nothing half-written is left."""
    for message, left in run_ranks(2, overflow, run, asynchronous):
        assert (
            "step 2" in message
            and "rank 1" in message
            and "rank_00001.safetensors: File too large" in message
        )
        assert left == ["step_00000001"]


def stumble(world, run, times):
    """Rank 1's storage fails `times` times in mid-file while it saves, and again while it loads."""
    storage.LONGEST_PAUSE, storage.SECONDS_OF_TRYING = 0.01, 0.2 if times > 3 else 60.0
    torch_shards = build(world, strategy="fsdp")[0].shards()
    checkpointer, left = Checkpointer(run, world), []

    def stumbling(real):
        def function(file, *rest):
            if world.rank == 1 and left and "rank_0" in str(file.name):
                left.pop()
                raise OSError(5, "Input/output error")
            return real(file, *rest)

        return function

    files._flush, files._exactly = stumbling(files._flush), stumbling(files._exactly)
    told = []
    for work in (
        lambda: (checkpointer.save(1, torch_shards, {}), checkpointer.wait()),
        lambda: load(run / "checkpoints/step_00000001", torch_shards, world),
    ):
        left[:] = range(times)
        try:
            work()
        except StorageError as error:
            told.append(str(error))
        left.clear()
        if told:
            return told[0], names(run)
    return [shard.data.clone() for shard in torch_shards], problems(
        run / "checkpoints/step_00000001", world
    )


@pytest.mark.slow
def test_storage_that_fails_for_a_moment_on_one_rank_fails_nobody(run, tmp_path):
    calm, stumbled = (
        run_ranks(2, stumble, folder, times) for folder, times in ((tmp_path / "calm", 0), (run, 3))
    )
    for (first, _), (second, wrong) in zip(calm, stumbled):
        assert not wrong and all(torch.equal(*pair) for pair in zip(first, second))


@pytest.mark.slow
def test_storage_that_stays_away_from_one_rank_is_told_as_that_on_all(run):
    for message, left in run_ranks(2, stumble, run, 10**6):
        assert (
            "step 1" in message
            and "rank 1" in message
            and "rank_00001.safetensors: Input/output error" in message
        )
        assert left == []


def test_what_the_disk_garbles_is_noticed_while_saving(run, world, monkeypatch):
    """A file that reads back differently from what was written is never committed."""

    def flip(file):
        with open(file.name, "r+b") as again:
            again.seek(-1, os.SEEK_END)
            last = again.read(1)[0]
            again.seek(-1, os.SEEK_END)
            again.write(bytes([last ^ 1]))

    monkeypatch.setattr(files, "_flush", flip)
    with pytest.raises(UserError, match="rank 0 .*read back is not what was written"):
        make(run, world, [1])
    assert names(run) == []


def test_an_error_while_committing_is_loud_and_commits_nothing(run, world, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device", "COMMIT")

    monkeypatch.setattr(module, "write_atomically", fail)
    with pytest.raises(UserError, match="No space left"):
        make(run, world, [1])
    assert not [name for name in names(run) if name.startswith("step")]


@pytest.mark.parametrize("lost", ["before", "between", "while saving"])
def test_a_folder_that_is_another_runs_is_left_alone(run, world, lost):
    """Another run's unfinished checkpoint stays, and nothing is committed or pruned."""
    others = run / "checkpoints/.step_00000009.abc.partial"
    ours = [True]

    def check_ours():
        if not ours[0]:
            raise UserError("another run's")

    def lose():
        others.mkdir(parents=True)
        ours[0] = False

    with pytest.raises(UserError, match="another run's"):
        if lost == "before":
            lose()
        checkpointer = Checkpointer(run, world, keep=1, check_ours=check_ours)
        checkpointer.save(1, shards(1), {})
        checkpointer.wait()
        if lost == "between":
            lose()
        checkpointer.save(2, shards(2), {})
        lose()
        checkpointer.wait()
    steps = [name for name in names(run) if name.startswith("step")]
    assert others.exists() and steps == ["step_00000001"] * (lost != "before")
