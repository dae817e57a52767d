"""python -m mamba_fsdp generate MODEL [--prompt=TEXT ...] [--length=100] [--temperature=0.8] [--top_k=0] [--top_p=1.0]
                                    [--stop=TEXT ...] [--seed=0] [--tokenizer=PATH]

Continue a text as it comes. MODEL is a run folder, a checkpoint, a consolidated.00.pth, or a transformers or
state-spaces folder. The text goes to stdout, the speed to stderr; Ctrl-C ends it.

  --prompt       text to continue; without it the text begins at a document's start. Repeat it for several, which are
                 continued together and shown in their order once all are written
  --length       tokens to generate at most; the end of the document ends it
  --stop         text that ends it, and is not shown; may be repeated
  --temperature  0 always takes the likeliest token; 1 draws as the model says
  --top_k        draw from the k likeliest tokens only; 0 from all
  --top_p        draw from the likeliest tokens that together have this probability
  --seed         equal seeds give equal texts
  --tokenizer    a tokenizer's folder, where MODEL came without one
  --allow_other_tokenizer  where you know that --tokenizer fits MODEL, which came with another
  --model_name   the preset that MODEL is, where there is no config.json beside it
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from config.fields import setting
from mamba_fsdp.errors import UserError

if TYPE_CHECKING:
    from mamba_fsdp.data.tokenizer import TextTokenizer
    from mamba_fsdp.verbs.loading import Loaded


@dataclass
class GenerationConfig:
    """The options beside prompts and stops, as the help page above tells them."""

    length: int = setting(100, at_least=1)
    temperature: float = setting(0.8, at_least=0)
    top_k: int = setting(0, at_least=0)
    top_p: float = setting(1.0, above=0, at_most=1)
    seed: int = setting(0)
    tokenizer: str = setting("")
    allow_other_tokenizer: bool = setting(False)
    model_name: str = setting("")


DEFAULTS = GenerationConfig()


@dataclass
class Piece:
    """What one token adds to the text of a prompt."""

    prompt: int  # its number
    text: str  # may be empty: see TextStream.add


def main(
    model: str,
    prompt: tuple[str, ...] = (),
    stop: tuple[str, ...] = (),
    options: GenerationConfig = DEFAULTS,
) -> None:
    prompts = prompt or ("",)
    for text in (*prompts, *stop):
        check_valid(text)
    from mamba_fsdp.verbs.loading import load

    loaded = load(model, model_name=options.model_name)
    pieces = continuations(loaded, prompts, stop, options)
    texts = list(prompts)
    count = 0
    began = time.perf_counter()
    try:
        for piece in pieces:
            if len(prompts) == 1:
                shown_before = "" if count else prompts[0]
                print(shown_before + piece.text, end="", flush=True)
            texts[piece.prompt] += piece.text
            count += 1
    finally:  # after Ctrl-C too
        if count:
            _show_end(texts, count, time.perf_counter() - began)


def _show_end(texts, count, seconds):
    if len(texts) == 1:  # which is shown already
        print(flush=True)
    else:
        for number, text in enumerate(texts, 1):
            if number > 1:
                print(f"--- {number} of {len(texts)} ---")
            print(text, flush=True)
    speed = f"{count:,} tokens in {seconds:.2f} s, {count / seconds:,.0f} tokens/s"
    print(speed, file=sys.stderr)


def generate(
    model: "Loaded", prompt: str = "", stop: Sequence[str] = (), **options: Any
) -> Iterator[str]:
    """Yields the text that continues `prompt`, piece by piece; options: the fields of GenerationConfig."""
    for piece in continuations(model, [prompt], stop, GenerationConfig(**options)):
        yield piece.text


def continuations(
    model: "Loaded",
    prompts: Sequence[str],
    stop: Sequence[str] = (),
    options: GenerationConfig = DEFAULTS,
) -> Iterator[Piece]:
    """Yields a Piece for each token that continues one of the prompts, which are continued together.

    stop: texts that end one. Raises UserError for a prompt that is no valid Unicode, and for a model with another
    tokenizer or none.
    """
    import torch

    from mamba_fsdp.model import generate

    for prompt in prompts:
        check_valid(prompt)
    tokenizer = _load_tokenizer(model, options)
    if tokenizer.eos is None and "" in prompts:
        raise UserError(
            "the tokenizer names no token that ends a document, so a text can't begin: give a --prompt"
        )
    device = next(model.network.parameters()).device
    prompt_ids = []
    for prompt in prompts:
        ids: list = tokenizer.encode(prompt) or [tokenizer.eos]
        prompt_ids.append(torch.tensor(ids, device=device))
    steps = generate.generate(
        model.network,
        prompt_ids,
        length=options.length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        generator=torch.Generator(device=device).manual_seed(options.seed),
    )
    streams = [TextStream(tokenizer, stop) for _ in prompts]
    for number, step in enumerate(steps, 1):
        for index, (stream, token) in enumerate(zip(streams, step.tolist())):
            if not stream.ended:
                yield Piece(index, stream.add(token, is_last=number == options.length))
        if all(stream.ended for stream in streams):
            break


def _load_tokenizer(model, options):
    from mamba_fsdp.data.tokenizer import check_tokenizer, identities_in, load_words

    if options.tokenizer and not options.allow_other_tokenizer:
        identity = next(identities_in(options.tokenizer), "")
        known = model.weights.tokenizer_identities()
        check_tokenizer(options.tokenizer, identity, model.weights.source, known)
    return load_words(options.tokenizer or model.tokenizer_path)


class TextStream:
    """The text of tokens that come one by one.

    What can't be shown yet is held back: a character whose last bytes are still to come, and what may be the beginning
    of a stop. `ended` is set by the end of the document, by a stop and by the last token.
    """

    def __init__(self, tokenizer: "TextTokenizer", stops: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stops = [stop for stop in stops if stop]
        self.ended = False
        self.held = ""  # text that is decoded and not shown
        self.decoded: list[
            int
        ] = []  # the latest tokens whose text is known: they say how the next is written
        self.pending: list[int] = []  # tokens that end within a character

    def add(self, token: int, *, is_last: bool) -> str:
        """Returns the text to be shown now. is_last: no more tokens come, whatever this one is."""
        if token == self.tokenizer.eos:
            is_last = True
        else:
            self.pending.append(token)
        before = self.tokenizer.decode(self.decoded)
        now = self.tokenizer.decode(self.decoded + self.pending)
        if is_last or not now.endswith("\ufffd"):  # which stands for a part of a character
            self.held += now[len(before) :]
            self.decoded = self.pending
            self.pending = []
        self.ended = is_last
        places = [self.held.find(stop) for stop in self.stops if stop in self.held]
        if places:
            self.ended = True
            return self.held[: min(places)]
        end = len(self.held)
        if not is_last:
            end -= self._length_of_a_begun_stop()
        shown = self.held[:end]
        self.held = self.held[end:]
        return shown

    def _length_of_a_begun_stop(self) -> int:
        longest = 0
        for stop in self.stops:
            for size in range(1, len(stop)):
                if self.held.endswith(stop[:size]):
                    longest = max(longest, size)
        return longest


def check_valid(prompt: str) -> None:
    """Raises UserError for text that a shell gave in another encoding than UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--prompt: invalid UTF-8 behind {prompt[: error.start][-20:]!r}; write it in UTF-8, a file's "
            "by iconv -f ISO-8859-1 -t UTF-8 FILE"
        ) from None
