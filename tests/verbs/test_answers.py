"""Tests the output and the exit codes of generate, train and doctor."""

import dataclasses
import importlib
import re
import sys

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.__main__ import VERBS
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import default, describe_type, format_value
from mamba_fsdp.inference import loading
from mamba_fsdp.launch.checks import Check
from mamba_fsdp.verbs import doctor, generate, train
from tests.support.processes import run_program


def test_an_option_s_default_or_bound_changes_only_on_purpose(golden):
    described = []
    for verb in VERBS:
        module = importlib.import_module(f"mamba_fsdp.verbs.{verb.replace('import', 'import_')}")
        options = command_line.options_class(module.main)
        # The options of tokenize are in tests/settings/defaults.txt.
        if options and verb != "tokenize":
            described += [
                f"{verb} --{leaf.name}={format_value(default(leaf))} ({describe_type(leaf)})"
                for leaf in dataclasses.fields(options)
            ]
    golden.check_text("options.txt", "".join(f"{line}\n" for line in described))


@pytest.mark.torch22
def test_equal_seeds_give_equal_texts_and_an_export_the_same(answer, in_user_folder):
    def text(model, *words):
        code, out, err = answer(generate, model, "--prompt=def naïve", "--length=20", *words)
        assert code == 0 and err.startswith("20 tokens in ") and err.endswith(" tokens/s\n")
        return out

    assert text("runs/demo") == text("runs/demo") != text("runs/demo", "--seed=1")
    likeliest = text("runs/demo", "--temperature=0")
    assert likeliest == text("exported/demo", "--temperature=0")
    assert re.match("def naïve.{5}", likeliest, re.S)


def test_generated_text_can_not_control_the_terminal(answer, in_user_folder, monkeypatch):
    monkeypatch.setattr(generate, "generate", lambda *_: iter(["\x1b[2J", "\r"]))
    assert answer(generate, "runs/demo", "--prompt=a")[1] == "a\x1b[2J\r\n"
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert answer(generate, "runs/demo", "--prompt=\x1b")[1] == r"\x1b\x1b[2J\r" + "\n"
    monkeypatch.setattr(
        generate, "generate", lambda *_: generate.check_valid("\x07" * 9999 + "\udcef")
    )
    code, _, err = answer(generate, "runs/demo", "--tokenizer=\x07" + "x" * 9999)
    assert code == 2 and "\x07" not in err and len(err) < 3000


def test_an_error_before_the_text_is_one_line(answer, in_user_folder, monkeypatch):
    model = loading.load("runs/demo")
    model.network.backbone.norm_f.weight.fill_(float("nan"))
    monkeypatch.setattr(loading, "load", lambda *given, **more: model)
    code, out, err = answer(generate, "runs/demo", "--prompt=def")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: the model's logits are not finite")


@pytest.mark.slow
def test_ctrl_c_ends_a_generation_with_its_text_and_speed(in_user_folder, project):
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


def test_a_training_that_a_signal_stopped_ends_with_a_shell_s_code(monkeypatch):
    """A training that a signal has stopped exits with 128 + signal, like in a shell, but with 0 as a rank, because
    torchrun treats any other exit code of a rank as a failure."""
    codes = [train.exit_code(stopped) for stopped in ("", "STOP file", "SIGTERM")]
    assert codes == [0, 0, 143]
    monkeypatch.setenv("RANK", "0")
    assert train.exit_code("SIGTERM") == 0


def test_the_doctor_fails_if_one_check_does(monkeypatch, answer):
    def fail():
        raise UserError("it is broken")

    checks = [Check("a", fail), Check("b", lambda: "it is fine")]
    monkeypatch.setattr(doctor, "CHECKS", checks)
    output = "FAIL a               it is broken\nok   b               it is fine\n"
    assert answer(doctor) == (1, output, "")
    monkeypatch.setattr(doctor, "CHECKS", checks[1:])
    assert answer(doctor)[0] == 0
