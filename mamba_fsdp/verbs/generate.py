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
"""

from typing import Annotated

from config.fields import Bounds


def main(model: str, prompt: str = "", length: Annotated[int, Bounds(at_least=1)] = 100,
         temperature: Annotated[float, Bounds(at_least=0)] = 0.8, top_k: Annotated[int, Bounds(at_least=0)] = 0,
         top_p: Annotated[float, Bounds(above=0, at_most=1)] = 1.0, seed: int = 0, tokenizer: str = "") -> None:
    import torch

    from mamba_fsdp.model.generate import generate
    from mamba_fsdp.verbs.loading import load_model, tokenizer_of

    network, weights = load_model(model)
    words = tokenizer_of(weights, tokenizer)
    ids = words(prompt, add_special_tokens=False)["input_ids"] or [words.eos_token_id]
    device = next(network.parameters()).device
    tokens, shown = [], prompt
    print(shown, end="")
    for token in generate(network, torch.tensor([ids], device=device), length=length, temperature=temperature,
                          top_k=top_k, top_p=top_p, generator=torch.Generator(device=device).manual_seed(seed)):
        if int(token) == words.eos_token_id:
            break
        tokens.append(int(token))
        text = prompt + words.decode(tokens)
        if not text.endswith("\ufffd"):  # a character whose last bytes are still to come
            print(text[len(shown):], end="", flush=True)
            shown = text
    print()
