"""Says what a path is, what is in it, and which command takes it, as far as names and first bytes tell. Whatever is
given a path that it can't take asks here. Without torch."""

import contextlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mamba_fsdp.data.splits import SPLITS, is_store, split_in
from mamba_fsdp.errors import UserError, command, import_command, near_path
from mamba_fsdp.run.layout import committed
from mamba_fsdp.run.names import (
    CHECKPOINTS,
    COMMIT,
    METRICS,
    MODEL_CONFIG,
    STATUS,
    TOKENIZER,
    step_of,
)
from mamba_fsdp.storage.patience import exists, is_file, is_folder, names_in
from mamba_fsdp.storage.signatures import BINARY, OF_IDS, POINTERS, Signature, content_of

PROGRESS = ".progress"  # in a folder that get_dataset.py has not finished
BEGUN = f"{PROGRESS}/begun.json"
WEIGHTS = (".safetensors", ".pth", ".pt", ".distcp")
WEIGHTS_NAMES = ("pytorch_model.bin", "model.safetensors.index.json")
MODEL_FIELDS = {"model_type", "architectures", "d_model"}  # one of them is in a model's config.json
DCP_INDEX = ".metadata"  # of torch.distributed.checkpoint
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
WANTED = (  # of --tokenizer
    "a tokenizer.json, or its folder with tokenizer_config.json, as save_pretrained writes them"
)
ITS_TOKENIZER = " --tokenizer=PATH"
INPUT_WORDS = {  # by kind; else text
    "arrow": "Arrow tables",
    "datalayout": "Composer's DataLayout",
    "megatron": "Megatron's token ids",
    "ids": "token ids",
}
NO_INPUT = {
    "store",
    "import",
    "run",
    "checkpoint",
    "checkpoints",
    "dcp",
    "model",
    "weights",
    "empty",
    "tokenizer",
    "streamed",
}
STREAMED = {"shards": "MosaicML's MDS", "chunks": "litdata's chunks"}  # by a field of index.json
MOST_LISTED = 8  # names in a message
MOST_LOOKED_AT = 10_000  # files of a folder, to find one that can be imported


@dataclass(frozen=True)
class Place:
    """What a path is."""

    path: Path
    kind: str  # such as run, store, input, nothing
    words: str  # what it is, and what is in it: "a token store"
    use: str  # what takes it, or what to name instead; "" if nothing is known
    names: tuple[str, ...] = ()  # the runs, stores or checkpoints in it


Finder = Callable[[Path], Place | None]


def what_is(path: str | Path) -> Place:
    """Returns what `path` is."""
    place = Path(path)
    finders: list[Finder] = [_missing]
    if is_file(place):
        finders = [_pointer, _weights_file, _tokenizer_file, _file_of_another, _settings]
        finders += [_foreign_file, _input_file, _other_file]
    elif exists(place):
        finders = [_checkpoint, _run, _streamed, _store, _import, _dcp, _model]
        finders += [_stores, _checkpoints, _tokenizer, _runs, _input_folder, _other_folder]
    return next(found for find in finders if (found := find(place)))


def refused(path: str | Path, wanted: str, use: str = "") -> UserError:
    """Returns the error for a path that is not what is wanted, as in "a token store". use: what to do with what is
    there, if the caller knows better."""
    place = what_is(path)
    not_wanted = "" if place.kind in ("nothing", "pruned") else f", not {wanted}"
    use = use or place.use
    return UserError(f"{path}: {place.words}{not_wanted}{use and '; '}{use}")


def refused_model(path: str | Path) -> UserError:
    """Returns the error for a path that names no model."""
    place = what_is(path)
    use = place.use
    is_name_on_hub = re.fullmatch(r"[^./~][^/]*/[^/]+", str(path)) and not exists(place.path.parent)
    if place.kind == "nothing" and is_name_on_hub:
        use = (
            "a model of the Hugging Face hub has to be downloaded first: "
            f"hf download {shlex.quote(str(path))} --local-dir FOLDER"
        )
    return refused(
        path, "a model", use or "name a run, a checkpoint, or weights with their config.json"
    )


def refused_data(path: str | Path, text_options: str = "") -> UserError:
    """Returns the error for a path that names no token store. text_options: of the command that makes one from text."""
    place = what_is(path)
    use = place.use
    if place.kind == "input":
        making = use.partition(" makes")[0]
        if text_options:
            making = making.removesuffix(ITS_TOKENIZER)
        use = f"make one of it: {making}{text_options}"
    if place.kind == "nothing" and not use:
        use = f"make a token store there: {import_command('INPUT', str(path))}"
    if not use:
        use = f"make one of text: {import_command('INPUT')}"
    return refused(path, "a token store", use)


def check_input(path: str | Path) -> None:
    """Raises UserError if `path` is something else than get_dataset.py imports, though some of its files may look so."""
    place = what_is(path)
    is_store_or_stores = place.kind == "stores" and not any("/" in name for name in place.names)
    if is_store_or_stores or place.kind in NO_INPUT:
        raise refused(path, "text or token ids to import")


def tokenizer_in(path: str | Path) -> Path | None:
    """Returns the folder or the file of the tokenizer that `path` names: itself, or that of a run, a store, a dataset or
    an export. None if there is none."""
    folder = Path(path)
    if is_file(folder):
        return folder
    for place in (folder, folder / TOKENIZER, split_in(folder) / TOKENIZER):
        if _has(place, *TOKENIZER_FILES):
            return place
    return None


def check_tokenizer_place(path: str | Path) -> Path:
    """Returns what tokenizer_in does. Raises UserError if `path` exists and holds no tokenizer; a name that does not
    exist is returned as it is, it may be one on the Hub."""
    found = tokenizer_in(path)
    may_hold_another = not exists(path) or exists(Path(path, MODEL_CONFIG))
    if found is None and not may_hold_another:
        raise refused(path, "a tokenizer", f"wanted is {WANTED}")
    tokenizer = found or Path(path)
    for file in (tokenizer, tokenizer / TOKENIZER_FILES[0]):
        if _pointer(file):
            raise refused(file, "a tokenizer")
    return tokenizer


def is_run(folder: Path) -> bool:
    """Returns whether a folder is that of a run."""
    return any(exists(folder / name) for name in (CHECKPOINTS, STATUS, METRICS))


def is_unfinished(folder: Path) -> bool:
    """Returns whether get_dataset.py has begun, and not finished, what is in a folder."""
    is_half_a_store = exists(folder / "00000.bin") and not is_store(folder)
    return is_half_a_store or exists(folder / PROGRESS) and not exists(folder / "dataset.json")


def stores_in(folder: Path) -> list[str]:
    """Returns the names of the token stores in a folder, as the setting datasets takes them."""
    return _named(folder, lambda place: is_store(split_in(place)))


def runs_in(folder: Path) -> list[str]:
    """Returns the names of the runs in a folder."""
    return _named(folder, is_run)


# ---------------------------------------------------------------- nothing


def _missing(path: Path) -> Place:
    kept = [checkpoint.name for checkpoint in committed(path.parent)]
    if step_of(path.name) is not None and kept:
        return Place(
            path,
            "pruned",
            f"there is no such checkpoint; its run has {_listed(kept)}",
            f"name one of them, or the run, which means the newest: {path.parent.parent}",
            tuple(kept),
        )
    hint = near_path(path).removeprefix("; ")
    return Place(path, "nothing", "there is no such file or folder", hint)


# ---------------------------------------------------------------- files


def _pointer(path: Path) -> Place | None:
    """Returns what stands in place of a file that a clone without Git LFS lacks."""
    found = _content(path)
    if found is None or found.name not in POINTERS:
        return None
    return Place(path, "foreign", found.title, found.advice(path))


def _content(path: Path) -> Signature | None:
    with contextlib.suppress(Exception):  # damaged compressed data: importing it says so
        return content_of(path)
    return None


def _weights_file(path: Path) -> Place | None:
    is_part = exists(path.parent / COMMIT)
    if is_part or not (path.name.endswith(WEIGHTS) or path.name in WEIGHTS_NAMES):
        return None
    return Place(path, "model", "a file of weights", _use_of_model(path))


def _tokenizer_file(path: Path) -> Place | None:
    if path.name not in TOKENIZER_FILES:
        return None
    return Place(path, "tokenizer", "a file of a tokenizer", _use_of_tokenizer(path.parent))


def _file_of_another(path: Path) -> Place | None:
    """Returns what a file in a run, a checkpoint, a token store or a model's folder is."""
    for folder in itertools.islice(path.parents, 3):
        is_of_run = _has(folder, STATUS, METRICS, COMMIT)
        is_of_model = path.name in (MODEL_CONFIG, "generation_config.json") and _model(folder)
        if is_of_run or is_of_model or is_store(folder):
            words = f"a file of the {what_is(folder).kind} in {folder}"
            return Place(path, "part", words, f"name {folder}", (str(folder),))
    return None


def _settings(path: Path) -> Place | None:
    if path.suffix not in (".yaml", ".yml"):
        return None
    return Place(path, "settings", "a YAML file", f"training takes settings as --config={path}")


def _foreign_file(path: Path) -> Place | None:
    """Returns what a file is by its content, if that is something else than its name says."""
    kind = _kind_of(path)
    if kind in ("datalayout", "megatron"):  # their numbers may look like anything
        return None
    found = _content(path)
    if found is None or found.name == kind or kind == "ids" and found.name in OF_IDS:
        return None
    return Place(path, "foreign", found.title, found.advice(path))


def _input_file(path: Path) -> Place | None:
    kind = _kind_of(path)
    if not kind:
        return None
    return Place(path, "input", INPUT_WORDS.get(kind, "text"), _use_of_input(path, path))


def _other_file(path: Path) -> Place:
    use = f"if it is text, {import_command(path)} --format=text imports it"
    return Place(path, "other", "a file that no command takes", use)


# ---------------------------------------------------------------- folders


def _checkpoint(path: Path) -> Place | None:
    if not exists(path / COMMIT):
        return None
    return Place(path, "checkpoint", "a checkpoint", _use_of_model(path))


def _run(path: Path) -> Place | None:
    if not is_run(path):
        return None
    kept = [checkpoint.name for checkpoint in committed(path / CHECKPOINTS)]
    words = "a run without a checkpoint"
    if kept:
        words = f"a run with {_listed(kept)}"
    use = f"{command('inspect')} {shlex.quote(str(path))} says how far it is"
    return Place(path, "run", words, use, tuple(kept))


def _streamed(path: Path) -> Place | None:
    """Returns what a folder is that another library streams."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        content = json.loads((path / "index.json").read_bytes())
        for field, words in STREAMED.items():
            if field in content:
                use = "docs/data.md has a command that makes a flat file of it"
                return Place(path, "streamed", f"a folder of {words}", use)
    return None


def _store(path: Path) -> Place | None:
    if not is_store(path) or exists(path / MODEL_CONFIG):
        return None
    return Place(path, "store", "a token store", f"training reads it: --dataset_path={path}")


def _import(path: Path) -> Place | None:
    if not is_unfinished(path):
        return None
    resumes = _command_in(path) or "its get_dataset.py command"
    return Place(path, "import", "an unfinished import", f"{resumes} resumes it")


def _command_in(folder: Path) -> str:
    """Returns the command that began an import, or that of its first unfinished part; "" if it is not recorded."""
    try:
        begun = json.loads((folder / BEGUN).read_bytes())
        source, *options = begun["command"]
        count = begun["parts"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    if count > 1:
        states = [folder / PROGRESS / f"{part}-of-{count}/state.json" for part in range(count)]
        unfinished = [part for part, state in enumerate(states) if not _says_finished(state)]
        options.append(f"--part={min(unfinished, default=0)}/{count}")
    return " ".join([import_command(source, shlex.quote(str(folder))), *map(shlex.quote, options)])


def _says_finished(state: Path) -> bool:
    return is_file(state) and b'"finished": true' in state.read_bytes()


def _stores(path: Path) -> Place | None:
    names = stores_in(path)
    if not names:
        return None
    use = f"name one, as in {path / names[0]}"
    if not set(names) <= {name for split in SPLITS.values() for name in split}:
        mixture = f"--dataset_path={path} --datasets={','.join(names)}"
        use = f"training mixes them with {mixture}; else {use}"
    elif "train" in names:
        use = f"training reads it: --dataset_path={path}; else {use}"
    return Place(path, "stores", f"a folder of token stores ({_listed(names)})", use, tuple(names))


def _checkpoints(path: Path) -> Place | None:
    kept = [checkpoint.name for checkpoint in committed(path)]
    if not kept:
        return None
    use = f"name the run, or one of them, as in {path / kept[-1]}"
    return Place(
        path, "checkpoints", f"a folder of checkpoints ({_listed(kept)})", use, tuple(kept)
    )


def _dcp(path: Path) -> Place | None:
    if not exists(path / DCP_INDEX):
        return None
    words = "a folder of torch.distributed.checkpoint"
    return Place(path, "dcp", words, f"--init_from={path} says how to convert it")


def _model(path: Path) -> Place | None:
    files = sorted(names_in(path))
    weights = [name for name in files if name.endswith(WEIGHTS) or name in WEIGHTS_NAMES]
    for name in weights:
        found = _pointer(path / name)
        if found:
            return replace(found, path=path, words=f"its {name} is {found.words}")
    if MODEL_CONFIG in files and _describes_model(path / MODEL_CONFIG):
        return Place(path, "model", "a model", _use_of_model(path))
    if not weights:
        return None
    use = f"name its file and its preset: {path / weights[0]} --model_name=NAME"
    return Place(path, "weights", f"weights without {MODEL_CONFIG}", use)


def _describes_model(file: Path) -> bool:
    """Returns whether a config.json is of a model: other programs have files of this name."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return True  # reading the model will say what is wrong
    return isinstance(content, dict) and bool(MODEL_FIELDS & content.keys())


def _tokenizer(path: Path) -> Place | None:
    if not _has(path, *TOKENIZER_FILES[:3]):
        return None
    return Place(path, "tokenizer", "a tokenizer", _use_of_tokenizer(path))


def _runs(path: Path) -> Place | None:
    names = runs_in(path)
    if not names:
        return None
    use = f"name one, as in {path / names[0]}"
    return Place(path, "runs", f"a folder of runs ({_listed(names)})", use, tuple(names))


def _input_folder(path: Path) -> Place | None:
    if _has(path, "dataset_dict.json", "dataset_info.json"):
        words = "a folder that the library datasets saved"
        return Place(path, "input", words, _use_of_input(path, path))
    for file in itertools.islice(_files_below(path), MOST_LOOKED_AT):
        if kind := _kind_of(file):
            words = f"a folder of {INPUT_WORDS.get(kind, 'text')}"
            return Place(path, "input", words, _use_of_input(path, file))
    return None


def _other_folder(path: Path) -> Place:
    names = sorted(names_in(path))
    if not names:
        return Place(path, "empty", "an empty folder", "")
    return Place(path, "other", f"a folder that no command takes ({_listed(names)})", "")


# ---------------------------------------------------------------- words


def _use_of_input(path: Path, file: Path) -> str:
    """Returns what makes token stores of `path`, with the options that its `file` needs."""
    kind = _kind_of(file)
    making = import_command(path)
    if kind not in INPUT_WORDS or kind == "arrow":
        return f"{making} makes token stores of it"
    if kind == "ids" and _content(file) in (None, BINARY):  # without a header
        making += " --dtype=TYPE"
    return (
        f"{making}{ITS_TOKENIZER} makes token stores of it, with the tokenizer that made the ids, or "
        "--tokenizer=none --eos_token=ID --vocab_size=N in its place"
    )


def _use_of_model(path: Path) -> str:
    return f"generate, evaluate, export and --init_from={path} take it"


def _use_of_tokenizer(path: Path) -> str:
    return f"an import takes it: {import_command('INPUT')} --tokenizer={shlex.quote(str(path))}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[-MOST_LISTED:])
    hidden = len(names) - MOST_LISTED
    return f"{hidden} more, {shown}" if hidden > 0 else shown


def _has(folder: Path, *names: str) -> bool:
    return any(is_file(folder / name) for name in names)


def _named(folder: Path, is_wanted: Callable[[Path], bool]) -> list[str]:
    """Returns the names of the wanted folders in a folder; if there are none, of those one level below."""
    inner = _folders_in(folder)
    wanted = [name for name in inner if is_wanted(folder / name)]
    if wanted:
        return wanted
    deeper = [f"{name}/{below}" for name in inner for below in _folders_in(folder / name)]
    return [name for name in deeper if is_wanted(folder / name)]


def _folders_in(folder: Path) -> list[str]:
    names = [name for name in names_in(folder) if not name.startswith(".")]
    return sorted(name for name in names if is_folder(folder / name))


def _files_below(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _kind_of(file: Path) -> str | None:
    from mamba_fsdp.data.corpus import kind_of  # imports numpy, which a host's Python may lack

    return kind_of(file)
