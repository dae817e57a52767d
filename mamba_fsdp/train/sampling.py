"""Texts that the model in training writes at each validation, as sample_prompts asks."""

from collections.abc import Sequence
from pathlib import Path

import torch

from config.train_config import TrainConfig
from mamba_fsdp.data.source import Source
from mamba_fsdp.data.tokenizer import load_words
from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.model.generate import draw
from mamba_fsdp.parallel.model import ParallelModel

MOST_PROMPTS = 64  # which one forward pass reads
TEMPERATURE = 0.8


def read_prompts(settings: TrainConfig, data: Source) -> dict[str, list[int]]:
    """{prompt: its tokens} of the file sample_prompts. Raises UserError for a file or a tokenizer
    that doesn't serve."""
    name = settings.training.sample_prompts
    if not name:
        return {}
    try:
        lines = Path(name).read_text(encoding="utf-8").split("\n")
        words = load_words(data.tokenizer_path)
    except (OSError, UnicodeDecodeError, UserError) as error:
        raise UserError(f"sample_prompts {name}: {getattr(error, 'strerror', error)}") from None
    prompts = {}
    for line in lines:
        if line.strip():
            prompt = line.strip("\r").replace("\\n", "\n")
            prompts[prompt] = words.encode(prompt)
    vocab_size = settings.model.vocab_size
    fits = all(tokens and max(tokens) < vocab_size for tokens in prompts.values())
    if not fits or not 0 < len(prompts) <= MOST_PROMPTS:
        raise UserError(
            f"sample_prompts {name}: holds {len(prompts)} prompts; write one a line, at most {MOST_PROMPTS}, "
            "in tokens that the model has"
        )
    return prompts


@torch.no_grad()
def continue_prompts(
    parallel: ParallelModel, prompts: Sequence[list[int]], *, length: int, seed: int
) -> list[list[int]]:
    """`length` tokens that follow each prompt. All ranks call this, and each draws the same.

    A forward pass over all that is there gives a token of each: so a sharded model gathers its
    weights, block by block. The draws come from a generator of their own: the training's random
    state stays what it was."""
    module = parallel.module
    vocab_size = parallel.model.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(len(prompts))
    ends = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.zeros(len(prompts), int(ends.max()) + length, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = torch.tensor(prompt)  # what is ahead is not seen
    was_training = module.training
    module.eval()
    for _ in range(length):
        heart.beat()
        logits = module(tokens.to(parallel.world.device))
        logits = logits[rows, ends - 1, :vocab_size].float().cpu()
        tokens[rows, ends] = draw(logits, TEMPERATURE, 0, 1.0, generator)
        ends = ends + 1
    module.train(was_training)
    return [row[end - length : end].tolist() for row, end in zip(tokens, ends.tolist())]
