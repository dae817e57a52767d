"""docs/data.md is true: each command in it works on data of the formats that it names."""

import dataclasses
import re
import runpy
import shlex
import sys

import datasets
import numpy as np
import pytest

from config import resolve
from config.dataset_config import DatasetConfig
from mamba_fsdp.data import tokenizer
from tests.support.others_tokens import write_fms


@pytest.fixture
def page(project):
    return (project / "docs" / "data.md").read_text()


@pytest.fixture
def fsx(tmp_path):
    """What the page calls /fsx: text, data of others, and a tokenizer."""
    generator = np.random.default_rng(0)
    documents = [
        generator.integers(0, 256, size).tolist() for size in generator.integers(0, 200, 60)
    ]
    write_fms(tmp_path / "data" / "code" / "lang=c" / "0.arrow", documents)
    blocks = generator.integers(0, 256, (100, 32)).tolist()
    datasets.Dataset.from_dict({"input_ids": blocks}).save_to_disk(tmp_path / "data" / "blocks")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some text\n" * 99)
    tokenizer.train(["some text"], 300).save(tmp_path / "tokenizers" / "mine")
    return tmp_path


@pytest.mark.slow
def test_every_command_works(project, page, fsx, monkeypatch):
    monkeypatch.chdir(project)
    commands = re.findall(r"^\.venv/bin/python (.*)$", page, re.M)
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command.replace("/fsx", str(fsx)).replace(" data/", f" {fsx}/out/"))
        start = runpy.run_path
        if words[0] == "-m":
            start = runpy.run_module
            words.pop(0)
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            start(words[0], run_name="__main__")
        assert ended.value.code == 0, command


def test_the_options_it_names_exist(page):
    known = {leaf.name for leaf in dataclasses.fields(DatasetConfig)}
    known |= {"verify", "array", *resolve.all_settings()}
    assert set(re.findall(r"--(\w+)", page)) <= known
