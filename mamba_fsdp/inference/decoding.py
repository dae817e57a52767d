"""Generates tokens one by one with a recurrent state, so that SSM layers need constant time and memory per token."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mamba_fsdp.errors import UserError
from mamba_fsdp.model.lm import MambaLM, States


@torch.no_grad()
def generate(
    model: MambaLM,
    prompts: Tensor,
    *,
    length: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Continues the prompts, and yields the tokens of each position as an int64 tensor of shape (batch,).

    prompts: (batch, longest prompt), int64; shorter prompts are filled with -1 at the end. length: the number of tokens
    after the longest prompt. temperature, top_k, top_p: see `draw`. generator: the source of random numbers, on the
    model's device.

    The first position is the one after the shortest prompt. While a longer prompt has not ended, its row of the yielded
    tensors contains the prompt's own tokens. This way the model never reads padding. Tokens that only pad the
    vocabulary are never drawn.
    """
    batch, longest = prompts.shape
    shortest = int((prompts >= 0).sum(1).min())
    assert length > 0, "generation appends at least one token"
    assert shortest > 0, "generation continues at least one token"

    end = longest + length
    read = prompts[:, :shortest]
    states: States = []
    for position in range(shortest, end):
        ends = torch.full((batch,), read.shape[1] - 1, device=prompts.device)
        logits, states = model(read, states, ends=ends)
        logits = logits[:, : model.config.vocab_size].float()
        tokens = draw(logits, temperature, top_k, top_p, generator)
        if position < longest:
            given = prompts[:, position]
            tokens = torch.where(given < 0, tokens, given)
        yield tokens
        read = tokens[:, None]


def draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """Returns one token for each row of the logits, as an int64 tensor of shape (batch,).

    logits: (batch, vocabulary). At temperature 0, the token is the most likely one. Otherwise it is drawn from the most
    likely tokens that together have the probability top_p (nucleus sampling, Holtzman et al. 2019), but from at most
    top_k tokens (0: no limit).

    Raises UserError for logits that are not finite.
    """
    if not logits.isfinite().all():
        raise UserError(
            "the model's logits are not finite: its weights are damaged, or its training diverged; use another checkpoint"
        )
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits, tokens = (logits / max(temperature, 1e-6)).sort(dim=-1, descending=True)
    probabilities = logits.softmax(dim=-1)
    likelier = probabilities.cumsum(dim=-1) - probabilities
    probabilities[likelier >= max(top_p, 1e-30)] = 0
    if top_k:
        probabilities[:, top_k:] = 0
    # This draws like torch.multinomial, but without its checks, because they make the host wait for the device.
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    drawn = (probabilities / noise).argmax(dim=-1, keepdim=True)
    return tokens.gather(1, drawn).squeeze(1)
