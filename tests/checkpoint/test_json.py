"""JSON that anyone may have written becomes what it is said to hold, or an error of one line."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.storage.formats import Format
from mamba_fsdp.storage.typed_json import FileName, at_least, from_json, read_object


@dataclass
class Inner:
    name: FileName
    share: float = 0.5


@dataclass
class Outer:
    step: int
    eos: int = at_least(-1)
    is_open: bool = False
    job: str | None = None
    counts: list[int] = field(default_factory=list)
    inner: dict[str, Inner] = field(default_factory=dict)
    rest: Any = None


def test_an_object_becomes_the_dataclass_that_wrote_it():
    content = {
        "step": 2**63 - 1,
        "eos": -1,
        "job": None,
        "counts": [0, 1],
        "inner": {"a": {"name": "a.bin", "share": 1}},
        "rest": [{}, -1],
    }
    outer = from_json(Outer, content)
    assert outer == Outer(
        2**63 - 1, -1, False, None, [0, 1], {"a": Inner(FileName("a.bin"), 1)}, [{}, -1]
    )


WRONG = {  # another field than there should be: what is said
    '{"step": -1}': "step is -1, not a whole number from 0 on",
    '{"step": 9223372036854775808}': "step is 9223372036854775808, not a whole number",
    '{"step": true}': "step is True, not",
    '{"step": 1.0}': "step is 1.0, not",
    '{"eos": -2}': "eos is -2, not a whole number from -1 on",
    '{"is_open": 1}': "is_open is 1, not true or false",
    '{"job": []}': r"job is \[\], not text",
    '{"counts": {}}': "counts is {}, not a list",
    '{"counts": [1, "2"]}': "an item of counts is '2', not",
    '{"inner": {"a": []}}': r"'a' is \[\], not an object",
    '{"inner": {"a": {}}}': "'a' lacks name",
    '{"inner": {"a": {"name": "../b"}}}': "name is '../b', not the name of a file in this folder",
    '{"inner": {"a": {"name": "b", "share": 1%s}}}' % ("0" * 400): "share is .*, not a number",
    '{"extra": 1}': "the content has an unknown field 'extra'",
}


@pytest.mark.parametrize("text", WRONG)
def test_whatever_else_it_holds_is_an_error(text):
    with pytest.raises(ValueError, match=WRONG[text]):
        from_json(Outer, {"step": 1, "eos": 0, **json.loads(text)})


def test_no_name_leads_out_of_its_folder():
    for name in ("", ".", "..", "a/b", "/a", "a\0", "a" * 256, 1, None):
        with pytest.raises(ValueError):
            from_json(FileName, name)


WRONG_FILES = {
    "[" * 100_000: "can't be read .*; do this",
    "[]": r"can't be read \(the content is \[\], not an object\); do this",
    '{"format": "ours", "version": 1}': r"can't be read \(the content lacks step\); do this",
    '{"step": 1, "eos": 0}': "None of version None; .* reads 'ours' of version 1",
}


def test_a_file_is_refused_in_a_line(tmp_path):
    path = tmp_path / "file.json"
    for text, message in WRONG_FILES.items():
        path.write_text(text)
        with pytest.raises(UserError, match=f"^{path}: {message}") as refused:
            read_object(path, Outer, "do this", Format("ours", 1))
        assert "\n" not in str(refused.value)
