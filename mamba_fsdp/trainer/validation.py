"""Validates the model during training: computes its loss, and generates texts."""

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.loader import Batch, evaluation_batches, evaluation_windows
from mamba_fsdp.data.selection import representative_source
from mamba_fsdp.data.text import bits_per_byte, count_words_and_bytes, predicted_spans
from mamba_fsdp.data.tokenizer import load_for_prompts
from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import World
from mamba_fsdp.this_process import progress
from mamba_fsdp.trainer.metrics_logger import LossMeasure, MetricsLogger
from mamba_fsdp.trainer.saver import Saver
from mamba_fsdp.trainer.setup import TrainContext
from mamba_fsdp.trainer.starting_point import SAMPLE_LENGTH
from mamba_fsdp.trainer.stopping import StopRequest

MAX_DECODED_TOKENS = 1 << 22  # decoding this many tokens takes a few seconds


class LossSums(NamedTuple):
    """The sums over the tokens of an evaluation."""

    nats: float  # weighted sum of the token losses
    weight: float  # sum of the weights
    tokens: float  # number of tokens

    def measure(self, size: float) -> LossMeasure:
        """Returns the weighted mean loss as a LossMeasure.

        size: the bytes of the text, 0 if unknown. Raises UserError if the sum of weights is 0.
        """
        if not self.weight:
            raise UserError(
                "no token of the data counts in the loss; choose other data (in a training run: "
                "another validation_path, or none)"
            )
        loss = self.nats / self.weight
        tokens = int(self.tokens)
        return LossMeasure(loss, tokens, bits_per_byte(loss, tokens, size))


def validate(context: TrainContext, logger: MetricsLogger, saver: Saver, stop: StopRequest) -> bool:
    """Validates the model after the current step, and reports the losses of all data and of each source.

    All ranks call it. Returns False if a request to stop ended the validation early, otherwise True. If the loss is not
    finite, waits until the save in progress is complete, because its weights are of an earlier step, and then raises
    UserError on all ranks.
    """
    world = context.world
    step = context.state.step
    seq_length = context.settings.data.seq_length
    began = time.perf_counter()
    limit = context.schedule.eval_batches * context.schedule.global_batch
    sources = context.data.validation
    labels = [source.token_count - 1 for source in sources.values()]
    wanted = sum(labels)
    if limit:
        wanted = sum(min(each, limit * seq_length) for each in labels)
    sums: dict[str, LossSums] = {}

    def is_stopped(tokens: int) -> bool:
        before = sum(each.tokens for each in sums.values())
        read = min(1.0, (before + tokens * world.size) / wanted)
        logger.console.show_progress(f"step {step}: validation, {read:.0%} read")
        return stop.any_rank_asked(world)

    with logger.clock.paused():
        for name, source in sources.items():
            batches = evaluation_batches(
                source,
                str(source.path),
                context.settings.data,
                context.loader.batch_shape,
                vocab_size=context.settings.model.vocab_size,
                limit=limit,
                stride=seq_length,
            )
            found = sum_losses(context.parallel.module, batches, world, is_stopped)
            if found is None:
                return False
            sums[name] = found
        seconds = time.perf_counter() - began
        if context.validation_bytes is None:
            context.validation_bytes = world.on_rank0(_count_predicted_bytes, context, limit)
        total, parts = measure_sources(sums, context.validation_bytes)
        if len(context.data.sources) == 1:
            parts = {}
        share = total.tokens / sum(labels)
        logger.report_validation(step, total, parts, share, seconds, write_samples(context))
    if not math.isfinite(total.loss):
        saver.wait()
        raise UserError(
            f"the validation loss after step {step} is {total.loss}: training has diverged. Lower learning_rate; the same "
            "command then resumes from the newest checkpoint"
        )
    return True


def measure_sources(
    sums: dict[str, LossSums], sizes: dict[str, float]
) -> tuple[LossMeasure, dict[str, LossMeasure]]:
    """Returns (result for all data, {source: result}). Sources without any weight are left out.

    sizes: {source: bytes of its text}, 0 if unknown. If one size is unknown, so is the total size. Raises UserError if
    the sum of all weights is 0.
    """
    total = LossSums(*(sum(column) for column in zip(*sums.values())))
    size = sum(sizes.values()) if all(sizes.values()) else 0.0
    parts = {}
    for name, part in sums.items():
        if part.weight:
            parts[name] = part.measure(sizes[name])
    return total.measure(size), parts


def _count_predicted_bytes(context: TrainContext, limit: int) -> dict[str, float]:
    """Returns {source: bytes of the text that a validation predicts}, estimated from at most MAX_DECODED_TOKENS tokens.

    The value is 0 if the source does not have a tokenizer, or if the loss is weighted. limit: the maximum number of
    windows of each source; 0 means all.
    """
    data = context.settings.data
    length = data.seq_length
    sizes = dict.fromkeys(context.data.validation, 0.0)
    if data.position_weighting:
        return sizes
    for name, source in context.data.validation.items():
        windows = evaluation_windows(source.token_count, length, length, limit)
        decoded = windows[:: 1 + len(windows) * length // MAX_DECODED_TOKENS]
        spans = predicted_spans(decoded, length, length, source.token_count)
        _, size = count_words_and_bytes(source, spans)
        sizes[name] = size * len(windows) / len(decoded)
    return sizes


@torch.no_grad()
def write_samples(context: TrainContext) -> list[str]:
    """Generates a text for each prompt by greedy decoding.

    Returns the prompts with their continuations on rank 0, and an empty list on other ranks.

    All ranks call it and compute the same. The number of forward passes is fixed, because all ranks must take part in
    each of them to gather the weights. The shape of the tokens is constant, so that the code is compiled only once. The
    padding after a text does not influence its next token, because the model is causal.
    """
    prompts = context.data.prompts
    if not prompts:
        return []
    device = context.world.device
    padded = [torch.tensor(prompt + [0] * SAMPLE_LENGTH) for prompt in prompts]
    tokens = pad_sequence(padded, batch_first=True).to(device)
    ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows = torch.arange(len(prompts), device=device)
    for _ in range(SAMPLE_LENGTH):
        progress.touch()
        logits = context.parallel.module(tokens, ends=ends - 1)
        tokens[rows, ends] = logits[:, : context.settings.model.vocab_size].argmax(dim=1)
        ends += 1
    if context.world.rank:
        return []
    tokenizer = load_for_prompts(
        representative_source(context.data.sources.values()).tokenizer_path
    )
    return [tokenizer.decode(row[:end]) for row, end in zip(tokens.tolist(), ends.tolist())]


def batch_loss(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Runs the model on one micro-batch. Returns the weighted sum of its token losses in nats, 0-dim."""
    progress.touch()
    return module(
        batch.tokens,
        labels=batch.labels,
        seq_idx=batch.seq_idx,
        weights=batch.weights,
        documents=batch.documents,
    )


@torch.no_grad()
def sum_losses(
    module: torch.nn.Module,
    batches: Iterable[Batch],
    world: World,
    is_stopped: Callable[[int], bool] | None = None,
) -> LossSums | None:
    """Evaluates a model. Returns the sums over the batches of all ranks; None if the evaluation was stopped.

    module: returns the weighted sum of the token losses of a batch. batches: all ranks must have the same number of
    them, because all ranks take part in each forward pass. is_stopped: a function that gets the number of tokens that
    this rank has read so far; if it returns True, the evaluation stops.

    The module is not switched to evaluation mode, because no layer behaves differently in training.
    """
    nats = 0.0
    weight = 0.0
    tokens = 0.0
    for batch in batches:
        if is_stopped and is_stopped(int(tokens)):
            return None
        on_device = batch.to(world.device)
        nats += float(batch_loss(module, on_device))
        weight += batch.total_weight()
        tokens += float((batch.labels != IGNORED_LABEL).sum())
    return LossSums(*world.all_reduce_sum([nats, weight, tokens]))
