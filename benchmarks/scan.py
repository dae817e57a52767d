"""Compares a training step of Mamba-1 on the CPU with the model of transformers of the same size: tokens/s, peak memory.

    python -m benchmarks.scan [--rounds 7] [--threads 2]

Each backend runs in a separate process. The processes take the same steps (forward, loss, backward, AdamW) in turn, on batches
of the same shape. The model of transformers runs with use_mambapy=True.
"""

import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch

from benchmarks.measure import command_line, steps_in_turn, table
from benchmarks.our_step import our_step
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.parallel.world import CPU
from mamba_fsdp.settings.train_config import TrainConfig


class Size(NamedTuple):
    d_model: int
    n_layer: int
    length: int
    batch: int


SIZES = {"tiny": Size(128, 4, 256, 8), "small": Size(256, 8, 512, 4)}
VOCABULARY = 1024
SHIPPED = "transformers mambapy"
OURS = {  # {name: (backend, precision of matrix products)}
    "reference": ("reference", "fp32"),
    "cpp": ("cpp", "fp32"),
    "cpp, bf16 products": ("cpp", "bf16"),
}


def their_step(size: Size, threads: int) -> Callable[[], None]:
    from transformers import MambaConfig, MambaForCausalLM

    import_module("mambapy")  # if it is missing, transformers silently runs a slow loop
    torch.set_num_threads(threads)
    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.d_model,
        num_hidden_layers=size.n_layer,
        use_mambapy=True,
        use_cache=False,
        tie_word_embeddings=True,
    )
    model = MambaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (size.batch, size.length))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def step_on_tokens(settings: TrainConfig, threads: int) -> Callable[[], float]:
    """Returns a function that takes a step of this program on random tokens."""
    torch.set_num_threads(threads)
    shape = (settings.training.batch_size, settings.data.seq_length + 1)
    tokens = torch.randint(VOCABULARY, shape)
    return partial(our_step(settings, CPU), tokens)


def settings_of(size: Size, **others: str) -> TrainConfig:
    model = ModelConfig(
        layers="mamba1", d_model=size.d_model, n_layer=size.n_layer, vocab_size=VOCABULARY
    )
    return TrainConfig(model).with_values(
        batch_size=size.batch, seq_length=size.length, reset_at_documents=False, **others
    )


def compare(size: Size, rounds: int, threads: int) -> str:
    """Returns the table of a size."""
    makers: dict[str, Callable] = {SHIPPED: partial(their_step, size, threads)}
    for name, (kernels, precision) in OURS.items():
        settings = settings_of(size, kernels=kernels, mixed_precision=precision)
        makers[name] = partial(step_on_tokens, settings, threads)
    taken = steps_in_turn(makers, rounds)
    seconds = {name: [step.seconds for step in steps] for name, steps in taken.items()}
    shipped_peak = taken[SHIPPED][-1].peak
    rows = []
    for name in makers:
        peak = taken[name][-1].peak
        rate = size.batch * size.length / statistics.median(seconds[name])
        row = {"backend": name, "tokens/s": f"{rate:,.0f}"}
        ratios = [theirs / ours for ours, theirs in zip(seconds[name], seconds[SHIPPED])]
        row["x shipped"] = f"{statistics.median(ratios):.1f}"
        row["peak MB (x shipped)"] = f"{peak:,} ({peak / shipped_peak:.2f})"
        rows.append(row)
    return table(rows)


def main() -> None:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    for name, size in SIZES.items():
        print(f"\n{name}: {size}, vocabulary {VOCABULARY}, {given.threads} threads")
        print(compare(size, given.rounds, given.threads), flush=True)


if __name__ == "__main__":
    main()
