"""Every option of get_dataset.py: name, type, default, bounds and meaning (the string below each field)."""

import re
from dataclasses import dataclass

from config.fields import setting
from mamba_fsdp.errors import UserError


@dataclass
class DatasetConfig:
    """How text, or tokens of another format, become token stores."""

    tokenizer: str = setting("train:4096")
    """train:SIZE trains a byte-level BPE of that size on the input; else the name or path of a transformers tokenizer,
    or a tokenizer.json file; none takes token ids without one."""
    eos_token: str = setting("")
    """The token put after each document, with --tokenizer=none its number; empty takes the one that the tokenizer
    names."""
    validation_fraction: float = setting(0.01, at_least=0, below=1)
    """Share of the documents held out for OUT/validation; 0 for none. Where that is no whole document, the last tokens
    of the input are."""
    splits: str = setting("held_out", choices=("held_out", "official"))
    """Where OUT/validation comes from: a share is held out, or official: the input's own splits become OUT/train,
    OUT/validation and OUT/test. Those of a datasets name, or files and folders named so, as save_to_disk names them."""
    documents: str = setting("file")
    """What a document of a .txt file is: file (all of it), lines, blank_line (what stands between blank lines), or
    separator:TEXT, such as separator:'<|endoftext|>'."""
    text_column: str = setting("text")
    """The column or JSON field that holds the text, or token ids as a list, taken as they are (then --tokenizer names
    the one that made them). document.text is the field text within document."""
    format: str = setting("auto", choices=("auto", "text", "json", "csv", "parquet", "arrow"))
    """How to read the files; auto goes by their names."""
    config: str = setting("")
    """Configuration of a datasets name."""
    split: str = setting("")
    """Split of a datasets name or a save_to_disk folder; empty takes train where there are several."""
    pack: str = setting("document", choices=("document", "none"))
    """What comes after each document: document puts its end-of-text token there, none nothing: rows of token ids that
    are blocks of one long text follow each other as they are."""
    strip_tokens: list[str] = setting([])
    """Token ids to take from both ends of documents that come as token ids, besides the tokenizer's own bos and eos."""
    vocab_size: int = setting(0, at_least=0)
    """With --tokenizer=none, one more than the largest token id; up to 65,536 a token takes two bytes, else four."""
    part: str = setting("")
    """I/N, such as 0/4 to 3/4: this is one of N processes, on any machines that share OUT. Each does its share of the
    input's files (of its documents where there are fewer files than parts); the last to end completes OUT."""
    shard_tokens: int = setting(1 << 28, at_least=1)
    """Tokens after which a store begins its next file."""
    overwrite: bool = setting(False)
    """Replace what an earlier run left in OUT."""

    def check(self) -> None:
        """Raises UserError for a value that means nothing."""
        if not re.fullmatch("file|lines|blank_line|separator:.+", self.documents, re.DOTALL):
            raise UserError(
                f"--documents={self.documents}: write file, lines, blank_line or separator:TEXT"
            )
        if self.tokenizer == "none":
            needs_eos = self.pack != "none"
            if not self.eos_token.isdecimal() and (self.eos_token or needs_eos):
                raise UserError(
                    "--tokenizer=none: give the token id that ends documents, as in --eos_token=0, or "
                    "--pack=none, which takes the rows as they are"
                )
            if not self.vocab_size:
                raise UserError(
                    "--tokenizer=none: give --vocab_size=N too, one more than the largest token id"
                )
        elif self.vocab_size:
            raise UserError(
                f"--vocab_size={self.vocab_size} is for --tokenizer=none; a tokenizer has its own"
            )
        if not all(token.isdecimal() for token in self.strip_tokens):
            raise UserError(
                f"--strip_tokens={','.join(self.strip_tokens)}: give token ids, as in 1,2"
            )
        if self.splits == "official" and self.split:
            raise UserError(f"--split={self.split} and --splits=official exclude each other")
        number, count = self.part_of()
        if number >= count:
            last = max(count, 4) - 1
            raise UserError(
                f"--part={self.part}: write I/N; the parts of {last + 1} are 0/{last + 1} to {last}/{last + 1}"
            )
        if self.part and self.overwrite:
            raise UserError(
                "--overwrite with --part would remove what other parts have done; remove OUT by hand"
            )

    def part_of(self) -> tuple[int, int]:
        """Returns (number from 0, count of parts) as `part` says: (0, 1) without it, (0, 0) if it can't be read."""
        match = re.fullmatch(r"(\d+)/(\d+)", self.part or "0/1")
        if not match:
            return 0, 0
        return int(match[1]), int(match[2])
