"""Drawing text from a model, one token at a time, with a recurrent state: constant time and memory per token for SSM layers."""

import torch


@torch.no_grad()
def generate(model, tokens, *, length, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Yield up to `length` tokens, each (batch,) int64, that go on from `tokens` (batch, prompt length), at least one each.

    temperature 0 takes the likeliest token. generator: the torch.Generator to draw from, on the model's device.
    """
    batch, prompt = tokens.shape
    state = model.allocate_state(batch, prompt + length)
    for position in range(prompt):
        logits = model.step(tokens[:, position], state)
    for drawn in range(length):
        token = draw(logits[:, :model.config.vocab_size].float(), temperature, top_k, top_p, generator)
        yield token
        if drawn + 1 < length:
            logits = model.step(token, state)


def draw(logits, temperature, top_k, top_p, generator):
    """One token per row of logits (batch, vocabulary): among the top_k likeliest (0: all) that make up top_p (nucleus sampling,
    Holtzman et al. 2019)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits, tokens = (logits / temperature).sort(dim=-1, descending=True)
    probabilities = logits.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # of the likelier tokens; 0 for the first, which is always kept
    dropped = before >= top_p
    if top_k:
        dropped[:, top_k:] = True
    chosen = torch.multinomial(probabilities.masked_fill(dropped, 0.0), 1, generator=generator)
    return tokens.gather(1, chosen).squeeze(1)
