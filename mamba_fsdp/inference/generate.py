"""Generates text with a trained model, and yields each piece as soon as it is generated."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import setting

if TYPE_CHECKING:
    from torch import Tensor

    from mamba_fsdp.data.tokenizer import TextTokenizer
    from mamba_fsdp.inference.loading import Loaded


@dataclass
class GenerationConfig:
    """The options of text generation."""

    prompt: str = setting("")
    """Text to continue. Without it, the model begins a new document."""
    length: int = setting(
        100, at_least=1, elsewhere="max_new_tokens max_tokens max_length num_tokens n_predict"
    )
    """Maximum number of tokens to generate. The text ends earlier if the model ends the document."""
    temperature: float = setting(0.8, at_least=0)
    """0: always take the most likely token. 1: draw from the model's probabilities."""
    top_k: int = setting(0, at_least=0)
    """Draw only from the k most likely tokens; 0: from all."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Draw only from the most likely tokens that together have this probability."""
    seed: int = setting(0, at_most=2**63 - 1)
    """Seed of the random numbers. Equal seeds give equal texts."""
    tokenizer: str = setting("", is_path=True, elsewhere="tokenizer_path tokenizer_name")
    """Folder of the tokenizer, if MODEL has none."""
    model_name: str = setting("", elsewhere="model_variant")
    """Preset of MODEL, if there is no config.json next to it."""


def generate(model: "Loaded | str | Path", options: GenerationConfig) -> Iterator[str]:
    """Continues the prompt, and yields the text of each token, or "" while a character is incomplete.

    model: the result of `load`, or a path that `load` accepts. Raises UserError for a prompt that is not valid Unicode,
    for a model that can't be loaded or has no tokenizer, and for an empty prompt if the tokenizer has no
    end-of-document token to begin with.
    """
    import torch

    from mamba_fsdp.data.tokenizer import load_for_prompts
    from mamba_fsdp.inference import decoding
    from mamba_fsdp.inference.loading import ensure_loaded

    check_valid(options.prompt)
    loaded = ensure_loaded(model, options.model_name)
    tokenizer = load_for_prompts(options.tokenizer or loaded.tokenizer_path)
    if tokenizer.eos is None and not options.prompt:
        raise UserError(
            "the tokenizer has no end-of-document token to start a text without a prompt; give a --prompt"
        )
    device = next(loaded.network.parameters()).device
    prompt_ids: list = tokenizer.encode(options.prompt) or [tokenizer.eos]
    steps = decoding.generate(
        loaded.network,
        torch.tensor([prompt_ids], device=device),
        length=options.length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        generator=torch.Generator(device=device).manual_seed(options.seed),
    )
    return _decode_steps(steps, tokenizer)


def _decode_steps(steps: Iterable["Tensor"], tokenizer: "TextTokenizer") -> Iterator[str]:
    """Yields the text of each token until the model ends the document. `generate` itself is not a generator, so that its
    errors are raised when it is called."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    for step in steps:
        token = int(step)
        if token == tokenizer.eos:
            break
        yield stream.step(tokenizer.backend, token) or ""


def check_valid(prompt: str) -> None:
    """Raises UserError if the shell passed the prompt in another encoding than UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--prompt: invalid UTF-8 after {prompt[: error.start][-20:]!r}; convert it, for example "
            "with iconv -f ISO-8859-1 -t UTF-8 FILE"
        ) from None
