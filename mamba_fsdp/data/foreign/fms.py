"""Trees of Arrow files as fms-fsdp reads them: below a folder any files `**/*.arrow`, each record batch a document.

Beside the folder may lie meta/*counts*.csv, which says of each file how many documents and tokens it holds.
"""

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from config.train_config import ReadingConfig
from mamba_fsdp.data.foreign import arrow
from mamba_fsdp.data.foreign.indexed import DataFile, Plan
from mamba_fsdp.errors import UserError

FORMAT = "fms"


def recognise(path: Path) -> bool:
    return (
        path.suffix == ".arrow" or path.is_dir() and next(path.rglob("*.arrow"), None) is not None
    )


def plan(path: Path, reading: ReadingConfig) -> Plan:
    root = path if path.is_dir() else path.parent
    files = sorted(path.rglob("*.arrow")) if path.is_dir() else [path]
    others = [
        file.parent.name
        for name in ("state.json", "index.json")
        for file in sorted(root.glob(f"*/{name}"))
        if not file.parent.name.startswith("documents-")
    ]
    if others:
        raise UserError(
            f"{path}: holds several data sets, such as {others[0]}; name which to read: --datasets=..."
        )
    column = arrow.column_of(files[0], reading.col_name)
    tables = sorted(
        table for place in (root, root.parent) for table in place.glob("meta/*counts*.csv")
    )

    def check(held: Sequence[DataFile]) -> None:
        for table in tables[:1]:
            compare(table, root, held)

    return Plan(
        root,
        [str(file.relative_to(root)) for file in files],
        partial(arrow.find_rows, column=column),
        reading.pack != "none",
        f"column {column}, ",
        check=check,
    )


def compare(table: Path, root: Path, files: Sequence[DataFile]) -> None:
    """Raises UserError where the table of counts names a file of the folder `root` that there is not, or says other
    numbers of documents or tokens than it holds."""
    holds = {file.name: file for file in files}
    try:
        with open(table, newline="") as lines:
            said = list(csv.DictReader(lines))
        for row in said:
            # Paths there begin anywhere above the dataset's folder, or in it.
            parts = row["dataset/filename"].strip("/").split("/")
            inside = [
                "/".join(parts[at + 1 :]) for at, part in enumerate(parts) if part == root.name
            ]
            name = next(
                (name for name in ["/".join(parts), *inside] if name in holds),
                inside[-1] if inside else "",
            )
            if not name:
                continue
            if name not in holds:
                raise UserError(
                    f"{root / name}: missing, which {table} names; copy the file, or remove its line there"
                )
            for what in ("documents", "tokens"):
                if row.get(what) and int(row[what]) != (held := getattr(holds[name], what)):
                    raise UserError(
                        f"{root / name}: holds {held:,} {what}, but {table} says {int(row[what]):,}; copy "
                        "the file again, or correct or remove its line there"
                    )
    except (KeyError, ValueError, OSError) as error:
        raise UserError(
            f"{table}: no table of dataset/filename, documents, tokens ({error!r}); correct or remove "
            "it"
        ) from error
