"""The verbs on what a training left."""

import gzip
import json
import os
import shutil

import datasets
import pytest
import torch

from mamba_fsdp.verbs import export, inspect
from tests.support.checkpoints import flip

pytestmark = pytest.mark.torch22


def test_verify_reads_every_byte(in_user_folder, tmp_path, call):
    copy = shutil.copytree("data/builtin", tmp_path / "copy")
    flip(copy / "validation/00000.bin")
    code, told = call(inspect, copy, "--verify")
    assert code == 2 and "00000.bin" in told and "does not match its checksum" in told


def test_an_export_can_be_read_by_others(in_user_folder, tmp_path):
    """Files as the umask says, what transformers' generate needs, nothing of a killed attempt."""
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
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation == {"pad_token_id": 0, "eos_token_id": 0}


def test_an_export_as_pth_is_what_the_run_published(in_user_folder, tmp_path):
    published = in_user_folder / "runs/demo/pth/step_00000004"
    pth = export.ExportConfig(format="pth")
    export.main("runs/demo", str(tmp_path / "pth"), pth)
    for path in published.rglob("*"):
        if path.is_file():
            other = tmp_path / "pth" / path.relative_to(published)
            assert path.read_bytes() == other.read_bytes()
    export.main("runs/demo/checkpoints/step_00000002", str(tmp_path / "older"), pth)
    state, older = (
        torch.load(folder / "consolidated.00.pth", weights_only=True)["lm_head.weight"]
        for folder in (published, tmp_path / "older")
    )
    assert state.dtype == older.dtype == torch.float32 and not torch.equal(state, older)


ROWS = [{"document": {"text": "a b"}, "n": 1}] * 2


def test_inspect_shows_the_fields_of_every_format_and_the_command_that_imports_them(
    call, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    datasets.Dataset.from_list(ROWS).to_parquet("d.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk("e")
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.parquet", "e"):
        code, told = call(inspect, name)
        assert code == 0 and "field          document.text: 'a b'\n" in told, told
        assert f"get_dataset.py {name} OUT --text_column=document.text\n" in told
    (tmp_path / "f.csv").write_text("id;words\n1;some text\n")
    assert "get_dataset.py f.csv OUT --text_column=words\n" in call(inspect, "f.csv")[1]
