"""What a person looks at."""

import errno
import io
import json
import subprocess
import sys
import time

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.display import Display, duration
from mamba_fsdp.report.output import output_that_may_go
from mamba_fsdp.report.plot import plot_losses
from mamba_fsdp.report.trackers import make_tracker

STEP = dict(loss=3.25, learning_rate=3e-4, tokens_per_second=21400.4)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_plain_line_per_report_without_a_terminal():
    stream = io.StringIO()
    display = Display(1000, stream=stream)
    display.step(19, **STEP)
    display.step(20, **STEP, seconds_left=3725, report=True)
    display.close()
    assert stream.getvalue() == "step   20/1000  loss  3.2500  lr 3.00e-04     21,400 tokens/s  left 1:02:05\n"


def test_one_live_line_on_a_terminal_that_other_lines_do_not_garble():
    stream = Terminal()
    display = Display(1000, stream=stream)
    display.step(1, **STEP, mfu=0.412)
    display.line("step 1: validation loss 3.0")
    display.close()
    drawn = stream.getvalue().split("\r")
    assert drawn[1].endswith("MFU 41.2%") and not drawn[2].strip() and drawn[3] == "step 1: validation loss 3.0\n"


def test_other_ranks_are_silent():
    stream = Terminal()
    display = Display(10, enabled=False, stream=stream)
    display.step(1, **STEP, report=True)
    display.line("x")
    display.close()
    assert stream.getvalue() == ""


class Gone(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_what_is_printed_when_nobody_can_read_it_is_dropped(monkeypatch):
    """A library's print too; and afterwards the streams are what they were."""
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", None)  # as with `2>&-`
    with output_that_may_go():
        display = Display(10)
        display.line("x")
        display.step(1, **STEP, report=True)
        print("from a library", file=sys.stderr)
        assert sys.stdout.encoding is None  # all else is the stream's
    assert isinstance(sys.stdout, Gone) and sys.stderr is None


def test_a_process_whose_reader_has_gone_ends_as_it_would_have(project):
    code = ("import sys, time; from mamba_fsdp.report.output import output_that_may_go\n"
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


def test_a_plot_is_a_picture_of_the_runs_losses(tmp_path):
    entries = [{"step": 0, "val_loss": 4.0}, {"step": 1, "loss": 3.9},
               {"step": 2, "loss": None}, {"step": 2, "val_loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    plot_losses([tmp_path], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="nowhere.png"):
        plot_losses([tmp_path], tmp_path / "missing" / "nowhere.png")
    with pytest.raises(UserError, match="is it a run folder"):
        plot_losses([tmp_path / "missing"], tmp_path / "loss.png")


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, written in ((0, [(3, 2.5), (4, 2.0), (5, 1.5)]), (3, [(4, 2.25)])):  # the second resumes from step 3
        tracker = make_tracker("tensorboard", tmp_path, {}, start)
        for step, loss in written:
            tracker.write({"step": step, "loss": loss, "grad_norm": None})
        tracker.close()
        time.sleep(1.1)  # names of event files count seconds
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 2.5), (4, 2.25)]


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package, which needs an account.

    What its functions, as documented, are called with is in `calls`.
    """
    import sys
    import types

    calls = []
    run = types.SimpleNamespace(log=lambda values, step: calls.append((values, step)),
                                finish=lambda: calls.append("finish"))
    package = types.SimpleNamespace(calls=calls, init=lambda **named: calls.append(named) or run)
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_wandb_goes_on_in_the_same_curves(tmp_path, wandb):
    """And another run folder of the same name has curves of its own."""
    for folder in ("a/mine", "a/mine", "b/mine"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        make_tracker("wandb", tmp_path / folder, {"seed": 1}, 0)
    first, again, other = wandb.calls
    assert first == again and first["id"] != other["id"] and first["name"] == other["name"] == "mine"
    assert first["resume"] == "allow" and first["config"] == {"seed": 1}


def test_wandb_gets_every_number(tmp_path, wandb):
    tracker = make_tracker("wandb", tmp_path, {}, 0)
    tracker.write({"step": 3, "loss": 2.5})
    tracker.close()
    assert wandb.calls[1:] == [({"loss": 2.5}, 3), "finish"]


def test_an_account_that_wandb_refuses_is_said_with_the_remedy(tmp_path, wandb):
    def refuse(**_):
        raise RuntimeError("api_key not configured (no-tty).\nmore of it")

    wandb.init = refuse
    with pytest.raises(UserError, match=r"tracker=wandb: .*api_key not configured \(no-tty\)\.\).*`wandb login`"):
        make_tracker("wandb", tmp_path, {}, 0)


def test_a_missing_tracker_is_said_with_the_remedy(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        make_tracker("wandb", tmp_path, {}, 0)
