"""Tests mamba_fsdp.data.store: reading returns the written tokens, and an error contains the name of the damaged
file."""

import pickle
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_fsdp.data.store import StoreFile, StoreIndex, TokenStore
from mamba_fsdp.errors import UserError
from tests.support.checkpoints import flip
from tests.support.corpora import stored_documents, write_store

pytestmark = pytest.mark.torch22

EOS = 0
DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8, 9, 10, 11], [12, 13]]


def write(path, documents, vocab_size=100, shard_tokens=6):
    return write_store(
        path, documents, vocab_size=vocab_size, eos=EOS, tokenizer="none", shard_tokens=shard_tokens
    )


@pytest.fixture
def store(tmp_path):
    return write(tmp_path / "store", DOCUMENTS)


@settings(max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(1, 99), max_size=12), min_size=1, max_size=12),
    shard_tokens=st.integers(1, 30),
    data=st.data(),
)
def test_any_window_equals_the_slice_of_the_documents(
    tmp_path_factory, documents, shard_tokens, data
):
    """read(start, count) returns this slice of the concatenated documents, also across files of the store. Positions
    restart at each document."""
    store = write(tmp_path_factory.mktemp("store"), documents, shard_tokens=shard_tokens)
    flat = [token for document in documents for token in [*document, EOS]]
    positions = [i for document in documents for i in range(len(document) + 1)]
    assert store.token_count == len(flat) and store.document_count == len(documents)
    start = data.draw(st.integers(0, len(flat)))
    count = data.draw(st.integers(0, len(flat) - start))
    window = store.read(start, count)
    assert window.tokens.tolist() == flat[start : start + count]
    assert (
        window.positions.tolist() == positions[start : start + count]
        and window.positions.dtype == np.int32
    )
    assert [d.tolist() for d in stored_documents(store)] == [
        [*document, EOS] for document in documents
    ]
    store.verify()


def test_positions_beyond_four_gib_can_be_read(tmp_path):
    """Tokens at byte offsets above 4 GiB can be read. The file of the test is sparse up to its last tokens."""
    count = 3 << 30
    starts = np.array([0, 1 << 30, 2 << 30, count - 3], "<i8")
    file = StoreFile("00000", "", "", tokens=count, documents=len(starts))
    index = StoreIndex("uint16", vocab_size=100, tokenizer="none", files=[file], eos=EOS)
    starts.tofile(tmp_path / "00000.doc")
    with open(tmp_path / "00000.bin", "wb") as stream:
        stream.seek(2 * (count - 3))
        stream.write(np.array([7, 8, EOS], "<u2").tobytes())
    window = TokenStore(tmp_path, index).read(count - 5, 5)
    assert window.tokens.tolist() == [0, 0, 7, 8, EOS]
    assert window.positions[2:].tolist() == [0, 1, 2]


def test_the_identity_depends_on_the_content_not_the_path(store, tmp_path):
    """A copy of a store has the same identity, and a store with a changed token has another one. An opened store can
    be pickled, because rank 0 sends it to other ranks."""
    shutil.copytree(store.path, tmp_path / "copy")
    assert TokenStore(tmp_path / "copy").identity == store.identity
    assert write(tmp_path / "other", [[1, 2, 4], *DOCUMENTS[1:]]).identity != store.identity
    copy = pickle.loads(pickle.dumps(store))
    assert copy.read(3, 5).tokens.tolist() == store.read(3, 5).tokens.tolist()


OF_VERSION = "of version .*, but this version of the program reads"
DAMAGES = {  # {command that damages the store: part of the message}
    "rm -r $PWD": "no such file or folder; make a token store there: ",
    "rm -r $PWD && echo text > $PWD": "a file that no command accepts, not a token store",
    "rm index.json": "an unfinished import, not a token store",
    "rm *": "an empty folder, not a token store; make one .* get_dataset.py INPUT OUT",
    "echo '{\"format\": ' > index.json": "an unfinished import, not a token store",
    "sed -i 's/.version.: 1/\"version\": 2/' index.json": OF_VERSION.replace(".*", "2"),
    "truncate -s 300 index.json": "index.json: can't be read",
    "sed -i 's/.eos.: 0/\"eos\": 1/' index.json": "does not match its own checksum",
    "rm 00001.bin": "00001.bin: can't be read",
    "truncate -s 2 00001.bin": "00001.bin: the file has 2 bytes instead of the",
    "truncate -s 0 00000.doc": "00000.doc: the file has 0 bytes instead of the 16 in the index",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_store_is_refused_by_name(store, damage):
    """Opening a damaged store raises an error with the path of the damaged file and a description of the damage."""
    subprocess.run(damage, shell=True, check=True, cwd=store.path)
    with pytest.raises(UserError, match=DAMAGES[damage]):
        TokenStore(store.path)


@pytest.mark.parametrize("name", ["00000.bin", "00001.doc"])
@pytest.mark.parametrize("change", ["rm", "truncate -s 2"])
def test_a_file_that_changes_after_opening_is_named_when_it_is_first_read(store, name, change):
    subprocess.run(f"{change} {name}", shell=True, cwd=store.path)
    with pytest.raises(UserError, match=rf"{name}: .*; copy .* make the store again"):
        store.read(0, store.token_count)


@pytest.mark.parametrize("name", ["00000.bin", "00001.doc"])
def test_verify_finds_a_changed_bit(store, name):
    """verify() compares checksums, so that it finds damage that does not change the size of a file."""
    flip(store.path / name)
    with pytest.raises(UserError, match=f"{name}: the content does not match"):
        TokenStore(store.path).verify()
