"""Every option of get_dataset.py: name, type, default, bounds and meaning (the string below each field)."""

import re
from dataclasses import dataclass

from config.fields import setting
from mamba_fsdp.errors import UserError


@dataclass
class DatasetConfig:
    """How text becomes token stores."""

    tokenizer: str = setting("train:4096")
    """train:SIZE trains a byte-level BPE of that size on the input; else the name or path of a transformers tokenizer,
    or a tokenizer.json file; none takes token ids without one."""
    eos_token: str = setting("")
    """The token put after each document, with --tokenizer=none its number; empty takes the one that the tokenizer
    names. Where it stands in the text itself it ends a document, too."""
    validation_fraction: float = setting(0.01, at_least=0, below=1)
    """Share of the documents held out for OUT/validation; 0 for none. Where that is no whole document, the last tokens
    of the input are."""
    pack: str = setting("document", choices=("document", "none"))
    """What comes after each document: its end-of-text token, or nothing: rows of token ids that are blocks of one long
    text follow each other as they are."""
    vocab_size: int = setting(0, at_least=0)
    """With --tokenizer=none, one more than the largest token id; 0 reads all of them once for it."""
    splits: str = setting("held_out", choices=("held_out", "official"))
    """Where OUT/validation comes from: a share is held out, or official: the input's own splits become OUT/train,
    OUT/validation and OUT/test. Those of a datasets name or a save_to_disk folder, or files and folders named so."""
    documents: str = setting("file")
    """What a document of a .txt file is: file (all of it), lines, blank_line (what stands between blank lines), or
    separator:TEXT, such as separator:'<|endoftext|>'."""
    text_column: str = setting("text")
    """The column or JSON field that holds the text, or token ids as a list, taken as they are (then --tokenizer names
    the one that made them). document.text is the field text within document."""
    format: str = setting("auto", choices=("auto", "text", "json", "csv", "parquet", "arrow"))
    """How to read the files; auto goes by their names."""
    invalid_utf8: str = setting("error", choices=("error", "replace"))
    """Text that is no valid UTF-8: an error, or U+FFFD in its place."""
    config: str = setting("")
    """Configuration of a datasets name."""
    split: str = setting("")
    """Split of a datasets name or a save_to_disk folder, or several, as in train+validation; empty takes train where
    there are several. `datasets` takes parts too, as in train[:10%] of a name."""
    streaming: bool = setting(False)
    """Read a datasets name while downloading it, keeping nothing on disk."""
    workers: int = setting(0, at_least=0)
    """Processes that tokenise; 0 for one per core. The result does not depend on it."""
    part: str = setting("")
    """I/N, such as 0/4 to 3/4: this is one of N processes, on any machines that share OUT. Each does its share of the
    input, then what others leave; the last to end completes OUT."""
    shard_tokens: int = setting(1 << 28, at_least=1)
    """Tokens after which a store begins its next file; each GiB of the input begins one, too."""
    overwrite: bool = setting(False)
    """Replace what an earlier run left in OUT."""

    def check(self) -> None:
        """Raises UserError for a value that means nothing."""
        if not re.fullmatch("file|lines|blank_line|separator:.+", self.documents, re.DOTALL):
            raise UserError(
                f"--documents={self.documents}: write file, lines, blank_line or separator:TEXT"
            )
        if (
            self.tokenizer == "none"
            and not self.eos_token.isdecimal()
            and (self.eos_token or self.pack == "document")
        ):
            raise UserError(
                "--tokenizer=none: give the token id that ends documents, as in --eos_token=0, or "
                "--pack=none, which takes the rows as they are"
            )
        if self.splits == "official" and self.split:
            raise UserError(f"--split={self.split} and --splits=official exclude each other")
        if self.vocab_size and self.tokenizer != "none":
            raise UserError(
                f"--vocab_size={self.vocab_size} is for --tokenizer=none; a tokenizer has its own"
            )
        number, count = self.part_of()
        if number >= count:
            raise UserError(
                f"--part={self.part}: write I/N; the parts of {count or 4} are 0/{count or 4} to "
                f"{(count or 4) - 1}/{count or 4}"
            )
        if self.part and self.overwrite:
            raise UserError(
                "--overwrite with --part would remove what other parts have done; remove OUT by hand"
            )

    def part_of(self) -> tuple[int, int]:
        """(number from 0, count of parts) as `part` says; without it, the only one; 0 of 0 for what it can't read."""
        match = re.fullmatch(r"(\d+)/(\d+)", self.part or "0/1")
        return (int(match[1]), int(match[2])) if match else (0, 0)
