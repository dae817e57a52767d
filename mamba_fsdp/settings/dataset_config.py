"""Defines the options of get_dataset.py. Each field has a type, a default and bounds; the string below it is its help text."""

import re
from dataclasses import dataclass

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import setting

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int32", "int64")


@dataclass
class DatasetConfig:
    """Options for converting text, or token ids in another format, to token stores."""

    tokenizer: str = setting("train:4096", is_path=True, elsewhere="tokenizer_name tokenizer_path")
    """Tokenizer. train:SIZE trains a byte-level BPE tokenizer with SIZE tokens on the input. Any other value is the name
    or path of a transformers tokenizer, or a tokenizer.json file. none: the input is token ids."""
    eos_token: str = setting("", elsewhere="eos eos_id eos_token_id eod_id")
    """The token that ends each document; its id with --tokenizer=none. Empty: the end-of-text token of the tokenizer,
    or <|endoftext|> for a tokenizer that is trained here."""
    bos: bool = setting(False)
    """Put the tokenizer's bos token before each document. The tokenizer that is saved with runs and exports then adds it
    too."""
    lossy_tokenizer: bool = setting(False)
    """Import the text even if encoding and decoding it changes more than a fifth of its characters."""
    validation_fraction: float = setting(
        0.01, at_least=0, below=1, elsewhere="val_fraction validation_split_percentage test_size"
    )
    """Fraction of the tokens to hold out as OUT/validation. They are taken as spans from all over the input. 0: no
    validation data."""
    splits: str = setting("held_out", choices=("held_out", "official"))
    """held_out: OUT/validation is a fraction of the input (see validation_fraction). official: the input's own splits
    become OUT/train, OUT/validation and OUT/test. A split is a folder or file named train, validation or test, or a
    split of a dataset on the Hub."""
    documents: str = setting("file")
    """How to split text files into documents: file (each file is one document), lines (each line is one), blank_line (at
    blank lines), or separator:TEXT (at each TEXT), for example separator:'<|endoftext|>'."""
    text_column: str = setting(
        "text", elsewhere="text_field text_key json_keys column_name col_name"
    )
    """The column or JSON field that contains the text. It can also contain lists of token ids; --tokenizer is then the
    tokenizer that produced them. A nested field is written document.text."""
    format: str = setting(
        "auto", choices=("auto", "text", "json", "csv", "parquet", "arrow", "ids")
    )
    """Format of the files. auto: detect it from the file extension, or from the content of files without one. ids: flat
    files of token ids."""
    encoding: str = setting("", elsewhere="file_encoding charset")
    """Encoding of text, JSON and CSV files that are not UTF-8, by its name in Python: cp1252, cp1251, gb18030. In a file
    that is mostly UTF-8, it is used only for the bytes that are not valid UTF-8."""
    dtype: str = setting("auto", choices=("auto", *DTYPES), elsewhere="token_dtype memmap_dtype")
    """Type of the token ids in flat files (.bin, .npy). nanoGPT writes uint16, OLMo uint16 or uint32. auto: read the
    type from the NumPy header."""
    delimiter: str = setting("")
    """The character that separates the fields of CSV files. Empty: comma, semicolon, tab or vertical bar, whichever
    occurs most often in the header."""
    config: str = setting("", elsewhere="dataset_config dataset_config_name subset")
    """Name of the configuration (subset) of a dataset on the Hub."""
    split: str = setting("")
    """The split to read from a dataset on the Hub, or from a folder with train/ and validation/. all: every split.
    Empty: train, if the input has splits."""
    pack: str = setting("document", choices=("document", "none"))
    """document: put the end-of-text token after each document. none: add no token; use it if the rows of token ids are
    consecutive blocks of one long text."""
    strip_tokens: list[str] = setting([])
    """Token ids to remove from both ends of each document, in addition to the tokenizer's bos and eos. Only for input
    that consists of token ids."""
    vocab_size: int = setting(0, at_least=0)
    """With --tokenizer=none: the largest token id plus one. Up to 65,536, the store takes two bytes per token, above that
    four."""
    part: str = setting("")
    """Convert only part I of N, written I/N and counted from 0, for example 0/4 to 3/4. N processes, on any machines that
    share OUT, convert one part each: a share of the files, or of the documents if there are fewer files than parts. The
    last process to finish completes OUT."""
    shard_tokens: int = setting(1 << 28, at_least=1, at_most=1 << 40)
    """Maximal number of tokens in each file of a store."""
    skip_unreadable: bool = setting(False)
    """Skip input that can't be read instead of stopping: broken records, the rest of a damaged file, and missing files of
    a numbered set. The last lines of the output count them."""
    overwrite: bool = setting(False, elsewhere="overwrite_cache force")
    """Replace the output of an earlier import in OUT."""

    def check(self) -> None:
        """Checks the options. Raises UserError for an invalid value, and for options that exclude each other."""
        if not re.fullmatch("file|lines|blank_line|separator:.+", self.documents, re.DOTALL):
            raise UserError(
                f"--documents={self.documents}: write file, lines, blank_line or separator:TEXT"
            )
        self._check_tokenizer()
        if not all(token.isdecimal() for token in self.strip_tokens):
            raise UserError(
                f"--strip_tokens={','.join(self.strip_tokens)}: give token ids, as in 1,2"
            )
        if self.splits == "official" and self.split:
            raise UserError(
                f"--split={self.split} selects the split to read, but --splits=official imports all splits; give only one of them"
            )
        self._check_encoding()
        if len(self.delimiter) > 1:
            raise UserError(
                f"--delimiter={self.delimiter}: give one character, as in --delimiter=^"
            )
        self._check_part()

    def _check_tokenizer(self) -> None:
        if self.tokenizer == "none":
            needs_eos = self.pack != "none"
            if not self.eos_token.isdecimal() and (self.eos_token or needs_eos):
                raise UserError(
                    f"--tokenizer=none: eos_token {self.eos_token!r} is not a token id; give the token id that ends documents, "
                    "as in --eos_token=0, or --pack=none to add no token to the rows"
                )
            if not self.vocab_size:
                raise UserError(
                    "--tokenizer=none: give --vocab_size=N too, one more than the largest token id"
                )
        if self.bos and (self.tokenizer == "none" or self.tokenizer.startswith("train:")):
            raise UserError(
                f"--bos=true needs a tokenizer with a bos token; --tokenizer={self.tokenizer} has none"
            )
        if self.tokenizer != "none" and self.vocab_size:
            raise UserError(
                f"--vocab_size={self.vocab_size} is for --tokenizer=none only; leave it out: the tokenizer has a vocabulary size"
            )

    def _check_part(self) -> None:
        number, count = self.part_of()
        if number >= count:
            parts = max(count, 4)
            raise UserError(
                f"--part={self.part}: write I/N; the parts of {parts} are 0/{parts} to {parts - 1}/{parts}"
            )
        if self.part and self.overwrite:
            raise UserError(
                "--overwrite with --part would remove what other parts have done; remove OUT by hand and leave --overwrite out"
            )

    def _check_encoding(self) -> None:
        try:
            "a".encode(self.encoding or "utf-8")
        except (LookupError, UnicodeError):
            raise UserError(
                f"--encoding={self.encoding}: Python does not know this text encoding; give a name that it knows, as in --encoding=cp1252"
            ) from None

    def part_of(self) -> tuple[int, int]:
        """Parses `part`. Returns (index of the part, number of parts): (0, 1) if it is empty, (0, 0) if it is invalid."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.part or "0/1")
        if not match:
            return 0, 0
        return int(match[1]), int(match[2])
