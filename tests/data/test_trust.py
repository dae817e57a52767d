"""Loading a tokenizer never runs code that lies beside it."""

import io
import json
import re
import sys
from pathlib import Path

import pytest

from mamba_fsdp.data import tokenizer
from mamba_fsdp.data.tokenize import make_dataset
from mamba_fsdp.errors import UserError
from mamba_fsdp.settings.dataset_config import DatasetConfig


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A tokenizer's folder with code, in a folder that tells whether it ran."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "in.txt").write_text("text")
    (tmp_path / "evil" / "tokenization_evil.py").write_text(
        "open('owned', 'w')\nfrom transformers import PreTrainedTokenizerFast as Evil\n"
    )
    fields = {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": [None, "tokenization_evil.Evil"]},
    }
    (tmp_path / "evil" / "tokenizer_config.json").write_text(json.dumps(fields))
    yield
    assert not (tmp_path / "owned").exists()


def import_with(name):
    make_dataset("in.txt", "out", DatasetConfig(tokenizer=name))


@pytest.mark.parametrize("load", [import_with, tokenizer.load_words])
def test_a_tokenizer_folder_with_code_runs_none_of_it(evil, monkeypatch, load):
    """Where `yes |` answers whatever is asked: neither get_dataset.py nor generate, inspect and evaluate."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    with pytest.raises(UserError, match="tokenizer evil: can't be loaded"):
        load("evil")
    assert not list(tokenizer.identities_in(Path("evil")))


def test_every_call_of_transformers_says_so(project):
    """What a program is given to load, it loads without code."""
    calls = []
    for place in ("*.py", "mamba_fsdp/**/*.py", "benchmarks/**/*.py"):
        for path in project.glob(place):
            code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
            for match in re.finditer(r"Auto\w+\.from_(pretrained|config)\b", code):
                calls.append((path.name, code[match.start() : match.start() + 200]))
    assert {name for name, _ in calls} == {"tokenizer.py", "models.py"}
    assert not [name for name, call in calls if "trust_remote_code=False" not in call]
