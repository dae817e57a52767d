"""python -m mamba_fsdp convert SRC OUT --format=store|fms|datalayout|save_to_disk [--block=N]

Write tokens in another format into the new folder OUT, so that other trainers read them. SRC is a token store, data in
any format that training reads (docs/data.md), or a folder with train and validation, which become two in OUT.

  --format      store: a token store; fms: Arrow files, a record batch per document, with meta/counts.csv; datalayout:
                int32 of token, position and loss mask, with .size; save_to_disk: what datasets.load_from_disk opens
  --block       save_to_disk: rows of so many tokens, laid end to end; without it each document is a row

How to read SRC, as in training: --tokenizer, --eos_token, --bos_token, --strip_tokens, --col_name, --pack, --index_dir
"""

from pathlib import Path
from typing import Annotated

from config.fields import Bounds
from config.train_config import USUAL_READING, DataConfig, ReadingConfig
from mamba_fsdp.errors import UserError

FORMATS = "store", "fms", "datalayout", "save_to_disk"


def main(
    src: str,
    out: str,
    format: Annotated[str, Bounds(choices=FORMATS)],
    block: Annotated[int, Bounds(at_least=0)] = 0,
    reading: ReadingConfig = USUAL_READING,
) -> None:
    from mamba_fsdp.checkpoint.retention import new_folder
    from mamba_fsdp.data.opening import open_source, split_in
    from mamba_fsdp.data.writing import WRITERS, Copy, copy_tokenizer
    from mamba_fsdp.report.console import Console

    display, place = Console(), Path(src)
    if block and format != "save_to_disk":
        raise UserError("--block: only rows of --format=save_to_disk have a length")
    data = DataConfig(**vars(reading))
    splits = {split: split_in(place, split) for split in ("train", "validation")}
    parts = (
        {"": place}
        if splits["train"] == place
        else {name: path for name, path in splits.items() if path != place}
    )
    with new_folder(Path(out)) as folder:
        for split, path in parts.items():
            source = open_source(path, data, display.line)
            if source.eos < 0 and not block and format != "datalayout":
                raise UserError(
                    f"{path}: which token ends its documents is not known; give --eos_token=ID"
                )
            at = folder / split
            at.mkdir(exist_ok=True)
            copy = Copy(source, folder if format == "fms" else at, block, show=display.passing)
            WRITERS[format](copy, split or path.stem)
            copy_tokenizer(source, at)
            display.line(f"{Path(out) / split}: {source.token_count:,} tokens as {format}")
            for what, count in copy.told.items():
                display.line(f"  {count:,} {what}")
