"""A mistyped name without a network is one line, at once."""

import http.server
import os
import subprocess
import sys
import threading
import types

import pytest

from mamba_fsdp.data import hub
from tests.support.corpora import ROOT


@pytest.fixture
def ask(monkeypatch):
    """why_offline() in an environment of these variables only, and what the libraries are told. It has patience."""
    monkeypatch.setattr(hub, "SECONDS", 300.0)

    def run(**environment):
        imported = types.SimpleNamespace(HF_HUB_OFFLINE=False)
        monkeypatch.setitem(sys.modules, "huggingface_hub.constants", imported)
        monkeypatch.setitem(sys.modules, "datasets.config", imported)
        for name in (
            "HF_HUB_OFFLINE",
            "HF_ENDPOINT",
            "https_proxy",
            "http_proxy",
            "all_proxy",
            "no_proxy",
        ):
            for spelling in (name, name.upper()):
                monkeypatch.setenv(spelling, "")
                monkeypatch.delenv(spelling)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        reason, told = hub.why_offline(), os.environ.get("HF_HUB_OFFLINE")
        assert imported.HF_HUB_OFFLINE == (told == "1" and "HF_HUB_OFFLINE" not in environment)
        return reason, told

    return run


def test_the_hub_is_asked_once_and_silence_is_told_to_its_libraries(ask):
    assert ask(HF_ENDPOINT="http://127.0.0.1:9") == ("http://127.0.0.1:9: Connection refused", "1")
    reason, told = ask(https_proxy="http://127.0.0.1:9")  # a proxy that is not there
    assert reason.startswith("https://huggingface.co: ") and told == "1"
    assert ask(HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9") == (
        "HF_HUB_OFFLINE is set",
        "1",
    )
    assert ask(HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9") == ("", "0")
    assert ask(all_proxy="socks5://127.0.0.1:9") == ("", None)  # the libraries may know how


def test_any_answer_is_a_network(ask):
    with http.server.HTTPServer(
        ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
    ) as server:  # answers 501
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert ask(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}") == ("", None)


def test_a_name_server_that_is_silent_is_not_waited_for(ask, monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(hub, "_why_silent", lambda place: asked.wait(600) and "")
    monkeypatch.setattr(hub, "SECONDS", 0.01)
    assert ask() == ("https://huggingface.co: no answer in 0.01 s", "1")
    asked.set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, said",
    [
        (["x.txt", "out", "--tokenizer=gpt22"], "tokenizer gpt22: can't be loaded as a folder, a"),
        (
            ["nobody/nothing", "out"],
            "nobody/nothing: no local path, and `datasets` can't load it (",
        ),
    ],
)
def test_a_mistyped_name_without_a_network_is_one_line(words, said, tmp_path):
    (tmp_path / "x.txt").write_text("some text")
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, ROOT / "get_dataset.py", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment | {"HF_ENDPOINT": "http://127.0.0.1:9"},
    )
    assert (
        done.returncode == 2
        and done.stderr.startswith(f"error: {said}")
        and "network" in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1, done.stderr
