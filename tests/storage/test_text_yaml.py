"""Tests mamba_fsdp.storage.text_yaml: YAML values are read as text, and each mistake in a file is an error of one
line."""

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.storage.text_yaml import load_yaml

# A small file whose nested aliases expand to 2 ** 40 values.
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
WRONG = {
    BOMB: "can't be read as YAML: .*a0 stands for more than one value",
    "a: 1\nb: {c: 1, d: 2, c: 3}\n": "c is given twice",
    "!!python/object/apply:os.system ['false']": "can't be read as YAML: could not determine",
    "a: [": "can't be read as YAML: while parsing",
    "[" * 10_000: "can't be read as YAML: ",
    "- 1\n": "expected `name: value` lines",
    "no mapping": "expected `name: value` lines",
}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "file.yaml"


@pytest.mark.parametrize("is_own", [False, True])
def test_every_value_stays_text(file, is_own):
    """load_yaml returns every scalar as text. Only null becomes None, which means the default. In files of this program
    (is_own=True), null is text too."""
    file.write_text("a: &one 01\nb: [yes, 1e3, *one]\nc: 'null'\nd: none\n")
    expected = {"a": "01", "b": ["yes", "1e3", "01"], "c": "null", "d": "none"}
    assert load_yaml(file, is_own) == expected
    for null in ("", "~", "null", "None"):
        file.write_text(f"a: {null}\n")
        assert load_yaml(file, is_own) == {"a": null if is_own else None}
    file.write_text("")
    assert load_yaml(file, is_own) == {}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:20])
def test_a_file_without_a_mapping_of_names_is_refused_in_a_line(file, text):
    file.write_text(text)
    with pytest.raises(UserError, match=WRONG[text]) as refused:
        load_yaml(file)
    assert str(refused.value).startswith(f"{file}: ") and "\n" not in str(refused.value)
