"""Make token stores, the input of training.py, from text or token ids.

    python get_dataset.py [INPUT [OUT]] [--OPTION=VALUE ...]

INPUT  a file, folder or glob of .txt, .md, .jsonl, .ndjson, .json or .csv files
       (also compressed: .gz, .zst, .bz2, .xz), of .parquet or .arrow files, or
       of token ids from other programs (.bin, .npy); a save_to_disk folder; or
       a name for datasets.load_dataset. Default: builtin, the source code of
       Python's standard library. Hidden files (.name) are left out.
OUT    a folder for the stores OUT/train and OUT/validation. Default: data/NAME,
       with the name of the input.

If it is killed or stopped with Ctrl-C, the same command resumes. Whole numbers
can end in k, M, B or T (10k).
"""

import os
import sys
from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.reporting.console import ignore_output_errors
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.settings.help import Page
from mamba_fsdp.storage.retry import is_file

COMMON = "tokenizer validation_fraction splits documents text_column config overwrite".split()


def main(input: str = "builtin", out: str = "", *others: str, options: DatasetConfig) -> None:
    if others or is_file(out):
        raise UserError(
            f"{out}: OUT is a folder for the stores; if INPUT is a glob, quote it: 'texts/*.txt'"
        )
    ignore_output_errors()
    try:
        tokenize(input, out, options=options)
    except KeyboardInterrupt:  # do not wait for the threads
        sys.stdout.flush()
        os._exit(130)


def tokenize(input: str = "builtin", out: str = "", *, options: DatasetConfig) -> Path:
    """Makes token stores, the input of training, from text or token ids, and returns their folder. The same call resumes
    after an interruption.

    input: a file, folder or glob, a name for datasets.load_dataset, or builtin, the source code of Python's standard library.
    out: a folder for the stores out/train and out/validation; if it is empty, data/NAME, with the name of the input. Raises
    UserError for invalid input, and for files that can't be written.
    """
    # These imports take time, and neither --help nor errors in the options should wait for them.
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
    # This import takes seconds; errors in the arguments are reported before.
    from mamba_fsdp.importing.make_dataset import make_dataset

    make_dataset(input, folder, options)
    return folder


def default_folder(input: str) -> Path:
    """Returns data/NAME for an input named NAME. Raises UserError if the input has no name or is a glob."""
    name = Path(os.path.abspath(input)).name.split(".")[0]
    if not name or set("*?[") & set(name):
        raise UserError(f"{input}: give OUT too, the folder for the stores")
    return Path("data") / name


def page() -> Page:
    return Page(__doc__, {"": DatasetConfig}, COMMON)
