#!/usr/bin/env python3
"""Text in, token stores out: what training.py reads.

    python get_dataset.py [INPUT [OUT]] [--OPTION=VALUE ...]

INPUT   a file, folder or glob of .txt, .md, .jsonl, .ndjson, .json, .csv (each also .gz or .zst), .parquet or
        .arrow files, a save_to_disk folder, or a name for datasets.load_dataset. Default: builtin, the source of
        Python's own library. What is hidden in a folder (.name) is left out.
OUT     a folder for the stores OUT/train and OUT/validation. Default: data/ and the input's name.

Killed or interrupted, the same command resumes; complete, it says so. Whole numbers may end in k, M, B or T (10k).
"""

import os
from pathlib import Path

from mamba_fsdp import interpreter

interpreter.need("fire", "numpy", "tokenizers", "datasets")

from config.dataset_config import DatasetConfig
from config.fields import help_lines
from mamba_fsdp import command_line
from mamba_fsdp.errors import UserError


def main(input: str = "builtin", out: str = "", *, options: DatasetConfig) -> None:
    options.check()
    # Imported late: --help and mistakes in the options answer at once.
    from mamba_fsdp.data.tokenize import make_dataset

    make_dataset(input, out or default_folder(input), options)


def default_folder(input: str) -> Path:
    """data/NAME for an input of that name."""
    name = Path(os.path.abspath(input)).name.split(".")[0]
    if not name or set("*?[") & set(name):
        raise UserError(f"{input}: give OUT too, the folder for the stores")
    return Path("data") / name


def help_page() -> str:
    return "\n".join([__doc__, *help_lines(DatasetConfig)])


if __name__ == "__main__":
    command_line.run(main, help_page)
