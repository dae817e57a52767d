"""The training loop: gradients of one global batch, one update, and once in a while a report, a validation, a
checkpoint."""

import math
import time
from dataclasses import dataclass, field

import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.train.evaluate import evaluate


@dataclass
class Progress:
    """Where a run stands: what a checkpoint holds beside the tensors. `tokens` counts the inputs of all samples
    drawn."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    optimizer_steps: int = 0  # updates behind the optimiser's moments: those of the run it was loaded from count too
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    loss_sum: float = 0.0  # of the applied steps since the last report
    loss_steps: int = 0
    loss_scale: float = 0.0  # 0 before the first step in fp16
    loss_scale_good_steps: int = 0
    data: dict = field(default_factory=dict)  # the position in the data at the start of this process


def train(run):
    """Take steps until the run is over or asked to stop. Returns "" when it is over, else the reason of the stop.

    run: see mamba_fsdp/train/run.py. Raises UserError after max_skipped_steps in a row that could not be applied.
    """
    progress, settings = run.progress, run.settings.training
    run.clock.start(progress.step)
    if progress.step == 0 and run.validates():
        validate(run)
    while progress.step < run.total_steps:
        batches = run.next_batches()
        learning_rate = run.set_learning_rate(progress.step)
        counted_tokens, stop_asked = agree_on_step(run, batches)
        loss, gradient_norm = accumulate_gradients(run, batches, counted_tokens)
        applied = update_weights(run, loss, gradient_norm)
        account(run, batches, loss, applied)

        last = progress.step == run.total_steps
        report_due = progress.step % run.settings.report.report_interval == 0 or last
        run.show(loss, learning_rate, gradient_norm, report_due)
        if run.validates() and (progress.step % run.eval_steps == 0 or last):
            validate(run)
        if progress.skipped_in_a_row >= settings.max_skipped_steps:
            raise UserError(run.describe_bad_samples(batches))
        if progress.step % run.checkpoint_steps == 0 or last or stop_asked:
            run.save(wait=last or stop_asked)
        if stop_asked and not last:
            return run.stop.reason or "asked on another rank"
    return ""


def agree_on_step(run, batches):
    """(tokens that count in the loss of this step, whether any rank was asked to stop), the same on every rank."""
    counted = sum(int((batch.labels != -100).sum()) for batch in batches)
    counted, stops = run.clock.wait(run.world.all_reduce_sum, [float(counted), float(run.stop.look())])
    return max(counted, 1.0), stops > 0


def accumulate_gradients(run, batches, counted_tokens):
    """Backward passes over this rank's micro-batches. Returns (mean loss per token, gradient norm) of the global
    batch."""
    run.optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=run.world.device)
    for index, batch in enumerate(batches):
        with run.parallel.accumulate(last=index == len(batches) - 1):
            loss = run.loss(batch)
            (loss * (run.loss_scale.value / counted_tokens)).backward()
        loss_sum += loss.detach()
    run.parallel.reduce_gradients()
    gradient_norm = float(run.parallel.gradient_norm()) / run.loss_scale.value
    return run.world.all_reduce_sum([float(loss_sum)])[0] / counted_tokens, gradient_norm


def update_weights(run, loss, gradient_norm):
    """One clipped AdamW update, unless the loss or the gradient is not finite. Returns whether it was applied."""
    finite = math.isfinite(loss) and math.isfinite(gradient_norm)
    scale = run.loss_scale.value
    explained_by_scale = run.loss_scale.update(finite) and math.isfinite(loss)
    if finite:
        clip = run.settings.optimizer.grad_clip_thresh
        factor = min(1.0, clip / (gradient_norm + 1e-6)) if clip else 1.0
        if factor != 1.0 or scale != 1.0:
            run.parallel.scale_gradients(factor / scale)
        run.optimizer.step()
        run.progress.optimizer_steps += 1
        run.progress.skipped_in_a_row = 0
    else:
        run.optimizer.zero_grad(set_to_none=True)
        run.progress.skipped_steps += 1
        run.progress.skipped_in_a_row += 0 if explained_by_scale else 1
        run.progress_line(f"step {run.progress.step + 1} skipped: loss {loss:.4g}, gradient norm {gradient_norm:.4g} "
                          f"({run.progress.skipped_steps} skipped so far)")
    return finite


def account(run, batches, loss, applied):
    progress = run.progress
    progress.step += 1
    progress.samples += run.global_batch
    progress.tokens += run.tokens_per_step
    if applied:
        progress.loss_sum += loss
        progress.loss_steps += 1


def validate(run):
    """Validation loss at the current step, into the metrics and the log."""
    started = time.perf_counter()
    loss = evaluate(run.parallel.module, run.validation_batches(), run.world)
    entry = {"step": run.progress.step, "val_loss": loss, "val_perplexity": math.exp(min(loss, 700.0))}
    run.record(entry)
    run.progress_line(f"step {run.progress.step}: validation loss {loss:.4f}, "
                      f"perplexity {entry['val_perplexity']:,.2f} ({time.perf_counter() - started:.1f} s)")
    run.clock.skip(time.perf_counter() - started)
