"""Tests mamba_fsdp.importing.inputs: which files an input consists of, which of their splits is imported, and inputs
on the Hugging Face Hub."""

import errno
import os
from itertools import product

import datasets
import pytest

from mamba_fsdp.data import hub
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing import inputs
from mamba_fsdp.importing.inputs import find_files
from mamba_fsdp.importing.kinds import LeftOut
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.verbs import tokenize as get_dataset
from tests.support.corpora import read_back, read_input, write_files, write_records


def test_a_folder_is_walked_including_links_and_odd_names(tmp_path, capsys):
    files = {
        "elsewhere/c.txt": "linked",
        "in/state.json": '{"text": "no state of `datasets`"}',
        "in/sub/notes.xyz": "unknown",
        "in/logo.bin": "next to text, such a name says nothing",
    }
    root = write_files(tmp_path, files) / "in"
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "linked" / "back").symlink_to(root)
    (root / "again.txt").symlink_to(root / "linked" / "c.txt")
    with open(os.fsencode(root) + b"/caf\xe9.TXT", "w") as file:
        file.write("odd name")
    assert sorted(read_input(root)) == ["linked", "no state of `datasets`", "odd name"]
    output = capsys.readouterr().out
    assert "left out: 2 of an unknown format: " in output and "logo.bin, ..." in output
    assert "left out: 1 named twice or linked to another: /" in output
    assert "unknown" in read_input(root, format="text")


def test_a_glob_finds_each_file_once_and_reports_folders_that_cannot_be_read(tmp_path, monkeypatch):
    root = tmp_path / "in"
    secret = root / "a" / "secret"
    secret.mkdir(parents=True)
    (root / ".hidden").mkdir()
    for place in (root / "1.txt", root / "a/2.txt", secret / "3.txt", root / ".hidden/4.txt"):
        place.write_text(place.stem)
    (secret / "back").symlink_to(root)

    assert read_input(root / "*.txt") == ["1"]
    assert read_input(root / "[a-b]/*.txt") == ["2"]
    assert read_input(root / "**/*.txt") == ["1", "2", "3"]
    assert read_input(root / "**/.hid*/*.txt") == ["4"]

    scandir = os.scandir

    def without_permission(folder):
        if str(folder).endswith("secret"):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", without_permission)
    for pattern in ("a/*/*.txt", "**/*.txt", "*"):
        with pytest.raises((UserError, OSError), match="in/a/secret"):
            read_input(root / pattern)
    assert read_input(root / "*.txt") == ["1"]


def test_the_card_of_a_dataset_is_not_imported(tmp_path, capsys):
    """A dataset card or license is left out if the data next to it has another format. Among text files, it is
    imported."""
    for folder in ("records", "texts"):
        write_records(tmp_path / folder / "data/a.jsonl", ["a row"])
        for name in ("README.md", "data/LICENSE-2.txt", "readmes.txt"):
            (tmp_path / folder / name).write_text(name)
    (tmp_path / "texts/data/a.jsonl").unlink()
    assert sorted(read_input(tmp_path / "records")) == ["a row", "readmes.txt"]
    assert "left out: 2 describing the data next to it: " in capsys.readouterr().out
    assert len(read_input(tmp_path / "texts")) == 3
    assert "left out" not in capsys.readouterr().out


def test_the_builtin_data_is_pythons_own_library(tmp_path, monkeypatch):
    """The built-in data consists of the source files of Python's standard library, without third-party packages and
    files that are not UTF-8."""
    monkeypatch.setattr(inputs.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(
        UserError, match="installed without the source files of its library; name another INPUT"
    ):
        find_files("builtin", DatasetConfig(), LeftOut())
    files = {"a.py": "x = 1", "site-packages/b.py": "theirs", "c.txt": "text"}
    write_files(tmp_path, files | {"latin.py": b"# caf\xe9"})
    assert read_input("builtin") == ["x = 1"]


# ---------------------------------------------------------------- splits


def write_saved(path, documents):
    rows = datasets.Dataset.from_dict({"text": documents})
    rows.save_to_disk(path)
    # This file is not part of the saved dataset, so it must not be read.
    rows.to_parquet(path / "cache.parquet")
    (path.parent / "dataset_dict.json").touch()


# {layout: {path: the store to which the official split of this path is written}}. The first path of a layout contains
# the token 5, the next one 6, and so on. Only 5 is training data.
TREES = {
    "folders": {"train/0.jsonl": "train", "val/0.jsonl": "validation", "test/0.jsonl": "test"},
    "folders below": {
        "en/train/a.jsonl": "train",
        "en/val/0.jsonl": "validation",
        "en/Dev/0.jsonl": "validation",
    },
    "files": {"a-train.jsonl": "train", "a-eval.jsonl": "validation", "a_test.jsonl": "test"},
    "files of DataLayout": {"c.train.gig.jsonl": "train", "c.valid.gig.jsonl": "validation"},
    "files as the Hub has them": {
        "train-00000-of-00001.jsonl": "train",
        "dev-00000-of-00001.jsonl": "validation",
    },
    "saved": {"train": "train", "unsupervised": "", "test": "test"},
}


def make_tree(folder, name):
    folder.mkdir()
    write = write_saved if name == "saved" else write_records
    for number, place in enumerate(TREES[name]):
        write(folder / place, [[5 + number, 7]])
    return folder


def first_tokens(source, **settings):
    return sorted(int(document[0]) for document in read_input(source, **settings))


@pytest.mark.parametrize(
    ("name", "pattern"), [*product(TREES, [""]), ("files", "*"), ("folders below", "**/*.*")]
)
def test_other_splits_are_left_out_of_training(tmp_path, capsys, name, pattern):
    """By default only the training split is imported. --split selects another split or all of them, and
    --splits=official assigns each file to the store of its split, if every file belongs to one."""
    tree = make_tree(tmp_path / "in", name) / pattern
    stores = list(TREES[name].values())
    assert first_tokens(tree) == [5]
    output = capsys.readouterr().out
    others = f"train is read; {len(stores) - 1} of {len(stores)} files belong to other splits"
    assert others in output and "--split=all reads all files" in output
    every = list(range(5, 5 + len(stores)))
    assert first_tokens(tree, split="all") == every
    for split in {"validation", "test"}.intersection(stores):
        expected = [token for token, store in zip(every, stores) if store == split]
        assert first_tokens(tree, split=split) == expected
    if all(stores):
        files = find_files(str(tree), DatasetConfig(splits="official"), LeftOut())
        assert sorted(file.store for file in files) == sorted(stores)


# {reason: names of files that are not splits}
NO_SPLITS = {
    "packages": ["libcrypt-dev/a.jsonl", "libfoo/b.jsonl", "libtrain/c.jsonl"],
    "a repository": ["src/a.jsonl", "test/a.jsonl", "test/b.jsonl", "web-dev/a.jsonl"],
    "pages": ["a_local_train.1.jsonl", "b_dev.1.jsonl", "c-continuous-validation.1.jsonl"],
    "a folder next to a file": ["train/a.jsonl", "dev.jsonl"],
    "train elsewhere": ["a/train/a.jsonl", "b/test/a.jsonl"],
    "words around": ["train.jsonl", "turing test.jsonl", "validated.jsonl"],
    "next to train": ["train/a.jsonl", "unsupervised/a.jsonl", "train-notes/a.jsonl"],
}


@pytest.mark.parametrize("name", NO_SPLITS)
def test_a_name_without_a_matching_train_is_not_a_split(tmp_path, capsys, name):
    """A file belongs to a split only if its name differs in one word from another name that has the word "train" in the
    place of this word. The import prints why it reads all files."""
    places = NO_SPLITS[name]
    for number, place in enumerate(places):
        write_records(tmp_path / place, [[number]])
    assert first_tokens(tmp_path) == list(range(len(places)))
    output = capsys.readouterr().out
    assert (
        f"all of {len(places)} files, because " in output
        and "0.01 of the tokens are held out" in output
    )


def test_a_missing_part_of_a_numbered_set_is_named(tmp_path, capsys):
    for number in (0, 2):
        write_records(tmp_path / f"train-0000{number}-of-00003.jsonl", [[number]])
    with pytest.raises(UserError, match="train-00001-of-00003.jsonl is missing from its numbered"):
        first_tokens(tmp_path)
    assert first_tokens(tmp_path, skip_unreadable=True) == [0, 2]
    assert "left out: 1 missing from their numbered sets" in capsys.readouterr().out
    assert first_tokens(tmp_path / "train-00002-of-00003.jsonl") == [2]


def test_names_within_a_split_do_not_count(tmp_path):
    make_tree(tmp_path / "train", "folders")
    assert first_tokens(tmp_path / "train" / "val") == [6]


def test_a_requested_split_needs_no_train(tmp_path):
    write_records(tmp_path / "corpus-valid.jsonl", [[5]])
    write_records(tmp_path / "corpus.jsonl", [[6]])
    write_records(tmp_path / "odd/a.jsonl", [[7]])
    assert first_tokens(tmp_path, split="validation") == [5]
    assert first_tokens(tmp_path, split="odd") == [7]


# ---------------------------------------------------------------- the Hub


def test_a_name_on_the_hub_is_streamed(prepare, tmp_path, monkeypatch, capsys):
    """A dataset on the Hub is streamed. Only its training split is read, unless all splits are requested."""
    splits = ["train", "validation", "test"]
    requests = []

    def load(name, config, *, split, streaming):
        requests.append((name, config, split, streaming))
        rows = datasets.Dataset.from_dict({"text": [f"some {split}"] * 3})
        return rows.to_iterable_dataset(num_shards=3)

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: splits)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_input("some/corpus", config="de") == ["some train"] * 3
    assert requests == [("some/corpus", "de", "train", True)]
    assert (
        "2 of 3 files belong to other splits according to their names (test, validation)"
        in capsys.readouterr().out
    )
    prepare("some/corpus", tmp_path, splits="official")
    for split in splits:
        assert read_back(tmp_path / split) == [f"some {split}"] * 3


def no_route(*_):
    raise OSError(101, "Network is unreachable")


def test_a_mistyped_name_is_reported_without_waiting_for_the_hub(tmp_path, monkeypatch, answer):
    """If the Hub can't be reached, a mistyped path is reported at once with a suggestion. Libraries that are imported
    later stay offline."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub.socket, "create_connection", no_route)
    monkeypatch.setattr(datasets, "get_dataset_split_names", no_route)
    hub.prepare_hub.cache_clear()
    (tmp_path / "mytexts").mkdir()
    code, _, errors = answer(get_dataset, "mytxts", "out")
    first, second, last = errors.splitlines()
    assert first.startswith("asking the Hugging Face Hub for mytxts: no file or folder")
    assert "cache" in second and last.startswith("error: mytxts: there is no such file or folder")
    assert first.endswith("did you mean mytexts?") and last.endswith("did you mean mytexts?")
    assert code == 2 and os.environ["HF_HUB_OFFLINE"] == "1"
