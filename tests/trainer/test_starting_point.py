"""A start is one value: rank 0 finds it, and nothing is looked up again."""

import dataclasses
import pickle

import pytest

from mamba_fsdp.parallel.world import World
from mamba_fsdp.trainer import loop, run, starting_point
from mamba_fsdp.trainer.run_folder import RunFolder
from tests.support.checkpoints import equal, flip

MOST_ENTRIES = 4


@pytest.fixture
def entries(monkeypatch):
    """What ranks have done together before the first step, by name."""
    entries = []
    is_counting = [True]

    def count(name, real):
        def counted(world, work, *inputs):
            if is_counting[0]:
                entries.append(f"{name} {work.__qualname__}")
            return real(world, work, *inputs)

        monkeypatch.setattr(World, name, counted)

    def first_step(*given, real=loop.take_step, **named):
        is_counting[0] = False
        return real(*given, **named)

    count("on_rank0", World.on_rank0)
    count("on_all_ranks", World.on_all_ranks)
    monkeypatch.setattr(loop, "take_step", first_step)

    def take():
        found = list(entries)
        entries.clear()
        is_counting[0] = True
        return found

    return take


@pytest.mark.torch22
def test_ranks_meet_four_times_before_the_first_step(train, tmp_path, entries):
    """A fresh run, one that resumes, and one that goes on from another's checkpoint."""
    train(tmp_path / "run", num_steps=2, eval_interval=2)
    fresh = entries()
    train(tmp_path / "run", num_steps=4, eval_interval=2)
    resumed = entries()
    train(tmp_path / "other", num_steps=1, eval_interval=0, load_ckpt_path=tmp_path / "run")
    from_other = entries()
    for found in (fresh, resumed, from_other):
        assert 0 < len(found) <= MOST_ENTRIES, found


@pytest.mark.torch22
def test_it_is_found_once_and_never_changes(train, tmp_path, monkeypatch):
    """It goes to the ranks as a message; training has a train state of its own."""
    found = []

    def find(*given, real=starting_point.find_start):
        start = real(*given)
        found.append((start, pickle.dumps(start.state)))
        return pickle.loads(pickle.dumps(start))

    monkeypatch.setattr(run, "find_start", find)
    train(tmp_path, num_steps=2)
    train(tmp_path, num_steps=4)
    (fresh, _), (resumed, before) = found
    assert fresh.begins == "the start" and not fresh.checkpoint and fresh.state.step == 0
    assert resumed.checkpoint.path.name == "step_00000002" and resumed.state.step == 2
    assert pickle.dumps(resumed.state) == before
    assert resumed.schedule.total_steps == 4 and not resumed.validation_due
    with pytest.raises(dataclasses.FrozenInstanceError):
        resumed.begins = "elsewhere"


@pytest.mark.torch22
def test_a_broken_checkpoint_makes_another_start(train, tmp_path, weights_of):
    """Of the older one, with its step and its position in the data: the run ends as an unbroken one does."""
    for name in ("whole", "broken"):
        train(tmp_path / name, num_steps=6, schedule="constant")
    flip(tmp_path / "broken/checkpoints/step_00000006/rank_00000.safetensors")
    for name in ("whole", "broken"):
        said = train(tmp_path / name, num_steps=8, schedule="constant")
    older = tmp_path / "broken/checkpoints/step_00000004"
    assert "step_00000006 is broken and is skipped" in said
    assert said.count("resumes    from ") == 1 and f"resumes    from {older}, step 4\n" in said
    assert equal(weights_of(tmp_path / "whole"), weights_of(tmp_path / "broken"))


def test_the_folder_is_acquired_before_the_start_is_found(train, tmp_path, monkeypatch):
    order = []
    for owner, name in ((RunFolder, "acquire"), (run, "find_start")):
        real = getattr(owner, name)

        def noted(*given, name=name, real=real):
            order.append(name)
            return real(*given)

        monkeypatch.setattr(owner, name, noted)
    train(tmp_path / "dry", dry_run=True)
    train(tmp_path / "run", num_steps=1)
    assert order == ["find_start", "acquire", "find_start"]
