"""What a run reports while it trains: metrics.jsonl and trackers, the live line, the profile."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable

import torch

from config.resolve import as_dict
from config.train_config import TrainConfig
from mamba_fsdp.data.loader import Loader
from mamba_fsdp.data.sampler import seen
from mamba_fsdp.data.tokenizer import load_words
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.spec import flops_per_token
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.devices import device_peak
from mamba_fsdp.report.console import Console, read_share
from mamba_fsdp.report.records import Log, add_event
from mamba_fsdp.report.trackers import make_trackers
from mamba_fsdp.run_layout import GENERATED, METRICS, TOKENIZER
from mamba_fsdp.storage import exists
from mamba_fsdp.train.clock import Clock, device_metrics, stragglers
from mamba_fsdp.train.profiling import make_profiler
from mamba_fsdp.train.run_folder import RunFolder
from mamba_fsdp.train.setup import RunSchedule
from mamba_fsdp.train.state import TrainState


class MetricsLogger(contextlib.ExitStack):
    """A context manager around the loop. All ranks call every method at the same place; only rank 0 writes."""

    def __init__(
        self,
        settings: TrainConfig,
        world: World,
        folder: RunFolder,
        plan: RunSchedule,
        loader: Loader,
        step: int,
        display: Console,
    ) -> None:
        """step: the one that the run resumes from; what was written after it is dropped."""
        super().__init__()
        report = settings.report
        self.world, self.folder, self.plan, self.loader = world, folder, plan, loader
        self.interval = report.report_interval.steps(plan.tokens_per_step)
        self.display = display
        self.flops_per_token = flops_per_token(settings.model, settings.data.seq_length)
        peak = (
            device_peak(torch.cuda.get_device_name(world.device))
            if world.device.type == "cuda"
            else None
        )
        self.peak_flops = peak and peak * world.size
        self.metrics = self.generated = None
        if world.rank == 0:
            self.metrics = Log(folder.path / METRICS, step, folder.lease.check)
            if settings.training.sample_prompts or exists(folder.path / GENERATED):
                self.generated = Log(folder.path / GENERATED, step, folder.lease.check)
        self.trackers = (
            []
            if world.rank
            else make_trackers(
                report.tracker,
                folder.path,
                as_dict(settings),
                step,
                report.wandb_project,
                report.wandb_name,
                display.line,
            )
        )
        for part in (*self.trackers, self.display):
            self.callback(part.close)
        self.profiler = (
            self.enter_context(make_profiler(folder.path, world.rank, loader, self.display.line))
            if report.use_profiler
            else None
        )
        self.clock = Clock(step, world.size)
        self.stall_seconds: Callable[[], float] = (
            float  # what saving has held the training up since it was asked last
        )

    def report(
        self, state: TrainState, loss: float, learning_rate: float, gradient_norm: float
    ) -> None:
        """After a step: the live line, and when due an entry with the mean loss in the metrics."""
        state.step_seconds += self.clock.new_seconds()
        if (
            not self.folder.startup.steps
            and self.metrics
            and (recovery := self.folder.recovery(state.step))
        ):
            self.display.line(recovery)
        if self.folder.startup.stepped() and self.world.rank == 0:
            self.folder.say("running", state.step)
            self.display.line(self.folder.startup.line())
        due = self.plan.is_due(self.interval, state.step)
        loss = state.take_mean_loss() if due else loss
        seconds, own_seconds = self.clock.seconds_per_step(state.step)
        rate = self.plan.tokens_per_step / seconds
        mfu = rate * self.flops_per_token / self.peak_flops if self.peak_flops else None
        if due:
            compared = stragglers(own_seconds) if self.world.size > 1 else {}
            self._write(
                {
                    "step": state.step,
                    "tokens": state.tokens,
                    "loss": loss,
                    "perplexity": math.exp(min(loss, 700.0)),
                    "learning_rate": learning_rate,
                    "grad_norm": gradient_norm,
                    "skipped_steps": state.skipped_steps,
                    "goodput": round(state.step_seconds / (time.time() - state.first_started), 4),
                    "tokens_per_second": round(rate, 1),
                    "tokens_per_second_per_device": round(rate / self.world.size, 1),
                    **({"mfu": round(mfu, 4)} if mfu else {}),
                    **compared,
                    **device_metrics(self.world.device),
                    "data_wait_seconds": round(self.clock.data_wait, 6),
                    "checkpoint_stall_seconds": round(self.stall_seconds(), 6),
                    **seen(self.loader.state_before(state.step)),
                }
            )
            self.clock.next_interval(state.step)
        self.display.step(
            state.step,
            self.plan.total_steps,
            loss=loss,
            learning_rate=learning_rate,
            tokens_per_second=rate,
            mfu=mfu,
            report=due,
            seconds_left=self.clock.seconds_left(state.step, self.plan.total_steps),
        )
        if self.profiler:
            self.profiler.step()

    def validated(self, step: int, loss: float, tokens: int, share: float, seconds: float) -> None:
        """The validation loss (nats per token) after `step`, of `tokens`, a `share` of the data, in so many seconds."""
        perplexity = math.exp(min(loss, 700.0))
        self.folder.startup.done("validation")
        self._write(
            {
                "step": step,
                "val_loss": loss,
                "val_perplexity": perplexity,
                "val_tokens": tokens,
                "val_share": round(share, 6),
            }
        )
        self.display.line(
            f"step {step}: validation loss {loss:.4f}, perplexity {perplexity:,.2f} "
            f"({read_share(share)}, {seconds:.1f} s)"
        )

    def save_failed(
        self, step: int, in_a_row: int = 0, reason: str = "", what_next: str = ""
    ) -> None:
        """Saving has failed so many times in a row after `step`, for this reason; 0: it went well again."""
        self._write({"step": step, "failed_saves": in_a_row})
        if in_a_row:
            self.display.line(f"warning    step {step}: saving failed: {reason}. {what_next}")
        if self.metrics:
            if in_a_row:
                add_event(self.folder.path, "failed_save", step, reason=reason, in_a_row=in_a_row)
            if not self.metrics.failing:
                with contextlib.suppress(OSError, UserError):
                    self.folder.say("running", step, f"saving failed: {reason}" if in_a_row else "")

    def sampled(self, step: int, prompts: list[str], drawn: list[list[int]]) -> None:
        """Texts that continue the prompts after `step`, up to their documents' ends."""
        if self.generated:
            words = load_words(self.folder.path / TOKENIZER)
            self.generated.write(
                *(
                    {
                        "step": step,
                        "prompt": prompt,
                        "text": words.decode(
                            list(itertools.takewhile(lambda token: token != words.eos, tokens))
                        ),
                    }
                    for prompt, tokens in zip(prompts, drawn)
                )
            )

    def sync(self) -> None:
        """Returns when the metrics are on the disk."""
        for log in (self.metrics, self.generated):
            if log:
                log.sync()

    def _write(self, entry: dict) -> None:
        if self.metrics:
            self.metrics.write(entry)
        for tracker in self.trackers:
            tracker.write(entry)
