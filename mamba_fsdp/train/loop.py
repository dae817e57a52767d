"""The training loop: the gradient of a global batch, an update; now and then a report, a validation, a checkpoint."""

import math
import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

import torch

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.loader import Batch, evaluation_batches
from mamba_fsdp.data.sample_log import read_by
from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.parallel.model import ParallelModel
from mamba_fsdp.parallel.world import World
from mamba_fsdp.train.recorder import Recorder
from mamba_fsdp.train.setup import Parts
from mamba_fsdp.train.stopping import StopRequest

ELSEWHERE = "asked on another rank"  # why this one stops


def train(parts: Parts, recorder: Recorder, stop: StopRequest, validation_due: bool) -> str:
    """Takes steps until the run has them all or is asked to stop. Returns the reason of the stop, "" without one.

    validation_due: of the step that it begins at. Raises UserError after max_skipped_steps in a row.
    """
    settings, plan, state, parallel, clock = parts.settings, parts.plan, parts.state, parts.parallel, recorder.clock
    if validation_due and not validate(parts, recorder, stop):
        return stop.reason or ELSEWHERE
    while state.step < plan.total_steps:
        heart.beat()
        batches = parts.loader.step(state.step)
        counted = sum(batch.total_weight() for batch in batches)  # while on the CPU
        read = read_by(batches) if settings.data.sample_log else 0
        batches = [batch.to(parts.world.device) for batch in batches]
        scale, own_seconds = parts.loss_scale.value, clock.own_seconds()
        loss_sum = accumulate_gradients(parallel, parts.optimizer, batches, scale / plan.tokens_per_step)
        sums = add_up(parts.world, loss_sum, parallel.gradient_squares(), counted, stop.look(),
                      parts.checkpointer.is_writing(), own_seconds, read)
        clock.meet(sums.own_seconds)
        loss, gradient_norm, factor = sums.means(plan.tokens_per_step, scale)
        lr = settings.optimizer.learning_rate * plan.schedule.next_factor(state, plan.tokens_per_step)
        applied = update_weights(parallel, parts.optimizer, loss, gradient_norm, factor,
                                 clip=settings.optimizer.grad_clip_thresh, lr=lr)
        excused = parts.loss_scale.update(applied) and math.isfinite(loss)
        state.advance(plan.split.global_batch, plan.tokens_per_step, loss, applied=applied, excused=excused)
        if not sums.writing:
            with clock.paused():
                parts.checkpointer.wait()  # where there is a save under way, all ranks have written and it is committed
        if not applied:
            recorder.display.line(f"step {state.step} skipped: loss {loss:.4g}, gradient norm {gradient_norm:.4g} "
                                  f"({state.skipped_steps} skipped so far)")

        recorder.report(state, loss, lr, gradient_norm, sums.read)
        validated = not plan.is_due(plan.eval_steps, state.step) or validate(parts, recorder, stop)
        if state.skipped_in_a_row >= settings.training.max_skipped_steps:
            raise UserError(describe_bad_samples(parts, batches))
        last, stop_asked = state.step == plan.total_steps, sums.stops > 0 or not validated
        if plan.is_due(plan.checkpoint_steps, state.step) or stop_asked:
            save(parts, recorder, wait=last or stop_asked)
        if stop_asked and not (last and validated):
            return stop.reason or ELSEWHERE
    return ""


class Sums(NamedTuple):
    """What the ranks tell each other in a step besides weights and gradients, added up."""

    own_seconds: list[float]  # of each rank, see Clock
    loss: float  # of the labels that count, nats
    squares: float  # of the gradient that the backward passes left
    counted: float  # labels that count, or the sum of their weights
    stops: float  # ranks that were asked to stop
    writing: float  # ranks that still write the save under way
    high: float  # halves of what each rank's `read_by` says: sums of 32 bits are exact in fp64
    low: float

    @property
    def read(self) -> int:
        return ((int(self.high) << 32) + int(self.low)) % (1 << 64)

    def means(self, tokens_per_step: int, loss_scale: float = 1.0) -> tuple[float, float, float]:
        """(mean loss per label that counts, the norm of its gradient, what makes the gradients at hand that gradient):
        they are of the losses times loss_scale / tokens_per_step, which was known before this sum."""
        counted = self.counted or 1.0
        factor = tokens_per_step / counted / loss_scale
        norm = torch.tensor(self.squares, dtype=torch.float64).sqrt().float()
        return self.loss / counted, float(norm) * factor, factor


def add_up(world: World, loss_sum: torch.Tensor, squares: torch.Tensor, counted: float, stop: bool = False,
           writing: bool = False, own_seconds: float = 0.0, read: int = 0) -> Sums:
    """The one small collective of a step, and the one time that the host waits for the device. Called by all ranks."""
    slots = [own_seconds if rank == world.rank else 0.0 for rank in range(world.size)]
    told = torch.tensor([counted, stop, writing, *divmod(read, 1 << 32), *slots], dtype=torch.float64,
                        pin_memory=world.device.type == "cuda").to(world.device, non_blocking=True)
    numbers = world.all_reduce_sum(torch.cat([torch.stack([loss_sum.double(), squares]), told])).tolist()
    return Sums(numbers[7:], *numbers[:7])


def batch_loss(parallel: ParallelModel, batch: Batch) -> torch.Tensor:
    """The sum of the token losses (nats) of one micro batch."""
    heart.beat()
    return parallel.module(batch.tokens, labels=batch.labels, documents=batch.documents, weights=batch.weights)


def accumulate_gradients(parallel: ParallelModel, optimizer: torch.optim.Optimizer, batches: list[Batch],
                         scale: float) -> torch.Tensor:
    """Backward passes over this rank's micro batches, of the token losses times `scale`. Returns the losses' sum."""
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=parallel.world.device)
    for index, batch in enumerate(batches):
        with parallel.accumulate(last=index == len(batches) - 1):
            loss = batch_loss(parallel, batch)
            (loss * scale).backward()
        loss_sum += loss.detach()
    parallel.reduce_gradients()
    return loss_sum


def update_weights(parallel: ParallelModel, optimizer: torch.optim.Optimizer, loss: float, gradient_norm: float,
                   factor: float = 1.0, *, clip: float, lr: float) -> bool:
    """One AdamW update, with the gradients times `factor`, which then have the norm `gradient_norm`, clipped to the
    norm `clip` (0: not), unless the loss or the gradient is not finite. Returns whether it was applied."""
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        optimizer.zero_grad(set_to_none=True)
        return False
    factor *= min(1.0, clip / (gradient_norm + 1e-6)) if clip else 1.0
    if factor != 1.0:
        parallel.scale_gradients(factor)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return True


def validate(parts: Parts, recorder: Recorder, stop: StopRequest) -> bool:
    """Validation loss at the current step, into metrics and log. False where a stop was asked for, which ends it."""
    settings, plan, world, step, began = parts.settings, parts.plan, parts.world, parts.state.step, time.perf_counter()
    windows = plan.eval_batches * plan.split.global_batch or None
    sizes = [store.token_count - 1 for store in parts.validation]
    wanted = sum(min(size, windows * settings.data.seq_length) if windows else size for size in sizes)
    batches = chain.from_iterable(
        evaluation_batches(store, str(store.path), settings.data, plan.split, vocab_size=settings.model.vocab_size,
                           limit=windows) for store in parts.validation)

    def stopped(tokens: int) -> bool:
        recorder.display.passing(f"step {step}: validation, {min(1.0, tokens * world.size / wanted):.0%} read")
        asked = torch.tensor(float(stop.look()), dtype=torch.float64, device=world.device)
        return bool(world.all_reduce_sum(asked) > 0)

    with recorder.clock.paused():
        loss, tokens = evaluate(parts.parallel.module, batches, world, stopped)
        if tokens:
            recorder.validated(step, loss, tokens, tokens / sum(sizes), time.perf_counter() - began)
    return tokens > 0


@torch.no_grad()
def evaluate(module: torch.nn.Module, batches: Iterable[Batch], world: World,
             stopped: Callable[[int], bool] = lambda tokens: False) -> tuple[float, int]:
    """(mean of the token losses in nats, of which `module` returns the weighted sum, how many) over the batches of all
    ranks; (nan, 0) once `stopped`, of the tokens that this rank has read, is true.

    All ranks must bring as many batches (each forward pass gathers weights). Raises UserError where no token counts.
    """
    training = module.training
    module.eval()
    total, weight, counted = 0.0, 0.0, 0
    for batch in batches:
        heart.beat()
        if stopped(counted):
            module.train(training)
            return math.nan, 0
        here = batch.to(world.device)
        total += float(module(here.tokens, labels=here.labels, documents=here.documents, weights=here.weights))
        weight += batch.total_weight()
        counted += int((batch.labels != IGNORED_LABEL).sum())
    module.train(training)
    total, weight, tokens = world.all_reduce_sum([total, weight, float(counted)])
    if not weight:
        raise UserError("of what is to be evaluated no token counts in the loss; choose other data (in a training run: "
                        "another validation_path, or none)")
    return total / weight, int(tokens)


def save(parts: Parts, recorder: Recorder, wait: bool) -> None:
    """Saves a checkpoint of the run after the current step. wait: until it is committed."""
    state, parallel = parts.state, parts.parallel
    with recorder.clock.paused():
        recorder.sync()  # the metrics up to a committed checkpoint must not be lost
        state.data = parts.loader.state_before(state.step)
        shards = parallel.shards() + parallel.optimizer_shards(parts.optimizer)
        parts.checkpointer.save(state.step, shards, state.saved(parts.settings, parts.world.size))
        if wait:
            parts.checkpointer.wait()


@torch.no_grad()
def describe_bad_samples(parts: Parts, batches: list[Batch]) -> str:
    """The message that names the samples of the step whose loss is not finite, found one by one."""
    finite = [("{} window {}".format(*row.samples[0]), bool(torch.isfinite(batch_loss(parts.parallel, row))))
              for batch in batches for row in batch.rows()]
    drawn = parts.world.tell_all(finite)
    bad = [name for name, is_finite in drawn if not is_finite]
    said = (f"loss not finite for {', '.join(bad[:8])}" if bad
            else f"only gradients overflow; samples {', '.join(name for name, _ in drawn[:8])}")
    return (f"{parts.state.skipped_in_a_row} steps in a row were not finite, the last is step {parts.state.step}: "
            f"{said}. Lower learning_rate, use mixed_precision=bf16, or look at these samples")
