"""python -m mamba_fsdp generate MODEL [--prompt=TEXT ...] [--length=100] [--temperature=0.8] [--top_k=0] [--top_p=1.0]
                                    [--stop=TEXT ...] [--seed=0] [--tokenizer=PATH]

Continue a text as it comes. MODEL is a run folder, a checkpoint, a consolidated.00.pth, or a transformers or
state-spaces folder. The text goes to stdout, the speed to stderr; Ctrl-C ends it.

  --prompt       text to continue; without it the text begins at a document's start. Repeat it for several, which are
                 continued together and shown in their order
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
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from config.fields import Bounds
from mamba_fsdp.errors import UserError

if TYPE_CHECKING:
    from mamba_fsdp.data.tokenizer import TextTokenizer
    from mamba_fsdp.verbs.loading import Loaded

BETWEEN = "\n--- {} of {} ---\n"  # texts


class Piece(NamedTuple):
    """What a token adds to the text of a prompt, by its number: maybe nothing. last: it ends with it."""

    prompt: int
    text: str
    last: bool


def main(
    model: str,
    prompt: tuple[str, ...] = (),
    length: Annotated[int, Bounds(at_least=1)] = 100,
    temperature: Annotated[float, Bounds(at_least=0)] = 0.8,
    top_k: Annotated[int, Bounds(at_least=0)] = 0,
    top_p: Annotated[float, Bounds(above=0, at_most=1)] = 1.0,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    tokenizer: str = "",
    allow_other_tokenizer: bool = False,
    model_name: str = "",
) -> None:
    prompts = [prompt] if isinstance(prompt, str) else prompt or [""]
    for text in (*prompts, *stop):
        check_valid(text)
    from mamba_fsdp.verbs.loading import load

    loaded, shown, count = load(model, model_name=model_name), -1, 0
    pieces = continuations(
        loaded,
        prompts,
        length=length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        tokenizer=tokenizer,
        allow_other_tokenizer=allow_other_tokenizer,
    )
    began = time.perf_counter()
    try:
        for index, text, _ in in_order(pieces, len(prompts)):
            if index > shown:
                print(
                    BETWEEN.format(index + 1, len(prompts)) * (index > 0) + prompts[index], end=""
                )
            print(text, end="", flush=True)
            shown, count = index, count + 1
    finally:  # Ctrl-C too
        if count:
            seconds = time.perf_counter() - began
            print(flush=True)
            print(
                f"{count:,} tokens in {seconds:.2f} s, {count / seconds:,.0f} tokens/s",
                file=sys.stderr,
            )


def generate(model: "Loaded", prompt: str = "", **options: Any) -> Iterator[str]:
    """Yields the text that continues `prompt`, piece by piece; the options are those of `continuations`."""
    return (piece.text for piece in continuations(model, [prompt], **options))


def continuations(
    model: "Loaded",
    prompts: Sequence[str],
    *,
    length: int = 100,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    tokenizer: str = "",
    allow_other_tokenizer: bool = False,
) -> Iterator[Piece]:
    """Yields a Piece for each token that continues one of the prompts; the options are those of the command above.

    Raises UserError for a prompt that is no valid Unicode, and for a model with another tokenizer or none.
    """
    import torch

    from mamba_fsdp.data.tokenizer import check_tokenizer, identities_in, load_words
    from mamba_fsdp.model import generate

    for prompt in prompts:
        check_valid(prompt)
    if tokenizer and not allow_other_tokenizer:
        check_tokenizer(
            tokenizer,
            next(identities_in(tokenizer), ""),
            model.weights.source,
            model.weights.tokenizer_identities(),
        )
    words = load_words(tokenizer or model.tokenizer_path)
    if words.eos is None and "" in prompts:
        raise UserError(
            "the tokenizer names no token that ends a document, so a text can't begin: give a --prompt"
        )
    device = next(model.network.parameters()).device
    start: list[Any] = [words.eos]
    ids = [torch.tensor(words.encode(prompt) or start, device=device) for prompt in prompts]
    drawn = generate.generate(
        model.network,
        ids,
        length=length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=torch.Generator(device=device).manual_seed(seed),
    )
    texts = {index: Text(words, stop) for index in range(len(ids))}
    for remaining, tokens in zip(reversed(range(length)), drawn):
        following = tokens.tolist()
        for index, text in [*texts.items()]:
            piece, last = text.add(following[index], last=not remaining)
            yield Piece(index, piece, last)
            if last:
                del texts[index]
        if not texts:
            break


class Text:
    """What tokens that come one by one say. stops: what ends it."""

    def __init__(self, words: "TextTokenizer", stops: Sequence[str] = ()):
        self.words, self.stops, self.held = words, [stop for stop in stops if stop], ""
        self.tokens: list[int] = []
        self.begin, self.end = (
            0,
            0,
        )  # tokens before `end` are said; those from `begin` on say how the next is written

    def add(self, token: int, *, last: bool) -> tuple[str, bool]:
        """(what is to be shown now, whether the text ends). A character whose last bytes are still to come waits, and
        so does what may begin a stop."""
        last = last or token == self.words.eos
        self.tokens += [token] * (token != self.words.eos)
        before, now = (self.words.decode(self.tokens[self.begin : end]) for end in (self.end, None))
        if last or not now.endswith("\ufffd"):
            self.begin, self.end, self.held = (
                self.end,
                len(self.tokens),
                self.held + now[len(before) :],
            )
        if found := [at for stop in self.stops if (at := self.held.find(stop)) >= 0]:
            return self.held[: min(found)], True
        wait = max(
            (
                size
                for stop in self.stops
                for size in range(1, len(stop))
                if self.held.endswith(stop[:size])
            ),
            default=0,
        ) * (not last)
        shown, self.held = self.held[: len(self.held) - wait], self.held[len(self.held) - wait :]
        return shown, last


def in_order(pieces: Iterator[Piece], count: int) -> Iterator[Piece]:
    """Those of the first of `count` texts as they come, then what there is of the second by then, and so on."""
    waiting: list[list[Piece]] = [[] for _ in range(count)]
    current = 0
    for piece in pieces:
        waiting[piece.prompt].append(piece)
        while current < count and waiting[current]:
            due, waiting[current] = waiting[current], []
            yield from due
            current += due[-1].last


def check_valid(prompt: str) -> None:
    """Raises UserError for text that a shell gave in another encoding than UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--prompt: invalid UTF-8 behind {prompt[: error.start][-20:]!r}; write it in UTF-8, a file's "
            "by iconv -f ISO-8859-1 -t UTF-8 FILE"
        ) from None
