"""What a person looks at."""

import errno
import io
import json
import os
import re
import subprocess
import sys
import time

import pytest
from terminal import Terminal, drawings

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.display import Display, duration, output_that_may_go
from mamba_fsdp.report.trackers import make_trackers

STEP = dict(loss=3.25, learning_rate=3e-4, tokens_per_second=21400.4)


LONG = dict(loss=3.25, learning_rate=3e-4, tokens_per_second=1_214_000.4, mfu=0.412, seconds_left=360_125)


def test_a_plain_line_per_report_without_a_terminal():
    stream = io.StringIO()
    display = Display(stream=stream)
    display.step(19, 1000, **STEP)
    display.step(20, 1000, **STEP, seconds_left=3725, report=True)
    display.passing("validation 3/16")
    display.line("data       " + "word " * 40)
    display.close()
    assert stream.getvalue() == ("step   20/1000  loss  3.2500  lr 3.00e-04   21,400 tok/s  left 1:02:05\n"
                                 "data       " + "word " * 40 + "\n")


def test_one_live_line_below_lines_that_stay(terminal, monkeypatch):
    """A report stays; what is passing makes room for what comes next."""
    monkeypatch.setattr("mamba_fsdp.report.display.SECONDS_BETWEEN_UPDATES", 0.0)
    display = Display(stream=terminal.stream())
    for step in (18, 19, 20):
        display.step(step, 100, **STEP, report=step == 19)
    display.passing("validation 3/16")
    display.line("step 20: validation loss 3.0")
    display.passing("and so on")
    display.close()
    lines = [drawings(line)[-1] for line in terminal.text().split("\r\n") if line.strip()]
    assert [line[:15] for line in lines] == ["step  19/100  l", "step 20: valida", "and so on"]


@pytest.mark.parametrize("columns, parts", [
    (100, ["step", "loss", "lr", "tok/s", "MFU", "left"]), (81, ["step", "loss", "lr", "tok/s", "left"]),
    (80, ["step", "loss", "lr", "left"]), (60, ["step", "loss", "left"]), (40, ["step", "loss"]), (12, ["step"])])
def test_the_live_line_fits_and_keeps_what_matters(columns, parts):
    window = Terminal(columns)
    display = Display(stream=window.stream())
    display.step(123_456, 1_000_000, **LONG)
    display.step(123_456, 1_000_000, **LONG, report=True)
    display.close()
    live, line = drawings(window.text())[0], drawings(window.text())[-1]
    window.close()
    assert live == line and len(live) < columns
    assert [part for part in ("step", "loss", "lr", "tok/s", "MFU", "left") if part in live] == parts


def test_a_terminal_that_can_only_print_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    display = Display(stream=terminal.stream())
    display.step(1, 100, **LONG)
    display.step(2, 100, **LONG, report=True)
    display.passing("validation 3/16")
    display.close()
    assert terminal.text().count("step") == 1 and "\r" not in terminal.text().replace("\r\n", "\n")


def test_long_lines_are_wrapped_where_the_text_begins(terminal):
    display = Display(stream=terminal.stream())
    display.line("kernels    portable: " + "; ".join(["conv not native: gcc is too old"] * 5) + "\na second line")
    first, *rest, last = drawings(terminal.text())
    assert first.startswith("kernels    portable") and last == "a second line"
    assert len(rest) == 2 and all(len(row) < 80 and re.match(" {11}[ct]", row) for row in rest)


def test_other_ranks_are_silent(terminal):
    display = Display(enabled=False, stream=terminal.stream())
    display.step(1, 10, **STEP, report=True)
    display.line("x")
    display.passing("x")
    display.close()
    assert terminal.text() == ""


class Gone(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_what_is_printed_when_nobody_can_read_it_is_dropped(monkeypatch):
    """A library's print too; and afterwards the streams are what they were."""
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", None)  # as with `2>&-`
    with output_that_may_go():
        display = Display()
        display.line("x")
        display.step(1, 10, **STEP, report=True)
        print("from a library", file=sys.stderr)
        assert sys.stdout.encoding is None  # all else is the stream's
    assert isinstance(sys.stdout, Gone) and sys.stderr is None


def test_a_process_whose_reader_has_gone_ends_as_it_would_have(project):
    code = ("import sys, time; from mamba_fsdp.report.display import output_that_may_go\n"
            "with output_that_may_go():\n"
            "    for turn in range(3): print('x', flush=True); sys.stdin.readline()\n"
            "print('also after it')")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=project, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"x\n"
    process.stdout.close()
    process.stdin.close()
    assert (process.wait(30), process.stderr.read()) == (0, b"")


def test_durations_read_like_a_clock():
    assert [duration(seconds) for seconds in (0, 61.9, 3600)] == ["0:00", "1:01", "1:00:00"]


@pytest.mark.slow
def test_tensorboard_gets_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, written in ((0, [(3, 2.5), (4, 2.0), (5, 1.5)]), (3, [(4, 2.25)])):  # the second resumes from step 3
        (tracker,) = make_trackers(["tensorboard"], tmp_path, {}, start)
        for step, loss in written:
            tracker.write({"step": step, "loss": loss, "grad_norm": None})
        tracker.close()
        time.sleep(1.1)  # names of event files count seconds
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 2.5), (4, 2.25)]


@pytest.fixture
def offline(monkeypatch):
    """W&B as it is without an account, and nothing of this machine's settings for it."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def recorded(run_folder):
    """[(W&B's record of the run, [its entries])] of each start in a run folder, in order."""
    return [read_offline(file)
            for file in sorted((run_folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.parent.name)]


def read_offline(file, patience=30.0):
    """Its own process writes the file to its end, after finish() has returned."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    for _ in range(int(patience / 0.1)):
        store = DataStore()
        store.open_for_scan(str(file))
        records = [Record.FromString(data) for data in iter(store.scan_data, None)]
        if records and records[-1].HasField("exit"):
            entries = [{item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                       for record in records if record.HasField("history")]
            return next(record.run for record in records if record.HasField("run")), entries
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


@pytest.mark.slow
def test_wandb_gets_every_number(tmp_path, offline):
    (tracker,) = make_trackers(["wandb"], tmp_path, {"seed": 1}, 0, "mine", "second")
    tracker.write({"step": 3, "loss": 2.5})
    tracker.write({"step": 5, "loss": 2.25})
    tracker.close()
    ((run, entries),) = recorded(tmp_path)
    assert [(entry["_step"], entry["loss"]) for entry in entries] == [(3, 2.5), (5, 2.25)]
    assert (run.project, run.display_name) == ("mine", "second")
    assert [item.value_json for item in run.config.update if item.key == "seed"] == ["1"]


@pytest.mark.slow
def test_wandb_goes_on_in_the_same_curves(tmp_path, offline, monkeypatch):
    """And another run folder of the same name has curves of its own. Project and name come from the environment, else
    from us."""
    runs = []
    for folder in ("a/mine", "a/mine", "b/mine"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tracker,) = make_trackers(["wandb"], tmp_path / folder, {}, 0)
        tracker.close()
        runs.append(recorded(tmp_path / folder)[-1][0])
        monkeypatch.setenv("WANDB_PROJECT", "theirs")
        monkeypatch.setenv("WANDB_NAME", "named")
        time.sleep(1.1)  # names of its folders count seconds
    first, again, other = runs
    assert first.run_id == again.run_id != other.run_id
    assert [(run.project, run.display_name) for run in runs] == [("mamba-fsdp", "mine")] + 2 * [("theirs", "named")]


@pytest.mark.slow
def test_several_trackers_at_once(tmp_path, offline):
    trackers = make_trackers(["wandb", "tensorboard"], tmp_path, {}, 0)
    for tracker in trackers:
        tracker.write({"step": 3, "loss": 2.5})
        tracker.close()
    assert len(trackers) == 2 and recorded(tmp_path)[0][1][0]["loss"] == 2.5 and any(tmp_path.glob("tensorboard/*"))
    assert make_trackers([], tmp_path, {}, 0) == []


@pytest.mark.slow
def test_a_tracker_is_imported_only_when_it_is_used(project):
    code = ("import sys, mamba_fsdp.train.run, mamba_fsdp.verbs.evaluate, mamba_fsdp.data.tokenize\n"
            "assert not {'wandb', 'tensorboard', 'sentencepiece', 'google.protobuf', 'sentry_sdk'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], cwd=project, check=True)


def test_an_account_that_wandb_refuses_is_said_with_the_remedy(tmp_path, offline, monkeypatch):
    import wandb

    def refuse(**_):
        raise RuntimeError("api_key not configured (no-tty).\nmore of it")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"tracker=wandb: .*api_key not configured \(no-tty\)\.\).*`wandb login`"):
        make_trackers(["wandb"], tmp_path, {}, 0)


@pytest.mark.parametrize("package, kind", [("wandb", "wandb"), ("torch.utils.tensorboard", "tensorboard")])
def test_a_missing_tracker_is_said_with_the_remedy(tmp_path, monkeypatch, package, kind):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"pip install {kind}"):
        make_trackers([kind], tmp_path, {}, 0)
