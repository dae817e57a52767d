"""Tests mamba_fsdp.storage.typed_json: untrusted JSON becomes a dataclass of the expected types, or is an error of one
line."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.storage.formats import Format
from mamba_fsdp.storage.typed_json import (
    FileName,
    at_least,
    from_json,
    read_object,
    write_object,
)


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


@dataclass
class Open:
    HAS_OTHER_FIELDS = True
    name: str


LONGEST = "a" * 255
HUGE = 10**400


def test_an_object_becomes_the_dataclass_that_wrote_it():
    content = {
        "step": 2**63 - 1,
        "eos": -1,
        "job": None,
        "counts": [0, 1],
        "inner": {"a": {"name": LONGEST, "share": 1}},
        "rest": [{}, -1],
    }
    inner = {"a": Inner(FileName(LONGEST), 1)}
    assert from_json(Outer, content) == Outer(2**63 - 1, -1, False, None, [0, 1], inner, [{}, -1])
    assert from_json(Open, {"name": "a", "unknown": 1}) == Open("a")


WRONG = {  # {part of the message: an invalid field}
    "step is -1, not a whole number of at least 0": {"step": -1},
    "step is 9223372036854775808, not a whole": {"step": 2**63},
    "step is True, not": {"step": True},
    "step is 1.0, not": {"step": 1.0},
    "eos is -2, not a whole number of at least -1": {"eos": -2},
    "is_open is 1, not true or false$": {"is_open": 1},
    r"job is \[\], not text$": {"job": []},
    "counts is {}, not a list": {"counts": {}},
    "an item of counts is '2', not": {"counts": [1, "2"]},
    r"'a' is \[\], not an object": {"inner": {"a": []}},
    "'a' lacks name": {"inner": {"a": {}}},
    "share is .*, not a number": {"inner": {"a": {"name": "b", "share": HUGE}}},
    f"the content has an unknown field '{60 * 'x'}'$": {61 * "x": 1},
}


@pytest.mark.parametrize("message", WRONG)
def test_an_invalid_field_is_an_error(message):
    with pytest.raises(ValueError, match=message):
        from_json(Outer, {"step": 1, "eos": 0, **WRONG[message]})


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0", "a" * 256, 1, None], ids=repr)
def test_a_file_name_can_not_leave_its_folder(name):
    with pytest.raises(ValueError, match="not the name of a file in this folder"):
        from_json(FileName, name)


WRONG_FILES = {
    "[" * 100_000: "can't be read .the JSON is nested too deeply.; do this",
    "{": "can't be read .Expecting .*; do this",
    "[]": r"can't be read \(the content is \[\], not an object\); do this",
    '{"format": "ours", "version": 1}': r"can't be read \(the content lacks step\); do this",
    '{"step": 1, "eos": 0}': "the file has the format None of version None, .* reads 'ours' of version 1",
    '{"format": "ours", "version": 2}': "the file has the format 'ours' of version 2, ",
}


def test_a_file_is_read_unchanged_or_refused_with_one_line(tmp_path):
    path = tmp_path / "file.json"
    ours = Format("ours", 1)
    write_object(path, {**ours.header(), "step": 1, "eos": 0})
    assert read_object(path, Outer, "do this", ours) == Outer(1, 0)
    for text, message in WRONG_FILES.items():
        path.write_text(text)
        with pytest.raises(UserError, match=f"^{path}: {message}") as refused:
            read_object(path, Outer, "do this", ours)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="can't be read .Is a directory.; do this"):
        read_object(tmp_path, Outer, "do this")
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "nowhere", Outer, "do this")
