"""Reads the input's files as batches of documents: texts or arrays of token ids."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mamba_fsdp.errors import StorageError, UserError, first_line
from mamba_fsdp.importing import text_files
from mamba_fsdp.importing.compression import peeked, unpacked
from mamba_fsdp.importing.inputs import Document, Fault, InputFile
from mamba_fsdp.importing.kinds import reader_of
from mamba_fsdp.importing.text_files import NulByte, check_head, fault_in
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import is_file, open_with_retries

MAX_REASON = 700  # characters
SECONDS_OF_CHECKING = (
    60.0  # the limit for checking files before any is encoded; a GB takes about one second
)
SKIP = "--skip_unreadable=true skips records and files that can't be read"
TEXTS = ("text", "json", "csv")
TABLES = ("parquet", "arrow")
# What a batch counts besides documents.
SKIPPED = "records that can't be read"
LINE_ENDS = "line ends in CRLF"
MARKS = "byte order marks"


class UnreadableFile(UserError):
    """The error if a file of the input, or a record in it, can't be read; its message names the file."""


@dataclass(frozen=True)
class Position:
    """A reader's position in the input."""

    file: int = 0  # the number of the file that is being read
    row: int = 0  # documents and faults read of that file, or stretches of long documents
    documents: int = 0  # documents of all files, if read to their ends


BEGINNING = Position()


@dataclass
class DocumentBatch:
    """Consecutive documents, all for one store."""

    position: Position  # the one after the last document that was read
    store: str
    documents: list[Document] = field(default_factory=list)
    size: int = 0  # characters or tokens
    counts: Counter[str] = field(default_factory=Counter)
    fault: str = ""  # the first one


@dataclass
class Share:
    """The share of one part of the work: each `stride`-th document of its files, from number `first` on."""

    files: list[InputFile]
    first: int = 0
    stride: int = 1
    unreadable: dict[str, str] = field(default_factory=dict)  # {a file that is left out: its fault}

    @classmethod
    def of_part(cls, files: list[InputFile], number: int, count: int) -> "Share":
        """Returns the share of part `number` of `count`: some of the files or, if they are fewer, some documents of
        all."""
        if count > len(files):
            return cls(files, number, count)
        start = number * len(files) // count
        end = (number + 1) * len(files) // count
        return cls(files[start:end])


def read_batches(
    share: Share, options: DatasetConfig, size: int, start: Position = BEGINNING
) -> Iterator[DocumentBatch]:
    """Yields batches of about `size` characters or tokens.

    start: the position of an earlier batch, to resume after it. A file or a record that can't be read raises
    UnreadableFile, or with skip_unreadable is counted.
    """
    documents = start.documents
    batch = None
    for place, document in _documents(share, options, start.file):
        if place <= (start.file, start.row):
            continue
        number, row = place
        file = share.files[number]
        if batch and (batch.size >= size or batch.store != file.store):
            yield batch
            batch = None
        if not batch:
            batch = DocumentBatch(start, file.store)
        is_in_share = documents % share.stride == share.first
        if is_in_share:
            batch.counts[MARKS] += file.has_mark and row == 1
            _add(batch, document, file)
        if isinstance(document, Document):
            documents += document.ends
        batch.position = Position(number, row, documents)
    if batch:
        yield batch


def _add(batch: DocumentBatch, document: Document | Fault, file: InputFile) -> None:
    if isinstance(document, Fault):
        batch.counts[SKIPPED] += 1
        batch.fault = batch.fault or f"{file.name}: {document.reason}"
        return
    batch.documents.append(document)
    batch.size += len(document.content)
    if isinstance(document.content, str) and "\r" in document.content:
        batch.counts[LINE_ENDS] += document.content.count("\r\n")


def _documents(
    share: Share, options: DatasetConfig, first: int
) -> Iterator[tuple[tuple[int, int], Document | Fault]]:
    """Yields ((the file's number, the document's number in it from 1), the document), from file `first` on."""
    for number, file in enumerate(share.files[first:], first):
        row = 0
        document: Document | Fault = Document("")
        try:
            for row, document in enumerate(_documents_of(file, options), 1):
                if isinstance(document, Fault) and not options.skip_unreadable:
                    # If records before it were read, the column is right.
                    raise _unreadable(file, document.reason, SKIP if row > 1 else document.advice)
                yield (number, row), document
        except UnreadableFile as error:
            if not options.skip_unreadable:
                raise
            share.unreadable[file.name] = str(error).removesuffix(f"; {SKIP}")
            # The next file's first document must not continue this one.
            if isinstance(document, Document) and not document.ends:
                yield (number, row + 1), Document(document.content[:0], begins=False)


def _documents_of(file: InputFile, options: DatasetConfig) -> Iterator[Document | Fault]:
    """Yields the documents of a file. Raises UnreadableFile, and StorageError after a minute of retries."""
    reader = reader_of(file.kind)
    try:
        if file.kind in TABLES:
            _check_head(file)
        for document in reader(file, options):
            yield _checked(document, options.vocab_size)
    except StorageError:
        raise
    except Exception as error:  # the libraries raise whatever a file runs into
        reason = getattr(error, "strerror", None) or first_line(error)[:MAX_REASON]
        if isinstance(error, (NulByte, UnicodeDecodeError)):
            reason = fault_in(file.name, options.encoding)
        raise _unreadable(file, reason) from error


def _unreadable(file: InputFile, reason: str, advice: str = "") -> UnreadableFile:
    if "; " not in reason:
        advice = advice or SKIP
    return UnreadableFile(
        f"{file.name}: can't be read as {file.kind}: {reason}{advice and '; '}{advice}"
    )


def check_content(files: list[InputFile], encoding: str) -> None:
    """Raises UnreadableFile for a file that is something else than its name suggests, or text in another encoding.

    Reading finds that too, but in a large file after hours of encoding. Compressed files, token ids, and files that can't
    be checked within a minute are left to reading.
    """
    deadline = time.monotonic() + SECONDS_OF_CHECKING
    for file in files:
        if file.kind not in (*TEXTS, *TABLES) or not is_file(file.name):
            continue
        reason = ""
        try:
            is_compressed = _check_head(file)
            if file.kind in TEXTS and not is_compressed:
                reason = fault_in(file.name, encoding, deadline)
        except StorageError:
            raise
        except Exception as error:
            reason = first_line(error)[:MAX_REASON]
        if reason:
            raise _unreadable(file, reason)
        if time.monotonic() > deadline:
            return


def _check_head(file: InputFile) -> bool:
    """Returns whether a file is compressed. Raises ValueError if it is something else than its name suggests."""
    with open_with_retries(file.name) as stored:
        stream = unpacked(stored) if file.kind in TEXTS else stored
        check_head(file.kind, peeked(stream))
        return stream is not stored


def _checked(document: Document | Fault, vocab_size: int) -> Document | Fault:
    """Returns the document, emptied if it is only white space, or a fault if it is too long. Raises ValueError for token
    ids outside the vocabulary, if that is known."""
    if isinstance(document, Fault):
        return document
    content = document.content
    if isinstance(content, str):
        if len(content) > text_files.LONGEST_TEXT:
            return Fault(text_files.too_long())
        return Document("") if content.isspace() else document
    if vocab_size and len(content) and not 0 <= content.min() <= content.max() < vocab_size:
        raise ValueError(
            f"token ids from {content.min()} to {content.max()}, but the vocabulary has {vocab_size}; name the tokenizer "
            "that made them with --tokenizer"
        )
    return document
