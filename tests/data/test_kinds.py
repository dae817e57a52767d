"""Tests mamba_fsdp.importing.kinds, which determines the kind of any path, describes its content, and suggests a
command that accepts it."""

import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mamba_fsdp.importing.kinds import (
    classify_path,
    tokenizer_path_in,
    unexpected_data_error,
    unexpected_model_error,
)
from tests.support.corpora import write_files

MODEL = '{"model_type": "mamba"}'
RUN = {"runs/a/status.json": "{}", "runs/a/config.yaml": "", "runs/a/metrics.jsonl": ""}
RUN |= {f"runs/a/checkpoints/step_0000000{step}/COMMIT": "" for step in (4, 6)}
RUN |= {
    "runs/a/pth/step_00000006/consolidated.00.pth": "",
    "runs/a/pth/step_00000006/config.json": MODEL,
    "runs/b/status.json": "{}",
    "runs/b/config.yaml": "",
}
POINTER = "version https://git-lfs.github.com/spec/v1\n"
INDEX = '{"format": "mamba_fsdp token store"}'
FILES = RUN | {
    "data/mine/train/index.json": INDEX,
    "data/mine/validation/index.json": INDEX,
    "mix/code/index.json": INDEX,
    "mix/prose/train/index.json": INDEX,
    "begun/.progress/begun.json": "{}",
    "half/00000.bin": "",
    "hf/config.json": MODEL,
    "hf/tokenizer.json": "",
    "weights/a.safetensors": "",
    "pointers/config.json": MODEL,
    "pointers/model.safetensors": POINTER,
    "pointers/tokenizer.json": POINTER,
    "dcp/.metadata": "",
    "tok/tokenizer.json": "",
    "texts/deep/a.txt": "text",
    "my texts/a.txt": "text",
    "texts/config.json": '{"colour": "red"}',
    "saved/dataset_info.json": "",
    "rows.jsonl": "{}",
    "flat.bin": "\0\1",
    "notes": "text",
    "settings.yaml": "",
    "strange/a.xyz": "",
}
PLACES = {  # {path: (its kind, part of its description or suggested command)}
    "runs/a": ("run", "step_00000004, step_00000006"),
    "runs/a/": ("run", "inspect runs/a shows"),
    "link": ("run", "inspect link shows"),
    "runs": ("runs", "(a, b)"),
    "runs/a/checkpoints": ("checkpoints", "name one, as in runs/a/checkpoints/step_00000006"),
    "runs/a/checkpoints/step_00000006": ("checkpoint", "--init_from=runs/a/checkpoints/step_0"),
    "runs/a/checkpoints/step_00000002": ("pruned", "has step_00000004, step_00000006; name one"),
    "runs/a/config.yaml": ("part", "a file of the run in runs/a; name runs/a"),
    "runs/a/checkpoints/step_00000006/COMMIT": ("part", "a file of the checkpoint in runs/a/"),
    "runs/a/pth/step_00000006/consolidated.00.pth": ("model_file", "--init_from=runs/a/pth"),
    "runs/a/pth": ("models", "name one, as in runs/a/pth/step_00000006"),
    "run": ("nothing", "did you mean runs?"),
    "data/mine": ("stores", "training reads it: --dataset_path=data/mine; else name one"),
    "data/mine/train": ("store", "--dataset_path=data/mine/train"),
    "data/mine/train/index.json": ("part", "a file of the store in data/mine/train"),
    "data": ("stores", "--dataset_path=data --datasets=mine;"),
    "mix": ("stores", "--dataset_path=mix --datasets=code,prose;"),
    "begun": ("import", "resumes it, with the settings that begun/.progress/begun.json contains"),
    "half": ("import", "command that began it resumes it"),
    "hf": ("model", "--init_from=hf"),
    "hf/config.json": ("part", "a file of the model in hf"),
    "weights": ("weights", "weights/a.safetensors --model_name=NAME"),
    "pointers": (
        "foreign",
        "a folder whose model.safetensors is a pointer of Git LFS or git-annex in place of the file; see",
    ),
    "pointers/tokenizer.json": (
        "foreign",
        "a pointer of Git LFS or git-annex in place of the file; see",
    ),
    "dcp": ("dcp", "--init_from=dcp shows how to convert it"),
    "tok": ("tokenizer", "get_dataset.py INPUT OUT --tokenizer=tok"),
    "tok/tokenizer.json": ("tokenizer_file", "--tokenizer=tok"),
    "texts": ("input", "a folder of text; "),
    "my texts": ("input", "get_dataset.py 'my texts' OUT"),
    "saved": ("saved", "a folder that the library datasets saved"),
    "rows.jsonl": ("json", "get_dataset.py rows.jsonl OUT"),
    "ids.npy": ("ids", "ids.npy OUT --tokenizer=PATH makes"),
    "flat.bin": ("ids", "OUT --tokenizer=PATH makes token stores of it, with --dtype=TYPE if"),
    "arch.tar.gz": ("foreign", "an archive (tar, zip"),
    "arch.zip": ("foreign", "7z, RAR, LZ4); see"),
    "notes": ("other", "get_dataset.py notes OUT --format=text"),
    "settings.yaml": ("settings", "--config=settings.yaml"),
    "strange": ("other", "(a.xyz)"),
    "empty": ("empty", "an empty folder"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_files(tmp_path_factory.mktemp("places"), FILES)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("runs/a")
    np.save(folder / "ids.npy", np.arange(9))
    with tarfile.open(folder / "arch.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    with zipfile.ZipFile(folder / "arch.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("path", PLACES)
def test_a_path_is_classified_and_its_command_is_named(path):
    kind, text = PLACES[path]
    place = classify_path(path)
    assert (place.kind, text in f"{place.title}; {place.use}") == (kind, True), place


@pytest.mark.parametrize("path", PLACES)
def test_an_unsuitable_path_is_an_error_of_one_line_with_a_remedy(path):
    """The error for a path that is not data, or not a model, has one line with the kind of the path, and a remedy or
    a list of accepted inputs."""
    for error in (unexpected_data_error(path), unexpected_model_error(path)):
        start, _, remedy = str(error).partition("; ")
        assert start.startswith(f"{path}: ") and remedy and "\n" not in str(error)


def test_the_error_for_a_name_on_the_hub_contains_the_download_command():
    error = unexpected_model_error("state-spaces/mamba-130m")
    assert str(error).endswith("first: hf download state-spaces/mamba-130m --local-dir FOLDER")
    assert "hf download" not in str(unexpected_model_error("runs/c")) + str(
        unexpected_model_error("/no/such")
    )


def test_a_tokenizer_is_found_in_stores_and_models(folder):
    for path in ("tok", "hf"):
        assert tokenizer_path_in(path) == Path(path)
    (folder / "data/mine/train/tokenizer").mkdir()
    (folder / "data/mine/train/tokenizer/tokenizer.json").touch()
    for path in ("data/mine", "data/mine/train"):
        assert tokenizer_path_in(path) == Path("data/mine/train/tokenizer")
    assert tokenizer_path_in("texts") is None
