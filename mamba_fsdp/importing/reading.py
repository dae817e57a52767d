"""Reads the files of the input as batches of documents. A document is a text or an array of token ids."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mamba_fsdp.errors import StorageError, UserError, first_line
from mamba_fsdp.importing import text_files
from mamba_fsdp.importing.compression import decompress, peek_head
from mamba_fsdp.importing.inputs import Document, Fault, InputFile
from mamba_fsdp.importing.kinds import reader_of
from mamba_fsdp.importing.text_files import NulByte, check_head, find_invalid_byte
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.retry import is_file, open_with_retries

MAX_REASON = 700  # maximum length of another library's error message
CHECK_SECONDS = 60.0  # the time limit of check_content; a GB takes about one second
SKIP = "--skip_unreadable=true skips records and files that can't be read"
TEXTS = ("text", "json", "csv")
TABLES = ("parquet", "arrow")
# Keys of DocumentBatch.counts.
SKIPPED = "records that can't be read"
LINE_ENDS = "line ends in CRLF"


class UnreadableFile(UserError):
    """The error for a file of the input, or for a record in it, that can't be read. The message names the file."""


@dataclass(frozen=True)
class Position:
    """A reader's position in the input."""

    file: int = 0  # the index of the file that is being read
    row: int = 0  # the number of items (Documents and Faults) that have been read from this file
    documents: int = 0  # the number of documents in all files that have been read to their end


BEGINNING = Position()


@dataclass
class DocumentBatch:
    """Consecutive documents for the same store."""

    position: Position  # the position after the last item that was read
    store: str
    documents: list[Document] = field(default_factory=list)
    size: int = 0  # the number of characters or tokens in `documents`
    counts: Counter[str] = field(default_factory=Counter)  # {SKIPPED or LINE_ENDS: count}
    fault: str = ""  # the problem of the first record that was skipped


@dataclass
class Share:
    """The share of one part of the work: every `stride`-th document of the files, beginning with document `first`."""

    files: list[InputFile]
    first: int = 0
    stride: int = 1
    unreadable: dict[str, str] = field(default_factory=dict)  # {file that was left out: problem}

    @classmethod
    def of_part(cls, files: list[InputFile], number: int, count: int) -> "Share":
        """Returns the share of part `number` of `count`. It consists of some of the files, or of some documents of all files if
        there are fewer files than parts."""
        if count > len(files):
            return cls(files, number, count)
        start = number * len(files) // count
        end = (number + 1) * len(files) // count
        return cls(files[start:end])


def read_batches(
    share: Share, options: DatasetConfig, size: int, start: Position = BEGINNING
) -> Iterator[DocumentBatch]:
    """Yields batches of about `size` characters or tokens.

    start: the position of an earlier batch, to resume after it. Raises UnreadableFile for a file or a record that can't be
    read. With options.skip_unreadable, no error is raised: such a file is added to `share.unreadable`, and such a record
    is counted in its batch.
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
            _add_document(batch, document, file)
        if isinstance(document, Document):
            documents += document.ends
        batch.position = Position(number, row, documents)
    if batch:
        yield batch


def _add_document(batch: DocumentBatch, document: Document | Fault, file: InputFile) -> None:
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
    """Yields ((index of the file, number of the item in the file, from 1), item), beginning with file `first`."""
    for number, file in enumerate(share.files[first:], first):
        row = 0
        document: Document | Fault = Document("")
        try:
            for row, document in enumerate(_documents_of(file, options), 1):
                if isinstance(document, Fault) and not options.skip_unreadable:
                    # If earlier records could be read, advice about the column would be wrong.
                    raise _unreadable(file, document.reason, SKIP if row > 1 else document.advice)
                yield (number, row), document
        except UnreadableFile as error:
            if not options.skip_unreadable:
                raise
            share.unreadable[file.name] = str(error).removesuffix(f"; {SKIP}")
            # End this document. Otherwise the first document of the next file would continue it.
            if isinstance(document, Document) and not document.ends:
                yield (number, row + 1), Document(document.content[:0], begins=False)


def _documents_of(file: InputFile, options: DatasetConfig) -> Iterator[Document | Fault]:
    """Yields the documents of a file. Raises UnreadableFile if its content can't be read, and StorageError if the
    storage still fails after a minute of retries."""
    reader = reader_of(file.kind)
    try:
        if file.kind in TABLES:
            _check_head(file)
        for document in reader(file, options):
            yield _check_document(document, options.vocab_size)
    except StorageError:
        raise
    except Exception as error:  # the libraries can raise any exception
        reason = getattr(error, "strerror", None) or first_line(error)[:MAX_REASON]
        if isinstance(error, (NulByte, UnicodeDecodeError)):
            reason = find_invalid_byte(file.name, options.encoding)
        raise _unreadable(file, reason) from error


def _unreadable(file: InputFile, reason: str, advice: str = "") -> UnreadableFile:
    if "; " not in reason:
        advice = advice or SKIP
    return UnreadableFile(
        f"{file.name}: can't be read as {file.kind}: {reason}{advice and '; '}{advice}"
    )


def check_content(files: list[InputFile], encoding: str) -> None:
    """Raises UnreadableFile for a file whose content contradicts its name, and for text in another encoding.

    Reading the files finds these problems too, but possibly only after hours of encoding. Compressed files, token ids, and
    files that are not reached within CHECK_SECONDS are not checked here.
    """
    deadline = time.monotonic() + CHECK_SECONDS
    for file in files:
        if file.kind not in (*TEXTS, *TABLES) or not is_file(file.name):
            continue
        reason = ""
        try:
            is_compressed = _check_head(file)
            if file.kind in TEXTS and not is_compressed:
                reason = find_invalid_byte(file.name, encoding, deadline)
        except StorageError:
            raise
        except Exception as error:
            reason = first_line(error)[:MAX_REASON]
        if reason:
            raise _unreadable(file, reason)
        if time.monotonic() > deadline:
            return


def _check_head(file: InputFile) -> bool:
    """Returns whether a file is compressed. Raises ValueError if its content contradicts its name."""
    with open_with_retries(file.name) as stored:
        stream = decompress(stored) if file.kind in TEXTS else stored
        check_head(file.kind, peek_head(stream))
        return stream is not stored


def _check_document(document: Document | Fault, vocab_size: int) -> Document | Fault:
    """Returns the document. Returns an empty Document if it is only white space, and a Fault if it is too long.

    vocab_size: 0 if it is not known. Raises ValueError for token ids outside of the vocabulary."""
    if isinstance(document, Fault):
        return document
    content = document.content
    if isinstance(content, str):
        if len(content) > text_files.MAX_TEXT_LENGTH:
            return Fault(text_files.too_long_message())
        return Document("") if content.isspace() else document
    if vocab_size and len(content) and not 0 <= content.min() <= content.max() < vocab_size:
        raise ValueError(
            f"token ids from {content.min()} to {content.max()}, but the vocabulary has {vocab_size} tokens; name the tokenizer "
            "that made the ids with --tokenizer"
        )
    return document
