"""Tests mamba_fsdp.trainer.stopping: requests to stop by signals, by STOP files, and by the on_record function of a
caller."""

import os
import signal

import pytest

from mamba_fsdp.run.names import OLD_STOP_VARIABLE, START_VARIABLE, stop_file_id
from mamba_fsdp.run.records import read_entries, read_status
from mamba_fsdp.trainer import setup, stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_a_request_and_the_old_handler_is_restored(tmp_path, number):
    before = signal.getsignal(number)
    with stopping.StopRequest(tmp_path, True) as stop:
        assert not stop.check()
        stop.has_stepped = True
        os.kill(os.getpid(), number)
        assert stop.check() and stop.reason == number.name
    assert signal.getsignal(number) == before


def test_two_signals_are_one_request_but_a_second_ctrl_c_does_not_wait(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt), stopping.StopRequest(tmp_path, True) as stop:
        stop.has_stepped = True
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun sends SIGTERM to its ranks after a Ctrl-C
        assert stop.check() and stop.reason == "SIGINT"
        assert capsys.readouterr().err.count("stopping") == 1
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("content, reason", [("", "STOP file"), ("SIGINT\n", "SIGINT")])
def test_the_stop_file_is_seen_by_rank_0_and_removed_at_the_end(
    tmp_path, monkeypatch, content, reason
):
    """Rank 0 finds the STOP file, and removes it at the end of the run. The reason of the stop is the content of the
    file, which the launcher writes, or otherwise "STOP file"."""
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.0)
    with (
        stopping.StopRequest(tmp_path, True) as stop,
        stopping.StopRequest(tmp_path, False) as other,
    ):
        assert not stop.check()
        (tmp_path / "STOP").write_text(content)
        assert stop.check() and stop.reason == reason and not other.check()
    assert not (tmp_path / "STOP").exists()


def test_a_stop_file_that_replaces_an_old_one_is_a_request(tmp_path):
    (tmp_path / "STOP").touch()
    stop = stopping.StopRequest(tmp_path, True)
    (tmp_path / "STOP").write_text("another")
    with stop:
        assert stop.check()


def test_the_stop_file_is_kept_for_the_launcher_if_a_rank_fails(tmp_path):
    """If a rank fails, the STOP file is kept, so that the ranks that the launcher restarts find it."""
    with pytest.raises(ConnectionError), stopping.StopRequest(tmp_path, True):
        (tmp_path / "STOP").touch()
        raise ConnectionError
    assert stopping.StopRequest(tmp_path, True).check()


@pytest.mark.torch22
def test_a_caller_gets_the_records_and_stops_a_run(train, tmp_path):
    given = {"num_steps": 4, "eval_interval": 2}
    heard = []

    def listen(record):
        heard.append(record)
        return "val_loss" in record and record["step"] == 2

    printed = train(tmp_path, **given, on_record=listen)
    assert "stopped    at step 3 (on_record); the same command resumes from here" in printed
    assert heard == read_entries(tmp_path / "metrics.jsonl")
    status = read_status(tmp_path)
    assert (status["status"], status["step"], status["reason"]) == ("stopped", 3, "on_record")
    train(tmp_path, **given, on_record=heard.append)
    assert heard == read_entries(tmp_path / "metrics.jsonl") and heard[-1]["step"] == 4


@pytest.fixture
def while_it_sets_up(monkeypatch):
    """Returns a function while_it_sets_up(request), which makes the next training call `request` when its setup
    begins."""

    def change(request):
        def asked(*given):
            monkeypatch.undo()
            request()
            return context(*given)

        context = setup.RunSetup.make_context
        monkeypatch.setattr(setup.RunSetup, "make_context", asked)

    return change


@pytest.mark.parametrize("how", ["SIGTERM", "STOP file"])
def test_a_request_while_a_run_sets_up_ends_it_before_its_first_step(
    train, tmp_path, while_it_sets_up, how
):
    """A request to stop during the setup ends the run before its first step. A STOP file from before the start is
    ignored."""
    (tmp_path / "STOP").touch()
    train(tmp_path, num_steps=1)
    if how == "SIGTERM":
        while_it_sets_up(lambda: os.kill(os.getpid(), signal.SIGTERM))
    else:
        while_it_sets_up((tmp_path / "STOP").touch)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody heard it"))
    printed = train(tmp_path, num_steps=2)
    signal.signal(signal.SIGTERM, before)
    assert printed.endswith(f"before the first step of this start ({how}): nothing was lost\n")
    status = read_status(tmp_path)
    assert (status["status"], status["step"], status["reason"]) == ("stopped", 1, how)


def test_ctrl_c_during_the_setup_is_not_a_failure(train, tmp_path, capsys, while_it_sets_up):
    while_it_sets_up(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    printed = capsys.readouterr().out
    assert printed.endswith("before the first step of this start: nothing was lost\n")
    status = read_status(tmp_path)
    assert (status["status"], status["reason"]) == ("stopped", "SIGINT")


def test_ranks_of_a_launcher_keep_a_request_for_their_start(train, tmp_path, monkeypatch):
    """For ranks of a launcher, only the STOP file whose identity is in OLD_STOP_VARIABLE is ignored, so that
    restarted ranks still find a request. The launcher can also write a STOP file to the folder of the start."""
    monkeypatch.setenv(OLD_STOP_VARIABLE, "")
    (tmp_path / "STOP").touch()
    assert "before the first step of this start (STOP file)" in train(tmp_path)
    (tmp_path / "STOP").touch()
    monkeypatch.setenv(OLD_STOP_VARIABLE, stop_file_id(str(tmp_path)))
    train(tmp_path, num_steps=1)
    assert not (tmp_path / "STOP").exists()
    monkeypatch.setenv(START_VARIABLE, str(tmp_path / "starts/1.0"))
    (tmp_path / "starts/1.0").mkdir(parents=True)
    (tmp_path / "starts/1.0/STOP").write_text("SIGUSR1\n")
    assert "before the first step of this start (SIGUSR1)" in train(tmp_path, num_steps=2)
