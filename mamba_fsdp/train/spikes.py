"""Loss spikes: a step whose loss is far above those before it takes the run back to its newest checkpoint.

With loss_spike_skip the samples from there up to that step are passed over, as in PaLM (Chowdhery et al. 2022, section
5.1), whose spikes did not come again without these batches. All ranks decide alike, from the step's one sum.
"""

import math
import statistics
from itertools import takewhile

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.records import add_event, read_events
from mamba_fsdp.run_layout import no_checkpoint, step_of
from mamba_fsdp.train.optimizer import LossScale
from mamba_fsdp.train.run_folder import RunFolder
from mamba_fsdp.train.saver import Saver
from mamba_fsdp.train.setup import Say, TrainContext, load_checkpoint

WINDOW, FEWEST = (
    64,
    16,
)  # applied steps whose median loss is the usual one, and from how many on there is one
MOST_ROLLBACKS = 3  # to one checkpoint


class LossSpike(Exception):
    """Its arguments: the step, its loss, the usual loss."""


def refuse_spike(parts: TrainContext, loss: float, saver: Saver) -> None:
    """After each applied step. Raises LossSpike where its loss is above loss_spike_factor times the median of the
    applied steps before it, at most WINDOW and at least FEWEST, and there is a checkpoint to return to; later where a
    save hangs, for its storage can't be read either."""
    if factor := parts.settings.training.loss_spike_factor:
        recent, pending, step = (
            parts.state.recent_losses,
            parts.checkpointer.pending,
            parts.state.step,
        )
        usual = statistics.median(recent) if len(recent) >= FEWEST else math.inf
        if loss > factor * usual and not saver.spike:
            saver.wait()
            saver.spike = step, loss, usual
            if pending:
                saver.recorder.display.line(
                    f"warning    step {step}: loss {loss:.4g}, usual {usual:.4g}; no rollback "
                    "while a save hangs"
                )
        if saver.spike and not pending:
            spike, saver.spike = saver.spike, None
            if -1 < parts.checkpointer.newest_step < spike[0]:  # not one saved while it waited
                raise LossSpike(*spike)
        recent[:] = [*recent[1 - WINDOW :], loss]


def roll_back(parts: TrainContext, folder: RunFolder, spike: LossSpike, say: Say) -> None:
    """Takes weights, moments and train state back, the data too unless its samples are to be passed over. Raises
    UserError where too many led to one checkpoint."""
    (step, loss, usual), state, loader = spike.args, parts.state, parts.loader
    said, skip = (
        f"step {step}: loss {loss:.4g}, usual {usual:.4g}",
        parts.settings.training.loss_spike_skip,
    )
    parts.world.on_rank0(folder.lease.check)
    shards = parts.parallel.shards(parts.optimizer)
    if not (checkpoint := parts.checkpointer.to_resume(shards)):
        raise no_checkpoint(folder.path)
    saved = load_checkpoint(
        checkpoint, shards, parts.settings, parts.parallel, parts.optimizer, "save_ckpt_path"
    )
    noted = parts.world.on_rank0(lambda: _rollbacks_to(step_of(checkpoint.name), folder.path))
    if (
        max(noted, state.rollbacks - saved.rollbacks) >= MOST_ROLLBACKS
    ):  # what a full disk refuses to note counts too
        raise UserError(
            f"the loss spikes again after {MOST_ROLLBACKS} rollbacks to {checkpoint} ({said}): lower "
            "learning_rate, raise loss_spike_factor, "
            f"{'pass over the samples (loss_spike_skip=true), ' * (not skip)}or remove this checkpoint to "
            "return to the one before"
        )
    same = (
        saved.data.get("closed", []) == loader.order.before["closed"]
    )  # else this start began sources anew
    position = saved.data if same else loader.order.state_after(0)
    loader.skip((step - saved.step) * skip, saved.step, position["drawn"])
    saved.passed_over += sum(end - first for first, end in loader.passed_over.values())
    saved.rollbacks = state.rollbacks + 1
    kept = {
        name: getattr(state, name)
        for name in ("first_tokens_per_step", "first_started", "schedule", "tokenizer")
    }
    vars(state).update(vars(saved) | kept)
    parts.loss_scale = LossScale(state, parts.world.device, dynamic=parts.loss_scale.dynamic)
    say(
        f"{said}; rolled back to {checkpoint.name}, "
        + (
            f"{saved.passed_over:,} samples passed over so far"
            if skip
            else "whose steps come again"
        )
    )
    if parts.world.rank == 0:
        add_event(
            folder.path,
            "rollback",
            step,
            to=saved.step,
            loss=loss,
            mean=usual,
            skipped=loader.passed_over,
        )


def _rollbacks_to(step, run_folder):
    """In all starts, since that checkpoint was saved and the user was last asked to mend something."""
    since = takewhile(
        lambda event: (
            (event.get("event"), event.get("step")) != ("checkpoint", step)
            and not (str(event.get("reason")).startswith("UserError"))
        ),
        reversed(read_events(run_folder)),
    )
    return sum((event.get("event"), event.get("to")) == ("rollback", step) for event in since)
