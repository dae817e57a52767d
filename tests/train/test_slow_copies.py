"""Training goes on while a save still copies what it changes next: what is stored is the step's, bit for bit."""

import json
import threading

import pytest

from config import resolve
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.train import loop, run
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.torch22, pytest.mark.slow]


def train(world, words, file, when):
    """A run whose saves copy "at once", "late": when the update waits for it, or, the second, "never". Returns whether
    each step's backward passes had ended before the copies of the save under way were there."""
    start_copying, accumulate, early, saves, waits = (
        Checkpointer._start_copying,
        loop.accumulate_gradients,
        [],
        [],
        threading.Event(),
    )

    def start_late(checkpointer, save, tensors):
        copy = start_copying(checkpointer, save, tensors)
        saves.append(save)
        waits.clear()
        if when == "never" and len(saves) == 2:
            return threading.Event().wait
        return copy if when == "at once" else lambda: waits.wait() and copy()

    def noted(parallel, *rest):
        loss = accumulate(parallel, *rest)
        early.append(bool(saves) and not saves[-1].copied.is_set())
        return loss

    for method in (Checkpointer.wait_for_copies, Checkpointer.wait):

        def told(checkpointer, *given, method=method, **how):
            waits.set()
            return method(checkpointer, *given, **how)

        setattr(Checkpointer, method.__name__, told)
    Checkpointer._start_copying, loop.accumulate_gradients, run.start_world = (
        start_late,
        noted,
        lambda **_: world,
    )
    run.run_training(resolve.resolve_settings(words, file)[0])
    return early


def settings(corpus, folder, **given):
    words = {
        "dataset_path": corpus,
        "save_ckpt_path": folder,
        "num_steps": 7,
        "checkpoint_interval": 2,
        "eval_interval": 4,
        "report_interval": 1,
        "keep_checkpoints": 9,
        "publish": False,
        **given,
    }
    return {name: str(value) for name, value in words.items()}


def content(folder):
    """Of each checkpoint: the checksums of its files but state.json, whose settings name the folder."""
    return {
        path.name: [
            entry
            for name, entry in json.loads((path / "COMMIT").read_text())["files"].items()
            if name != "state.json"
        ]
        for path in sorted(folder.glob("checkpoints/step_*"))
    }


@pytest.mark.parametrize("ranks, strategy", [(2, "fsdp"), (1, "none")])
def test_a_slow_copy_is_waited_for_by_the_update_alone(
    corpus, tiny_file, tmp_path, ranks, strategy
):
    for when in ("at once", "late"):
        words = settings(corpus, tmp_path / when, sharding_strategy=strategy)
        told = run_ranks(ranks, train, words, tiny_file, when)
    assert told == [[False, False, True, False, True, False, True]] * ranks
    calm, slow = content(tmp_path / "at once"), content(tmp_path / "late")
    assert list(calm) == [f"step_0000000{step}" for step in (2, 4, 6, 7)] and calm == slow
