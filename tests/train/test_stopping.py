"""Requests to stop, and a rank that stands still."""

import os
import signal

import pytest

from mamba_fsdp.train import stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_a_request_and_the_old_handler_comes_back(tmp_path, number):
    before = signal.getsignal(number)
    with stopping.StopRequest(tmp_path, True) as stop:
        assert not stop.look()
        stop.has_stepped = True
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
    with pytest.raises(KeyboardInterrupt), stopping.StopRequest(tmp_path, True) as stop:
        stop.has_stepped = True
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun's, in between
        assert stop.reason == "SIGINT"
        os.kill(os.getpid(), signal.SIGINT)


def test_before_the_first_step_ctrl_c_does_not_wait(tmp_path):
    with pytest.raises(KeyboardInterrupt), stopping.StopRequest(tmp_path, True):
        os.kill(os.getpid(), signal.SIGINT)


def test_two_signals_are_one_request(tmp_path, capsys):
    with stopping.StopRequest(tmp_path, True) as stop:
        stop.has_stepped = True
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher's
        assert stop.look() and stop.reason == "SIGINT"
    assert capsys.readouterr().err.count("stopping") == 1


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


def test_the_stop_file_stays_for_the_launcher_to_see_where_a_rank_fails(tmp_path, monkeypatch):
    """And for the ranks that it starts again in place."""
    with pytest.raises(ConnectionError), stopping.StopRequest(tmp_path, True):
        (tmp_path / "STOP").touch()
        raise ConnectionError
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert stopping.StopRequest(tmp_path, True).look()
