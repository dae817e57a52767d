"""What the tests of get_dataset.py share: texts, and what a dataset holds."""

import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mamba_fsdp.data.store import StoreWriter, TokenStore


def stored_documents(store):
    """Each document of a store, with its eos."""
    tokens, positions = store.read(0, store.token_count)
    return np.split(tokens, np.flatnonzero(positions == 0)[1:])


def make_texts(count, seed=0):
    """Documents of words in several scripts, with line breaks inside, none of them blank."""
    words = 'the of state space model α βγδ naïve 日本語 x=1 {"k": 2} emoji🙂 \t'.split(" ")
    chooser = random.Random(seed)
    return [
        " ".join(chooser.choice(words) for _ in range(chooser.randint(1, 60))).replace(
            " of ", " of\n"
        )
        + f" {i}"
        for i in range(count)
    ]


def write_store(path, documents, **how):
    """A token store of documents given without their eos. how: as StoreWriter has it."""
    writer = StoreWriter(path, **how)
    for document in documents:
        writer.append([*document, writer.eos])
    return writer.finish()


def read_back(store):
    """A store's documents as text."""
    store = TokenStore(store)
    backend = Tokenizer.from_file(str(store.tokenizer_path / "tokenizer.json"))
    return [
        backend.decode(document[:-1].tolist(), skip_special_tokens=False)
        for document in stored_documents(store)
    ]


def content(folder):
    """{name: bytes} of everything in a finished dataset but what says how long it took or where it came from."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.parent != Path(folder)
    }
