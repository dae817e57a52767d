"""Tests mamba_fsdp.reporting.trackers: TensorBoard and Weights & Biases get each entry of metrics.jsonl once, even if a
restart repeats steps."""

import os
import sys
from types import SimpleNamespace

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.reporting.trackers import make_trackers


def settings(*kinds, project="", name=""):
    """Returns those settings of a run that trackers read."""
    return {"report": {"tracker": [*kinds], "wandb_project": project, "wandb_name": name}}


@pytest.mark.slow
def test_tensorboard_gets_every_number_in_groups_and_the_settings(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing import plugin_event_accumulator
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    entry = {
        "val_loss": 3.0,
        "grad_norm": None,
        "tokens_per_second": 7.0,
        "source_tokens": {"code": 5},
        "memory_gb": 1.5,
        "samples": ["def f(x):\n    return", "once"],
    }
    starts = {0: {3: 2.5, 4: 2.0, 5: 1.5}, 3: {4: 2.25}}  # the second start resumes from step 3
    for number, (start, losses) in enumerate(starts.items()):
        # TensorBoard names its files by the second, so each start gets its own second.
        clock = SimpleNamespace(time=lambda number=number: 1.7e9 + number)
        monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
        (tracker,) = make_trackers(tmp_path, settings("tensorboard"), start, print)
        for step, loss in losses.items():
            tracker.write({"step": step, "loss": loss, **entry})
        tracker.close()
    folder = str(tmp_path / "tensorboard")
    events = EventAccumulator(folder).Reload()
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "validation/val_loss",
        "train/tokens_per_second",
        "train/source_tokens/code",
        "train/memory_gb",
    }
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(3, 2.5), (4, 2.25)]
    shown = plugin_event_accumulator.EventAccumulator(folder).Reload()
    texts = shown.Tensors("settings/text_summary")
    assert [text.step for text in texts] == [0, 3]
    assert texts[0].tensor_proto.string_val[0].startswith(b"    report:\n      tracker:\n")
    (*_, last) = shown.Tensors("validation/samples/text_summary")
    assert last.tensor_proto.string_val[0] == b"    def f(x):\n        return\n\n    once"


@pytest.fixture
def wandb(monkeypatch):
    """Returns W&B's module, without an account and without the settings of this machine."""
    wandb = pytest.importorskip("wandb")
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for patience in ("WANDB__SERVICE_WAIT", "WANDB_INIT_TIMEOUT"):
        monkeypatch.setenv(patience, "600")
    return wandb


@pytest.mark.slow
def test_wandb_takes_every_number_and_tells_one_line(tmp_path, wandb, capfd):
    """A run with W&B prints a single line, with the location of its data. The forty lines of W&B itself are
    suppressed."""
    messages = []
    for tracker in make_trackers(tmp_path, settings("wandb", "tensorboard"), 0, messages.append):
        tracker.write({"step": 3, "loss": 2.5, "samples": ["once"]})
        tracker.close()
    assert messages == [f"tracker    W&B: offline, in {tmp_path}/wandb"]
    assert capfd.readouterr() == ("", "")
    assert any(tmp_path.glob("tensorboard/*")) and any(tmp_path.glob("wandb/offline-run-*/*.wandb"))


class FakeRun:
    """Replaces the result of wandb.init."""

    url = "https://it"

    def __init__(self, step=0, resumed=False):
        self.step = step
        self.resumed = resumed
        self.sent = []

    def log(self, values, step):
        self.sent.append((step, values))

    def finish(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    """Returns a function fake(mode, run, api_key). The function replaces wandb by a module with this mode and key,
    whose `init` returns the given run, or raises it if it is an exception. The function returns the list to which
    `init` appends its arguments."""

    def fake(mode, run, api_key="x"):
        given = []

        def init(**arguments):
            given.append(arguments)
            if isinstance(run, Exception):
                raise run
            return run

        settings = SimpleNamespace(settings=SimpleNamespace(mode=mode))
        module = SimpleNamespace(
            init=init,
            setup=lambda: settings,
            api=SimpleNamespace(api_key=api_key),
            Table=lambda *rows: rows,
        )
        monkeypatch.setitem(sys.modules, "wandb", module)
        return given

    return fake


def test_a_run_that_wandb_s_server_knows_goes_on_where_it_ends(tmp_path, fake):
    run = FakeRun(step=5, resumed=True)
    given = fake("online", run)
    (tmp_path / "wandb_id").write_text("older 4")  # in the format of an older version
    messages = []
    (tracker,) = make_trackers(tmp_path, settings("wandb"), 3, messages.append)
    for step in (4, 5, 6):
        tracker.write({"step": step, "loss": 1.0 * step, "samples": ["a", "b"]})
    texts = (["text"], [["a"], ["b"]])
    assert run.sent == [
        (5, {"train/loss": 5.0, "validation/samples": texts}),
        (6, {"train/loss": 6.0, "validation/samples": texts}),
    ]
    names = {"project": "mamba-fsdp", "name": tmp_path.name, "config": settings("wandb")}
    assert given == [{**names, "id": "older", "resume": "allow", "dir": str(tmp_path)}]
    assert messages == ["tracker    W&B: https://it"]
    first = FakeRun(step=5)
    fake("online", first)
    (tracker,) = make_trackers(tmp_path, settings("wandb"), 0, print)
    tracker.write({"step": 0, "loss": 9.0})
    assert first.sent == [(0, {"train/loss": 9.0})]


def test_names_are_those_of_the_settings_then_of_the_environment(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_NAME", "third")
    given = fake("offline", FakeRun())
    make_trackers(tmp_path, settings("wandb"), 0, print)
    make_trackers(tmp_path, settings("wandb", project="mine", name="second"), 0, print)
    found = [(words["project"], words["name"], words["resume"]) for words in given]
    assert found == [("theirs", "third", None), ("mine", "second", None)]
    assert given[0]["id"] == given[1]["id"]


def test_a_run_whom_wandb_refuses_does_without_it(tmp_path, fake):
    messages = []
    fake("online", FakeRun(), api_key=None)  # W&B must not ask for a key at the terminal
    assert make_trackers(tmp_path, settings("wandb"), 0, messages.append) == []
    fake("online", RuntimeError("no route to its server\nmore of it"))
    assert make_trackers(tmp_path, settings("wandb"), 0, messages.append) == []
    assert len(messages) == 2 and "nobody is logged in" in messages[0]
    assert (
        "W&B is off: no route to its server; training continues without it. To log in, run `wandb login`"
        in messages[1]
    )


def test_a_missing_package_is_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    command = "requirements/wandb.txt"
    with pytest.raises(UserError, match=f"tracker=wandb needs .* -m pip install -r .*{command}$"):
        make_trackers(tmp_path, settings("wandb"), 0, print)
