"""Chooses the sources for training, with their weights, and for validation. This module does not import torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations, count
from pathlib import Path
from typing import TYPE_CHECKING

from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.source import Source
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.tokenizer import ANOTHER_TOKENIZER, IDENTITY, check_tokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import setting
from mamba_fsdp.importing.kinds import SPLITS, is_store, split_in
from mamba_fsdp.settings.train_config import DataConfig

if TYPE_CHECKING:
    from mamba_fsdp.data.loader import Batch


def training_sources(data: DataConfig) -> tuple[dict[str, Source], dict[str, float]]:
    """Opens the sources to train on. Returns ({name: source}, {name: sampling weight}). Raises UserError if a source is
    missing or broken."""
    sources: dict[str, Source] = {name: _open(path, data) for name, path in _stores(data).items()}
    weights = data.weights or [source.token_count for source in sources.values()]
    return sources, dict(zip(sources, weights))


def validation_sources(data: DataConfig) -> dict[str, Source]:
    """Opens the sources to validate on, and returns {name: source}.

    If validation_path is a path, the result is the store at this path. For `auto`, it consists of the validation splits
    next to the training sources, each with the name of its training source (or name/split for a second split). For
    `none`, it is empty. Raises UserError if a source is missing or broken."""
    if data.validation_path == "none":
        return {}
    if data.validation_path != "auto":
        path = split_in(Path(data.validation_path), "validation")
        return {path.name: _open(path, data)}
    places = _stores(data)
    found: dict[str, Source] = {}
    seen = set(places.values())
    for name, trained in places.items():
        for split in SPLITS["validation"]:
            path = trained.parent / split
            if is_store(path) and path not in seen:
                seen.add(path)
                found[name if name not in found else f"{name}/{split}"] = _open(path, data)
    return found


def _stores(data: DataConfig) -> dict[str, Path]:
    """Returns {name: path} of the stores to train on. Raises UserError if the settings contain a name twice."""
    root = Path(data.dataset_path)
    places = {name: split_in(root / name) for name in data.datasets}
    if len(places) < len(data.datasets):
        raise UserError(
            f"datasets={','.join(data.datasets)} lists a dataset twice; list each dataset once"
        )
    if not places:
        path = split_in(root)
        places[path.name] = path
    return places


def _open(path: Path, data: DataConfig) -> TokenStore:
    store = TokenStore(path)
    if data.reset_at_documents and store.eos < 0:
        raise UserError(
            f"{path}: reset_at_documents needs the token that ends documents, but the store does not have it; make the store "
            "again with --eos_token=ID"
        )
    return store


def check_tokenizers_agree(stores: Iterable[Source]) -> None:
    """Raises UserError if two of the sources are known to have different tokenizers."""
    for first, second in combinations(stores, 2):
        check_tokenizer(first.path, first.tokenizer, second.path, [second.tokenizer])
        sizes = {first.vocab_size, second.vocab_size}
        ends = {first.eos, second.eos} - {-1}  # -1: unknown
        if len(sizes) > 1 or len(ends) > 1:
            raise UserError(
                f"the tokenizers of {first.path} (vocabulary {first.vocab_size}, eos {first.eos}) and {second.path} "
                f"(vocabulary {second.vocab_size}, eos {second.eos}) are different; {ANOTHER_TOKENIZER}"
            )


def representative_source(stores: Iterable[Source]) -> Source:
    """Returns one source to take the tokenizer from: the first source with a known tokenizer, or the first one if no source has
    a known tokenizer."""
    stores = list(stores)
    identified = [store for store in stores if store.tokenizer.startswith(IDENTITY)]
    return (identified or stores)[0]


@dataclass
class BatchesConfig:
    """The settings of training that determine its batches."""

    seq_length: int = setting(256, at_least=1)
    """Number of tokens per sample."""
    batch_size: int = setting(8, at_least=1)
    """Number of samples per batch."""
    seed: int = setting(2023, at_least=0, at_most=2**63 - 1)
    """Seed of the order of the samples."""


def batches(dataset_path: str | Path, *, options: BatchesConfig) -> Iterator["Batch"]:
    """Yields the batches that a training with these settings reads on one device, in the same order and without end.

    dataset_path: a token store, or a folder with one in train/. Raises UserError if the data is missing or can't be read.
    """
    from mamba_fsdp.data.loader import BatchShape, Loader

    # Threads would keep running if the caller does not exhaust the generator, so the loader uses none.
    data = DataConfig(str(dataset_path), seq_length=options.seq_length, num_workers=0)
    sources, weights = training_sources(data)
    vocab_size = max(source.vocab_size for source in sources.values())
    loader = Loader(
        sources,
        Sampler(sources, weights, options.seq_length, options.seed),
        data,
        BatchShape(0, 1, options.batch_size),
        vocab_size=vocab_size,
    )
    return chain.from_iterable(map(loader.step, count()))
