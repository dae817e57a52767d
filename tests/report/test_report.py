"""What a person looks at."""

import errno
import io
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.console import Console, duration, output_that_may_go
from mamba_fsdp.report.trackers import make_trackers
from tests.support.terminal import Terminal, drawings

STEP = dict(loss=3.25, learning_rate=3e-4, tokens_per_second=21400.4)


LONG = dict(
    loss=3.25, learning_rate=3e-4, tokens_per_second=1_214_000.4, mfu=0.412, seconds_left=360_125
)


def test_a_plain_line_per_report_without_a_terminal():
    stream = io.StringIO()
    display = Console(stream=stream)
    display.step(19, 1000, **STEP)
    display.step(20, 1000, **STEP, seconds_left=3725, report=True)
    display.passing("validation 3/16")
    display.line("data       " + "word " * 40)
    display.close()
    assert stream.getvalue() == (
        "step   20/1000  loss  3.2500  lr 3.00e-04   21,400 tok/s  left 1:02:05\n"
        "data       " + "word " * 40 + "\n"
    )


def test_one_live_line_below_lines_that_stay(terminal, monkeypatch):
    """A report stays; what is passing makes room for what comes next."""
    monkeypatch.setattr("mamba_fsdp.report.console.SECONDS_BETWEEN_UPDATES", 0.0)
    display = Console(stream=terminal.stream())
    for step in (18, 19, 20):
        display.step(step, 100, **STEP, report=step == 19)
    display.passing("validation 3/16")
    display.line("step 20: validation loss 3.0")
    display.passing("and so on")
    display.close()
    lines = [drawings(line)[-1] for line in terminal.text().split("\r\n") if line.strip()]
    assert [line[:15] for line in lines] == ["step  19/100  l", "step 20: valida", "and so on"]


@pytest.mark.parametrize(
    "columns, parts",
    [
        (100, ["step", "loss", "lr", "tok/s", "MFU", "left"]),
        (81, ["step", "loss", "lr", "tok/s", "left"]),
        (80, ["step", "loss", "lr", "left"]),
        (60, ["step", "loss", "left"]),
        (40, ["step", "loss"]),
        (12, ["step"]),
    ],
)
def test_the_live_line_fits_and_keeps_what_matters(columns, parts):
    window = Terminal(columns)
    display = Console(stream=window.stream())
    display.step(123_456, 1_000_000, **LONG)
    display.step(123_456, 1_000_000, **LONG, report=True)
    display.close()
    live, line = drawings(window.text())[0], drawings(window.text())[-1]
    window.close()
    assert live == line and len(live) < columns
    assert [
        part for part in ("step", "loss", "lr", "tok/s", "MFU", "left") if part in live
    ] == parts


def test_a_terminal_that_can_only_print_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    display = Console(stream=terminal.stream())
    display.step(1, 100, **LONG)
    display.step(2, 100, **LONG, report=True)
    display.passing("validation 3/16")
    display.close()
    assert terminal.text().count("step") == 1 and "\r" not in terminal.text().replace("\r\n", "\n")


def test_long_lines_are_wrapped_where_the_text_begins(terminal):
    display = Console(stream=terminal.stream())
    display.line(
        "kernels    reference: "
        + "; ".join(["conv not cpp: gcc is too old"] * 5)
        + "\na second line"
    )
    first, *rest, last = drawings(terminal.text())
    assert first.startswith("kernels    reference") and last == "a second line"
    assert len(rest) == 2 and all(len(row) < 80 and re.match(" {11}[cot]", row) for row in rest)


def test_help_pages_fit_and_options_keep_their_column(terminal):
    from mamba_fsdp.verbs import evaluate, plan

    for page in (plan.__doc__, evaluate.__doc__):
        Console(stream=terminal.stream()).line(page)
    rows = terminal.text().split("\r\n")
    assert max(map(len, rows)) < 80
    first = next(number for number, row in enumerate(rows) if row.startswith("  --instance=NAME  "))
    assert rows[first + 1].startswith(" " * len("  --instance=NAME     ") + "p4d.24xlarge")
    assert sorted(" ".join(rows).split()) == sorted(f"{plan.__doc__} {evaluate.__doc__}".split())


def test_other_ranks_are_silent(terminal):
    display = Console(enabled=False, stream=terminal.stream())
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
        display = Console()
        display.line("x")
        display.step(1, 10, **STEP, report=True)
        print("from a library", file=sys.stderr)
        assert sys.stdout.encoding is None  # all else is the stream's
    assert isinstance(sys.stdout, Gone) and sys.stderr is None


def test_a_process_whose_reader_has_gone_ends_as_it_would_have(project):
    code = (
        "import sys, time; from mamba_fsdp.report.console import output_that_may_go\n"
        "with output_that_may_go():\n"
        "    for turn in range(3): print('x', flush=True); sys.stdin.readline()\n"
        "print('also after it')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=project,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"x\n"
    process.stdout.close()
    process.stdin.close()
    assert (process.wait(300), process.stderr.read()) == (0, b"")


def test_durations_read_like_a_clock():
    assert [duration(seconds) for seconds in (0, 61.9, 3600)] == ["0:00", "1:01", "1:00:00"]


@pytest.mark.slow
def test_tensorboard_gets_every_number_in_groups_and_the_settings(tmp_path):
    from tensorboard.backend.event_processing import plugin_event_accumulator
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, written in (
        (0, [(3, 2.5), (4, 2.0), (5, 1.5)]),
        (3, [(4, 2.25)]),
    ):  # the second resumes from step 3
        (tracker,) = make_trackers(["tensorboard"], tmp_path, {"data": {"seed": 1}}, start)
        for step, loss in written:
            tracker.write(
                {
                    "step": step,
                    "loss": loss,
                    "val_loss": 3.0,
                    "grad_norm": None,
                    "tokens_per_second": 7.0,
                    "source_tokens": {"code": 5},
                    "memory_gb": 1.5,
                }
            )
        tracker.close()
        time.sleep(1.1)  # names of event files count seconds
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "validation/val_loss",
        "time/tokens_per_second",
        "data/source_tokens/code",
        "device/memory_gb",
    }
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (3, 2.5),
        (4, 2.25),
    ]
    shown = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [
        (event.step, event.tensor_proto.string_val[0])
        for event in shown.Tensors("settings/text_summary")
    ] == [(step, b"    data:\n      seed: 1\n    ") for step in (0, 3)]


def test_prometheus_finds_the_latest_numbers(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    (tracker,) = make_trackers(["prometheus"], tmp_path, {}, 0)
    for step, loss in ((3, 2.5), (4, None)):
        tracker.write({"step": step, "loss": loss, "source_tokens": {'co"de': 5 * step}})
    tracker.close()
    text = (tmp_path / "prometheus/metrics.prom").read_text()
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    run = ("run", str(tmp_path))
    assert str(found.pop(("mamba_fsdp_loss", run))) == "nan"
    assert found == {
        ("mamba_fsdp_step", run): 4,
        ("mamba_fsdp_source_tokens", run, ("source", 'co"de')): 20,
    }


@pytest.fixture
def offline(monkeypatch):
    """W&B as it is without an account, and nothing of this machine's settings for it."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for patience in ("WANDB__SERVICE_WAIT", "WANDB_INIT_TIMEOUT"):
        monkeypatch.setenv(patience, "600")


def recorded(run_folder):
    """[(W&B's record of the run, [its entries])] of each start in a run folder, in order."""
    return [
        read_offline(file)
        for file in sorted(
            (run_folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.parent.name
        )
    ]


def read_offline(file, patience=300.0):
    """Its own process writes the file to its end, after finish() has returned."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    for _ in range(int(patience / 0.1)):
        store = DataStore()
        store.open_for_scan(str(file))
        try:
            records = [Record.FromString(data) for data in iter(store.scan_data, None)]
        except AssertionError:  # the last of them is half written yet
            records = []
        if records and records[-1].HasField("exit"):
            entries = [
                {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                for record in records
                if record.HasField("history")
            ]
            return next(record.run for record in records if record.HasField("run")), entries
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


@pytest.mark.slow
def test_wandb_gets_every_number(tmp_path, offline, capfd):
    """And says one line, where it goes; not the forty of its own."""
    said = []
    (tracker,) = make_trackers(
        ["wandb"], tmp_path, {"seed": 1}, 0, "mine", "second", say=said.append
    )
    tracker.write({"step": 3, "loss": 2.5})
    tracker.write({"step": 5, "loss": 2.25})
    tracker.close()
    assert said == [f"tracker    W&B: offline, in {tmp_path}/wandb"] and capfd.readouterr() == (
        "",
        "",
    )
    ((run, entries),) = recorded(tmp_path)
    assert [(entry["_step"], entry.get("train/loss")) for entry in entries] == [(3, 2.5), (5, 2.25)]
    assert (run.project, run.display_name) == ("mine", "second")
    assert [item.value_json for item in run.config.update if item.key == "seed"] == ["1"]


@pytest.mark.slow
def test_wandb_goes_on_in_the_same_curves(tmp_path, offline, monkeypatch):
    """And another run folder of the same name has curves of its own. Project and name come from the environment, else
    from us."""
    runs = []
    for folder, steps in (("a/mine", (1, 2, 3, 3)), ("a/mine", (3, 4)), ("b/mine", ())):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tracker,) = make_trackers(["wandb"], tmp_path / folder, {}, 0)
        for step in steps:
            tracker.write({"step": step, "loss": float(step)})
        tracker.close()
        runs.append(recorded(tmp_path / folder)[-1][0])
        monkeypatch.setenv("WANDB_PROJECT", "theirs")
        monkeypatch.setenv("WANDB_NAME", "named")
        time.sleep(1.1)  # names of its folders count seconds
    first, again, other = runs
    logged = [[entry["_step"] for entry in entries] for _, entries in recorded(tmp_path / "a/mine")]
    assert logged == [[1, 2, 3], [4]]  # what comes again is not sent again
    # A run that was killed before W&B had written steps 5 and 6 sends them when it resumes.
    (tmp_path / "a/mine/wandb_id").write_text(f"{first.run_id} 6")
    (tmp_path / "a/mine/metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in (4, 5, 6))
    )
    (tracker,) = make_trackers(["wandb"], tmp_path / "a/mine", {}, 6)
    tracker.close()
    assert [entry["_step"] for entry in recorded(tmp_path / "a/mine")[-1][1]] == [5, 6]
    assert first.run_id == again.run_id != other.run_id
    assert [(run.project, run.display_name) for run in runs] == [("mamba-fsdp", "mine")] + 2 * [
        ("theirs", "named")
    ]


@pytest.mark.slow
def test_several_trackers_at_once(tmp_path, offline):
    trackers = make_trackers(["wandb", "tensorboard"], tmp_path, {}, 0)
    for tracker in trackers:
        tracker.write({"step": 3, "loss": 2.5})
        tracker.close()
    assert len(trackers) == 2 and any(tmp_path.glob("tensorboard/*"))
    assert recorded(tmp_path)[0][1][0]["train/loss"] == 2.5
    assert make_trackers([], tmp_path, {}, 0) == []


@pytest.mark.slow
def test_a_tracker_is_imported_only_when_it_is_used(project):
    code = (
        "import sys, mamba_fsdp.train.run, mamba_fsdp.verbs.evaluate, mamba_fsdp.data.tokenize\n"
        "assert not {'wandb', 'tensorboard', 'sentencepiece', 'google.protobuf', 'sentry_sdk'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=project, check=True)


@pytest.mark.slow
def test_a_run_that_nobody_is_logged_in_for_does_without_wandb(tmp_path, offline, monkeypatch):
    """It is not asked for a key at a terminal either. Other refusals, such as no network, are told alike."""
    import wandb

    said = []
    monkeypatch.setattr(wandb.sdk.wandb_setup, "_singleton", None)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert make_trackers(["wandb"], tmp_path, {}, 0, say=said.append) == []
    monkeypatch.setattr(
        wandb, "init", Mock(side_effect=RuntimeError("no route to its server\nmore of it"))
    )
    monkeypatch.setattr(
        wandb, "setup", lambda: SimpleNamespace(settings=SimpleNamespace(mode="offline"))
    )
    assert make_trackers(["wandb"], tmp_path, {}, 0, say=said.append) == []
    assert len(said) == 2 and "nobody is logged in" in said[0]
    assert "W&B is off: no route to its server; training does without it. `wandb login`" in said[1]


def test_a_run_that_wandb_s_server_knows_goes_on_where_it_ends(tmp_path, monkeypatch):
    """Whatever was sent and lost when the run was killed."""
    sent = []
    run = SimpleNamespace(
        step=5,
        resumed=True,
        finish=None,
        url="https://it",
        log=lambda values, step: sent.append(step),
    )
    settings = SimpleNamespace(settings=SimpleNamespace(mode="online"))
    monkeypatch.setitem(
        sys.modules,
        "wandb",
        SimpleNamespace(
            init=lambda **_: run, setup=lambda: settings, api=SimpleNamespace(api_key="x")
        ),
    )
    (tmp_path / "wandb_id").write_text("older")  # of an older version: the id alone
    (tracker,) = make_trackers(["wandb"], tmp_path, {}, 0)
    for step in (4, 5, 6):
        tracker.write({"step": step, "loss": 1.0})
    assert sent == [5, 6] and (tmp_path / "wandb_id").read_text() == "older 6"


@pytest.mark.parametrize(
    "package, kind",
    [
        ("wandb", "wandb"),
        ("torch.utils.tensorboard", "tensorboard"),
        ("prometheus_client", "prometheus"),
    ],
)
def test_a_missing_tracker_is_said_with_the_remedy(tmp_path, monkeypatch, package, kind):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"pip install {kind}"):
        make_trackers([kind], tmp_path, {}, 0)
