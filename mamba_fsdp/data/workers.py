"""The processes that tokenise: blocks of text in, arrays of token ids out, in the input's order."""

import array
import collections
import concurrent.futures
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from config.dataset_config import DatasetConfig
from mamba_fsdp.data import tokenizer as tokenizers_
from mamba_fsdp.data.documents import TextBlock, documents
from mamba_fsdp.data.readers import BLOCK_BYTES, cut_words, grouped
from mamba_fsdp.errors import UserError


class Workers:
    """A pool of them; a context manager. The processes start with the first chunk."""

    def __init__(self, tokenizer: tokenizers_.TextTokenizer, options: DatasetConfig):
        context = multiprocessing.get_context(
            "spawn"
        )  # forking after threads have started can deadlock
        backend = tokenizer.backend and tokenizer.backend.to_str()
        arguments = (backend, tokenizer.eos, tokenizer.bos, tokenizer.vocab_size, options)
        self.count = options.workers or len(os.sched_getaffinity(0))
        self._pool = concurrent.futures.ProcessPoolExecutor(
            self.count, context, _start_worker, arguments
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.shutdown(cancel_futures=True)

    def results(self, blocks: Iterable[TextBlock]) -> Iterator[tuple[list, tuple]]:
        """(chunk of `blocks`, what `_tokenize` makes of it), a few chunks per worker at once. Raises UserError for bad
        input, BrokenExecutor for a worker that died."""
        under_way: collections.deque = collections.deque()
        for chunk in _chunks(blocks):
            under_way.append((chunk, deaf_to_ctrl_c(self._pool.submit, _tokenize, chunk)))
            if len(under_way) > 3 * self.count:
                chunk, future = under_way.popleft()
                yield chunk, future.result()
        for chunk, future in under_way:
            yield chunk, future.result()


def _chunks(blocks):
    """Small files share a trip to a worker."""
    return grouped(blocks, lambda block: block.size, BLOCK_BYTES)


def _start_worker(tokenizer, eos, bos, vocab_size, options):
    """Prepares a worker process. It has one core: the library's own threads would fight over them."""
    os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = "1", "false"
    end_with_parent()
    global _worker
    _worker = tokenizer and tokenizers_.Tokenizer.from_str(tokenizer), eos, bos, vocab_size, options


def deaf_to_ctrl_c(start: Callable[..., Any], *given: Any) -> Any:
    """What `start(*given)` returns. Processes that it starts never hear Ctrl-C, even importing: the parent decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return start(*given)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Called in a worker process: it ends when its parent does, even by kill -9."""

    def follow():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _tokenize(chunk):
    """(tokens (n,) uint32, counts of what is left out) of a list of blocks; each eos ends a document, none is empty."""
    backend, eos, bos, vocab_size, options = _worker
    as_they_are = options.pack == "none"
    counts = collections.Counter()
    texts, tokens = [], array.array("I")  # texts: (text, whether an eos follows)

    def flush():
        encodings = (
            backend.encode_batch_fast([text for text, _ in texts], add_special_tokens=False)
            if texts
            else []
        )
        for encoding, (_, closes) in zip(encodings, texts):
            tokens.fromlist(encoding.ids + [eos] * (closes and not as_they_are))
        texts.clear()

    for block in chunk:
        for content, closes in documents(block, options, counts):
            if isinstance(content, str):
                if not backend:
                    raise UserError(
                        f"{block.name}: holds text, and --tokenizer=none is for token ids; name their "
                        "column with --text_column, or another tokenizer"
                    )
                *parts, last = _short_parts(content)
                texts += [*((part, False) for part in parts), (last, closes)]
            else:
                flush()
                if content.min() < 0 or content.max() >= vocab_size:
                    remedy = (
                        "name the one that made them with --tokenizer"
                        if backend
                        else "give another --vocab_size"
                    )
                    raise UserError(
                        f"{block.name}: token ids from {content.min()} to {content.max()}, but the "
                        f"{'tokenizer knows' if backend else 'vocabulary is'} {vocab_size}; {remedy}"
                    )
                tokens.fromlist(
                    content.tolist()
                    if as_they_are
                    else content[bos is not None and content[0] == bos :].tolist() + [eos]
                )
    flush()
    tokens = np.frombuffer(tokens, dtype=np.uint32)
    if as_they_are:
        return tokens, dict(counts)
    # An eos that follows an eos, or stands first, ends nothing; but the first may end the chunk before's open document.
    follows = (
        np.concatenate([[not chunk[0].inside], tokens[:-1] == eos])
        if len(tokens)
        else np.zeros(0, dtype=bool)
    )
    return tokens[~(follows & (tokens == eos))], dict(counts)


def _short_parts(text):
    """A long text in parts, since the library takes some hundred bytes of memory for each token of a call."""
    if len(text) <= BLOCK_BYTES:
        yield text
        return
    data = text.encode()
    while len(data) > BLOCK_BYTES:
        cut = cut_words(data[:BLOCK_BYTES])
        yield data[:cut].decode()
        data = data[cut:]
    yield data.decode()
