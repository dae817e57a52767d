"""The tokens that separate documents, and what is known of the tokenizer, by the settings."""

import functools
from typing import NamedTuple

from config.train_config import ReadingConfig
from mamba_fsdp.data.tokenizer import Words, identities_in, load_words
from mamba_fsdp.errors import UserError


class Known(NamedTuple):
    tokenizer: tuple[str, str]  # its identity and its folder or name, see Source
    bos: int  # -1: none
    eos: int  # -1: not known
    strip: tuple[int, ...]  # what is taken from the ends of documents, bos and eos among it

    @classmethod
    def of(cls, data: ReadingConfig) -> "Known":
        """As the settings say: eos_token, else the tokenizer's. Raises UserError for a token that there is not."""
        name = data.tokenizer.removesuffix("/tokenizer.json")

        def number(setting: str, text: str) -> int:
            if text in ("", "-1"):
                return -1
            if text.isdecimal():
                return int(text)
            ids = _words(name).encode(text) if name else []
            if len(ids) != 1:
                what = f"{len(ids)} tokens of {name}, not one" if name else "no id, and no --tokenizer is given"
                raise UserError(f"{setting}={text} is {what}; give the token's id")
            return ids[0]

        bos, eos = number("bos_token", data.bos_token), number("eos_token", data.eos_token)
        if eos < 0 and name and (own := _words(name).eos) is not None:
            eos = own
        strip = {number("strip_tokens", text) for text in data.strip_tokens} | {bos, eos}
        return cls((_identity(name), name), bos, eos, tuple(sorted(strip - {-1})))


@functools.cache
def _words(name: str) -> Words:
    return load_words(name)


@functools.cache
def _identity(name: str) -> str:
    return next(identities_in(name), "") if name else ""
