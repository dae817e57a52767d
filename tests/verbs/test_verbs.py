"""Tests the files that the verb `export` writes."""

import os

import pytest

from mamba_fsdp.verbs import export

pytestmark = pytest.mark.torch22


def test_an_export_can_be_read_by_others(in_user_folder, tmp_path):
    """The files of an export have the permissions of the umask, and files of a killed attempt are removed."""
    (tmp_path / "..hf.lease.0123456789ab.partial").mkdir()
    before = os.umask(0o027)
    try:
        export.main("runs/demo", str(tmp_path / "hf"), export.ExportConfig())
        theirs = export.ExportConfig(format="state-spaces")
        export.main("runs/demo/pth/step_00000004", str(tmp_path / "theirs"), theirs)
    finally:
        os.umask(before)
    assert sorted(os.listdir(tmp_path)) == ["hf", "theirs"]
    for folder in ("hf", "theirs"):
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / folder).iterdir()} == {0o640}
