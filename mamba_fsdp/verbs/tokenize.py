"""Make token stores, which training.py reads, from text or tokens.

    python get_dataset.py [INPUT [OUT]] [--OPTION=VALUE ...]

INPUT  a file, folder or glob of .txt, .md, .jsonl, .ndjson, .json, .csv (each
       also .gz, .zst, .bz2 or .xz), .parquet or .arrow files, or of others'
       token ids (.bin, .npy), a save_to_disk folder, or a name for
       datasets.load_dataset. Default: builtin, the source of Python's own
       library. Hidden files (.name) are left out.
OUT    a folder for the stores OUT/train and OUT/validation. Default:
       data/NAME, by the input's name.

After a kill or Ctrl-C, the same command resumes. Whole numbers may end in k,
M, B or T (10k).
"""

import os
import sys
from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.reporting.console import ignore_output_errors
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.settings.help import Page

USUAL = "tokenizer validation_fraction splits documents text_column config overwrite".split()


def main(input: str = "builtin", out: str = "", *, options: DatasetConfig) -> None:
    ignore_output_errors()
    try:
        tokenize(input, out, options=options)
    except KeyboardInterrupt:  # the work of its threads is of no use
        sys.stdout.flush()
        os._exit(130)


def tokenize(input: str = "builtin", out: str = "", *, options: DatasetConfig) -> Path:
    """Makes token stores, which training reads, of text or tokens, and returns their folder. The same call resumes.

    input: a file, folder or glob, a name for datasets.load_dataset, or builtin, the source of Python's own library.
    out: a folder for the stores out/train and out/validation; without it, data/NAME, by the input's name. Raises
    UserError for bad input, and for files that can't be written.
    """
    # Imported late, so that --help and mistakes in the options are answered at once.
    from mamba_fsdp.data.hub import prepare_hub
    from mamba_fsdp.importing.inputs import is_local

    options.check()
    folder = Path(out or default_folder(input))
    tokenizer = options.tokenizer
    is_made = tokenizer == "none" or tokenizer.startswith("train:")
    if not is_made and not is_local(tokenizer):
        prepare_hub(tokenizer)
    if not is_local(input):
        prepare_hub(input)
    elif input != "builtin":
        print(f"making {folder} from {input}", flush=True)
    # This imports libraries for seconds; mistakes are reported earlier.
    from mamba_fsdp.importing.make_dataset import make_dataset

    make_dataset(input, folder, options)
    return folder


def default_folder(input: str) -> Path:
    """Returns data/NAME for an input named NAME. Raises UserError if the input has no plain name."""
    name = Path(os.path.abspath(input)).name.split(".")[0]
    if not name or set("*?[") & set(name):
        raise UserError(f"{input}: give OUT too, the folder for the stores")
    return Path("data") / name


def page() -> Page:
    return Page(__doc__, {"": DatasetConfig}, USUAL)
