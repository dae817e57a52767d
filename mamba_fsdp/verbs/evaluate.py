"""python -m mamba_fsdp evaluate MODEL STORE [--seq_length=2048] [--batch_size=8] [--limit=0]

Token loss, perplexity and bits per byte of a model over a token store, every token predicted once from those before it
in its window. MODEL is a run folder, a checkpoint, a consolidated.00.pth, or a transformers or state-spaces folder.

  --seq_length          tokens per window; more context, lower loss
  --batch_size          windows per forward pass
  --limit               windows in all, spread evenly over the store; 0 for all
  --reset_at_documents  let nothing cross the start of a document
"""

import math
import time
from typing import Annotated, Any

from config.fields import Bounds
from mamba_fsdp.errors import UserError


def main(model: str, store: str, seq_length: Annotated[int, Bounds(at_least=1)] = 2048,
         batch_size: Annotated[int, Bounds(at_least=1)] = 8, limit: Annotated[int, Bounds(at_least=0)] = 0,
         reset_at_documents: bool = False) -> None:
    import torch

    from config.train_config import DataConfig
    from mamba_fsdp.conventions import IGNORED_LABEL
    from mamba_fsdp.data.loader import Split, evaluation_batches
    from mamba_fsdp.data.store import TokenStore
    from mamba_fsdp.parallel.world import start_world
    from mamba_fsdp.train.loop import evaluate
    from mamba_fsdp.verbs.loading import load_model, tokenizer_of

    tokens = TokenStore(store)
    network, weights = load_model(model, reset_at_documents=reset_at_documents)
    if tokens.vocab_size > weights.config.vocab_size:
        raise UserError(f"{store} has a vocabulary of {tokens.vocab_size}, the model one of "
                        f"{weights.config.vocab_size}: they don't belong together")
    byte_counts = torch.tensor(bytes_of_tokens(tokenizer_of(weights, str(tokens.tokenizer_path))))
    counted = {"tokens": 0, "bytes": 0}

    def measured(batches):
        for batch in batches:
            labels = batch.labels[batch.labels != IGNORED_LABEL]
            counted["tokens"] += len(labels)
            counted["bytes"] += int(byte_counts[labels].sum())
            yield batch

    began = time.perf_counter()
    data = DataConfig(seq_length=seq_length, reset_at_documents=reset_at_documents)
    batches = evaluation_batches(tokens, store, data, Split(0, 1, batch_size), vocab_size=weights.config.vocab_size,
                                 limit=limit or None)
    loss = evaluate(network, measured(batches), start_world())
    seconds = time.perf_counter() - began
    bits = loss * counted["tokens"] / math.log(2)
    print(f"tokens         {counted['tokens']:,}")
    print(f"loss           {loss:.4f} nats per token")
    print(f"perplexity     {math.exp(loss):,.3f}")
    print(f"bits per byte  {bits / max(1, counted['bytes']):.4f}")
    print(f"speed          {counted['tokens'] / seconds:,.0f} tokens/s")


def bytes_of_tokens(tokenizer: Any) -> list[int]:
    """Token id -> bytes of text it stands for; 0 for special tokens such as eos.

    A byte-level token's string has one character per byte; other tokens are decoded, which is exact for whole
    characters.
    """
    special = set(tokenizer.all_special_ids)
    byte_level = "ByteLevel" in str(getattr(tokenizer, "backend_tokenizer", tokenizer).decoder)
    counts = []
    for token in range(len(tokenizer)):
        text = tokenizer.convert_ids_to_tokens(token) if byte_level else tokenizer.decode([token])
        counts.append(0 if token in special or text is None else len(text) if byte_level else len(text.encode()))
    return counts
