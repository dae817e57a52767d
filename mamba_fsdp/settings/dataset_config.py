"""Describes every option of get_dataset.py: name, type, default, bounds and meaning (the string below each field)."""

import re
from dataclasses import dataclass

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import setting

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int32", "int64")


@dataclass
class DatasetConfig:
    """How text, or token ids in another format, becomes token stores."""

    tokenizer: str = setting("train:4096", is_path=True, elsewhere="tokenizer_name tokenizer_path")
    """train:SIZE trains a byte-level BPE tokenizer of SIZE tokens on the input. Otherwise: the name or path of a
    transformers tokenizer, or a tokenizer.json file. none: the input is token ids."""
    eos_token: str = setting("", elsewhere="eos eos_id eos_token_id eod_id")
    """The token that ends each document; with --tokenizer=none its id. Empty: the end-of-text token that the tokenizer
    names; a trained tokenizer names <|endoftext|>."""
    bos: bool = setting(False)
    """Put the tokenizer's bos before each document; the tokenizer of runs and exports then adds it too. Otherwise
    neither does."""
    lossy_tokenizer: bool = setting(False)
    """Import text though more than a fifth of its characters don't come back from the tokenizer."""
    validation_fraction: float = setting(
        0.01, at_least=0, below=1, elsewhere="val_fraction validation_split_percentage test_size"
    )
    """Share of the tokens held out as OUT/validation, in spans over the whole input; 0 holds out none."""
    splits: str = setting("held_out", choices=("held_out", "official"))
    """held_out: OUT/validation is a share of the input. official: the input's own splits become OUT/train,
    OUT/validation and OUT/test. A split is a folder or file named train, validation or test, or a split of a name on
    the Hub."""
    documents: str = setting("file")
    """What one document of a text file is: file (the whole file), lines (each line), blank_line (the text between blank
    lines), or separator:TEXT (the text between separators), as in separator:'<|endoftext|>'."""
    text_column: str = setting(
        "text", elsewhere="text_field text_key json_keys column_name col_name"
    )
    """The column or JSON field that holds the text, or a list of token ids (then --tokenizer names the tokenizer that
    made them). document.text is the field text inside document."""
    format: str = setting(
        "auto", choices=("auto", "text", "json", "csv", "parquet", "arrow", "ids")
    )
    """Format of the files. auto: their names show it, or their content if a name has no ending. ids: token ids, one after
    the other."""
    encoding: str = setting("", elsewhere="file_encoding charset")
    """Encoding of text, JSON and CSV files that are not UTF-8, as Python names it: cp1252, cp1251, gb18030. In a file that
    is UTF-8 but for some bytes, it decodes these bytes alone."""
    dtype: str = setting("auto", choices=("auto", *DTYPES), elsewhere="token_dtype memmap_dtype")
    """Type of the token ids in flat files (.bin, .npy): uint16 in nanoGPT's, uint16 or uint32 in OLMo's. auto: NumPy's
    header names it."""
    delimiter: str = setting("")
    """The character between the fields of CSV files. Empty: whichever of comma, semicolon, tab and bar occurs most
    often in the header."""
    config: str = setting("", elsewhere="dataset_config dataset_config_name subset")
    """Configuration of a dataset on the Hub."""
    split: str = setting("")
    """The split to read, of a dataset on the Hub or of a folder with train/ and validation/. all: every split. Empty:
    train, if the input has splits."""
    pack: str = setting("document", choices=("document", "none"))
    """document: put the end-of-text token after each document. none: do not, for rows of token ids that are blocks of
    one long text."""
    strip_tokens: list[str] = setting([])
    """Token ids to remove from both ends of documents that come as token ids, besides the tokenizer's bos and eos."""
    vocab_size: int = setting(0, at_least=0)
    """With --tokenizer=none: the largest token id plus one. A token takes two bytes up to 65,536, above that four."""
    part: str = setting("")
    """I/N, as in 0/4 to 3/4: this process is one of N, on any machines that share OUT. Each process reads its share of
    the input's files, or of its documents if there are fewer files than parts. The last process to finish completes
    OUT."""
    shard_tokens: int = setting(1 << 28, at_least=1, at_most=1 << 40)
    """A store begins its next file after this many tokens."""
    skip_unreadable: bool = setting(False)
    """Skip records that can't be read, files from a fault on, and missing parts of numbered sets, instead of stopping there.
    The last lines count them."""
    overwrite: bool = setting(False, elsewhere="overwrite_cache force")
    """Replace the output of an earlier run in OUT."""

    def check(self) -> None:
        """Raises UserError for a value without meaning, or for options that exclude each other."""
        if not re.fullmatch("file|lines|blank_line|separator:.+", self.documents, re.DOTALL):
            raise UserError(
                f"--documents={self.documents}: write file, lines, blank_line or separator:TEXT"
            )
        if self.tokenizer == "none":
            needs_eos = self.pack != "none"
            if not self.eos_token.isdecimal() and (self.eos_token or needs_eos):
                raise UserError(
                    f"--tokenizer=none: eos_token {self.eos_token!r} is no token id; give the token id that ends documents, "
                    "as in --eos_token=0, or --pack=none, which adds no token to the rows"
                )
            if not self.vocab_size:
                raise UserError(
                    "--tokenizer=none: give --vocab_size=N too, one more than the largest token id"
                )
        if self.bos and (self.tokenizer == "none" or self.tokenizer.startswith("train:")):
            raise UserError(
                f"--bos=true is for a tokenizer that has a bos; --tokenizer={self.tokenizer} has none"
            )
        if self.tokenizer != "none" and self.vocab_size:
            raise UserError(
                f"--vocab_size={self.vocab_size} is for --tokenizer=none; a tokenizer has its own"
            )
        if not all(token.isdecimal() for token in self.strip_tokens):
            raise UserError(
                f"--strip_tokens={','.join(self.strip_tokens)}: give token ids, as in 1,2"
            )
        if self.splits == "official" and self.split:
            raise UserError(f"--split={self.split} and --splits=official exclude each other")
        self._check_encoding()
        if len(self.delimiter) > 1:
            raise UserError(
                f"--delimiter={self.delimiter}: give one character, as in --delimiter=^"
            )
        number, count = self.part_of()
        if number >= count:
            parts = max(count, 4)
            raise UserError(
                f"--part={self.part}: write I/N; the parts of {parts} are 0/{parts} to {parts - 1}/{parts}"
            )
        if self.part and self.overwrite:
            raise UserError(
                "--overwrite with --part would remove what other parts have done; remove OUT by hand"
            )

    def _check_encoding(self) -> None:
        try:
            "a".encode(self.encoding or "utf-8")
        except (LookupError, UnicodeError):
            raise UserError(
                f"--encoding={self.encoding}: Python has no such encoding of text; give its name, as in --encoding=cp1252"
            ) from None

    def part_of(self) -> tuple[int, int]:
        """Returns (number from 0, count of parts) from `part`: (0, 1) if it is empty, (0, 0) if it can't be read."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.part or "0/1")
        if not match:
            return 0, 0
        return int(match[1]), int(match[2])
