#!/usr/bin/env python3
"""Text in, token stores out: what training.py reads.

    python get_dataset.py [INPUT [OUT]] [options]

INPUT   a file, folder or glob of .txt, .jsonl, .ndjson, .json (each also .gz or .zst), .parquet or .arrow files, a
        save_to_disk folder, or a name for datasets.load_dataset. Default: builtin, the source of Python's own library.
OUT     a folder for the stores OUT/train and OUT/validation. Default: data/ and the input's name.

Killed or interrupted, the same command goes on where it was; complete, it says so.

  --tokenizer=train:4096      train:SIZE trains a byte-level BPE of that size on the input; else the name or path of a
                              transformers tokenizer, or a tokenizer.json file
  --eos_token=TOKEN           the token put after each document, where the tokenizer names none. Where it stands in the
                              text itself it ends a document, too
  --validation_fraction=0.01  share of the documents held out for OUT/validation; 0 for none
  --documents=file            what a document of a .txt file is: file (all of it), lines, blank_line (what stands
                              between blank lines), or separator:TEXT, such as separator:'<|endoftext|>'
  --text_column=text          the column or JSON field that holds the text, or token ids as a list, taken as they are
                              (then --tokenizer names the one that made them)
  --format=auto               how to read the files: auto (by their names), text, json, parquet or arrow
  --invalid_utf8=error        text that is no valid UTF-8: error, replace (by U+FFFD), or skip (the document, or of one
                              longer than 512 KiB that part)
  --config=NAME               configuration of a datasets name
  --split=NAME                split of a datasets name or a save_to_disk folder; train where there are several
  --streaming=false           read a datasets name while downloading it, keeping nothing on disk
  --workers=0                 processes that tokenise; 0 for one per core. The result does not depend on it
  --shard_tokens=268435456    tokens after which a store begins its next file
  --overwrite=false           replace what an earlier run left in OUT
"""

import os
from pathlib import Path

from mamba_fsdp import command_line
from mamba_fsdp.errors import UserError


def main(input: str = "builtin", out: str = None, *, tokenizer: str = "train:4096", eos_token: str = None,
         validation_fraction: float = 0.01, documents: str = "file", text_column: str = "text", format: str = "auto",
         invalid_utf8: str = "error", config: str = None, split: str = None, streaming: bool = False, workers: int = 0,
         shard_tokens: int = 1 << 28, overwrite: bool = False):
    # Imported late: --help and mistakes in the options answer at once.
    from mamba_fsdp.data import builtin, text, tokenize
    from mamba_fsdp.data.documents import Options

    options = Options(text_column, documents, invalid_utf8)
    if input == "builtin":
        options.check()
        source = text.Files([(str(path), "text") for path in builtin.corpus_files()], options)
    else:
        source = text.open_source(input, options, format=format, config=config, split=split, streaming=streaming)
    tokenize.make_dataset(source, out or default_folder(input), tokenizer=tokenizer, eos_token=eos_token,
                          workers=workers, validation_fraction=validation_fraction, shard_tokens=shard_tokens,
                          overwrite=overwrite)


def default_folder(input):
    """data/NAME for an input of that name."""
    name = Path(os.path.abspath(input)).name.split(".")[0]
    if not name or set("*?[") & set(name):
        raise UserError(f"{input}: give OUT too, the folder for the stores")
    return Path("data") / name


if __name__ == "__main__":
    command_line.run(main, lambda: __doc__.strip())
