"""Tests that all commands agree about the kind of a path, for every input of these tests and in ../shared/cases."""

import os
import re
from pathlib import Path

import pytest

from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing import kinds
from mamba_fsdp.importing.inputs import find_files
from mamba_fsdp.importing.kinds import LeftOut, check_input, classify_path
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.verbs import inspect
from tests.conftest import PROJECT
from tests.data import test_kinds, test_refused_inputs
from tests.support.corpora import read_input, write_files

CASES = PROJECT.parent / "shared/cases"
BROKEN = b"word \xff" * 9
FILES = {
    **{f"refused/{name}": content for name, content in test_refused_inputs.FILES.items()},
    **{f"kinds/{name}": content.encode() for name, content in test_kinds.FILES.items()},
    "mixed/a.md": b"text",
    "mixed/a.bin": bytes(range(256)),
    "mixed/.git/config": b"hidden",
    "mixed/README.md": b"a description",
    "mixed/rows.csv": b"id,text\n1,a row\n2\n",
    "mixed/latin.txt": BROKEN,
    "mixed/sub/part-00000": b'{"text": "a record"}\n{"no": 1}\n',
    "mixed/out/train/index.json": test_kinds.INDEX.encode(),
    "mixed/unknown.xyz": b"",
}
PLACES = sorted({str(Path(*Path(name).parts[:2])) for name in FILES} | {"mixed"})
PLACES += sorted(str(path) for path in CASES.rglob("*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("answers"), FILES)


@pytest.mark.parametrize("place", PLACES)
def test_inspect_import_and_training_agree(folder, call, place):
    """An import reads each file of an input, or lists it as left out. A path that is not an input is refused with the
    kind that `inspect` shows, and training refuses every path that is not a token store."""
    path = folder / place
    info = classify_path(path)
    if info.kind != "store":
        with pytest.raises(UserError, match="^" + re.escape(f"{path}: {info.title}")):
            TokenStore(path)
    options = DatasetConfig(skip_unreadable=True, dtype="uint8")
    if not info.is_input:
        with pytest.raises(UserError, match=re.escape(f"{path}: {info.title}, not text")):
            check_input(path)
            find_files(str(path), options, LeftOut())
        return
    code, output = call(inspect, path)
    assert code == 0 and info.title in output
    left_out = LeftOut()
    read = find_files(str(path), DatasetConfig(skip_unreadable=True), left_out)
    listed = {os.path.realpath(name) for names in left_out.values() for name in names}
    listed |= {file.place for file in read}
    for file in path.rglob("*"):
        is_listed = {*map(os.path.realpath, [file, *file.parents])} & listed
        assert file.is_dir() or is_listed, f"{file} is neither read nor left out"
    read_input(path, skip_unreadable=True, dtype="uint8")


def test_each_kind_has_a_title_and_an_existing_reader():
    """Each kind has a title, and each kind that an import can read has a reader. Each section that a message mentions
    is a heading in docs/data.md."""
    headings = re.findall("^### (.*)$", (PROJECT / "docs/data.md").read_text(), re.MULTILINE)
    for kind in kinds.KINDS.values():
        assert kind.title
        assert not kind.reader or kinds.reader_of(kind.name)
    for recipe in (kinds.UNPACK, kinds.CONVERT, kinds.CLEAN, kinds.TOKENS):
        assert recipe.split('"')[1] in headings
