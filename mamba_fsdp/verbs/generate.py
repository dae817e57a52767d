"""python -m mamba_fsdp generate MODEL [--prompt=TEXT] [--length=100] [--temperature=0.8] [--top_k=0] [--top_p=1.0]
                                    [--seed=0] [--tokenizer=PATH]

Continue a text. MODEL is a run folder, a checkpoint, a consolidated.00.pth, or a transformers or state-spaces folder.

  --prompt       text to continue; without it the text begins at a document's start
  --length       tokens to generate at most; the end of the document ends it
  --temperature  0 always takes the likeliest token; 1 draws as the model says
  --top_k        draw from the k likeliest tokens only; 0 from all
  --top_p        draw from the likeliest tokens that together have this probability
  --seed         equal seeds give equal texts
  --tokenizer    a tokenizer's folder, where MODEL came without one
  --allow_other_tokenizer  where you know that --tokenizer fits MODEL, which came with another
  --model_name   the preset that MODEL is, where there is no config.json beside it
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from config.fields import Bounds
from mamba_fsdp.errors import UserError

if TYPE_CHECKING:
    from mamba_fsdp.verbs.loading import Loaded


def main(model: str, prompt: str = "", length: Annotated[int, Bounds(at_least=1)] = 100,
         temperature: Annotated[float, Bounds(at_least=0)] = 0.8, top_k: Annotated[int, Bounds(at_least=0)] = 0,
         top_p: Annotated[float, Bounds(above=0, at_most=1)] = 1.0, seed: int = 0, tokenizer: str = "",
         allow_other_tokenizer: bool = False, model_name: str = "") -> None:
    refuse_invalid(prompt)
    from mamba_fsdp.verbs.loading import load

    pieces = generate(load(model, model_name=model_name), prompt, length=length, temperature=temperature, top_k=top_k,
                      top_p=top_p, seed=seed, tokenizer=tokenizer, allow_other_tokenizer=allow_other_tokenizer)
    print(prompt, end="")
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def generate(model: "Loaded", prompt: str = "", *, length: int = 100, temperature: float = 0.8, top_k: int = 0,
             top_p: float = 1.0, seed: int = 0, tokenizer: str = "",
             allow_other_tokenizer: bool = False) -> Iterator[str]:
    """Yields the text that continues `prompt`, piece by piece; the options are those of the command above.

    Raises UserError for a prompt that is no valid Unicode, and for a model with another tokenizer or none.
    """
    import torch

    from mamba_fsdp.data.tokenizer import identities_in, load_words, refuse_other_tokenizer
    from mamba_fsdp.model import generate

    refuse_invalid(prompt)
    if tokenizer and not allow_other_tokenizer:
        refuse_other_tokenizer(tokenizer, next(identities_in(tokenizer), ""), model.weights.source,
                               model.weights.tokenizer_identities())
    words = load_words(tokenizer or model.tokenizer_path)
    ids: list[int | None] = [*words.encode(prompt)]
    if not ids and words.eos is None:
        raise UserError("the tokenizer names no token that ends a document, so a text can't begin: give a --prompt")
    ids = ids or [words.eos]
    device = next(model.network.parameters()).device
    tokens, shown = [], ""
    drawn = generate.generate(model.network, torch.tensor([ids], device=device), length=length, temperature=temperature,
                              top_k=top_k, top_p=top_p, generator=torch.Generator(device=device).manual_seed(seed))
    for token in drawn:
        if int(token) == words.eos:
            break
        tokens.append(int(token))
        text = words.decode(tokens)
        if not text.endswith("\ufffd"):  # a character whose last bytes are still to come
            yield text[len(shown):]
            shown = text


def refuse_invalid(prompt: str) -> None:
    """Raises UserError for text that a shell gave in another encoding than UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt: invalid UTF-8 behind {prompt[:error.start][-20:]!r}; write it in UTF-8, a file's "
                        "by iconv -f ISO-8859-1 -t UTF-8 FILE") from None
