"""Classifies paths with one table of the kinds of files and folders. Every command uses it.

`classify_path` recognizes a path by its name, by its first bytes, and by the content of this program's own files.
`files_below` lists the files in a folder, and `input_kinds` selects the files that an import reads. This module imports
neither torch nor numpy.
"""

import itertools
import json
import os
import pkgutil
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import StorageError, UserError, command
from mamba_fsdp.importing.compression import HEAD, decompress, peek_head, strip_compression
from mamba_fsdp.run.layout import list_committed
from mamba_fsdp.run.names import (
    CHECKPOINTS,
    COMMIT,
    EVENTS,
    LEASE,
    METRICS,
    MODEL_CONFIG,
    SETTINGS,
    STATUS,
    STEPS,
    TOKENIZER,
    step_of,
)
from mamba_fsdp.storage.formats import DATASET as DATASET_FORMAT
from mamba_fsdp.storage.formats import TOKEN_STORE
from mamba_fsdp.storage.retry import (
    exists,
    is_file,
    is_folder,
    list_entries,
    list_names,
    open_with_retries,
    read_bytes,
)
from mamba_fsdp.storage.typed_json import FileName, read_object
from mamba_fsdp.text import suggest_path

# ---------------------------------------------------------------- the table

# Names in token stores and in the output folder of an import.
INDEX = "index.json"
DATASET = "dataset.json"
PROGRESS = ".progress"  # exists while an import is unfinished
BEGUN = f"{PROGRESS}/begun.json"
# {split and name of its store: words that identify the split in the names of files and folders}
SPLITS = {
    "train": ["train"],
    "validation": ["validation", "valid", "val", "dev", "eval", "heldout"],
    "test": ["test"],
}
# A folder that contains files or folders with two of these names is a run.
RUN_NAMES = {CHECKPOINTS, EVENTS, LEASE, METRICS, SETTINGS, STATUS, STEPS}
# Names in other programs' folders.
NUMPY_MAGIC = b"\x93NUMPY"
DCP_INDEX = ".metadata"  # written by torch.distributed.checkpoint
MODEL_FIELDS = {"model_type", "architectures", "d_model"}  # a model's config.json has one of these
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
SAVED_SPLITS = "dataset_dict.json"  # exists in a save_to_disk folder with several splits
SAVED_MARKS = f"{SAVED_SPLITS} dataset_info.json"
SAVED_FILES = {SAVED_SPLITS, "dataset_info.json", "state.json"}

# References to the headings of docs/data.md about formats that other programs have to convert.
UNPACK = 'see "Unpack archives and fetch pointers" in docs/data.md'
CONVERT = 'see "Convert documents and records to text" in docs/data.md'
CLEAN = 'see "Clean and split text" in docs/data.md'
TOKENS = 'see "Convert tokens of other programs" in docs/data.md'

IMPORT = "{importing} makes token stores of it"
IMPORT_IDS = "{importing} --tokenizer=PATH makes token stores of it"
MODEL = "generate, evaluate, export and --init_from={path} accept it"
RESUME = (
    "the get_dataset.py command that began it resumes it, "
    f"with the settings that {{path}}/{BEGUN} contains"
)
DCP = "--init_from={path} shows how to convert it"
TOKENIZE = "an import can use it: {tokenizing} --tokenizer={folder}"
WANTED_TOKENIZER = (
    "a tokenizer.json, or its folder with tokenizer_config.json, as save_pretrained writes them"
)


@dataclass(frozen=True)
class Kind:
    """A row of the table: one kind of file or folder."""

    name: str
    title: str  # completes the sentence "PATH is ..."
    # A command or setting that accepts such a path, or other advice. See `_fill_in` for its placeholders.
    use: str = ""
    extensions: str = ""  # file name extensions of this kind, separated by spaces
    # Names of such files. For a folder: names of files and folders of which it contains at least one.
    names: str = ""
    magic: str = ""  # a regular expression for the first bytes of such files, decoded as Latin-1
    reader: str = ""  # module:function in importing/ that yields the documents of such a file
    content: str = ""  # completes "a folder of ..."; empty if imports do not read this kind
    matches: Callable[[Path], bool] | None = None  # returns whether a folder is of this kind
    # Describes a folder, given its path and the names in it. Returns None if the folder is of another kind.
    describe: Callable[[Path, set[str]], "PathInfo | None"] | None = None

    @property
    def remedy(self) -> str:
        """Returns advice for a file of this kind that has the extension of another kind."""
        return f"--format={self.name} reads it" if self.reader else self.use


FILES = [
    Kind(
        "text", "text", IMPORT, ".txt .text .md", reader="text_files:text_documents", content="text"
    ),
    Kind(
        "json",
        "JSON records",
        IMPORT,
        ".jsonl .ndjson .json",
        magic=r'(?:\xef\xbb\xbf)?\s*(?:\[\s*)?\{\s*"',
        reader="json_records:json_documents",
        content="text",
    ),
    Kind("csv", "CSV", IMPORT, ".csv .tsv", reader="csv_files:csv_documents", content="text"),
    Kind(
        "parquet",
        "a Parquet file",
        IMPORT,
        ".parquet",
        magic=r"PAR1[\0-\x1f]",
        reader="tables:parquet_documents",
        content="text",
    ),
    Kind(
        "arrow",
        "an Arrow file",
        IMPORT,
        ".arrow",
        magic=r"ARROW1\0\0",
        reader="tables:arrow_documents",
        content="Arrow tables",
    ),
    Kind(
        "ids",
        "token ids",
        "{importing} --tokenizer=PATH makes token stores of it, with --dtype=TYPE if it does not have a header of NumPy",
        ".bin .npy",
        magic=NUMPY_MAGIC.decode("latin-1"),
        reader="token_files:flat_documents",
        content="token ids",
    ),
    Kind(
        "datalayout",
        "Composer's DataLayout",
        IMPORT_IDS,
        reader="token_files:datalayout_documents",
        content="Composer's DataLayout",
    ),
    Kind("hub", "a name on the Hugging Face Hub", reader="tables:hub_documents"),
    # The following kinds are accepted by other commands.
    Kind(
        "model_file",
        "a file of weights",
        MODEL,
        ".safetensors .pth .pt .distcp",
        "pytorch_model.bin model.safetensors.index.json",
    ),
    Kind("tokenizer_file", "a file of a tokenizer", TOKENIZE, names=" ".join(TOKENIZER_FILES)),
    Kind("settings", "a YAML file", "training takes settings as --config={path}", ".yaml .yml"),
    # The following kinds are not accepted by any command.
    Kind(
        "pointer",
        "a pointer of Git LFS or git-annex in place of the file",
        UNPACK,
        magic="version https://git-lfs|/annex/objects/",
    ),
    Kind(
        "archive",
        "an archive (tar, zip, .docx, .epub, .npz, 7z, RAR, LZ4)",
        UNPACK,
        magic=r".{257}ustar|PK(?:\x03\x04|\x05\x06)|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|\x04\x22\x4d\x18",
    ),
    Kind(
        "compressed",
        "a file that was compressed twice",
        UNPACK,
        magic=r"\x1f\x8b\x08|BZh[1-9](?:1AY&SY|\x17rE8P\x90)|\xfd7zXZ\0|\x28\xb5\x2f\xfd",
    ),
    Kind(
        "other_tokens",
        "a file of tokens of llm.c, or an index file of Megatron",
        TOKENS,
        magic=r"(?:\x88\xd8\x34\x01\x01|\xa1\xd9\x34\x01\x07)\0\0\0|MMIDIDX\0\0",
    ),
    Kind(
        "document",
        "a PDF, RTF, Office, SQLite, HDF5 or pickle file",
        CONVERT,
        magic=r"%PDF-\d|\{\\rtf\d|\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1|SQLite format 3\0|\x89HDF\r\n"
        r"|\x80(?:[\x02\x03][\]}(cX\x8a]|[\x04\x05]\x95)",
    ),
    Kind(
        "page",
        "an HTML or XML page, for example a sign-in or error page in place of the download",
        "download the file again",
        magic=r"(?:\xef\xbb\xbf)?\s*(?i:<(?:!doctype|html|head|body|\?xml))",
    ),
    Kind(
        "binary",
        "binary data",
        "leave it out, or give the type of its token ids, as in --format=ids --dtype=uint16",
    ),
    Kind("other", "a file that no command accepts", "{importing} --format=text imports it as text"),
]

BY_NAME = {name: kind for kind in FILES for name in (kind.extensions + " " + kind.names).split()}
MAGIC = [kind for kind in FILES if kind.magic]
ANY_MAGIC = re.compile("|".join(f"({kind.magic})" for kind in MAGIC), re.DOTALL)
AMBIGUOUS = ("json", "page")  # the beginning of a text can look like these kinds
UNDECIDED = ("nothing", "pruned", "other", "settings", "part")  # an import of these can succeed
BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")  # UTF-16 and UTF-32
# Matches the names of files that describe the data next to them.
DESCRIPTION = re.compile(
    r"(README|LICEN[CS]E|CITATION)([-._].*)?\.(md|txt)|(dataset_infos|index|meta|metadata)\.json",
    re.I,
)
MAX_LISTED = 8  # maximum number of names in a message
MAX_SCANNED_FILES = 10_000  # maximum number of files to examine for a description of a folder


@dataclass(frozen=True)
class PathInfo:
    """The result of classify_path."""

    path: Path
    kind: str  # a key of KINDS; or nothing, pruned, part, foreign, empty
    title: str  # completes the sentence "PATH is ..."
    use: str  # what accepts the path, or which path to give instead; "" if nothing is known
    names: tuple[str, ...] = ()  # the runs, stores or checkpoints in the folder

    @property
    def is_input(self) -> bool:
        """Returns whether an import accepts the path."""
        kind = KINDS.get(self.kind)
        return kind is not None and bool(kind.content)


def unexpected_path_error(path: str | Path, wanted: str, use: str = "") -> UserError:
    """Returns the error for a path that is not what a command expects.

    wanted: the expected kind, such as "a token store". use: advice that replaces the advice in the table."""
    info = classify_path(path)
    not_wanted = "" if info.kind in ("nothing", "pruned") else f", not {wanted}"
    use = use or info.use
    return UserError(f"{path}: {info.title}{not_wanted}{use and '; '}{use}")


def unexpected_model_error(path: str | Path) -> UserError:
    """Returns the error for a path that is not a model."""
    info = classify_path(path)
    use = "" if info.kind == "other" else info.use
    is_name_on_hub = re.fullmatch(r"[^./~][^/]*/[^/]+", str(path)) and not exists(info.path.parent)
    if info.kind == "nothing" and is_name_on_hub:
        use = (
            "download a model of the Hugging Face Hub first: "
            f"hf download {shlex.quote(str(path))} --local-dir FOLDER"
        )
    otherwise = "name a run, a checkpoint, or weights with their config.json"
    return unexpected_path_error(path, "a model", use or otherwise)


def unexpected_data_error(path: str | Path, options: str = "") -> UserError:
    """Returns the error for a path that is not a token store. options: further options for the recommended import command."""
    info = classify_path(path)
    use = info.use
    if info.is_input and info.names:
        use = f"name the token store in it: {info.path / info.names[0]}"
    elif info.is_input:
        importing = use.partition(" makes")[0]
        if options:
            importing = importing.removesuffix(" --tokenizer=PATH")
        use = f"make one from it: {importing}{options}"
    elif info.kind == "nothing" and not use:
        use = f"make a token store there: {import_command('INPUT', str(path))}"
    elif not use:
        use = f"make one from text: {import_command('INPUT')}"
    return unexpected_path_error(path, "a token store", use)


def classify_path(path: str | Path) -> PathInfo:
    """Determines the kind of a path, which need not exist."""
    place = Path(path)
    if is_file(place):
        return _classify_file(place)
    if exists(place):
        return _classify_folder(place)
    return _classify_missing(place)


def check_input(path: str | Path) -> None:
    """Raises UserError if `path` is certainly not text or token ids."""
    info = classify_path(path)
    if not info.is_input and info.kind not in UNDECIDED:
        raise unexpected_path_error(path, "text or token ids to import")


def tokenizer_path_in(path: str | Path) -> Path | None:
    """Finds a tokenizer. Returns `path` itself if it is one, or the tokenizer in the run, store, dataset or export at `path`.
    Returns None if there is none."""
    folder = Path(path)
    if is_file(folder):
        return folder
    for place in (folder, folder / TOKENIZER, split_in(folder) / TOKENIZER):
        if any(is_file(place / name) for name in TOKENIZER_FILES):
            return place
    return None


def check_tokenizer_path(path: str | Path) -> Path:
    """Returns the path that tokenizer_path_in finds. Raises UserError if `path` exists and contains no tokenizer.

    There are two cases in which `path` itself is returned: a name that does not exist can be one on the Hub, and transformers
    can find a tokenizer for a folder with a config.json. Also raises UserError if the tokenizer is a pointer of Git LFS or
    git-annex.
    """
    found = tokenizer_path_in(path)
    is_possible = not exists(path) or exists(Path(path, MODEL_CONFIG))
    if found is None and not is_possible:
        raise unexpected_path_error(path, "a tokenizer", f"name {WANTED_TOKENIZER}")
    tokenizer = found or Path(path)
    for file in (tokenizer, tokenizer / TOKENIZER_FILES[0]):
        content = content_kind(file)
        if content and content.name == "pointer":
            raise unexpected_path_error(file, "a tokenizer")
    return tokenizer


def is_store(path: Path) -> bool:
    """Returns whether `path` is a token store, even if it is damaged. Folders of other programs can contain an index.json
    too."""
    try:
        with open_with_retries(path / INDEX) as file:
            return TOKEN_STORE.name.encode() in file.read(HEAD)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except PermissionError:  # reading the store will raise an error with this reason
        return True


def split_in(path: Path, split: str = "train") -> Path:
    """Returns the path of the store for `split`: a subfolder with a name in SPLITS[split], or `path` itself if it is a store
    or has no such subfolder."""
    if not is_store(path):
        for name in SPLITS[split]:
            if is_store(path / name):
                return path / name
    return path


# ---------------------------------------------------------------- files


def content_kind(path: Path) -> Kind | None:
    """Returns the kind of a file according to its first bytes after decompression. Returns None for text, for damaged data,
    and if the path is not a regular file. Raises StorageError after a minute of retries."""
    try:
        with open_with_retries(path) as file:
            return kind_of_bytes(peek_head(decompress(file)))
    except StorageError:
        raise
    except Exception:  # reading the damaged data will raise an error with the reason
        return None


def kind_of_bytes(head: bytes) -> Kind | None:
    """Returns the kind of a file whose first bytes are `head`; None for text."""
    match = ANY_MAGIC.match(head.decode("latin-1"))
    if match and match.lastindex:
        return MAGIC[match.lastindex - 1]
    if b"\0" in head and not head.startswith(BYTE_ORDER_MARKS):
        return KINDS["binary"]
    return None


def reader_of(name: str) -> Callable[..., Iterator[Any]]:
    """Returns the function that yields the documents of a file. name: the kind of the file. The function is imported here,
    because its module imports large packages."""
    return pkgutil.resolve_name(f"{__package__}.{KINDS[name].reader}")


def contradicts(content: Kind | None, kind: str) -> bool:
    """Returns whether the content of a file proves that it is not of the given kind.

    Text can begin like JSON or HTML, and DataLayout can begin with any bytes. Binary data does not count here: reading it
    raises an error with the position of the first wrong byte."""
    if content is None or content.name in (kind, "binary") or kind == "datalayout":
        return False
    return kind != "text" or content.name not in AMBIGUOUS


def input_kind(path: Path, format: str = "auto", is_alone: bool = False) -> Kind | None:
    """Returns the kind as which an import reads a file, or None if imports do not read it.

    The kind is `format` if it is given. Otherwise it follows from the name of the file, or else from its content. If a folder
    is imported, only files without an extension, or with a number as extension, are opened to find their kind. is_alone:
    whether the file is the only one.
    """
    extension = os.path.splitext(strip_compression(path.name.lower()))[1]
    kind = KINDS.get(format) or BY_NAME.get(extension)
    if kind is None and (is_alone or not extension or extension[1:].isdecimal()):
        kind = content_kind(path)
    if kind and kind.name == "ids" and exists(f"{path}.size"):
        return KINDS["datalayout"]
    return kind if kind and kind.content else None


def _classify_file(path: Path) -> PathInfo:
    content = content_kind(path)
    named = BY_NAME.get(path.name) or BY_NAME.get(path.suffix)
    is_pointer = content is KINDS["pointer"]
    is_weights = named is KINDS["model_file"] and not exists(path.parent / COMMIT)
    if named and not is_pointer and (is_weights or named.name == "tokenizer_file"):
        return _info_of_kind(path, named)
    owner = None if is_pointer else _find_owner(path)
    if owner:
        title = f"a file of the {owner.kind} in {owner.path}"
        return PathInfo(path, "part", title, f"name {owner.path}", (str(owner.path),))
    kind = input_kind(path, is_alone=True)
    if kind and not contradicts(content, kind.name):
        return _info_of_kind(path, kind)
    if content:
        return PathInfo(path, "foreign", content.title, _fill_in(content.remedy, path))
    return _info_of_kind(path, named or KINDS["other"])


def _find_owner(path: Path) -> PathInfo | None:
    """Returns the run, checkpoint, token store or model to which a file belongs, or None."""
    for folder in itertools.islice(path.parents, 3):
        names = set(list_names(folder))
        is_description = path.name in (MODEL_CONFIG, "generation_config.json")
        is_model = is_description and _is_model_config(folder / MODEL_CONFIG)
        if COMMIT in names or is_run(names) or is_model or is_store(folder):
            return _classify_folder(folder)
    return None


# ---------------------------------------------------------------- folders


def is_run(names: set[str]) -> bool:
    """Returns whether a folder with these names in it is a run. A single one is not enough, because other programs use some
    of the names too."""
    return len(names & RUN_NAMES) > 1


def is_unfinished(folder: Path) -> bool:
    """Returns whether a folder contains an import that has not been completed."""
    is_half_a_store = exists(folder / "00000.bin") and not is_store(folder)
    return is_half_a_store or exists(folder / PROGRESS) and not exists(folder / DATASET)


def _classify_folder(path: Path) -> PathInfo:
    names = set(list_names(path))
    for kind in FOLDERS:
        info = None
        if kind.describe:
            info = kind.describe(path, names)
        elif not names.isdisjoint(kind.names.split()) or kind.matches and kind.matches(path):
            info = _info_of_kind(path, kind)
        if info:
            return info
    if not names:
        return PathInfo(path, "empty", "an empty folder", "")
    title = f"a folder that no command accepts ({_format_names(names)})"
    file = next(files_below(path, LeftOut()), path)
    use = "" if content_kind(file) else _fill_in(KINDS["other"].use, path)
    return PathInfo(path, "other", title, use)


def _describe_run(path: Path, names: set[str]) -> PathInfo | None:
    has_nothing_else = bool(names) and names <= RUN_NAMES
    if not is_run(names) and not has_nothing_else:
        return None
    kept = [checkpoint.name for checkpoint in list_committed(path / CHECKPOINTS)]
    title = f"a run with {_format_names(kept)}" if kept else "a run without a checkpoint"
    use = f"{command('inspect')} {shlex.quote(str(path))} shows its progress"
    return PathInfo(path, "run", title, use, tuple(kept))


def _is_streamed(path: Path) -> bool:
    return not _json_fields(path / INDEX).keys().isdisjoint(("shards", "chunks"))


def _describe_model(path: Path, names: set[str]) -> PathInfo | None:
    for name in filter(_is_weights, sorted(names)):
        content = content_kind(path / name)
        if content and content.name == "pointer":
            title = f"a folder whose {name} is {content.title}"
            return PathInfo(path, "foreign", title, content.use)
    is_model = MODEL_CONFIG in names and _is_model_config(path / MODEL_CONFIG)
    return _info_of_kind(path, KINDS["model"]) if is_model else None


def _describe_weights(path: Path, names: set[str]) -> PathInfo | None:
    weights = next(filter(_is_weights, sorted(names)), "")
    use = f"name its file and its preset: {path / weights} --model_name=NAME"
    return _info_of_kind(path, KINDS["weights"], use) if weights else None


def _describe_models(path: Path, names: set[str]) -> PathInfo | None:
    if not all(_is_model_config(path / name / MODEL_CONFIG) for name in names):
        return None
    return _describe_collection(path, "models", sorted(names))


def _is_weights(name: str) -> bool:
    kind = BY_NAME.get(name) or BY_NAME.get(os.path.splitext(name)[1])
    return kind is KINDS["model_file"]


def _is_model_config(file: Path) -> bool:
    """Returns whether a config.json describes a model, even if it is damaged. Other programs have files with this name too."""
    return not MODEL_FIELDS.isdisjoint(_json_fields(file, if_damaged=MODEL_FIELDS))


def _describe_input(path: Path, names: set[str]) -> PathInfo | None:
    """Describes a folder by the files in it that an import would read."""
    if _is_dataset(path):
        return None
    left_out = LeftOut()
    files = itertools.islice(files_below(path, left_out), MAX_SCANNED_FILES)
    kinds = input_kinds(list(files), left_out)
    is_described_only = all(DESCRIPTION.fullmatch(file.name) for file in kinds)
    if not kinds or is_described_only and left_out[OURS]:
        return None
    kind = next(iter(kinds.values()))
    stores = tuple(stores_in(path)) if left_out[OURS] else ()
    use = _fill_in(kind.use, path)
    return PathInfo(path, "input", f"a folder of {kind.content}", use, stores)


def _describe_stores(path: Path, names: set[str]) -> PathInfo | None:
    stores = stores_in(path)
    info = _describe_collection(path, "stores", stores)
    if info and not set(stores) <= {name for words in SPLITS.values() for name in words}:
        mixture = f"--dataset_path={path} --datasets={','.join(stores)}"
        return replace(info, use=f"training mixes them with {mixture}; else {info.use}")
    if info and "train" in stores:
        return replace(info, use=f"training reads it: --dataset_path={path}; else {info.use}")
    return info


def _describe_checkpoints(path: Path, names: set[str]) -> PathInfo | None:
    return _describe_collection(
        path, "checkpoints", [checkpoint.name for checkpoint in list_committed(path)]
    )


def _describe_runs(path: Path, names: set[str]) -> PathInfo | None:
    runs = _find_folders(path, lambda folder: is_run(set(list_names(folder))))
    return _describe_collection(path, "runs", runs)


def _describe_collection(path: Path, kind: str, names: list[str]) -> PathInfo | None:
    """Describes a folder of runs, checkpoints, models or stores. names: the names of these in the folder."""
    if not names:
        return None
    title = f"{KINDS[kind].title} ({_format_names(names)})"
    is_by_step = kind in ("checkpoints", "models")
    newest_or_first = names[-1] if is_by_step else names[0]
    return PathInfo(path, kind, title, f"name one, as in {path / newest_or_first}", tuple(names))


FOLDERS = [  # the kind of a folder is the first one that fits
    Kind("checkpoint", "a checkpoint", MODEL, names=COMMIT),
    Kind("run", "a run", describe=_describe_run),
    Kind("streamed", "a dataset of MosaicML (MDS) or litdata", TOKENS, matches=_is_streamed),
    Kind("store", "a token store", "training reads it: --dataset_path={path}", matches=is_store),
    Kind("import", "an unfinished import", RESUME, matches=is_unfinished),
    Kind("dcp", "a folder of torch.distributed.checkpoint", DCP, names=DCP_INDEX),
    Kind("model", "a model", MODEL, describe=_describe_model),
    Kind("weights", f"weights without {MODEL_CONFIG}", describe=_describe_weights),
    Kind("models", "a folder of models", describe=_describe_models),
    Kind("tokenizer", "a tokenizer", TOKENIZE, names=" ".join(TOKENIZER_FILES[:3])),
    Kind(
        "saved", "a folder that the library datasets saved", IMPORT, "", SAVED_MARKS, content="rows"
    ),
    Kind(
        "input",
        "a folder of text or token ids",
        describe=_describe_input,
        content="text or token ids",
    ),
    Kind("stores", "a folder of token stores", describe=_describe_stores),
    Kind("checkpoints", "a folder of checkpoints", describe=_describe_checkpoints),
    Kind("runs", "a folder of runs", describe=_describe_runs),
]
KINDS = {kind.name: kind for kind in (*FILES, *FOLDERS)}


def _classify_missing(path: Path) -> PathInfo:
    kept = [checkpoint.name for checkpoint in list_committed(path.parent)]
    if step_of(path.name) is not None and kept:
        title = f"there is no such checkpoint; its run has {_format_names(kept)}"
        use = f"name one of them, or the run, for the newest: {path.parent.parent}"
        return PathInfo(path, "pruned", title, use, tuple(kept))
    hint = suggest_path(path).removeprefix("; ")
    return PathInfo(path, "nothing", "there is no such file or folder", hint)


# ---------------------------------------------------------------- the files of an input

OURS = "made by this program"
HIDDEN = "hidden"
UNKNOWN = "of an unknown format"
DESCRIBING = "describing the data next to it"
BESIDE_ROWS = "not part of the saved dataset"


class LeftOut(defaultdict[str, list[str]]):
    """The paths that an import leaves out: {reason: paths}."""

    def __init__(self) -> None:
        super().__init__(list)

    def lines(self) -> list[str]:
        """Returns a line for each reason, with the number of paths and the first one."""
        return [
            f"left out: {len({*paths}):,} {reason}: {ascii(paths[0])[1:-1]}{', ...' * (len({*paths}) > 1)}"
            for reason, paths in self.items()
            if paths
        ]


@dataclass
class SavedFile:
    """The required fields of a file's entry in SavedFolder."""

    HAS_OTHER_FIELDS = True
    filename: FileName


@dataclass
class SavedFolder:
    """The required fields of state.json in a folder that `datasets` saved."""

    HAS_OTHER_FIELDS = True
    _data_files: list[SavedFile]


def files_below(place: Path, left_out: LeftOut) -> Iterator[Path]:
    """Yields the file at `place`, or all files in the folder at `place` and its subfolders, sorted. Files and folders
    that are skipped are added to `left_out`. Raises UserError for a folder that can't be listed."""
    if not is_folder(place):
        yield place
        return
    for folder, names in folders_below(place, left_out):
        for name in _select_data_files(folder, names, left_out):
            yield folder / name


def folders_below(place: Path, left_out: LeftOut) -> Iterator[tuple[Path, list[str]]]:
    """Yields the folder at `place` and its subfolders, sorted, each with the names of its files.

    Links are followed, but each folder is read only once. Hidden files and this program's own folders are added to `left_out`.
    Raises UserError for a folder that can't be listed.
    """
    seen = set()
    remaining = [place]
    while remaining:
        folder = remaining.pop()
        target = os.path.realpath(folder)
        try:
            entries = list_entries(folder)
        except OSError as error:
            raise UserError(
                f"{folder}: can't be read ({error.strerror}); check that this user can read the folder"
            ) from error
        names = sorted(entries)
        is_ours = folder != place and _is_ours(folder, {*names})
        if is_ours:
            left_out[OURS].append(str(folder))
        if is_ours or target in seen:
            continue
        seen.add(target)
        left_out[HIDDEN] += [str(folder / name) for name in names if name.startswith(".")]
        shown = [name for name in names if not name.startswith(".")]
        remaining += [folder / name for name in reversed(shown) if entries[name]]
        yield folder, [name for name in shown if not entries[name]]


def _is_ours(folder: Path, names: set[str]) -> bool:
    """Returns whether a folder is a token store, an import or a run of this program. names: the names in it."""
    if is_run(names) or COMMIT in names:
        return True
    if names.isdisjoint((INDEX, DATASET, PROGRESS)):
        return False
    return _is_dataset(folder) or is_unfinished(folder) or is_store(folder)


def _is_dataset(folder: Path) -> bool:
    """Returns whether a folder is the output of an import."""
    return _json_fields(folder / DATASET).get("format") == DATASET_FORMAT.name


def _select_data_files(folder: Path, names: list[str], left_out: LeftOut) -> list[str]:
    """Returns the names of those files in a folder that can contain data. Adds the files next to a saved dataset to
    `left_out`.

    names: the sorted names of all files in the folder."""
    is_saved = "state.json" in names and "dataset_info.json" in names
    if is_saved or SAVED_SPLITS in names:
        rows = []
        if is_saved:
            saved = read_object(folder / "state.json", SavedFolder, "save it again")
            rows = [file.filename for file in saved._data_files]
        others = {*names} - SAVED_FILES - {*rows}
        left_out[BESIDE_ROWS] += [str(folder / name) for name in sorted(others)]
        return sorted(rows)
    # The size files of DataLayout and the tables of document counts of fms-fsdp do not contain documents.
    is_meta = folder.name == "meta"
    return [
        name
        for name in names
        if not name.endswith(".npy.size") and not (is_meta and "counts" in name)
    ]


def input_kinds(
    files: list[Path], left_out: LeftOut, format: str = "auto", dtype: str = "auto"
) -> dict[Path, Kind]:
    """Returns {file: its kind} for the files that an import reads. Adds the other files to `left_out`."""
    kinds = {file: input_kind(file, format, is_alone=len(files) == 1) for file in files}
    described = {file for file in files if DESCRIPTION.fullmatch(file.name)}
    data = {file: kind for file, kind in kinds.items() if kind and file not in described}
    if format == dtype == "auto" and any(kind.name != "ids" for kind in data.values()):
        # Next to text or tables, a name such as a.bin does not mean that the file contains token ids.
        data = {file: kind for file, kind in data.items() if kind.name != "ids"}
    other_formats = {
        folder for file, kind in data.items() if kind.name != "text" for folder in file.parents
    }
    chosen = {}
    for file, kind in kinds.items():
        if file in described and file.parent in other_formats:
            left_out[DESCRIBING].append(str(file))
        elif kind and (file in data or file in described):
            chosen[file] = kind
        else:
            left_out[UNKNOWN].append(str(file))
    return chosen


# ---------------------------------------------------------------- helpers


def stores_in(folder: Path) -> list[str]:
    """Returns the names of the token stores in a folder, in the form that the setting `datasets` accepts."""
    return _find_folders(folder, lambda place: is_store(split_in(place)))


def _find_folders(folder: Path, is_wanted: Callable[[Path], bool]) -> list[str]:
    """Returns the names of the wanted subfolders of a folder. If there are none, returns the wanted folders one level below
    them, as NAME/NAME."""
    inner = _list_folders(folder)
    wanted = [name for name in inner if is_wanted(folder / name)]
    if wanted:
        return wanted
    deeper = [f"{name}/{below}" for name in inner for below in _list_folders(folder / name)]
    return [name for name in deeper if is_wanted(folder / name)]


def _list_folders(folder: Path) -> list[str]:
    entries = sorted(list_entries(folder).items())
    return [name for name, is_folder in entries if is_folder and not name.startswith(".")]


def _info_of_kind(path: Path, kind: Kind, use: str = "") -> PathInfo:
    return PathInfo(path, kind.name, kind.title, use or _fill_in(kind.use, path))


def _fill_in(use: str, path: Path) -> str:
    """Replaces the placeholders in Kind.use by the path, its folder, and the commands that import the path or INPUT."""
    folder = path.parent if is_file(path) else path
    return use.format(
        path=path,
        folder=shlex.quote(str(folder)),
        importing=import_command(path),
        tokenizing=import_command("INPUT"),
    )


def _json_fields(file: Path, if_damaged: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty dict if the file does not exist or contains another value.

    if_damaged: the names of the fields to return, with None as values, if the file can't be read."""
    try:
        content = json.loads(read_bytes(file))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError):  # reading the model will raise an error
        return dict.fromkeys(if_damaged)
    return content if isinstance(content, dict) else {}


def _format_names(names: Iterable[str]) -> str:
    names = sorted(names)
    shown = ", ".join(names[-MAX_LISTED:])
    hidden = len(names) - MAX_LISTED
    return f"{hidden} more, {shown}" if hidden > 0 else shown


def import_command(source: str | Path, out: str = "OUT") -> str:
    """Returns the command that imports `source` into the token store `out`."""
    return f"{command('tokenize')} {shlex.quote(str(source))} {out}"
