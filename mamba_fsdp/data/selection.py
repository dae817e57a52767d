"""Which token stores a run reads: the training sources with their weights, and the validation stores."""

from collections.abc import Iterable, Iterator
from itertools import combinations, count
from pathlib import Path

from config.train_config import DataConfig
from mamba_fsdp.data.loader import Batch, Loader, Split
from mamba_fsdp.data.order import Order
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.tokenizer import ANOTHER_TOKENIZER, IDENTITY, refuse_other_tokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import exists


def training_sources(data: DataConfig) -> tuple[dict[str, TokenStore], dict[str, float]]:
    """({name: source}, {name: weight}) of the settings. Raises UserError where a store is missing or broken."""
    root = Path(data.dataset_path)
    folders = {name: _store_folder(root / name) for name in data.datasets}
    if len(folders) < len(data.datasets):
        raise UserError(f"datasets {','.join(data.datasets)} names one twice; give each once")
    folders = folders or {_store_folder(root).name: _store_folder(root)}
    sources = {name: TokenStore(folder) for name, folder in folders.items()}
    weights = data.weights or [store.token_count for store in sources.values()]
    return sources, dict(zip(sources, weights))


def validation_stores(data: DataConfig) -> list[TokenStore]:
    """The stores to validate on, if any: validation_path, or with `auto` each `validation` beside a training store."""
    if data.validation_path == "none":
        return []
    if data.validation_path != "auto":
        return [TokenStore(_store_folder(Path(data.validation_path), "validation"))]
    roots = [Path(data.dataset_path) / name for name in data.datasets] or [Path(data.dataset_path)]
    places = [folder for root in roots for folder in (root / "validation", root.parent / "validation")
              if exists(folder / "index.json") and folder != root]
    return [TokenStore(folder) for folder in dict.fromkeys(places)]


def refuse_other_tokenizers(stores: Iterable[TokenStore]) -> None:
    """Raises UserError where two of the stores are known to have different tokenizers."""
    for one, other in combinations(stores, 2):
        refuse_other_tokenizer(one.path, one.tokenizer, other.path, [other.tokenizer])
        ours, theirs = ((store.vocab_size, store.eos) for store in (one, other))
        if ours != theirs:
            raise UserError(f"{other.path}: its tokenizer (vocabulary {theirs[0]}, eos {theirs[1]}) is not that of "
                            f"{one.path} ({ours[0]}, {ours[1]}); {ANOTHER_TOKENIZER}")


def one_for_all(stores: Iterable[TokenStore]) -> TokenStore:
    """The one whose tokenizer stands for that of all: the first that is known, else the first."""
    return max(stores, key=lambda store: store.tokenizer.startswith(IDENTITY))


def batches(dataset_path: str | Path, *, seq_length: int = 256, batch_size: int = 8,
            seed: int = 2023) -> Iterator[Batch]:
    """Yields without end what training with these settings on one device reads, in its order. Raises UserError."""
    data = DataConfig(str(dataset_path), seq_length=seq_length)
    sources, weights = training_sources(data)
    vocab_size = max(store.vocab_size for store in sources.values())
    with Loader(sources, Order(sources, weights, seq_length, seed), data, Split(0, 1, batch_size),
                vocab_size=vocab_size) as loader:
        for step in count():
            yield from loader.step(step)


def _store_folder(path: Path, part: str = "train") -> Path:
    """`path` itself, or the store `part` inside it."""
    return path / part if not exists(path / "index.json") and exists(path / part / "index.json") else path
