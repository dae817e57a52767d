"""The log of samples and its audit: whatever the restarts, it holds for what was really read, and no forgery passes."""

import itertools
import json
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from config.train_config import DataConfig
from mamba_fsdp.data.loader import BatchLayout, Loader
from mamba_fsdp.data.sample_log import SampleLog, audit, read_by
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.source import Tokens
from mamba_fsdp.errors import UserError


class Zeros:
    vocab_size, eos = 1, 0

    def __init__(self, token_count):
        self.token_count, self.identity = token_count, str(token_count)

    def read(self, start, count):
        assert 0 <= start and start + count <= self.token_count
        return Tokens(np.zeros(count, np.uint16), np.arange(count, dtype=np.int32), None)


STARTS = st.lists(
    st.fixed_dictionaries(
        {
            "sources": st.dictionaries(
                st.sampled_from("abcd"), st.floats(0.1, 10), min_size=1
            ),  # with their weights
            "seed": st.sampled_from([1, 1, 1, 2]),
            "seq_length": st.sampled_from([4, 4, 4, 6]),
            "ranks": st.integers(1, 4),
            "batch_size": st.integers(1, 3),
            "grad_accumulation_steps": st.integers(1, 2),
            "workers": st.sampled_from([0, 0, 2]),
            "steps": st.integers(1, 8),
            "lost": st.integers(0, 3),
            "logged": st.sampled_from([True, True, True, False]),
        }
    ),
    min_size=1,
    max_size=5,
)
SIZES = st.fixed_dictionaries({name: st.integers(20, 150) for name in "abcd"})  # tokens


def run(folder, sizes, starts, state=None):
    """Trains in these starts, each killed `lost` steps after its last checkpoint, but for the training. Returns the
    train state of each checkpoint and the windows that were read until there: [(source, how often begun anew, window)].
    """
    saved, read, samples, step, anew = {}, [], 0, 0, Counter()
    for start in starts:
        length, ranks = start["seq_length"], start["ranks"]
        sources = {name: Zeros(sizes[name]) for name in start["sources"]}
        order = Sampler(sources, start["sources"], length, start["seed"], state, new_epoch=True)
        anew.update(order.closed.get("drawn", {}).keys())
        data = DataConfig(seq_length=length, num_workers=start["workers"])
        with ExitStack() as stack:
            loaders = [
                stack.enter_context(
                    Loader(
                        sources,
                        order,
                        data,
                        BatchLayout(
                            rank, ranks, start["batch_size"], start["grad_accumulation_steps"]
                        ),
                        vocab_size=1,
                        first_step=step,
                    )
                )
                for rank in range(ranks)
            ]
            log = SampleLog(folder / "samples.jsonl", step, loaders[0], logged=start["logged"])
            last = step + start["steps"]
            for now in range(step, last + start["lost"]):
                batches = [batch for loader in loaders for batch in loader.step(now)]
                log.add(now + 1, sum(read_by([batch]) for batch in batches) % 2**64)
                if now < last:
                    read += [
                        (name, anew[name], window)
                        for batch in batches
                        for name, window in batch.samples
                    ]
            log.sync()
        samples += start["steps"] * loaders[0].split.global_batch
        state = json.loads(json.dumps(loaders[0].state_before(last)))
        step = last
        saved[step] = {"step": step, "samples": samples, "data": state}
    return saved, read


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(sizes=SIZES, starts=STARTS)
def test_every_window_is_read_as_often_as_its_epochs_say_and_the_audit_agrees(sizes, starts):
    """Over random sources, weights, ranks, threads, restarts that lose steps, changed mixtures and new epochs."""
    with tempfile.TemporaryDirectory() as folder:
        saved, read = run(Path(folder), sizes, starts)
        ledger = audit(Path(folder) / "samples.jsonl", saved)
    final, anew = saved[max(saved)]["data"], Counter()
    lives = {}
    for part in [*final["closed"], final]:
        for name, drawn in part["drawn"].items():
            lives[name, anew[name]] = drawn, part["windows"][name]
        anew.update(part["drawn"].keys())
    counts = {life: Counter() for life in lives}
    for name, number, window in read:
        counts[name, number][window] += 1
    for life, (drawn, windows) in lives.items():
        whole, more = divmod(drawn, windows)
        assert sum(counts[life].values()) == drawn and set(counts[life]) <= set(range(windows))
        assert Counter(counts[life][window] for window in range(windows)) == +Counter(
            {whole: windows - more, whole + 1: more}
        ), life
    assert ledger.step - max(saved) == starts[-1]["lost"] * starts[-1]["logged"]


def forge(lines, how, number, source):
    """Changes a step of the log, or what stands around it; returns whether that could be."""
    steps = [place for place, line in enumerate(lines) if "draws" in line]
    place = steps[number % len(steps)]
    line = lines[place]
    names = sorted(line["draws"])
    name = names[source % len(names)]
    if how in ("repetition", "gap"):
        shift = 1 if how == "gap" else -1
        if how == "repetition" and not line["draws"][name][0]:
            return False
        line["draws"][name] = [draw + shift for draw in line["draws"][name]]
    elif how == "dropped":
        del lines[place]
    elif how == "doubled":
        lines.insert(place, line)
    elif how == "longer":
        line["draws"][name][1] += 1
    elif how == "exchanged":  # one draw of another source instead, consistently from here on
        other = names[(source + 1) % len(names)]
        if other == name or line["draws"][name][1] - line["draws"][name][0] < 2:
            return False
        for later in lines[place:]:
            for one, shift in ((name, -1), (other, 1)):
                if one in later["draws"]:
                    later["draws"][one] = [
                        draw + shift * (later is not line or end)
                        for end, draw in enumerate(later["draws"][one])
                    ]
    elif how == "read":
        line["read"] = f"{int(line['read'], 16) ^ 1:016x}"
    return True


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    sizes=SIZES,
    starts=STARTS,
    number=st.integers(0, 50),
    source=st.integers(0, 3),
    how=st.sampled_from(["repetition", "gap", "dropped", "doubled", "longer", "exchanged", "read"]),
)
def test_a_forged_log_is_refused(sizes, starts, number, source, how):
    starts = [
        {**start, "logged": True, "lost": 0}
        for start in (starts[:1] if how == "exchanged" else starts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        saved, _ = run(path.parent, sizes, starts)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assume(forge(lines, how, number, source))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(UserError):
            audit(path, saved)


START = {
    "sources": {"a": 1, "b": 1},
    "seed": 1,
    "seq_length": 4,
    "ranks": 2,
    "batch_size": 2,
    "grad_accumulation_steps": 1,
    "workers": 0,
    "steps": 6,
    "lost": 0,
    "logged": True,
}


@pytest.mark.parametrize(
    "how, message",
    [
        (
            "repetition",
            r"window \d+ of source 'a', epoch 0, is seen twice: step 4 takes up its source at draw 5, which "
            "step 3 had taken",
        ),
        (
            "gap",
            r"window \d+ of source 'a', epoch 0, was left out: step 4 takes up its source at draw 7, which the steps "
            "up to 3 had left at 6",
        ),
        (
            "dropped",
            "was left out: step 5 takes up its source at draw 8, which the steps up to 3 had left at 6",
        ),
        ("doubled", "is seen twice: step 4 takes up its source at draw 6, which step 4 had taken"),
        (
            "read",
            r"step 4: its ranks read other windows than those of its draws, of which the first is window \d+ of "
            "source 'a'",
        ),
    ],
)
def test_what_is_said_of_a_forgery(tmp_path, how, message):
    """Source, window, epoch and steps; of what it begins with, not of what follows from it."""
    saved, _ = run(tmp_path, {"a": 100, "b": 100}, [START, {**START, "ranks": 1}])
    path = tmp_path / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert forge(lines, how, 3, 0)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=message):
        audit(path, saved)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda data, _: data["drawn"].update(a=data["drawn"]["a"] + 1),
            "was left out: the checkpoint .step 12",
        ),
        (
            lambda data, _: data["drawn"].update(b=data["drawn"]["b"] - 1),
            "is seen twice: the checkpoint .step 12",
        ),
        (lambda data, _: data["drawn"].pop("a"), "is seen twice: the checkpoint .step 12"),
        (lambda data, _: data.update(seed=2), "has another seed or seq_length"),
        (lambda data, saved: saved[12].update(samples=47), "47 samples, but the draws in"),
        (
            lambda data, saved: saved.update({14: {**saved[12], "step": 14}}),
            "ends at step 12, but the checkpoint is of",
        ),
    ],
)
def test_checkpoints_that_the_log_contradicts_are_refused(tmp_path, change, message):
    saved, _ = run(tmp_path, {"a": 100, "b": 100}, [START, START])
    change(saved[12]["data"], saved)
    with pytest.raises(UserError, match=message):
        audit(tmp_path / "samples.jsonl", saved)


def test_without_a_log_the_positions_alone_are_held_against_each_other(tmp_path):
    saved, _ = run(
        tmp_path, {"a": 100, "b": 100}, [START, {**START, "seed": 2}, {**START, "seed": 2}]
    )
    ledger = audit(tmp_path / "none.jsonl", saved)
    assert ledger.unlogged == [(1, 18)] and not ledger.logged
    saved[18]["data"]["drawn"]["a"] = 1
    with pytest.raises(
        UserError,
        match="source 'a', epoch 0, is seen twice: the checkpoint .step 18. takes up its "
        "source at draw 1, which step . had taken",
    ):
        audit(tmp_path / "none.jsonl", saved)


def test_a_log_that_begins_or_stops_later_proves_its_part(tmp_path):
    starts = [{**START, "logged": False}, START, {**START, "logged": False}, START]
    saved, _ = run(tmp_path, {"a": 100, "b": 100}, starts)
    ledger = audit(tmp_path / "samples.jsonl", saved)
    assert ledger.unlogged == [(1, 6), (13, 18)] and ledger.logged == 2 * 6 * 4


def test_draws_of_a_run_that_was_taken_over_are_told_apart(tmp_path):
    first, _ = run(tmp_path, {"a": 100, "b": 100}, [START])
    saved, _ = run(tmp_path, {"a": 100, "b": 100}, [START, START], first[6]["data"])
    ledger = audit(tmp_path / "samples.jsonl", saved)
    assert (ledger.inherited, ledger.logged, ledger.unlogged) == (24, 48, [])
    saved[12]["samples"] = saved[6]["samples"] = 80
    with pytest.raises(UserError, match="80 samples, but the draws in"):
        audit(tmp_path / "samples.jsonl", saved)


def test_lines_that_no_run_writes_are_refused(tmp_path):
    saved, _ = run(tmp_path, {"a": 100, "b": 100}, [START])
    path = tmp_path / "samples.jsonl"
    lines = path.read_text().splitlines()
    for number, new in itertools.product(
        (0, 2),
        (
            "[]",
            "{}",
            '{"step": 2}',
            '{"step": 2, "draws": {"a": 3}}',
            '{"step": 0, "position": {}}',
        ),
    ):
        path.write_text("\n".join([*lines[:number], new, *lines[number + 1 :]]) + "\n")
        with pytest.raises(
            UserError,
            match="after step -?[01] stands what no run writes|was left out|it ends|"
            "line [13] is no entry of a run",
        ):
            audit(path, saved)


def test_reading_the_same_windows_on_other_ranks_gives_the_same_sum():
    rows = [("a", 3), ("b", 3), ("a", 7), ("b", 1), ("a", 3)]
    batches = [SimpleNamespace(samples=rows[:2]), SimpleNamespace(samples=rows[2:])]
    assert read_by(batches) == read_by([SimpleNamespace(samples=rows[::-1])])
    assert len({read_by([SimpleNamespace(samples=rows[:count])]) for count in range(1, 6)}) == 5
