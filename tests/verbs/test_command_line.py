"""Words become arguments by the verb's own annotations, and a mistake is one line."""

import dataclasses
import subprocess
import sys

import pytest

from config.fields import setting
from config.resolve import resolve_settings
from mamba_fsdp import command_line
from mamba_fsdp.errors import UserError


def verb(first, *rest, count: int = 1, share: float = 0.5, wanted: bool = False, name=""):
    return first, rest, count, share, wanted, name


@dataclasses.dataclass
class Options:
    share: float = setting(0.5, above=0, below=1)
    kind: str = setting("plain", choices=("plain", "fancy"))
    note: str = setting("")


def bounded(first, count: int = 1, *, options: Options):
    return first, count, options


def test_a_dataclass_takes_the_options_that_are_its_fields():
    assert command_line.call(bounded, ["a", "--share=0.25", "--note= x ", "--count=2"]) == (
        "a",
        2,
        Options(share=0.25, note=" x "),
    )
    assert command_line.call(bounded, ["a"]) == ("a", 1, Options())


@pytest.mark.parametrize(
    "words, message",
    [
        (["a", "--count=two"], "^--count=two: expected a whole number$"),
        (["a", "--share=1"], "^--share=1: must be below 1$"),
        (["a", "--share=x"], "^--share=x: expected a number$"),
        (["a", "--kind=other"], "^--kind=other: must be one of plain, fancy$"),
        (["a", "--kind="], "^--kind=: expected some text$"),
        (["a", "--shore=1"], "^--shore: there is no such option; did you mean --share.$"),
        (["a", "--options=1"], "^--options: there is no such option; "),
    ],
)
def test_values_out_of_bounds_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        command_line.call(bounded, words)


@pytest.mark.parametrize(
    "kind, name, texts",
    [
        (bool, "deterministic", ["on", "Off", "yes", "no", "TRUE", "0", "maybe", "2", ""]),
        (int, "batch_size", ["7", "2e3", "2_000", "10k", "2B", "1.5", "0x10", "two", "1e400", "k"]),
        (float, "timeout_minutes", ["7", "2e3", "1e-3", "nan", "inf", "x", ""]),
    ],
)
def test_settings_and_verbs_read_the_same_words_alike(kind, name, texts):
    """What one program takes all take, as the same value; what one refuses all refuse, in the same words."""

    def verb(value: kind):
        return value

    for text in texts:
        try:
            settings, _ = resolve_settings({name: text})
            as_setting = vars(
                settings.parallel if name == "timeout_minutes" else settings.training
            )[name]
        except UserError as error:
            as_setting = str(error).removeprefix(name).removesuffix(" (on the command line)")
        try:
            as_option = command_line.call(verb, [f"--value={text}"])
        except UserError as error:
            as_option = str(error).removeprefix("--value")
        assert as_option == as_setting and type(as_option) is type(as_setting), text


def test_words_are_not_guessed():
    assert command_line.call(verb, ["0123", "1e3", "--name=true"]) == (
        "0123",
        ("1e3",),
        1,
        0.5,
        False,
        "true",
    )
    assert command_line.call(verb, ["a", "--count=3", "--share", "2", "--wanted"]) == (
        "a",
        (),
        3,
        2.0,
        True,
        "",
    )
    assert command_line.call(verb, ["a", "--nowanted"])[4] is False


@pytest.mark.parametrize(
    "words, message",
    [
        (["a", "--cuont=3"], "did you mean --count"),
        (["a", "--count=x"], "--count=x: expected a whole number"),
        (["a", "--wanted=maybe"], "expected true or false"),
        ([], "missing a required argument: 'first'"),
        (["a", "--", "b"], "nothing is expected after --"),
    ],
)
def test_mistakes_are_refused_with_the_reason(words, message):
    with pytest.raises(UserError, match=message):
        command_line.call(verb, words)


@pytest.mark.parametrize(
    "words, code, start",
    [
        ([], 0, "python -m mamba_fsdp VERB"),
        (["report", "--version"], 0, "mamba_fsdp "),
        (["generate", "--help"], 0, "python -m mamba_fsdp generate"),
        (["genrate"], 2, "error: there is no verb 'genrate'"),
        (["generate"], 2, "error: missing a required argument: 'model'"),
        (["generate", "/nowhere", "--top_p=2"], 2, "error: --top_p=2: must be at most 1"),
        (["inspect", "/nowhere", "--verify=on"], 2, "error: /nowhere: there is no such"),
        (["report"], 2, "error: name at least one run"),
        (["inspect", "n" * 300], 2, "error: " + "n" * 300),
    ],
)
def test_verbs_explain_themselves_and_refuse_in_one_line(project, words, code, start):
    done = subprocess.run(
        [sys.executable, "-m", "mamba_fsdp", *words], cwd=project, capture_output=True, text=True
    )
    said = done.stdout if code == 0 else done.stderr
    assert (done.returncode, said[: len(start)]) == (code, start), done
    assert code == 0 or len(said.splitlines()) == 1


def test_a_stdout_that_is_closed_is_no_traceback(project):
    done = subprocess.run(
        f"{sys.executable} get_dataset.py --help >&-", shell=True, cwd=project, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
