"""The training loop: the gradient of a global batch, an update; now and then a report, a validation, a checkpoint.

On a GPU the host runs ahead: it reads a step's numbers when the next step is under way, and nothing in a step makes it
wait. What depends on those numbers within the step (clipping, whether it is applied, the scale of fp16) is decided on
the device, by all ranks from the same sums.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

import torch

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.data.loader import Batch, evaluation_batches
from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.parallel.compat import step_unless
from mamba_fsdp.parallel.model import ParallelModel
from mamba_fsdp.parallel.world import World
from mamba_fsdp.train.clock import Clock
from mamba_fsdp.train.metrics_logger import MetricsLogger
from mamba_fsdp.train.sampling import continued
from mamba_fsdp.train.saver import Saver
from mamba_fsdp.train.setup import TrainContext
from mamba_fsdp.train.stopping import StopRequest

ELSEWHERE = "asked on another rank"  # why this one stops
AHEAD = {"cpu": 0, "cuda": 1}  # steps that may be under way when a step's numbers are read


def train(
    parts: TrainContext, recorder: MetricsLogger, stop: StopRequest, validation_due: bool
) -> str:
    """Takes steps until the run has them all or is asked to stop. Returns the reason of the stop, "" without one.

    validation_due: of the step that it begins at. Raises UserError after max_skipped_steps in a row. The
    train state is that after the last step whose numbers are read: the last of all before a validation, a checkpoint.
    """
    plan, state = parts.plan, parts.state
    if validation_due and not validate(parts, recorder, stop):
        return stop.reason or ELSEWHERE
    under_way: deque[Step] = deque()
    saver = Saver(parts, recorder)
    while state.step < plan.total_steps:
        under_way.append(take_step(parts, recorder.clock, stop, ahead=len(under_way)))
        step, stop_asked = state.step + len(under_way), False
        due = step == plan.total_steps or saver.is_due(step) or plan.is_due(plan.eval_steps, step)
        while len(under_way) > (0 if due or stop_asked else AHEAD[parts.world.device.type]):
            stop_asked |= end_step(parts, recorder, saver, under_way.popleft())
        if under_way:
            continue
        validated = not plan.is_due(plan.eval_steps, state.step) or validate(parts, recorder, stop)
        last, stop_asked = state.step == plan.total_steps, stop_asked or not validated
        if saver.is_due(state.step) or stop_asked:
            saver.save(final=last or stop_asked)
        if stop_asked and not (last and validated):
            return stop.reason or ELSEWHERE
    return ""


class Step(NamedTuple):
    """A step under way."""

    batches: list[Batch]
    lr: float
    stage: tuple[int, int] | None  # of the save under way, when the ranks told whether they write
    numbers: Callable[
        [], list[float]
    ]  # waits for them: loss, gradient norm, applied, LossScale's two, the told ones


def take_step(parts: TrainContext, clock: Clock, stop: StopRequest, ahead: int = 0) -> Step:
    """The gradient of a global batch and the update with it. The host waits for nothing. ahead: steps under way."""
    settings, plan, parallel, world, step = (
        parts.settings,
        parts.plan,
        parts.parallel,
        parts.world,
        parts.state.step,
    )
    heart.beat()
    began = time.perf_counter()
    batches = parts.loader.step(step + ahead)
    clock.data_wait += time.perf_counter() - began
    counted = sum(batch.total_weight() for batch in batches)  # while on the CPU
    batches = [batch.to(world.device) for batch in batches]
    own_seconds, scale, saves = [0.0] * world.size, parts.loss_scale.value, parts.checkpointer
    stage, writing = saves.stage(), saves.is_writing()
    own_seconds[world.rank] = clock.own_seconds()
    loss_sum = accumulate_gradients(
        parallel, parts.optimizer, batches, scale / plan.tokens_per_step
    )
    sums = add_up(
        world,
        loss_sum,
        parallel.gradient_squares(),
        counted,
        (stop.look(), writing, *own_seconds),
    )
    loss, gradient_norm, factor = means(sums, plan.tokens_per_step / scale)
    lr = settings.optimizer.learning_rate * plan.schedule.next_factor(
        parts.state, plan.tokens_per_step, ahead
    )
    saves.wait_for_copies()
    applied = update_weights(
        parallel,
        parts.optimizer,
        loss,
        gradient_norm,
        factor,
        clip=settings.optimizer.grad_clip_thresh,
        lr=lr,
    )
    parts.loss_scale.update(applied)
    found = torch.stack(
        [loss, gradient_norm, applied, parts.loss_scale.value, parts.loss_scale.good_steps]
    )
    return Step(batches, lr, stage, world.reads(torch.cat([found, sums[TOLD:]])))


def end_step(parts: TrainContext, recorder: MetricsLogger, saver: Saver, step: Step) -> bool:
    """Counts and reports a step, once its numbers are there. Returns whether a rank was asked to stop in it. Raises
    as `train` does."""
    state, plan = parts.state, parts.plan
    numbers = step.numbers()
    loss, gradient_norm, applied, scale, good_steps, stops, writing = numbers[:7]
    recorder.clock.meet(numbers[7:])
    excused = parts.loss_scale.keep(state, scale, good_steps) and math.isfinite(loss)
    state.advance(
        plan.split.global_batch, plan.tokens_per_step, loss, applied=bool(applied), excused=excused
    )
    if not writing and step.stage == parts.checkpointer.stage():
        saver.settle()  # all ranks have written the save under way, if any, or rank 0 committed it
    if not applied:
        recorder.display.line(
            f"step {state.step} skipped: loss {loss:.4g}, gradient norm {gradient_norm:.4g} "
            f"({state.skipped_steps} skipped so far)"
        )
    recorder.report(state, loss, step.lr, gradient_norm)
    if state.skipped_in_a_row >= parts.settings.training.max_skipped_steps:
        saver.wait(final=True)  # what is being saved is not at fault
        raise UserError(describe_bad_samples(parts, step.batches))
    return stops > 0


TOLD = 3  # sums: loss, squares of the gradient, counted; then what else the ranks tell each other


def add_up(
    world: World,
    loss_sum: torch.Tensor,
    squares: torch.Tensor,
    counted: float,
    told: Iterable[float] = (),
) -> torch.Tensor:
    """The one small collective of a step, called by all ranks: (3 + n,) fp64 on the device, the sums over ranks.

    loss_sum: of the labels that count, nats. squares: of the gradient that the backward passes left. counted: labels
    that count, or the sum of their weights. told: n numbers that the host knows.
    """
    known = world.tell([counted, *told])
    return world.all_reduce_sum(torch.cat([torch.stack([loss_sum.double(), squares]), known]))


def means(
    sums: torch.Tensor, multiple: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean loss per label that counts, the norm of its gradient, what makes the gradients at hand that gradient), each
    0-dim fp64: they are of the losses divided by `multiple`, which was known before this sum."""
    loss_sum, squares, counted = sums[:TOLD]
    counted = counted + (counted == 0)
    factor = multiple / counted
    return loss_sum / counted, squares.sqrt().float().double() * factor, factor


def batch_loss(parallel: ParallelModel, batch: Batch) -> torch.Tensor:
    """The sum of the token losses (nats) of one micro batch."""
    heart.beat()
    return parallel.module(
        batch.tokens, labels=batch.labels, seq_idx=batch.documents, weights=batch.weights
    )


def accumulate_gradients(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    scale: torch.Tensor,
) -> torch.Tensor:
    """Backward passes over this rank's micro batches, of the token losses times `scale`. Returns the losses' sum."""
    optimizer.zero_grad(set_to_none=True)
    scale = scale.float()
    loss_sum = torch.zeros((), device=parallel.world.device)
    for index, batch in enumerate(batches):
        with parallel.accumulate(last=index == len(batches) - 1):
            loss = batch_loss(parallel, batch)
            (loss * scale).backward()
        loss_sum += loss.detach()
    parallel.reduce_gradients()
    return loss_sum


def update_weights(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    gradient_norm: torch.Tensor,
    factor: torch.Tensor,
    *,
    clip: float,
    lr: float,
) -> torch.Tensor:
    """One AdamW update, with the gradients times `factor`, which then have the norm `gradient_norm`, clipped to the
    norm `clip` (0: not), unless the loss or the gradient is not finite. Returns 1 if it was applied, else 0: all are
    0-dim fp64 tensors on the device."""
    if clip:
        factor = factor * (gradient_norm.new_full((), clip) / (gradient_norm + 1e-6)).clamp(max=1.0)
    parallel.scale_gradients(factor.float())
    for group in optimizer.param_groups:
        group["lr"] = lr
    refused = ~(loss.isfinite() & gradient_norm.isfinite())
    step_unless(optimizer, refused)
    return 1.0 - refused.double()


def validate(parts: TrainContext, recorder: MetricsLogger, stop: StopRequest) -> bool:
    """Validation loss at the current step, into metrics and log. False where a stop was asked for, which ends it."""
    settings, plan, world, step, began = (
        parts.settings,
        parts.plan,
        parts.world,
        parts.state.step,
        time.perf_counter(),
    )
    windows = plan.eval_batches * plan.split.global_batch or None
    sizes = [store.token_count - 1 for store in parts.validation]
    wanted = sum(
        min(size, windows * settings.data.seq_length) if windows else size for size in sizes
    )
    batches = chain.from_iterable(
        evaluation_batches(
            store,
            str(store.path),
            settings.data,
            plan.split,
            vocab_size=settings.model.vocab_size,
            limit=windows,
        )
        for store in parts.validation
    )

    def stopped(tokens: int) -> bool:
        recorder.display.passing(
            f"step {step}: validation, {min(1.0, tokens * world.size / wanted):.0%} read"
        )
        asked = torch.tensor(float(stop.look()), dtype=torch.float64, device=world.device)
        return bool(world.all_reduce_sum(asked) > 0)

    with recorder.clock.paused():
        loss, tokens = evaluate(parts.parallel.module, batches, world, stopped)
        if tokens:
            recorder.validated(step, loss, tokens, tokens / sum(sizes), time.perf_counter() - began)
        if tokens and parts.prompts:
            recorder.sampled(
                step,
                list(parts.prompts),
                continued(
                    parts.parallel,
                    list(parts.prompts.values()),
                    seed=(settings.training.seed),
                    length=settings.training.sample_length,
                ),
            )
    return tokens > 0


@torch.no_grad()
def evaluate(
    module: torch.nn.Module,
    batches: Iterable[Batch],
    world: World,
    stopped: Callable[[int], bool] = lambda tokens: False,
) -> tuple[float, int]:
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
        total += float(
            module(here.tokens, labels=here.labels, seq_idx=here.documents, weights=here.weights)
        )
        weight += batch.total_weight()
        counted += int((batch.labels != IGNORED_LABEL).sum())
    module.train(training)
    total, weight, tokens = world.all_reduce_sum([total, weight, float(counted)])
    if not weight:
        raise UserError(
            "of what is to be evaluated no token counts in the loss; choose other data (in a training run: "
            "another validation_path, or none)"
        )
    return total / weight, int(tokens)


def describe_bad_samples(parts: TrainContext, batches: list[Batch]) -> str:
    """The message that names the samples of the step whose loss or gradient is not finite."""
    drawn = parts.world.tell_all(
        ["{} window {}".format(*sample) for batch in batches for sample in batch.samples]
    )
    return (
        f"{parts.state.skipped_in_a_row} steps in a row were not finite, the last is step {parts.state.step}: "
        f"samples {', '.join(drawn[:8])}{', ...' * (len(drawn) > 8)}. Lower learning_rate, use "
        "mixed_precision=bf16, or look at these samples"
    )
