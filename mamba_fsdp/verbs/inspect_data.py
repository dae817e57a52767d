"""What `inspect` says of data of any format: what it holds, by all of it or by windows spread over it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from config.train_config import DataConfig, ReadingConfig
from mamba_fsdp.data.foreign.indexed import IndexedSource
from mamba_fsdp.data.opening import open_source
from mamba_fsdp.data.source import Source
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.tokenizer import load_words
from mamba_fsdp.errors import UserError
from mamba_fsdp.report.display import Display, say, scaled

WINDOW, WINDOWS = 1 << 16, 64  # tokens read at a time; how many times unless all is asked for
SAMPLES, SAMPLE_TOKENS, SAMPLE_WIDTH = 3, 64, 160


class Survey(NamedTuple):
    read: int  # tokens
    lowest: int
    highest: int
    documents: int  # that begin in what was read
    longest: int  # tokens of a document, as far as it was read
    counted: int  # tokens that count in the loss


def show_data(path: Path, reading: ReadingConfig, verify: bool) -> None:
    """Prints what the source at `path` holds. Raises UserError where something is wrong with it."""
    source = open_source(path, DataConfig(**vars(reading)), lambda line: say("note", " ".join(line.split())),
                         inspecting=True)
    say(source.format, path)
    if isinstance(source, TokenStore) and verify:
        source.verify()
        say("verified", "all bytes read, every file has its size and checksum")
    known = f" in {source.document_count:,} documents" if source.document_count else ""
    say("tokens", f"{source.token_count:,}{known}")
    if isinstance(source, IndexedSource):
        _show_files(source)
    found = survey(source, every=verify)
    part = "all of it" if found.read == source.token_count else f"of {found.read:,} tokens spread over it"
    say("ids", f"{found.lowest:,} to {found.highest:,} ({part})")
    if found.counted < found.read:
        say("loss mask", f"{found.counted / found.read:.1%} of the tokens count ({part})")
    say("documents", f"the longest {'' if found.read == source.token_count else 'at least '}{found.longest:,} tokens; "
        f"{found.documents:,} begin in {'it' if found.read == source.token_count else 'what was read'}")
    size, wrong = _show_tokenizer(source, found)
    if isinstance(source, TokenStore):
        say("vocabulary", f"{source.vocab_size:,}, eos {source.eos}, {source.dtype.name}")
    if source.eos < 0 and not (isinstance(source, IndexedSource) and source.plan.layout):  # which has positions
        wrong.append("which token ends documents is not known: --eos_token=ID or --tokenizer=FOLDER says it")
    if 0 < (size or source.vocab_size) <= found.highest:
        wrong.append(f"token id {found.highest:,} is not below the vocabulary's {size or source.vocab_size:,}")
    for sentence in wrong:
        say("beware", sentence)


def survey(source: Source, *, every: bool) -> Survey:
    """What `source` holds: read whole if it is `every` or small, else in WINDOWS windows. In constant memory."""
    display, count = Display(), -(-source.token_count // WINDOW)
    every = every or count <= WINDOWS
    read = documents = longest = counted = begun = 0
    lowest, highest = np.iinfo(np.int64).max, 0
    for number in range(count if every else WINDOWS):
        start = WINDOW * (number if every else number * count // WINDOWS)
        tokens, positions, mask = source.read(start, min(WINDOW, source.token_count - start))
        starts: np.ndarray = start + np.flatnonzero(positions == 0)
        begun = begun if every else start  # where the document that is open began, as far as it was read
        longest = max(longest, int(np.diff([begun, *starts, start + len(tokens)]).max()))
        begun = int(starts[-1]) if len(starts) else begun
        read, documents = read + len(tokens), documents + len(starts)
        lowest, highest = min(lowest, int(tokens.min())), max(highest, int(tokens.max()))
        counted += len(tokens) if mask is None else int(mask.sum())
        display.passing(f"{read:,} tokens read")
    display.close()
    return Survey(read, lowest, highest, documents, longest, counted)


def _show_files(source):
    plan, files = source.plan, source.files
    names = ("documents", "tokens", "pieces")
    documents, tokens, pieces = (sum(getattr(file, name) for file in files) for name in names)
    say("files", f"{len(files):,} of {scaled(sum(file.size for file in files), 'B')}, "
        f"{', '.join(sorted({np.dtype(file.dtype).name for file in files}))}")
    if plan.documents:
        added = plan.added * pieces
        say("in the files", f"{tokens:,} tokens in {documents:,} documents; left out: {documents - pieces:,} empty "
            f"ones, {tokens + added - source.token_count:,} separators at ends; added: {added:,}")


def _show_tokenizer(source, found):
    """(its size, 0 where it is not known; a list of what is wrong with it), after some samples."""
    try:
        folder = source.tokenizer_path
    except UserError:
        say("tokenizer", "none; --tokenizer=FOLDER shows samples")
        return 0, []
    say("tokenizer", folder)
    words = load_words(folder)
    for number in range(SAMPLES):
        start = source.token_count * number // SAMPLES
        tokens = source.read(start, min(SAMPLE_TOKENS, source.token_count - start)).tokens
        if tokens.max() < words.vocab_size:
            say(f"at {start:,}", repr(words.decode(tokens.tolist()))[:SAMPLE_WIDTH])
    other = source.eos >= 0 and words.eos is not None and words.eos != source.eos
    return words.vocab_size, [f"its tokenizer's eos is {words.eos}, not {source.eos}"] * other
