"""A tiny corpus, and tiny runs on it in this process."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import mamba_fsdp
from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.run import records
from tests.support import corpora
from tests.support.tiny import TINY, resolved


def write_store(path, seed, documents, tokenizer="ids:of the corpus"):
    """Documents of random length in which each token mostly follows from the one before: something to learn."""
    random = np.random.default_rng(seed)
    written = []
    for _ in range(documents):
        tokens = [int(random.integers(1, 64))]
        for _ in range(int(random.integers(5, 120))):
            follows = random.random() < 0.8
            next_token = 1 + (tokens[-1] * 5 + 3) % 63 if follows else random.integers(1, 64)
            tokens.append(int(next_token))
        written.append(tokens)
    corpora.write_store(path, written, vocab_size=64, eos=0, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with the stores train and validation, other/train, and foreign/train, whose tokenizer is another."""
    root = tmp_path_factory.mktemp("corpus")
    write_store(root / "train", 0, 200)
    write_store(root / "validation", 1, 20)
    write_store(root / "other" / "train", 2, 50)
    write_store(root / "foreign" / "train", 2, 50, tokenizer="ids:of others")
    return root


END = "<end>"
WORDS = [END, "?", *(f"w{number}" for number in range(62))]
OTHER_WORDS = [*WORDS[:-2], WORDS[-1], WORDS[-2]]


def word_tokenizer(vocabulary):
    """A tokenizer of words, as the tokenizers library has it."""
    numbers = {word: number for number, word in enumerate(vocabulary)}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([END])
    return backend


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder with the stores a and b, which hold the same tokens, of different tokenizers; and unknown, which does not
    say of which."""
    root = tmp_path_factory.mktemp("texts")
    for name, vocabulary in (("a", WORDS), ("b", OTHER_WORDS), ("unknown", WORDS)):
        tokenizer = TextTokenizer(word_tokenizer(vocabulary), END)
        identity = tokenizer.identity if name != "unknown" else "none"
        for seed, part in enumerate(("train", "validation")):
            write_store(root / name / part, seed, 20, tokenizer=identity)
            if name != "unknown":
                tokenizer.save(root / name / part / "tokenizer")
    return root


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory):
    """TINY as a file: what a test makes pointless in it is forgotten."""
    file = tmp_path_factory.mktemp("settings") / "tiny.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in TINY.items()))
    return file


@pytest.fixture
def settings_of(corpus, tiny_file, tmp_path):
    """settings_of(**settings): those of a tiny run in tmp_path/run."""

    def settings(**given):
        usual = {"dataset_path": corpus, "save_ckpt_path": tmp_path / "run"}
        return resolved(tiny_file, **{**usual, **given})

    return settings


@pytest.fixture
def train(corpus, tiny_file, capsys):
    """train(run folder, **settings) -> what it printed, in this process. As training.py does it."""

    def run_here(run, **given):
        capsys.readouterr()
        words = {"dataset_path": corpus, "save_ckpt_path": run, **given}
        mamba_fsdp.train(tiny_file, **words)
        return capsys.readouterr().out

    return run_here


@pytest.fixture
def weights_of():
    """weights_of(run) -> {name: tensor} of its last consolidated file."""

    def read(run):
        return torch.load(sorted(run.glob("pth/step_*/consolidated.00.pth"))[-1], weights_only=True)

    return read


TIMES = (
    "tokens_per_second",
    "mfu",
    "goodput",
    "goodput_of_commands",
    "delaying_rank",
    "largest_delay_seconds",
    "median_delay_seconds",
    "tokens_per_second_per_device",
    "data_wait_seconds",
    "checkpoint_stall_seconds",
    "memory_gb",
)


@pytest.fixture
def metrics_of():
    """metrics_of(run) -> its metrics without times and rates."""

    def read(run):
        return [
            {key: value for key, value in entry.items() if key not in TIMES}
            for entry in records.read(run / "metrics.jsonl")
        ]

    return read
