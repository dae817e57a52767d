"""Folders that `datasets` wrote with save_to_disk: rows of token ids in Arrow streams.

Rows of one length are text that was cut into blocks, and are laid end to end as they are; others are documents.
"""

import json
from functools import partial
from pathlib import Path

from config.train_config import DataConfig
from mamba_fsdp.data.foreign import arrow
from mamba_fsdp.data.foreign.index import Wanted
from mamba_fsdp.data.foreign.indexed import IndexedSource, Rule
from mamba_fsdp.data.foreign.opened import Say, opened
from mamba_fsdp.data.foreign.tokens import Known
from mamba_fsdp.errors import UserError

FORMAT = "save_to_disk"


def recognise(path: Path) -> bool:
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def open_source(path: Path, known: Known, data: DataConfig, say: Say) -> IndexedSource:
    try:
        state = json.loads((path / "state.json").read_bytes())
        names = [file["filename"] for file in state["_data_files"]]
        splits = json.loads((path / "dataset_info.json").read_bytes()).get("splits") or {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / 'state.json'}: not as save_to_disk writes it ({error}); save it again") from error
    if not names or state.get("_indices_data_files"):
        raise UserError(f"{path}: holds no rows, or only a choice of its rows; save it again with flatten_indices()")
    if missing := [name for name in names if not (path / name).is_file()]:
        raise UserError(f"{path / missing[0]}: missing, which state.json names; copy the folder again")
    column = arrow.column_of(path / names[0], data.col_name)
    some = names[::max(1, len(names) // 4)]
    mask = next((mask for name in some if (mask := arrow.mask_of(path / name, column))), "")
    lengths = arrow.find_rows(path / names[0], column).lengths
    block = int(lengths.max(initial=0))
    if data.pack == "auto":
        documents = len(lengths) < 2 or bool((lengths[:-1] != block).any())
    else:
        documents = data.pack == "document"
    find_rows = partial(arrow.find_rows, column=column, mask=mask)
    block = block if data.pack == "auto" and not documents else 0
    wanted = Wanted(find_rows, documents, block=block)
    rule = Rule(documents, uncounted=arrow.MASKS.get(mask, 0))
    told = "each row a document" if documents else f"rows of {block}" if block else "rows"
    source = opened(path, FORMAT, path, names, wanted, rule, known, data, say,
                    told + ("" if documents else " laid end to end") + (f", {mask} as loss mask" if mask else ""))
    rows, said = sum(file.documents for file in source.files), [part.get("num_examples") for part in splits.values()]
    if len(said) == 1 and said[0] not in (None, rows):
        raise UserError(f"{path}: holds {rows} rows, but dataset_info.json says {said[0]}; copy or save it again")
    return source
