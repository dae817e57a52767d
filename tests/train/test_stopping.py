"""Requests to stop, and a rank that stands still."""

import contextlib
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mamba_fsdp.planning.devices import device_peak
from mamba_fsdp.train import stopping, watchdog
from mamba_fsdp.train.clock import stragglers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_a_request_and_the_old_handler_comes_back(tmp_path, number):
    before = signal.getsignal(number)
    with stopping.StopRequest(tmp_path, True) as stop:
        assert not stop.look()
        os.kill(os.getpid(), number)
        assert stop.look() and stop.reason == number.name
    assert signal.getsignal(number) == before


def test_under_nohup_a_terminal_that_closes_is_no_request(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping.StopRequest(tmp_path, True) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.look()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    with pytest.raises(KeyboardInterrupt), stopping.StopRequest(tmp_path, True):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun's, in between
        os.kill(os.getpid(), signal.SIGINT)


def test_two_signals_are_one_request(tmp_path, capsys):
    with stopping.StopRequest(tmp_path, True) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher's
        assert stop.look() and stop.reason == "SIGINT"
    assert capsys.readouterr().err.count("stopping") == 1


def test_under_a_launcher_that_has_said_it_a_rank_does_not(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with stopping.StopRequest(tmp_path, True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.look()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content, reason", [("", "STOP file"), ("SIGINT\n", "SIGINT")])
def test_the_stop_file_is_seen_by_rank_0_and_removed_at_both_ends(
    tmp_path, monkeypatch, content, reason
):
    """It may say why, as the launcher's does."""
    monkeypatch.setattr(stopping, "MOST_SECONDS_BETWEEN_LOOKS", 0.0)
    (tmp_path / "STOP").touch()
    with (
        stopping.StopRequest(tmp_path, True) as stop,
        stopping.StopRequest(tmp_path, False) as other,
    ):
        assert not stop.look()  # the file was for a run that is over
        (tmp_path / "STOP").write_text(content)
        assert stop.look() and stop.reason == reason and not other.look()
    assert not (tmp_path / "STOP").exists()


def test_where_a_look_costs_little_there_is_one_each_step(tmp_path, monkeypatch):
    """And where it takes long, as over a network, a hundredth of the time goes to it."""
    now = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    for seconds, looks in ((1e-5, 100), (0.0025, 33), (5.0, 10)):
        with stopping.StopRequest(tmp_path, True) as stop:
            seen = []

            class File:
                def read_text(self, seconds=seconds, seen=seen, **_):
                    now[0] += seconds
                    seen.append(now[0])
                    raise FileNotFoundError

                def unlink(self, **_):
                    pass

            stop.file = File()
            for _ in range(100):  # steps of 0.1 s
                now[0] += 0.1
                assert not stop.look()
        assert abs(len(seen) - looks) < 0.1 * looks + 2, (seconds, len(seen))


def test_a_rank_without_progress_says_where_it_stands_and_ends():
    code = (
        "import time; from mamba_fsdp.train.watchdog import watchdog\n"
        "def stuck_here(): time.sleep(300)\n"
        "with watchdog(0.5 / 60, 3): stuck_here()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert (
        done.returncode == 1
        and "rank 3 made no progress" in done.stderr
        and "stuck_here" in done.stderr
    )


@pytest.mark.parametrize(
    "beats_at, stops_at, dies_at",
    [
        (range(30, 301, 30), None, None),  # progress
        ([], None, 60),
        ([45], None, 105),
        ([], (45, 7200), 7306),  # by Ctrl-Z, or with the machine: nobody's work continues then
        ([], (45, 3), 60),
    ],
)
def test_a_rank_ends_when_it_has_made_no_progress_while_it_ran(
    monkeypatch, capfd, beats_at, stops_at, dies_at
):
    """Of a minute's patience, in seconds of a clock of the test's own."""
    now, began = [0.0], 1000.0
    monkeypatch.setattr("time.monotonic", lambda: began + now[0])
    monkeypatch.setattr(watchdog, "leave_for_torchrun", lambda error: None)
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))

    def passes(seconds):
        at, now[0] = (
            now[0],
            now[0] + seconds + (stops_at[1] if stops_at and now[0] == stops_at[0] else 0),
        )
        if any(at < beat <= now[0] for beat in beats_at):
            watchdog.heart.beat()
        return now[0] >= 10_000 if dies_at else now[0] >= 300

    watchdog.heart.beat()
    with contextlib.suppress(SystemExit) if dies_at is None else pytest.raises(SystemExit):
        watchdog._watch(1.0, 3, SimpleNamespace(wait=passes))
    assert ("made no progress" in capfd.readouterr().err) == bool(dies_at)
    assert now[0] == (300 if dies_at is None else pytest.approx(dies_at + 1, abs=1))


def test_the_stop_file_is_not_there_while_storage_fails(tmp_path, monkeypatch):
    with stopping.StopRequest(tmp_path, True) as stop, monkeypatch.context() as failing:
        failing.setattr(
            stopping.os, "stat", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        )
        assert not stop.look()


def test_the_slow_rank_is_named():
    assert stragglers([1.0, 1.1, 4.0, 0.9]) == {
        "slowest_rank": 2,
        "slowest_rank_seconds": 4.0,
        "median_rank_seconds": 1.05,
    }


@pytest.mark.parametrize(
    "name, tera",
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB300", 2500),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 504),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 439),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name(name, tera):
    assert device_peak(name) == (tera and tera * 1e12)
