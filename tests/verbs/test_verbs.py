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


@pytest.fixture
def verify(call):
    """verify(path) -> (exit code, what is said) of inspect PATH --verify."""
    return lambda path: call(inspect, path, "--verify")


@pytest.mark.parametrize(
    "place, damaged, said",
    [
        ("runs/demo", "checkpoints/step_00000002/rank_00000.safetensors", "broken: the content of"),
        ("data/builtin", "validation/00000.bin", "the content does not match its checksum"),
    ],
)
def test_verify_reads_every_byte(place, damaged, said, in_user_folder, tmp_path, verify):
    copy = shutil.copytree(place, tmp_path / "copy")
    code, told = verify(copy)
    assert code == 0
    assert told.count("  whole") + told.count("all bytes read, every file has its size and ch") == 2
    flip(copy / damaged)
    code, told = verify(copy)
    assert code in (1, 2) and said in told and damaged.rpartition("/")[2][:14] in told, told


def test_inspect_says_what_a_run_a_checkpoint_and_models_hold(in_user_folder, capsys):
    for place, words in {
        "runs/demo": (
            "run            runs/demo",
            "status         finished",
            "step   tokens      size  committed         verdict",
            "4     256 ",
        ),
        "runs/demo/checkpoints/step_00000002": (
            "tokens         128, 0 steps skipped",
            "1 rank, torch",
            "  not verified",
        ),
        "exported/demo": ("model          exported/demo", "2 layers mamba1, d_model 16"),
    }.items():
        inspect.main(place, inspect.Options())
        told = capsys.readouterr().out
        assert all(word in told for word in words), told


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


def test_inspect_shows_each_run_and_each_store_of_a_folder(call, in_user_folder):
    code, told = call(inspect, "runs")
    assert code == 0 and "run            runs/demo  finished\n" in told
    code, told = call(inspect, "data")
    assert code == 0 and "token store    data/builtin/validation\n" in told
    assert "--dataset_path=data --datasets=builtin;" in told
    for path in ("runs/demo/config.yaml", "runs/demo/checkpoints", "runs/demo/"):
        code, told = call(inspect, path)
        assert code == 0 and "committed         verdict" in told
