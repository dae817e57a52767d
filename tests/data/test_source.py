"""The Source protocol: the native store keeps it, and whatever else keeps it is read by the same order and loader."""

import inspect

import numpy as np
import pytest
import torch

from config.train_config import DataConfig
from mamba_fsdp.data.loader import BatchLayout, Loader
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.source import Source, Tokens
from mamba_fsdp.data.store import StoreWriter, TokenStore
from mamba_fsdp.errors import UserError

EOS = ord("\n")


class Lines:
    """A source of another kind: the bytes of a text file as they lie there, each line a document."""

    vocab_size = 256
    eos = EOS
    tokenizer = ""

    def __init__(self, path):
        self.path = self.tokenizer_path = path
        self.content = np.frombuffer(path.read_bytes(), np.uint8)
        self.token_count = len(self.content)
        self.identity = str(hash(self.content.tobytes()))
        self.document_count = int((self.content == EOS).sum())
        self.starts = np.concatenate([[0], np.flatnonzero(self.content == EOS)[:-1] + 1])

    def read(self, start, count):
        place = np.arange(start, start + count)
        document = np.searchsorted(self.starts, place, "right") - 1
        return Tokens(
            self.content[start : start + count],
            (place - self.starts[document]).astype(np.int32),
        )


@pytest.fixture
def pair(tmp_path):
    """The same documents as a native store and as a text file."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(32, 127, generator.integers(1, 40)) for _ in range(60)]
    writer = StoreWriter(
        tmp_path / "store", vocab_size=256, eos=EOS, tokenizer="bytes", shard_tokens=300
    )
    for document in documents:
        writer.append([*document, writer.eos])
    text = tmp_path / "lines.txt"
    text.write_bytes(b"".join(bytes(document.tolist()) + b"\n" for document in documents))
    return writer.finish(), Lines(text)


def test_the_native_store_keeps_the_protocol(pair):
    """Every name is there with the type that the protocol says, and read takes and gives what it says."""
    store, toy = pair
    for name, kind in inspect.get_annotations(Source).items():
        assert isinstance(getattr(store, name), kind) and isinstance(getattr(toy, name), kind), name
    assert inspect.signature(TokenStore.read) == inspect.signature(Source.read)
    tokens, positions = store.read(5, 20)
    assert (
        tokens.dtype.kind == "u"
        and positions.dtype == np.int32
        and len(tokens) == len(positions) == 20
    )


def test_a_source_of_another_kind_gives_the_same_batches(pair):
    """Sampler and loader ask for nothing that the protocol doesn't name."""
    batches = []
    for source in pair:
        order = Sampler({"it": source}, {"it": 1.0}, 16, seed=3)
        data = DataConfig(seq_length=16, reset_at_documents=True)
        with Loader({"it": source}, order, data, BatchLayout(0, 1, 3, 2), vocab_size=256) as loader:
            batches.append([batch for step in range(12) for batch in loader.step(step)])
    for native, toy in zip(*batches):
        assert native.samples == toy.samples
        assert torch.equal(native.tokens, toy.tokens) and torch.equal(native.labels, toy.labels)
        assert torch.equal(native.seq_idx, toy.seq_idx)


def test_a_source_of_another_kind_is_known_again_when_a_run_resumes(pair, tmp_path):
    _, toy = pair
    state = Sampler({"it": toy}, {"it": 1.0}, 16, seed=3).state_after(5)
    later = Sampler({"it": toy}, {"it": 1.0}, 16, seed=3, state=state)
    assert (
        later.samples(0, 4)[1].tolist()
        == Sampler({"it": toy}, {"it": 1.0}, 16, seed=3).samples(5, 4)[1].tolist()
    )
    (tmp_path / "lines.txt").write_bytes(b"other\n" * 200)
    with pytest.raises(UserError, match="'it' holds other data"):
        Sampler({"it": Lines(tmp_path / "lines.txt")}, {"it": 1.0}, 16, seed=3, state=state)
