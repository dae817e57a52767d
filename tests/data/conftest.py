"""Provides a corpus, a small tokenizer, and a function that imports an input with this tokenizer."""

import pytest

from mamba_fsdp.data import tokenizer as tokenizer_lib
from mamba_fsdp.importing.make_dataset import make_dataset
from mamba_fsdp.settings.dataset_config import DatasetConfig
from tests.support.corpora import make_texts


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Prevents all tests in this folder from connecting to the Hugging Face Hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def texts():
    return make_texts(60)


@pytest.fixture(scope="session")
def tokenizer(texts, tmp_path_factory):
    """Returns the path of the tokenizer.json of a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_lib.train(texts, 300).save(folder)
    return str(folder / "tokenizer.json")


@pytest.fixture
def prepare(tokenizer):
    """Returns a function prepare(source, out, **settings), which imports an input. By default it uses one worker and
    the small tokenizer, and holds out no validation data."""

    def run(source, out, **settings):
        options = DatasetConfig(
            **{
                "tokenizer": tokenizer,
                "eos_token": tokenizer_lib.END_OF_TEXT,
                "validation_fraction": 0.0,
                **settings,
            }
        )
        return make_dataset(str(source), out, options)

    return run
