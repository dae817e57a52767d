"""What `generate` shows: text as it comes, whole characters, the speed beside it."""

import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mamba_fsdp.data.tokenizer import load_words, train
from mamba_fsdp.errors import UserError
from mamba_fsdp.inference import decoding, loading
from mamba_fsdp.verbs import generate
from tests.support.processes import run_program

pytestmark = pytest.mark.torch22


def test_a_character_of_several_tokens_waits_until_it_is_whole(monkeypatch, tmp_path):
    """The end of a document, and what is cut off within a character, are no text."""
    train(["aaa"], 257).save(tmp_path)  # its tokens are bytes
    letters = load_words(tmp_path)
    model = SimpleNamespace(network=torch.nn.Linear(1, 1), tokenizer_path=tmp_path)
    for text, pieces in (
        ("aé日b", ["a", "", "é", "", "", "日", "b"]),
        ("a<|endoftext|>b", ["a"]),
        ("日", ["", "", "日"]),
    ):
        tokens = letters.encode(text)
        monkeypatch.setattr(decoding, "generate", lambda *_, tokens=tokens, **__: iter(tokens))
        assert [*generate.generate(model, generate.GenerationConfig("x"))] == pieces
    monkeypatch.setattr(decoding, "generate", lambda *_, **__: iter(tokens[:2]))
    assert "".join(generate.generate(model, generate.GenerationConfig("x"))) == ""


@pytest.fixture
def run(in_user_folder, answer):
    """run(*words) -> (exit code, stdout, stderr) of generate."""
    return partial(answer, generate)


def test_equal_seeds_give_equal_texts_and_an_export_the_same(run):
    def text(model, *words):
        code, out, err = run(model, "--prompt=def naïve", "--length=20", *words)
        assert code == 0 and err.startswith("20 tokens in ") and err.endswith(" tokens/s\n")
        return out

    assert text("runs/demo") == text("runs/demo") != text("runs/demo", "--seed=1")
    likeliest = text("runs/demo", "--temperature=0")
    assert likeliest == text("exported/demo", "--temperature=0")
    assert re.match("def naïve.{5}", likeliest, re.S)


def test_what_is_generated_does_not_drive_the_terminal(run, monkeypatch):
    monkeypatch.setattr(generate, "generate", lambda *_: iter(["\x1b[2J", "\r"]))
    assert run("runs/demo", "--prompt=a")[1] == "a\x1b[2J\r\n"
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert run("runs/demo", "--prompt=\x1b")[1] == r"\x1b\x1b[2J\x0d" + "\n"
    monkeypatch.setattr(
        generate, "generate", lambda *_: generate.check_valid("\x07" * 9999 + "\udcef")
    )
    code, _, err = run("runs/demo", "--tokenizer=\x07" + "x" * 9999)
    assert code == 2 and "\x07" not in err and len(err) < 3000


def test_an_error_before_the_text_is_one_line(run, monkeypatch):
    model = loading.load("runs/demo")
    model.network.backbone.norm_f.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        "".join(generate.generate(model, generate.GenerationConfig("def")))
    monkeypatch.setattr(loading, "load", lambda *given, **more: model)
    for word, message in (
        ("--prompt=def", "the model's answer is not finite"),
        ("--prompt=na\udcefve", "--prompt: invalid UTF-8 after 'na'; convert it, "),
    ):
        code, out, err = run("runs/demo", word)
        assert (code, out) == (2, "") and err.startswith(f"error: {message}")
        assert err.count("\n") == 1


def test_words_without_transformers_are_those_of_transformers(in_user_folder):
    from transformers import AutoTokenizer

    text = "def naïve 日本<|endoftext|>x"
    for folder in ("runs/demo/tokenizer", "exported/demo"):
        ours = load_words(folder)
        theirs = AutoTokenizer.from_pretrained(folder)
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids) and ours.eos == theirs.eos_token_id


@pytest.mark.slow
def test_ctrl_c_ends_it_with_its_text_and_speed(in_user_folder, project):
    code = """
import os, signal
from mamba_fsdp import command_line
from mamba_fsdp.verbs import generate

from tokenizers import decoders

class Interrupted:
    count = 0

    def __init__(self, **how):
        self.stream = WHOLE(**how)

    def step(self, *given):
        self.count += 1
        if self.count == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return self.stream.step(*given)

WHOLE, decoders.DecodeStream = decoders.DecodeStream, Interrupted
words = ["runs/demo", "--prompt=def", "--length=100000", "--temperature=2"]
command_line.run(generate.main, str, words)
"""
    done = run_program(sys.executable, "-c", code, cwd=in_user_folder, PYTHONPATH=str(project))
    assert done.returncode == 130, done.stderr
    assert done.stdout.startswith("def") and done.stdout.endswith("\n")
    assert "8 tokens in" in done.stderr and "stopped by Ctrl-C" in done.stderr
    assert "Traceback" not in done.stderr
