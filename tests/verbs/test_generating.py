"""What `generate` shows: text as it comes, several texts in order, stops across tokens, the speed beside them."""

import os
import subprocess
import sys

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.errors import UserError
from mamba_fsdp.verbs import generate
from mamba_fsdp.verbs.generate import Piece, Text, in_order

pytestmark = pytest.mark.torch22


class Letters:
    """A tokenizer whose tokens are bytes."""

    eos = 0

    @staticmethod
    def decode(tokens):
        return bytes(tokens).decode(errors="replace")


def said(text, stops=()):
    """(what is shown after each byte, whether it ended before the last)."""
    data, ours = text.encode(), Text(Letters, stops)
    shown = []
    for number, byte in enumerate(data):
        piece, last = ours.add(byte, last=number + 1 == len(data))
        shown.append(piece)
        if last:
            return shown, number + 1 < len(data)


def test_a_character_of_several_tokens_waits_until_it_is_whole():
    assert said("aé日b") == (["a", "", "é", "", "", "日", "b"], False)


def test_a_stop_ends_the_text_across_tokens_and_is_not_shown():
    assert said("one\n\ntwo", ["\n\n"]) == (["o", "n", "e", "", ""], True)
    assert said("a\nb\n", ["\n\n"]) == (
        ["a", "", "\nb", "\n"],
        False,
    )  # what looked like one is shown in the end
    assert said("xaab", ["aab", "ab"])[0] == ["x", "", "", ""]
    assert said("né!", ["é"]) == (["n", "", ""], True)
    ours = Text(Letters, ["ab"])
    assert ours.add(ord("a"), last=False) == ("", False) and ours.add(Letters.eos, last=False) == (
        "a",
        True,
    )


def test_several_texts_are_shown_in_their_order():
    pieces = [
        Piece(0, "a", False),
        Piece(1, "x", False),
        Piece(2, "p", True),
        Piece(0, "b", False),
        Piece(1, "y", True),
        Piece(0, "c", True),
    ]
    seen = []
    texts = "".join(
        piece.text
        for piece in in_order((seen.append(piece) or piece for piece in pieces), 3)
        if piece.prompt or seen[-1] is piece
    )  # the first comes as soon as it is known
    assert texts == "abcxyp"


def continued(model, prompt, **options):
    return "".join(generate.generate(model, prompt, **options))


def test_prompts_are_continued_together_as_each_alone(there, capsys):
    from mamba_fsdp.verbs.loading import load

    prompts, model = ["def line", "x", "def line_20(x): return"], load("runs/demo")
    alone = [continued(model, prompt, length=12, temperature=0) for prompt in prompts]
    with pytest.raises(SystemExit) as exit:
        command_line.run(
            generate.main,
            lambda: "",
            [
                "runs/demo",
                *(f"--prompt={prompt}" for prompt in prompts[:2]),
                "--prompt",
                prompts[2],
                "--length=12",
                "--temperature=0",
            ],
        )
    told = capsys.readouterr()
    assert exit.value.code == 0
    assert told.out == (
        f"{prompts[0]}{alone[0]}\n--- 2 of 3 ---\n{prompts[1]}{alone[1]}"
        f"\n--- 3 of 3 ---\n{prompts[2]}{alone[2]}\n"
    )
    assert told.err.startswith("36 tokens in ") and told.err.endswith(" tokens/s\n")
    stop = alone[2][2:4]
    stopped = continued(model, prompts[2], length=12, temperature=0, stop=[stop])
    assert stopped == alone[2][: alone[2].index(stop)]


def test_an_error_before_the_text_is_one_line(there, monkeypatch, capsys):
    from mamba_fsdp.verbs import loading

    model = loading.load("runs/demo")
    model.network.backbone.norm_f.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        continued(model, "def")
    monkeypatch.setattr(loading, "load", lambda *given, **more: model)
    for words, said in (
        (["--prompt=def"], "the model's answer is not finite"),
        (["--prompt"], "--prompt: its value"),
    ):
        with pytest.raises(SystemExit):
            command_line.run(generate.main, str, ["runs/demo", *words])
        told = capsys.readouterr()
        assert (
            told.out == "" and told.err.startswith(f"error: {said}") and told.err.count("\n") == 1
        )


@pytest.mark.slow
def test_ctrl_c_ends_it_with_its_text_and_speed(there, project):
    code = (
        "import os, signal, sys; from mamba_fsdp import command_line; from mamba_fsdp.verbs import generate\n"
        "real, count = generate.Text.add, 0\n"
        "def add(*given, **more):\n"
        "    global count\n    count += 1\n    count == 9 and os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(*given, **more)\n"
        "generate.Text.add = add\n"
        "command_line.run(generate.main, str, ['runs/demo', '--prompt=def', '--length=100000', '--temperature=2'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=there,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(project)},
    )
    assert (
        done.returncode == 130 and done.stdout.startswith("def") and done.stdout.endswith("\n")
    ), done.stderr
    assert (
        "8 tokens in" in done.stderr
        and "stopped by Ctrl-C" in done.stderr
        and "Traceback" not in done.stderr
    )
