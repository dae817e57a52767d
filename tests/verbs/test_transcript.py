"""Compares the whole output of the verbs with a golden file."""

import importlib
import json
import os
import re
import shutil
from pathlib import Path

import datasets
import pytest

from tests.support.checkpoints import flip
from tests.support.corpora import write_files

TRANSCRIPT = Path(__file__).with_name("transcript.txt")
# Records of a run that was validated, restarted with another setting, and evaluated.
METRICS = [
    {"step": 4, "loss": 1.5},
    {"step": 5, "val_loss": 2.5, "val_share": 0.25},
    {"step": 6, "val_loss": 3.0, "val_share": 1.0, "goodput": 0.5, "goodput_of_commands": 0.75},
]
EVENT = {
    "step": 6,
    "event": "started",
    "time": "2026-01-02T03:04:05+00:00",
    "from": "checkpoint step_00000006",
    "changed": "seed 1 -> 2",
}
# {pattern: replacement} of parts of the output that depend on the machine, the time or a version
REPLACEMENTS = {
    r" \d+\.\d+ k?B(?=  )": " SIZE",
    r"(?<=torch )\S+": "VERSION",
    r"20\d\d-\d\d-\d\d \d\d:\d\d": "TIME",
    r"/\S*/python /\S*/(?=get_dataset.py)|/\S*/(?=mamba-fsdp )": "",
    r"(?<=^data           )/\S*/(?=data/builtin)": "",
    r"(?<=1 x cpu of )\S+": "ITS",
    r"\d\S* (?=nats|per token|per word|tokens/s)": "NUMBER ",
    r"(?<=per byte  )\S+|(?<=per_byte )\S+|(?<=/loss )\S+(?=,)": "NUMBER",
}


@pytest.fixture
def folder(in_user_folder, tmp_path, monkeypatch):
    """Makes a copy of the user's folder, with a second run that has more records and was killed during a save."""
    of_other_tests = shutil.ignore_patterns("evaluations", "lm_eval_*", "report.html")
    for place in ("data/builtin", "runs/demo", "exported/demo"):
        shutil.copytree(in_user_folder / place, tmp_path / place, ignore=of_other_tests)
    shutil.copy(in_user_folder / "a.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    more = Path(shutil.copytree("runs/demo", "more/more"))
    (more / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in METRICS))
    (more / "events.jsonl").write_text(json.dumps(EVENT) + "\n")
    files = {
        "lm_eval_2025.json": "",
        "lm_eval_2026.json": "",
        "evaluations/data.jsonl": "",
        "status.json": '{"status": "failed", "reason": "a full disk"}',
        "checkpoints/step_00000002/KEEP": "",
    }
    write_files(more, files)
    (more / ".lease.json.0123456789ab.partial/step_00000006").mkdir(parents=True)
    rows = datasets.Dataset.from_list([{"document": {"text": "a b"}, "n": 1}])
    rows.to_json("rows.jsonl")
    rows.to_parquet("rows.parquet")
    rows.save_to_disk("rows")
    write_files(
        tmp_path, {"words.csv": "id;words\n1;some text\n", "ids.jsonl": '{"ids": [1, 2]}\n'}
    )
    Path("bare").mkdir()
    shutil.copy("runs/demo/pth/step_00000004/consolidated.00.pth", "bare")
    shutil.copytree("data/builtin/train", "plain")
    shutil.rmtree("plain/tokenizer")
    flip(Path(shutil.copytree("plain", "flipped")) / "00000.bin")
    for name in ("cut", "changed"):
        shutil.copytree("runs/demo", name)
    os.truncate("cut/checkpoints/step_00000002/rank_00000.safetensors", 50)
    flip(Path("changed/checkpoints/step_00000002/state.json"))


def test_the_transcript_changes_only_on_purpose(folder, call, golden):
    entries = []
    for line in re.findall(r"^\$ (.*)$", TRANSCRIPT.read_text(), re.M):
        verb, *words = line.split()
        code, output = call(importlib.import_module(f"mamba_fsdp.verbs.{verb}"), *words)
        for pattern, word in REPLACEMENTS.items():
            output = re.sub(pattern, word, output, flags=re.M)
        entries.append(f"$ {line}\n{output}{code}\n")
    golden.check_text("transcript.txt", "".join(entries))
