"""Counts the characters that a tokenizer loses: characters of a text that are missing after encoding and decoding it."""

from collections import Counter
from collections.abc import Iterable
from os.path import commonprefix

from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.errors import UserError

MAX_LOST_SHARE = 0.2  # if a larger share of the characters is lost, the import is refused
EXCERPT = 12  # characters in the example before and after the first lost one


def check_losses(tokenizer: TextTokenizer, texts: Iterable[str], is_accepted: bool) -> None:
    """Prints a warning with an example if the tokenizer loses characters of the texts. Raises UserError if it loses more
    than MAX_LOST_SHARE of them, unless `is_accepted`."""
    total = 0
    lost = 0
    example = ""
    for text in texts:
        text = text.strip()  # some decoders add or remove white space at the ends
        back = round_trip(tokenizer, text).strip()
        missing = Counter(text) - Counter(back)
        total += len(text)
        lost += sum(missing.values())
        if missing and not example:
            first = len(commonprefix([text, back]))
            part = text[max(0, first - EXCERPT) : first + EXCERPT].strip()
            example = f"{part!r} becomes {round_trip(tokenizer, part)!r}"
    if not lost:
        return
    loss = f"the tokenizer loses {lost / total:.2%} of the text ({lost:,} of {total:,} characters of a sample): {example}"
    if lost > MAX_LOST_SHARE * total and not is_accepted:
        raise UserError(f"{loss}; use another tokenizer, or give --lossy_tokenizer=true")
    print(f"warning: {loss}", flush=True)


def round_trip(tokenizer: TextTokenizer, text: str) -> str:
    """Encodes and decodes a text, without the token that represents unknown text."""
    unknown = getattr(tokenizer.backend.model, "unk_token", None)
    unknown_id = tokenizer.backend.token_to_id(unknown) if unknown else None
    (ids,) = tokenizer.encode_documents([text])
    return tokenizer.decode(
        [number for number in ids[len(tokenizer.prefix) :] if number != unknown_id]
    )
