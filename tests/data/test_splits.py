"""Training reads no split but its own: importing, inspecting and training agree on what a folder's splits are."""

import json
from itertools import product

import datasets
import pytest

from mamba_fsdp.data.selection import training_sources, validation_sources
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.errors import UserError
from mamba_fsdp.settings.train_config import DataConfig
from mamba_fsdp.verbs import inspect
from tests.data.test_importers import IDS, documents_of
from tests.support.corpora import write_store
from tests.support.others_tokens import write_fms, write_layout

pytestmark = pytest.mark.torch22


def write_rows(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))


def write_parquet(path, documents):
    datasets.Dataset.from_dict({"text": documents}).to_parquet(path)


def write_saved(path, documents):
    rows = datasets.Dataset.from_dict({"text": documents})
    rows.save_to_disk(path)
    rows.to_parquet(path / "cache.parquet")  # what else lies there


def write_npy(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_layout(path, documents)


# How a format's splits lie in a folder, and who writes one. Each holds what it is called: 5 is train's token.
TREES = {
    "folders of fms": (["train/0.arrow", "validation/0.arrow", "test/0.arrow"], write_fms),
    "folders below": (["en/train/0.arrow", "en/val/0.arrow", "de/Valid/0.arrow"], write_fms),
    "no folder for training": (["lang=en/0.arrow", "valid/0.arrow"], write_fms),
    "folders of DataLayout": (["train/0.npy", "val/0.npy"], write_npy),
    "files of DataLayout": (["c.train.gig.npy", "c.valid.gig.npy"], write_npy),
    "files": (["corpus-train.jsonl", "corpus-valid.jsonl", "corpus_test.jsonl"], write_rows),
    "files as the Hub has them": (
        ["train-00000-of-00001.parquet", "validation-00000-of-00001.parquet"],
        write_parquet,
    ),
    "saved": (["train", "unsupervised", "test"], write_saved),
}


def make_tree(folder, name):
    folder.mkdir()
    places, write = TREES[name]
    for number, place in enumerate(places):
        write(folder / place, [[5 + number, 7]])
    return folder


@pytest.mark.parametrize(
    ("name", "pattern"), [*product(TREES, [""]), ("files", "*"), ("folders below", "**/*.*")]
)
def test_training_gets_no_other_split(prepare, tmp_path, capsys, name, pattern):
    tree = make_tree(tmp_path / "in", name)
    prepare(tree / pattern, tmp_path / "out", **IDS)
    assert documents_of(tmp_path / "out") == [[5, 7, 0]]
    others = len(TREES[name][0]) - 1
    told = capsys.readouterr().out
    assert f"({others} of {others + 1} files), other splits than train; --split=all reads" in told
    is_complete = name not in ("no folder for training", "saved")
    assert ("--splits=official makes stores of them" in told) == is_complete
    prepare(tree / pattern, tmp_path / "all", **IDS, split="all")
    assert TokenStore(tmp_path / "all" / "train").document_count == 1 + others


def test_what_only_looks_like_a_split_is_read(prepare, tmp_path):
    """One file's name says nothing without a sibling for training, and within train/ no name does."""
    make_tree(tmp_path / "train", "folders of DataLayout")
    write_rows(tmp_path / "in" / "turing test.jsonl", [[5]])
    write_rows(tmp_path / "in" / "dev.jsonl", [[6]])
    prepare(tmp_path / "in", tmp_path / "out", **IDS)
    assert documents_of(tmp_path / "out") == [[6, 0], [5, 0]]
    prepare(tmp_path / "train" / "val", tmp_path / "named", **IDS)
    assert documents_of(tmp_path / "named") == [[6, 7, 0]]


@pytest.mark.parametrize("name", ["folders of fms", "files", "saved"])
def test_another_split_is_read_where_it_is_asked_for(prepare, tmp_path, name):
    tree = make_tree(tmp_path / "in", name)
    prepare(tree, tmp_path / "out", **IDS, split="test")
    assert documents_of(tmp_path / "out") == [[7, 7, 0]]
    with pytest.raises(UserError, match="--split=dev: .* has no split of that name"):
        prepare(tree, tmp_path / "none", **IDS, split="dev")


@pytest.mark.parametrize("validation", ["validation", "valid", "val", "dev"])
def test_training_and_inspect_know_a_store_by_each_name(tmp_path, capsys, validation):
    for name in ("train", validation, "test"):
        write_store(tmp_path / name, [[1, 2, 3]], vocab_size=9, eos=0, tokenizer="")
    data = DataConfig(str(tmp_path))
    assert [source.path for source in training_sources(data)[0].values()] == [tmp_path / "train"]
    assert [source.path for source in validation_sources(data)] == [tmp_path / validation]
    assert inspect.main(str(tmp_path), inspect.Options()) == 0
    told = capsys.readouterr().out
    assert all(
        f"token store    {tmp_path / name}\n" in told for name in ("train", validation, "test")
    )


def test_inspect_says_what_importing_reads(tmp_path, capsys):
    tree = make_tree(tmp_path / "in", "folders of fms")
    assert inspect.main(str(tree), inspect.Options()) == 0
    told = capsys.readouterr().out
    assert "left out: test, validation (2 of 3 files)" in told and "1 file" in told
    assert f"get_dataset.py {tree} OUT" in told
