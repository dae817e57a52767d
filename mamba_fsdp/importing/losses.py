"""Counts the characters that a tokenizer loses: those that don't come back when the ids of a text are decoded."""

from collections import Counter
from collections.abc import Iterable
from os.path import commonprefix

from mamba_fsdp.data.tokenizer import TextTokenizer
from mamba_fsdp.errors import UserError

MOST = 0.2  # share of characters lost without which an import is refused
AROUND = 12  # characters of the example before and after the first one that is lost


def check_losses(tokenizer: TextTokenizer, texts: Iterable[str], is_accepted: bool) -> None:
    """Prints a warning with an example if the tokenizer loses characters of the texts. Raises UserError if it loses more
    than MOST and that is not accepted."""
    total = 0
    lost = 0
    example = ""
    for text in texts:
        text = text.strip()  # some decoders take the white space that their encoders put there
        back = round_trip(tokenizer, text).strip()
        missing = Counter(text) - Counter(back)  # wherever they were
        total += len(text)
        lost += sum(missing.values())
        if missing and not example:
            first = len(commonprefix([text, back]))
            part = text[max(0, first - AROUND) : first + AROUND].strip()
            example = f"{part!r} comes back as {round_trip(tokenizer, part)!r}"
    if not lost:
        return
    loss = (
        f"{lost / total:.2%} of the text ({lost:,} of {total:,} characters of a sample) does not come back from "
        f"the tokenizer: {example}"
    )
    if lost > MOST * total and not is_accepted:
        raise UserError(f"{loss}; take another tokenizer, or give --lossy_tokenizer=true")
    print(f"warning: {loss}", flush=True)


def round_trip(tokenizer: TextTokenizer, text: str) -> str:
    """Encodes and decodes a text. Leaves out the token for unknown text."""
    unknown = getattr(tokenizer.backend.model, "unk_token", None)
    unknown_id = tokenizer.backend.token_to_id(unknown) if unknown else None
    (ids,) = tokenizer.encode_documents([text])
    return tokenizer.decode(
        [number for number in ids[len(tokenizer.prefix) :] if number != unknown_id]
    )
