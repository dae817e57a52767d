"""Words become arguments by the verb's own annotations, and a mistake is one line."""

import subprocess
import sys

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.errors import UserError


def verb(first, *rest, count: int = 1, share: float = 0.5, wanted: bool = False, name=""):
    return first, rest, count, share, wanted, name


def test_words_are_not_guessed():
    assert command_line.call(verb, ["0123", "1e3", "--name=true"]) == ("0123", ("1e3",), 1, 0.5, False, "true")
    assert command_line.call(verb, ["a", "--count=3", "--share", "2", "--wanted"]) == ("a", (), 3, 2.0, True, "")
    assert command_line.call(verb, ["a", "--nowanted"])[4] is False


@pytest.mark.parametrize("words, message", [
    (["a", "--cuont=3"], "did you mean --count"),
    (["a", "--count=x"], "--count=x: expected a whole number"),
    (["a", "--wanted=maybe"], "expected true or false"),
    ([], "missing a required argument: 'first'"),
    (["a", "--", "b"], "nothing is expected after --"),
])
def test_mistakes_are_refused_with_the_reason(words, message):
    with pytest.raises(UserError, match=message):
        command_line.call(verb, words)


@pytest.mark.parametrize("words, code, start", [
    ([], 0, "python -m mamba_fsdp VERB"), (["generate", "--help"], 0, "python -m mamba_fsdp generate"),
    (["genrate"], 2, "error: there is no verb 'genrate'"),
    (["generate"], 2, "error: missing a required argument: 'model'"),
    (["generate", "/nowhere"], 2, "error: /nowhere"), (["evaluate", "/nowhere", "/nowhere"], 2, "error: /nowhere"),
    (["generate", "/nowhere", "--length=0"], 2, "error: --length=0: must be at least 1"),
    (["inspect", "/nowhere"], 2, "error: /nowhere"), (["plot"], 2, "error: name at least one run"),
    (["plot", "/nowhere"], 2, "error: /nowhere"),
    (["settings", "sead"], 2, "error: sead: there is no such setting"),
    (["settings", "seed", "--", "--sead=1"], 2, "error: sead"),
])
def test_verbs_explain_themselves_and_refuse_in_one_line(project, words, code, start):
    done = subprocess.run([sys.executable, "-m", "mamba_fsdp", *words], cwd=project, capture_output=True, text=True)
    said = done.stdout if code == 0 else done.stderr
    assert (done.returncode, said[:len(start)]) == (code, start), done
    assert code == 0 or len(said.splitlines()) == 1
