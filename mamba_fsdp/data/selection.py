"""Chooses the sources that a run trains on, with their weights, and those that it validates on. Needs no torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, count
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
    """Returns ({name: source}, {name: weight}) as the settings say. Raises UserError if a source is missing or
    broken."""
    sources: dict[str, Source] = {name: _open(path, data) for name, path in _places(data).items()}
    weights = data.weights or [source.token_count for source in sources.values()]
    return sources, dict(zip(sources, weights))


def validation_sources(data: DataConfig) -> dict[str, Source]:
    """Returns {name: source} to validate on: validation_path, or with `auto` the validation split next to each training
    source, which gives it its name."""
    if data.validation_path == "none":
        return {}
    if data.validation_path != "auto":
        path = split_in(Path(data.validation_path), "validation")
        return {path.name: _open(path, data)}
    places = _places(data)
    found: dict[str, Source] = {}
    seen = set(places.values())
    for name, trained in places.items():
        for split in SPLITS["validation"]:
            path = trained.parent / split
            if is_store(path) and path not in seen:
                seen.add(path)
                found[name if name not in found else f"{name}/{split}"] = _open(path, data)
    return found


def _places(data: DataConfig) -> dict[str, Path]:
    """Returns {name: path} of the stores to train on."""
    root = Path(data.dataset_path)
    places = {name: split_in(root / name) for name in data.datasets}
    if len(places) < len(data.datasets):
        raise UserError(f"datasets {','.join(data.datasets)} names one twice; give each once")
    if not places:
        path = split_in(root)
        places[path.name] = path
    return places


def _open(path: Path, data: DataConfig) -> TokenStore:
    store = TokenStore(path)
    if data.reset_at_documents and store.eos < 0:
        raise UserError(
            f"{path}: reset_at_documents needs to know which token ends its documents; make the store "
            "again with --eos_token=ID"
        )
    return store


def check_tokenizers_agree(stores: Iterable[Source]) -> None:
    """Raises UserError if two of the sources are known to have different tokenizers."""
    for first, second in combinations(stores, 2):
        check_tokenizer(first.path, first.tokenizer, second.path, [second.tokenizer])
        sizes = {first.vocab_size, second.vocab_size}
        ends = {first.eos, second.eos} - {-1}  # -1: not known
        if len(sizes) > 1 or len(ends) > 1:
            raise UserError(
                f"{second.path}: its tokenizer (vocabulary {second.vocab_size}, eos {second.eos}) is not that of "
                f"{first.path} ({first.vocab_size}, {first.eos}); {ANOTHER_TOKENIZER}"
            )


def one_for_all(stores: Iterable[Source]) -> Source:
    """Returns the first source with a known tokenizer, else the first: its tokenizer stands for that of all."""
    stores = list(stores)
    identified = [store for store in stores if store.tokenizer.startswith(IDENTITY)]
    return (identified or stores)[0]


@dataclass
class BatchesConfig:
    """The settings of training that decide its batches."""

    seq_length: int = setting(256, at_least=1)
    """Tokens of a sample."""
    batch_size: int = setting(8, at_least=1)
    """Samples of a batch."""
    seed: int = setting(2023, at_least=0, at_most=2**63 - 1)
    """Decides the order of the samples."""


def batches(dataset_path: str | Path, *, options: BatchesConfig) -> Iterator["Batch"]:
    """Yields, endlessly, the batches that a training on one device with these settings reads, in its order.

    dataset_path: a token store, or a folder with one in train/. Raises UserError.
    """
    from mamba_fsdp.data.loader import BatchShape, Loader

    # Without threads: a program may end before it has read all of the generator.
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
    for step in count():
        yield from loader.step(step)
