"""A path to the Source that lies there, whatever its format."""

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from config.train_config import DataConfig, ReadingConfig
from mamba_fsdp.data.foreign import datalayout, fms, megatron, nanogpt, save_to_disk
from mamba_fsdp.data.foreign.index import open_index
from mamba_fsdp.data.foreign.indexed import IndexedSource
from mamba_fsdp.data.source import Source
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.text import kind_of
from mamba_fsdp.data.tokenizer import check_tokenizer, identities_in, load_words
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import exists

Say = Callable[[str], None]  # prints a line, on rank 0
FORMATS = (
    save_to_disk,
    datalayout,
    megatron,
    nanogpt,
    fms,
)  # the first that recognises a path opens it
SPLITS = {  # what they are called in a folder that holds both
    "train": ("train", "train.bin", "train.npy"),
    "validation": ("validation", "val.bin", "val.npy"),
}


def open_source(
    path: str | Path,
    data: DataConfig | None = None,
    say: Say = lambda text: None,
    *,
    inspecting: bool = False,
) -> Source:
    """The source at `path`. Raises UserError where there is none, or something is wrong with it; not for documents that
    no known token ends where it is `inspecting`."""
    path, data = Path(path), data or DataConfig()
    form = format_of(path)
    if form:
        return _open_foreign(form, path, data, say, inspecting)
    if not exists(path / "index.json"):
        refuse_text(path, data.tokenizer)
    store = TokenStore(path)
    if data.reset_at_documents and store.eos < 0:
        raise UserError(
            f"{path}: reset_at_documents needs to know which token ends its documents; make the store "
            "again with --eos_token=ID"
        )
    if data.tokenizer and not data.allow_other_tokenizer:
        check_tokenizer(path, store.tokenizer, data.tokenizer, [_identity(_name(data))])
    return store


def _open_foreign(form, path, data, say, inspecting):
    plan, (bos, eos, strip) = form.plan(path, data), separators(data)
    if (
        eos < 0
        and not inspecting
        and not plan.layout
        and (plan.documents or data.reset_at_documents)
    ):
        why = (
            "which token ends its documents is not known"
            if plan.documents
            else "reset_at_documents needs to know which token ends its documents"
        )
        raise UserError(
            f"{path} ({form.FORMAT}): {why}; give --eos_token=ID, or the tokenizer that made them: "
            "--tokenizer=FOLDER"
        )
    plan = plan._replace(bos=bos, eos=eos, strip=strip if plan.documents else ())
    files, place = open_index(plan, data.index_dir, say)
    if plan.check:
        plan.check(files)
    if not sum(file.length for file in files):
        raise UserError(f"{path} ({form.FORMAT}): holds no tokens")
    # What is laid end to end is the same whichever token ends its documents.
    bos, eos = (bos, eos) if plan.documents else (-1, -1)
    content = [
        {"documents": plan.documents, "bos": bos, "eos": eos, "layout": plan.layout},
        [(file.dtype, file.length, file.digest) for file in files],
    ]
    added = [
        f"{name} {token} {where}"
        for name, token, where in (("bos", bos, "before"), ("eos", eos, "behind"))
        if token >= 0
    ]
    how = (
        f"documents{', ' if added else ''}{' and '.join(added)}"
        if plan.documents
        else "laid end to end"
    )
    say(f"reads      {path}: {form.FORMAT}, {plan.told}{how}")
    identity = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return IndexedSource(
        path, form.FORMAT, plan, files, place, identity, (_identity(_name(data)), _name(data))
    )


def format_of(path: Path):
    """The module of the foreign format that lies at `path`; None for none."""
    return (
        None
        if exists(path / "index.json")
        else next((form for form in FORMATS if form.recognise(path)), None)
    )


def is_source(path: Path) -> bool:
    """Whether a source of any format lies at `path`."""
    return exists(path / "index.json") or format_of(path) is not None


def split_in(path: Path, split: str = "train") -> Path:
    """`path` itself, or where it is a folder of splits that one: train or validation."""
    if exists(path / "index.json"):
        return path
    for name in SPLITS[split]:
        place, is_file = path / name, "." in name
        if exists(place) and (
            is_file or exists(place / "index.json") or exists(path / "dataset_dict.json")
        ):
            return place
    return path


def refuse_text(path: Path, tokenizer: str = "") -> None:
    """Raises UserError where `path` is text or a folder of it."""
    files = [path] if path.is_file() else sorted(path.glob("*.*"))
    if found := [
        file.name for file in files if kind_of(file) not in (None, "arrow") and file.suffix != ".md"
    ]:
        tokenizer = f" --tokenizer={tokenizer}" if tokenizer else ""
        out = Path("data", path.name.partition(".")[0])
        raise UserError(
            f"{path}: text ({found[0]}), to be tokenised once before it is read:\n"
            f"  .venv/bin/python get_dataset.py {path} {out}{tokenizer}\nand then --dataset_path={out}"
        )


_words = functools.cache(load_words)
_identity = functools.cache(lambda name: next(identities_in(name), "") if name else "")


def _name(data):
    return data.tokenizer.removesuffix("/tokenizer.json")


def separators(data: ReadingConfig) -> tuple[int, int, tuple[int, ...]]:
    """(bos, -1 for none; eos, -1 where it is not known; what is taken from the ends of documents, these among it), as
    the settings say: eos_token, else the tokenizer's. Raises UserError for a token that there is not."""
    name = _name(data)

    def number(setting: str, text: str) -> int:
        if text in ("", "-1"):
            return -1
        if text.isdecimal():
            return int(text)
        ids = _words(name).encode(text) if name else []
        if len(ids) != 1:
            what = (
                f"{len(ids)} tokens of {name}, not one"
                if name
                else "no id, and no --tokenizer is given"
            )
            raise UserError(f"{setting}={text} is {what}; give the token's id")
        return ids[0]

    bos, eos = number("bos_token", data.bos_token), number("eos_token", data.eos_token)
    if eos < 0 and name and (own := _words(name).eos) is not None:
        eos = own
    strip = {number("strip_tokens", text) for text in data.strip_tokens} | {bos, eos}
    return bos, eos, tuple(sorted(strip - {-1}))
