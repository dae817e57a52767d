"""Shared helpers for the tests of get_dataset.py: they write texts, read inputs, and read the content of datasets."""

import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mamba_fsdp.data.store import StoreWriter, TokenStore
from mamba_fsdp.importing.inputs import find_files
from mamba_fsdp.importing.kinds import LeftOut
from mamba_fsdp.importing.reading import Share, read_batches
from mamba_fsdp.settings.dataset_config import DatasetConfig


def read_input(source, **settings):
    """Returns the documents in an input, as texts or as arrays of token ids."""
    options = DatasetConfig(**settings)
    left_out = LeftOut()
    share = Share(find_files(str(source), options, left_out))
    print(*left_out.lines(), sep="\n")
    batches = read_batches(share, options, size=99)
    return [document.content for batch in batches for document in batch.documents]


def stored_documents(store):
    """Returns each document of a store, with its eos."""
    tokens, positions = store.read(0, store.token_count)
    return np.split(tokens, np.flatnonzero(positions == 0)[1:])


def documents_of(path):
    """Returns the token ids of each document in the store of a folder, with its eos."""
    return [document.tolist() for document in stored_documents(TokenStore(path))]


def make_texts(count, seed=0):
    """Returns documents with words in several scripts and with line breaks. None of them is blank."""
    words = 'the of state space model α βγδ naïve 日本語 x=1 {"k": 2} emoji🙂 \t'.split(" ")
    chooser = random.Random(seed)
    return [
        " ".join(chooser.choice(words) for _ in range(chooser.randint(1, 60))).replace(
            " of ", " of\n"
        )
        + f" {i}"
        for i in range(count)
    ]


def write_records(path, texts):
    """Writes a file of JSON lines, one for each text or list of token ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_store(path, documents, **how):
    """Writes a token store of documents that are given without their eos. how: keyword arguments of StoreWriter."""
    writer = StoreWriter(path, **how)
    for document in documents:
        writer.append([*document, writer.eos])
    return writer.finish()


def write_learnable(path, seed, documents, tokenizer="ids:of the corpus"):
    """Writes documents of random length in which each token mostly follows from the previous one, so that a model can
    learn something."""
    random = np.random.default_rng(seed)
    written = []
    for _ in range(documents):
        tokens = [int(random.integers(1, 64))]
        for _ in range(int(random.integers(5, 120))):
            follows = random.random() < 0.8
            next_token = 1 + (tokens[-1] * 5 + 3) % 63 if follows else random.integers(1, 64)
            tokens.append(int(next_token))
        written.append(tokens)
    write_store(path, written, vocab_size=64, eos=0, tokenizer=tokenizer)


def read_back(store):
    """Returns the documents of the store at this path as texts, without their eos."""
    store = TokenStore(store)
    backend = Tokenizer.from_file(str(store.tokenizer_path / "tokenizer.json"))
    return [
        backend.decode(document[:-1].tolist(), skip_special_tokens=False)
        for document in stored_documents(store)
    ]


def content(folder):
    """Returns {path: bytes} of all files in the subfolders of a finished dataset. The files directly in the folder are
    left out, because they contain durations and the path of the input."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.parent != Path(folder)
    }


def write_files(folder, files):
    """Writes {name below the folder: its text or bytes}. Returns the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder
