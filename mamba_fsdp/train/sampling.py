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

MOST, TEMPERATURE = 64, 0.8  # prompts, which one forward pass reads


def read_prompts(settings: TrainConfig, data: Source) -> dict[str, list[int]]:
    """{prompt: its tokens} of the file sample_prompts. Raises UserError for a file or a tokenizer that doesn't serve."""
    name = settings.training.sample_prompts
    if not name:
        return {}
    try:
        lines = Path(name).read_text(encoding="utf-8").split("\n")
        words = load_words(data.tokenizer_path)
    except (OSError, UnicodeDecodeError, UserError) as error:
        raise UserError(f"sample_prompts {name}: {getattr(error, 'strerror', error)}") from None
    prompts = [line.strip("\r").replace("\\n", "\n") for line in lines if line.strip()]
    tokens = {prompt: words.encode(prompt) for prompt in prompts}
    if not 0 < len(tokens) <= MOST or any(
        max(ids, default=1 << 62) >= settings.model.vocab_size for ids in tokens.values()
    ):
        raise UserError(
            f"sample_prompts {name}: holds {len(tokens)} prompts; write one a line, at most {MOST}, in "
            "tokens that the model has"
        )
    return tokens


@torch.no_grad()
def continued(
    parallel: ParallelModel, prompts: Sequence[list[int]], *, length: int, seed: int
) -> list[list[int]]:
    """`length` tokens that follow each prompt. All ranks call this, and each draws the same.

    A forward pass over all that is there gives a token of each: so a sharded model gathers its weights, block by block.
    The draws come from a generator of their own: the training's random state stays what it was.
    """
    module, generator = parallel.module, torch.Generator().manual_seed(seed)
    rows, ends = torch.arange(len(prompts)), torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.zeros(
        len(prompts), int(ends.max()) + length, dtype=torch.int64
    )  # what is ahead is not seen
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = torch.tensor(prompt)
    training = module.training
    module.eval()
    for end in range(length):
        heart.beat()
        logits = module(tokens.to(parallel.world.device))[
            rows, ends + end - 1, : parallel.model.config.vocab_size
        ]
        tokens[rows, ends + end] = draw(logits.float().cpu(), TEMPERATURE, 0, 1.0, generator)
    module.train(training)
    return [
        row[len(prompt) : len(prompt) + length].tolist() for row, prompt in zip(tokens, prompts)
    ]
