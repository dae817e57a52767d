"""Folders that `datasets` wrote with save_to_disk: rows of token ids in Arrow streams.

Rows of one length are text that was cut into blocks, and are laid end to end as they are; others are documents.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from config.train_config import ReadingConfig
from mamba_fsdp.data.foreign import arrow
from mamba_fsdp.data.foreign.indexed import DataFile, Plan
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import read_object

FORMAT = "save_to_disk"


def recognise(path: Path) -> bool:
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def plan(path: Path, reading: ReadingConfig) -> Plan:
    state = read_object(path / "state.json", {"_data_files": [{"filename": ...}]}, "save it again")
    names = [file["filename"] for file in state["_data_files"]]
    splits = read_object(path / "dataset_info.json", {}, "save it again").get("splits")
    if not names or state.get("_indices_data_files"):
        raise UserError(
            f"{path}: holds no rows, or only a choice of its rows; save it again with flatten_indices()"
        )
    if missing := [name for name in names if not (path / name).is_file()]:
        raise UserError(
            f"{path / missing[0]}: missing, which state.json names; copy the folder again"
        )
    column = arrow.column_of(path / names[0], reading.col_name)
    arrow.check_no_mask(path / names[0])
    lengths = arrow.find_rows(path / names[0], column).lengths
    block = (
        int(lengths.max(initial=0))
        if reading.pack == "auto"
        and (lengths[:-1] == lengths.max(initial=0)).all()
        and len(lengths) > 1
        else 0
    )

    def check(files: Sequence[DataFile]) -> None:
        held, said = (
            sum(file.documents for file in files),
            [
                part.get("num_examples")
                for part in (splits.values() if isinstance(splits, dict) else ())
                if isinstance(part, dict)
            ],
        )
        if len(said) == 1 and said[0] not in (None, held):
            raise UserError(
                f"{path}: holds {held} rows, but dataset_info.json says {said[0]}; copy or save it again"
            )

    return Plan(
        path,
        names,
        partial(arrow.find_rows, column=column),
        not block and reading.pack != "none",
        f"rows of {block} " if block else "",
        block,
        check=check,
    )
