"""Provides a tiny corpus, and functions that run tiny trainings on it in this process."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import mamba_fsdp
from mamba_fsdp.data.tokenizer import TextTokenizer
from tests.support import corpora
from tests.support.tiny import TINY, resolved


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Writes the stores train, validation and other/train, and foreign/train with another tokenizer. Returns their
    folder."""
    root = tmp_path_factory.mktemp("corpus")
    corpora.write_learnable(root / "train", 0, 200)
    corpora.write_learnable(root / "validation", 1, 20)
    corpora.write_learnable(root / "other" / "train", 2, 50)
    corpora.write_learnable(root / "foreign" / "train", 2, 50, tokenizer="ids:of others")
    return root


END = "<end>"
WORDS = [END, "?", *(f"w{number}" for number in range(62))]
OTHER_WORDS = [*WORDS[:-2], WORDS[-1], WORDS[-2]]


def word_tokenizer(vocabulary):
    """Returns a tokenizer in which each word of the vocabulary is a token."""
    numbers = {word: number for number, word in enumerate(vocabulary)}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([END])
    return backend


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Writes the stores of a and b, which contain the same tokens but have different tokenizers. Returns their
    folder."""
    root = tmp_path_factory.mktemp("texts")
    for name, vocabulary in (("a", WORDS), ("b", OTHER_WORDS)):
        tokenizer = TextTokenizer(word_tokenizer(vocabulary), END)
        for seed, part in enumerate(("train", "validation")):
            corpora.write_learnable(root / name / part, seed, 20, tokenizer=tokenizer.identity)
            tokenizer.save(root / name / part / "tokenizer")
    return root


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory):
    """Writes the settings TINY to a file and returns its path. Settings in a file, unlike arguments, are not an error
    if a test makes them ineffective."""
    file = tmp_path_factory.mktemp("settings") / "tiny.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in TINY.items()))
    return file


@pytest.fixture
def settings_of(corpus, tiny_file, tmp_path):
    """Returns a function settings_of(**settings), which returns the settings of a tiny run in tmp_path/run."""

    def settings(**given):
        usual = {"dataset_path": corpus, "save_ckpt_path": tmp_path / "run"}
        return resolved(tiny_file, **{**usual, **given})

    return settings


@pytest.fixture
def train(corpus, tiny_file, capsys):
    """Returns a function train(run folder, **settings), which trains in this process like training.py and returns
    stdout."""

    def run_here(run, **given):
        capsys.readouterr()
        settings = {"dataset_path": corpus, "save_ckpt_path": run, **given}
        mamba_fsdp.train(tiny_file, **settings)
        return capsys.readouterr().out

    return run_here
