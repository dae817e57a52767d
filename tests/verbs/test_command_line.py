"""Tests mamba_fsdp.command_line: arguments become parameters and options of a verb, and a mistake is an error of one
line."""

import dataclasses
import inspect
import sys
from types import SimpleNamespace

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.__main__ import main
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import setting
from tests.support.processes import run_program


@dataclasses.dataclass
class Options:
    """The options of the verbs below."""

    count: int = setting(1, elsewhere="number how_many")
    """How many there are; no more than needed. Further words."""
    share: float = setting(0.5, above=0, below=1)
    """Part of all."""
    wanted: bool = setting(False)
    """Whether it is wanted."""
    kind: str = setting("plain", choices=("plain", "fancy"))
    """What it looks like."""
    note: str = setting("")
    """What it says."""


def verb(first, *rest, options: Options):
    return first, rest, options


def in_order(first, options: Options):
    """Does something."""
    return first, options


def test_options_are_collected_into_the_dataclass():
    words = ["a", "b", "--share=0.25", "--note= x ", "--count=2"]
    assert command_line.call(verb, words) == (
        "a",
        ("b",),
        Options(count=2, share=0.25, note=" x "),
    )
    assert command_line.call(verb, ["a"]) == ("a", (), Options())
    assert command_line.call(in_order, ["a", "3", "--share=0.25"]) == ("a", Options(3, 0.25))


def test_a_function_of_the_package_accepts_options_as_keywords():
    function = command_line.python_function(in_order, "in_order")
    assert function("a", 3, wanted=True, note=None) == ("a", Options(3, wanted=True))
    assert str(inspect.signature(function)).startswith("(first, count: int = 1, share: float")
    assert "Does something." in function.__doc__ and "share: Part of all." in function.__doc__
    with pytest.raises(UserError, match="^cuont: there is no such option; did you mean count.$"):
        function("a", cuont=3)


MISTAKES = {
    "a --count=two": "^--count=two: expected a whole number$",
    "a --share=1": "^--share=1: must be below 1$",
    "a --share=x": "^--share=x: expected a number$",
    "a --kind=other": "^--kind=other: must be one of plain, fancy; --help explains them$",
    "a --kind=": "^--kind=: the value must not be empty$",
    "a --how_many=1": "^--how_many: there is no such option; did you mean --count.$",
    "a --shore=1": "^--shore: there is no such option; did you mean --share.$",
    "a --options=1": "^--options: there is no such option; ",
    "a --wanted=maybe": "expected true or false",
    "": "missing a required argument: 'first'",
    "a -- b": "arguments after -- are not supported",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_errors_with_a_reason(words):
    with pytest.raises(UserError, match=MISTAKES[words]):
        command_line.call(verb, words.split())


def test_values_stay_strings():
    words = ["0123", "1e3", "--note=true"]
    assert command_line.call(verb, words) == ("0123", ("1e3",), Options(note="true"))
    words = ["a", "--count=3", "--share", "0.2", "--wanted"]
    assert command_line.call(verb, words) == ("a", (), Options(3, 0.2, True))
    assert command_line.call(verb, ["a", "--nowanted"])[2].wanted is False


EXPLAINED = {
    "": "mamba-fsdp VERB",
    "help": "mamba-fsdp VERB",
    "report --version": "mamba_fsdp ",
    "generate --help": "python -m mamba_fsdp generate",
    "help generate": "python -m mamba_fsdp generate",
}


@pytest.mark.parametrize("words", EXPLAINED)
def test_verbs_explain_themselves(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["mamba-fsdp", *words.split()])
    with pytest.raises(SystemExit, match="^0$"):
        main()
    assert capsys.readouterr().out.startswith(EXPLAINED[words])


FULL = "error: can't write any more: No space left on device\n"
OUTPUTS = {">&-": "", ">/dev/full": FULL}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_or_full_stdout_gives_no_traceback(project, output, unbuffered):
    command = f"{sys.executable} get_dataset.py --help {output}"
    done = run_program("sh", "-c", command, cwd=project, PYTHONUNBUFFERED=unbuffered)
    error = OUTPUTS[output]
    assert (done.returncode, done.stderr) == (74 * bool(error), error)


def test_quoted_text_can_not_start_a_line_or_control_the_terminal(call, monkeypatch):
    def main():
        raise UserError("t\nerror: owned\x1b[2J: not a weight")

    code, output = call(SimpleNamespace(main=main))
    assert (code, output) == (2, "error: t\\nerror: owned\\x1b[2J: not a weight\n")
