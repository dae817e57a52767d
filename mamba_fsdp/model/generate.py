"""Drawing text from a model, token by token, with recurrent state: constant time and memory per token in SSM layers."""

import torch


@torch.no_grad()
def generate(model, tokens, *, length, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Yield `length` tokens, (batch,) int64 each, that continue the prompt `tokens` (batch, at least 1).

    temperature 0 takes the likeliest token; top_k and top_p as in `draw`; generator: the torch.Generator to draw from,
    on the model's device. Rows of the vocabulary's padding are never drawn.
    """
    batch, prompt_length = tokens.shape
    assert prompt_length > 0 and length > 0, "generation continues at least one token, by at least one"
    state = model.allocate_state(batch, prompt_length + length - 1)
    logits = model.prefill(tokens, state)
    for remaining in reversed(range(length)):
        token = draw(logits[:, :model.config.vocab_size].float(), temperature, top_k, top_p, generator)
        yield token
        if remaining:
            logits = model.step(token, state)


def draw(logits, temperature, top_k, top_p, generator):
    """One token per row of logits (batch, vocabulary), drawn from the likeliest: top_k of them (0: all), no more than
    it takes to make up the probability top_p (nucleus sampling, Holtzman et al. 2019)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits, tokens = (logits / temperature).sort(dim=-1, descending=True)
    probabilities = logits.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # of the likelier tokens; 0 for the first, which is kept
    dropped = before >= top_p
    if top_k:
        dropped[:, top_k:] = True
    chosen = torch.multinomial(probabilities.masked_fill(dropped, 0.0), 1, generator=generator)
    return tokens.gather(1, chosen).squeeze(1)
