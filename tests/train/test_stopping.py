"""Requests to stop, and a rank that stands still."""

import os
import signal
import subprocess
import sys

import pytest

from mamba_fsdp.train import stopping
from mamba_fsdp.train.clock import device_peak, stragglers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_a_request_and_the_old_handler_comes_back(tmp_path, number):
    before = signal.getsignal(number)
    with stopping.StopRequest(tmp_path, True) as stop:
        assert not stop.look()
        os.kill(os.getpid(), number)
        assert stop.look() and stop.reason == number.name
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    with pytest.raises(KeyboardInterrupt), stopping.StopRequest(tmp_path, True):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun's, in between
        os.kill(os.getpid(), signal.SIGINT)


def test_the_stop_file_is_seen_by_rank_0_and_removed_at_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "SECONDS_BETWEEN_LOOKS", 0.0)
    (tmp_path / "STOP").touch()
    with stopping.StopRequest(tmp_path, True) as stop, stopping.StopRequest(tmp_path, False) as other:
        assert not stop.look()  # the file was for a run that is over
        (tmp_path / "STOP").touch()
        assert stop.look() and not other.look()
    assert not (tmp_path / "STOP").exists()


def test_a_rank_without_progress_says_where_it_stands_and_ends():
    code = ("import time; from mamba_fsdp.train.watchdog import watchdog\n"
            "def stuck_here(): time.sleep(60)\n"
            "with watchdog(0.5 / 60, 3): stuck_here()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "rank 3 made no progress" in done.stderr and "stuck_here" in done.stderr


def test_a_rank_with_progress_goes_on():
    code = ("import time; from mamba_fsdp.train.watchdog import watchdog\n"
            "from mamba_fsdp.heartbeat import heart\n"
            "with watchdog(0.5 / 60, 3):\n"
            "    for _ in range(12): time.sleep(0.1); heart.beat()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_slow_rank_is_named():
    assert stragglers([1.0, 1.1, 4.0, 0.9]) == {
        "slowest_rank": 2, "slowest_rank_seconds": 4.0, "median_rank_seconds": 1.05}


def test_peaks_are_told_apart_by_the_whole_name():
    assert (device_peak("NVIDIA L40S") == 362e12 and device_peak("NVIDIA L4") == 121e12
            and device_peak("Tesla T4") is None)
