"""Finds what INPUT of get_dataset.py names: files, save_to_disk folders, or the splits of a name on the Hub."""

import contextlib
import datetime
import functools
import glob
import hashlib
import os
import re
import socket
import stat
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.request import getproxies

import numpy as np

from mamba_fsdp.data.splits import SPLITS
from mamba_fsdp.errors import UserError, counted, first_line, near_path
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.storage.patience import exists
from mamba_fsdp.storage.signatures import COMPRESSED, content_of
from mamba_fsdp.storage.typed_json import FileName, read_object

KINDS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".npy": "ids",
    ".bin": "ids",
}
SAVED_SPLITS = "dataset_dict.json"  # in a folder that `datasets` saved, of several splits
DESCRIPTION = re.compile(
    r"(README|LICEN[CS]E|CITATION)([-._].*)?\.(md|txt)|dataset_infos\.json", re.I
)
WORD = re.compile("[a-z]+")
NUMBERING = re.compile(r"\d+([-_]of[-_]\d+)?")
TEXTS = ("text", "json", "csv")  # kinds that may be compressed
HUB = ("huggingface.co", 443)
HUB_SECONDS = 5.0  # without an answer; then it counts as out of reach
MOST_LOOKED_AT = 10  # files without a known ending
# Folders in the standard library's folder that hold other packages.
NOT_BUILTIN = {"site-packages", "dist-packages", "__pycache__"}


@dataclass
class SavedFile:
    """The fields that are read of a file's entry in SavedFolder."""

    HAS_OTHER_FIELDS = True
    filename: FileName


@dataclass
class SavedFolder:
    """The fields that are read of state.json in a folder that `datasets` saved."""

    HAS_OTHER_FIELDS = True
    _data_files: list[SavedFile]


@dataclass
class InputFile:
    """A file of the input, or a split of a name on the Hub, which is read like one."""

    name: str  # path of a file, or name on the Hub
    kind: str  # a value of KINDS, or hub
    split: str = ""  # of a name on the Hub; the folder or file that is named after a split
    store: str = "train"  # a key of SPLITS: the store for its documents, except those held out
    place: str = ""  # the file's one path, however the input is spelled
    share_read: float = 0.0  # of the file, so far


class Document(NamedTuple):
    """A document, or a stretch of a long one."""

    content: str | np.ndarray  # text, or token ids (n,)
    begins: bool = True  # whether the document begins here
    ends: bool = True  # whether it ends here


def find_files(input: str, options: DatasetConfig) -> list[InputFile]:
    """Returns the files that `input` names, in order. Raises UserError if there is nothing to read."""
    if is_local(input):
        files = _local_files(os.path.expanduser(input), options)
        return _each_once(_of_the_split(files, options, input))
    prepare_hub(input)
    return _of_the_split(_hub_splits(input, options), options, input)


def _each_once(files: list[InputFile]) -> list[InputFile]:
    """Keeps one name of each file (links name a file again). Prints what is left out."""
    by_place: dict[str, InputFile] = {}
    again = []
    for file in files:
        file.place = os.path.realpath(file.name)
        if by_place.setdefault(file.place, file) is not file:
            again.append(file.name)
    if again:
        print(
            f"left out: {counted(len(again), 'file')} named twice or linked to another, such as {ascii(again[0])}"
        )
    return list(by_place.values())


def is_local(input: str) -> bool:
    """Returns whether `input` names files on this machine. Any other name is one on the Hub: see prepare_hub."""
    path = os.path.expanduser(input)
    return input == "builtin" or exists(path) or glob.has_magic(path)


@functools.cache  # printed and tried once
def prepare_hub(name: str) -> None:
    """Prints that the Hub is asked for a name, and makes libraries work without the Hub if it can't be reached.

    Libraries try for half a minute to reach the Hub. If it is out of reach, an environment variable tells libraries
    that are imported later to use only their cache. Raises UserError for a name that looks like a path.
    """
    name = os.path.expanduser(name)
    hint = near_path(Path(name))
    if not name or name.startswith((".", "/")) or name.count("/") > 1 or kind_of(Path(name)):
        raise UserError(f"{name}: there is no such file or folder{hint}")
    message = f"asking the Hugging Face Hub for {name}: no file or folder has this name here{hint}"
    print(message, file=sys.stderr, flush=True)
    if "HF_HUB_OFFLINE" not in os.environ and not _hub_answers():
        print("the Hub can't be reached; looking in its cache", file=sys.stderr, flush=True)
        os.environ["HF_HUB_OFFLINE"] = "1"


def _hub_answers() -> bool:
    """Returns whether the Hub accepts a connection. Returns True untried if there is a proxy or a mirror."""
    if getproxies() or "HF_ENDPOINT" in os.environ:
        return True
    answers = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection(HUB).close()
            answers.set()

    # In a thread: looking up the name, and trying one address after the other, can take much longer.
    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(HUB_SECONDS)
    return answers.is_set()


def _of_the_split(files: list[InputFile], options: DatasetConfig, input: str) -> list[InputFile]:
    """Returns the files that the options ask for, with their stores. Prints what is left out. Raises UserError if none
    is left."""
    names = {file.split for file in files}
    wanted = options.split or "train"
    chosen = {wanted} & names or {name for name in names if named_split(name) == wanted}
    each_is_named = bool(chosen) and "" not in map(named_split, names)
    if options.splits == "official":
        for file in files:
            file.store = named_split(file.split)
        if not each_is_named:
            raise UserError(
                f"--splits=official: the files or folders of {input} are not all named after the splits train, "
                "validation and test; leave it out, and a share of the text is held out"
            )
    if wanted == "all" or options.splits == "official":
        chosen = names
    if not options.split:
        chosen.add("")
    kept = [file for file in files if file.split in chosen]
    if not kept:
        raise UserError(f"--split={wanted}: {input} has no split of that name")
    if len(kept) < len(files):
        message = (
            f"left out: {', '.join(sorted(names - chosen)[:4])} ({len(files) - len(kept):,} of {len(files):,} "
            f"files), taken for other splits than {wanted}; --split=all reads them too"
        )
        if each_is_named:
            message += ", --splits=official makes stores of them"
        print(message)
    return kept


def describe(files: list[InputFile]) -> dict[str, Any]:
    """Returns what the input is at this moment, for JSON: its files' places, sizes and times."""
    if files[0].kind == "hub":
        return {"dataset": files[0].name, "splits": [file.split for file in files]}
    digest = hashlib.sha256()
    size = 0
    newest = 0.0
    places = []
    for file in files:
        try:
            status = os.stat(file.name)
        except OSError:  # a link to nowhere: reading it reports that
            continue
        if not stat.S_ISREG(status.st_mode):  # a pipe can't be read twice
            raise UserError(
                f"{file.name}: is a pipe or a device; write what it gives to a file, and name that"
            )
        size += status.st_size
        newest = max(newest, status.st_mtime)
        places.append(file.place)
        digest.update(os.fsencode(file.place))
        digest.update(f"\0{file.kind}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return {
        "files": len(files),
        "bytes": size,
        "place": ascii(os.path.commonpath(places))[1:-1] if places else "",
        "last change": str(datetime.datetime.fromtimestamp(newest)),
        "digest": digest.hexdigest(),
    }


def builtin_files() -> list[Path]:
    """Returns the UTF-8 .py files of the running Python's standard library, sorted. Raises UserError if it has no
    sources."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py"), key=Path.as_posix):
        if NOT_BUILTIN.intersection(path.relative_to(root).parts):
            continue
        # Some of Python's own tests are in other encodings, or broken on purpose.
        with contextlib.suppress(UnicodeDecodeError):
            path.read_bytes().decode()
            files.append(path)
    if not files:
        raise UserError(
            f"{root}: this Python comes without its library's source files; name an INPUT"
        )
    return files


def kind_of(path: Path, format: str = "auto") -> str | None:
    """Returns how a file is read: by `format`, or, if that is auto, by its name; None if the name doesn't tell. Of token
    ids, a file next to it tells more."""
    ending = os.path.splitext(_without_compression(path.name.lower()))[1]
    kind = KINDS.get(ending) if format == "auto" else format
    if kind == "ids" and exists(f"{path}.size"):
        return "datalayout"
    if kind == "ids" and ending == ".bin" and exists(path.with_suffix(".idx")):
        return "megatron"
    return kind


def _without_compression(name: str) -> str:
    base, ending = os.path.splitext(name)
    return base if ending.lower() in COMPRESSED else name


def _local_files(name: str, options: DatasetConfig) -> list[InputFile]:
    if name == "builtin":
        return [InputFile(str(path), "text") for path in builtin_files()]
    places = _places_of(name)
    kinds = {
        path: kind_of(path, options.format) for place in places for path in _files_below(place)
    }
    if options.format == options.dtype == "auto" and set(kinds.values()) - {"ids", None}:
        # Next to text and the like, such names say nothing about token ids.
        kinds = {path: None if kind == "ids" else kind for path, kind in kinds.items()}
    paths = _without_descriptions(_with_a_kind(name, kinds), kinds)
    root = _root_of(places)
    splits = _splits_of([path.relative_to(root) for path in paths], root, options)
    return [InputFile(str(path), str(kinds[path]), split) for path, split in zip(paths, splits)]


def _places_of(name: str) -> list[Path]:
    """Returns the files and folders that a path or a pattern means."""
    if glob.has_magic(name) and not os.path.exists(name):
        return [Path(place) for place in sorted(glob.glob(name, recursive=True))]
    return [Path(name)]


def _with_a_kind(name: str, kinds: dict[Path, str | None]) -> list[Path]:
    """Returns the files that can be read. Prints that there are others. Raises UserError if none can be read."""
    files = [path for path, kind in kinds.items() if kind]
    unknown = [path for path, kind in kinds.items() if not kind]
    remedy = _named_content(unknown)
    if not files:
        raise UserError(
            remedy
            or f"{name}: no file named {', '.join(KINDS)} there; --format=text takes every file as text"
        )
    if unknown:
        remedy = remedy or "--format=text takes all as text, or one that you name"
        print(
            f"left out: {counted(len(unknown), 'file')} without an ending that tells a format, such as "
            f"{ascii(unknown[0].name)}; {remedy}"
        )
    return files


def _without_descriptions(paths: list[Path], kinds: dict[Path, str | None]) -> list[Path]:
    """Leaves out what describes a dataset, as README.md does in a folder with data of another format, itself or deeper.
    Prints that."""
    told = {path for path in paths if DESCRIPTION.fullmatch(path.name)}
    data = {path for path in paths if kinds[path] != "text"} - told
    folders = {folder for path in data for folder in path.parents}
    left_out = {path for path in told if path.parent in folders}
    if left_out:
        names = ", ".join(sorted({ascii(path.name) for path in left_out})[:4])
        print(f"left out: {names}, by its name about the data with it; to read it, name the file")
    return [path for path in paths if path not in left_out]


def _named_content(files: list[Path]) -> str:
    """Returns what the first of these files is that holds no text, and what to do with it; "" if all may be text."""
    for path in files[:MOST_LOOKED_AT]:
        with contextlib.suppress(Exception):  # the libraries raise whatever a file runs into
            found = content_of(path)
            if found:
                return f"{path} is {found.title}; {found.advice(path)}"
    return ""


def _root_of(places: list[Path]) -> Path:
    """Returns the folder to look for splits in: the one that was named, else the one that holds all places."""
    if len(places) == 1 and places[0].is_dir():
        return places[0]
    return Path(os.path.commonpath([place.parent for place in places]))


def _splits_of(files: list[Path], root: Path, options: DatasetConfig) -> list[str]:
    """Returns each file's split: the name of the outermost folder or file on its path below `root` that is one; "" if
    it has none. Prints what is named after a split but read as text.

    A name alone makes no split: train must be next to it, in the same form, unless the options ask for splits. In a
    folder where `datasets` saved several, and next to the folder that --split names, everything is a split.
    """
    is_asked_for = bool(options.split) or options.splits == "official"
    names = {file: _split_name(file.name, is_file=True) for file in files}
    for file in files:
        for folder in list(file.parents)[:-1]:
            names[folder] = _split_name(folder.name, is_file=False)
    have_train = {
        (entry.parent, name.form) for entry, name in names.items() if name.split == "train"
    }
    divided = {entry.parent for entry in names if (root / entry.parent / SAVED_SPLITS).is_file()}
    if options.split:
        divided.update(entry.parent for entry in names if entry.name == options.split)
    splits = []
    text: Counter[str] = Counter()
    for file in files:
        split = ""
        only_named = ""
        for entry in [file, *file.parents][:-1]:  # from the file outwards, so the outermost wins
            name = names[entry]
            has_train = (entry.parent, name.form) in have_train
            if entry.parent in divided or name.split and (has_train or is_asked_for):
                split = entry.name
            elif name.split and name.form.is_whole:
                only_named = entry.name
        if only_named and not split:
            text[only_named] += 1
        splits.append(split)
    if text:
        print(
            f"read as text: {', '.join(sorted(text)[:4])} ({text.total():,} of {counted(len(files), 'file')}), since no "
            "train of the same form is next to them"
        )
    return splits


class SplitForm(NamedTuple):
    """How the name of a split is written: two splits of one corpus have equal forms."""

    is_file: bool
    words: tuple[str, ...]  # of the name, with "" for the split

    @property
    def is_whole(self) -> bool:
        return self.words == ("",)


class SplitName(NamedTuple):
    """What a name says about splits."""

    split: str  # a key of SPLITS, "" for a name that says nothing
    form: SplitForm


def _split_name(name: str, is_file: bool) -> SplitName:
    """Returns what the name of a file or folder says about splits.

    A folder's whole name must be a split's. A file's name may have other words, as in corpus-train.jsonl; numbers and
    endings don't count.
    """
    if is_file:
        name = _without_compression(name)
        name = os.path.splitext(name)[0]
    words = WORD.findall(NUMBERING.sub(" ", name.lower()))
    split = named_split(name)
    form = SplitForm(
        is_file, tuple("" if word in SPLITS.get(split, ()) else word for word in words)
    )
    if not is_file and not form.is_whole:
        split = ""
    return SplitName(split, form)


def named_split(name: str) -> str:
    """Returns the split, of SPLITS, that a folder, file or split is named after; "" if it is none or several."""
    words = set(WORD.findall(name.lower()))
    splits = [split for split, names in SPLITS.items() if words.intersection(names)]
    return splits[0] if len(splits) == 1 else ""


def _files_below(place: Path) -> Iterator[Path]:
    """Yields the file itself, or the files in a folder, without hidden ones. Links are followed once. Of a folder that
    `datasets` saved, yields the files that hold the rows."""
    if not place.is_dir():
        yield place
        return
    seen = set()
    for path, folders, names in os.walk(place, onerror=_refuse, followlinks=True):
        folder = Path(path)
        target = folder.resolve()
        if target in seen:
            folders.clear()
            continue
        seen.add(target)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if SAVED_SPLITS in names:
            names = []
        if "state.json" in names and "dataset_info.json" in names:
            saved = read_object(folder / "state.json", SavedFolder, "save it again")
            names = [file.filename for file in saved._data_files]
        for name in sorted(names):
            # fms-fsdp's tables of document counts, DataLayout's sizes and Megatron's indices are not text.
            is_count = folder.name == "meta" and "counts" in name
            if (
                not name.startswith(".")
                and not is_count
                and not name.endswith((".npy.size", ".idx"))
            ):
                yield folder / name


def _refuse(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename}: can't be read ({error.strerror})") from error


def _hub_splits(name: str, options: DatasetConfig) -> list[InputFile]:
    import datasets  # late: importing it takes a second

    try:
        splits = datasets.get_dataset_split_names(name, options.config or None)
    except Exception as error:  # the name, split or config is unknown, there is no network, ...
        raise UserError(
            f"{name}: no file or folder here, and `datasets` can't load it ({first_line(error)}){near_path(Path(name))}"
        ) from error
    return [InputFile(name, "hub", split) for split in splits]
