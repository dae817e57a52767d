"""Reports the progress of a run: metrics.jsonl, steps.jsonl, trackers, the live line and the profile."""

import contextlib
import datetime
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from mamba_fsdp.data.sampler import progress_by_source
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.spec import flops_per_token
from mamba_fsdp.planning.devices import device_peak
from mamba_fsdp.reporting.console import Console, describe_share
from mamba_fsdp.reporting.trackers import make_trackers
from mamba_fsdp.run.names import METRICS, STEPS
from mamba_fsdp.run.records import Log
from mamba_fsdp.settings.resolve import as_dict
from mamba_fsdp.trainer.clock import Clock, delay_metrics, peak_memory_bytes
from mamba_fsdp.trainer.profiling import make_profiler
from mamba_fsdp.trainer.run_folder import RunFolder
from mamba_fsdp.trainer.setup import TrainContext
from mamba_fsdp.trainer.step_stats import StepStats


class LossMeasure(NamedTuple):
    """The result of a validation."""

    loss: float  # nats per token
    tokens: int
    bits_per_byte: float | None  # bits per byte of the tokens' text; None if it is unknown

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def describe(self) -> str:
        """Formats the loss and the perplexity for a line of the log."""
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:,.2f}"


class MetricsLogger(contextlib.ExitStack):
    """Reports the progress of a run. It is a context manager around the training loop.

    All ranks call each method at the same point, but only rank 0 writes. When a run resumes, entries of later steps
    than the current one are removed from the files. on_record: rank 0 calls it with each entry that it has written to
    metrics.jsonl.
    """

    def __init__(
        self,
        context: TrainContext,
        folder: RunFolder,
        console: Console,
        on_record: Callable[[dict], None],
    ) -> None:
        super().__init__()
        settings = context.settings
        world = context.world
        step = context.state.step
        self.context = context
        self.folder = folder
        self.console = console
        self.on_record = on_record
        self.clock = Clock(step, world.size)
        self.first_step = step + 1
        self.earlier_step_seconds = context.state.step_seconds  # seconds of steps in earlier starts
        self.interval = settings.report.report_interval.steps(context.schedule.tokens_per_step)
        self.flops_per_token = flops_per_token(settings.model, settings.data.seq_length)
        # The peak FLOP/s of all devices together; None for an unknown device.
        self.peak_flops = None
        if world.device.type == "cuda":
            peak = device_peak(torch.cuda.get_device_name(world.device))
            self.peak_flops = peak and peak * world.size
        self.metrics: Log | None = None
        self.steps: Log  # set only on rank 0
        self.trackers = []
        if world.rank == 0:
            self.metrics = Log(folder.path / METRICS, step, folder.lease)
            self.steps = Log(folder.path / STEPS, step, folder.lease)
            self.trackers = make_trackers(
                folder.path, as_dict(settings), step, console.print_line, folder.lease.write
            )
        for tracker in self.trackers:
            self.callback(tracker.close)
        self.callback(console.clear)
        self.profiler = None
        if settings.report.use_profiler:
            profiler = make_profiler(folder.path, world.rank, context.loader, console.print_line)
            self.profiler = self.enter_context(profiler)

    def report(self, stats: StepStats, learning_rate: float) -> None:
        """Shows a step in the live line. If a report is due, writes an entry with the mean loss to metrics.jsonl.

        docs/watching.md explains the keys of an entry.
        """
        world = self.context.world
        state = self.context.state
        schedule = self.context.schedule
        state.step_seconds = self.earlier_step_seconds + self.clock.seconds()
        seconds, own_seconds = self.clock.seconds_per_step(state.step)
        tokens_per_second = schedule.tokens_per_step / seconds
        mfu = None
        if self.peak_flops:
            mfu = tokens_per_second * self.flops_per_token / self.peak_flops
        now = time.time()
        command_seconds = self.folder.earlier_seconds + now - self.context.settings.began
        loss = stats.loss
        if self.metrics:
            self.steps.buffer({"step": state.step, "loss": loss, "grad_norm": stats.gradient_norm})
        show = self.console.show_progress
        if schedule.is_due(self.interval, state.step):
            show = self.console.print_line
            loss = state.take_mean_loss()
            entry = {
                "step": state.step,
                "tokens": state.tokens,
                "loss": loss,
                "perplexity": math.exp(min(loss, 700.0)),
                "learning_rate": learning_rate,
                "grad_norm": stats.gradient_norm,
                "skipped_steps": state.skipped_steps,
                "goodput": round(state.step_seconds / (now - state.first_started), 4),
                "goodput_of_commands": round(state.step_seconds / command_seconds, 4),
                "tokens_per_second": round(tokens_per_second, 1),
                "tokens_per_second_per_device": round(tokens_per_second / world.size, 1),
            }
            if mfu:
                entry["mfu"] = round(mfu, 4)
            if world.size > 1:
                entry |= delay_metrics(own_seconds)
            entry["memory_gb"] = round(peak_memory_bytes(world.device) / 1e9, 3)
            entry["data_wait_seconds"] = round(self.clock.data_wait, 6)
            entry["checkpoint_stall_seconds"] = round(self.context.checkpointer.stall_seconds(), 6)
            self._write(entry | progress_by_source(self.context.loader.state_before(state.step)))
            self.clock.next_interval(state.step)
        total = schedule.total_steps
        row = (
            f"step {state.step:>{len(str(total))}}/{total}  loss {loss:7.4f}  lr {learning_rate:.2e}  "
            f"{tokens_per_second:>7,.0f} tok/s"
        )
        if mfu:
            row += f"  MFU {mfu:5.1%}"
        seconds_left = int(self.clock.mean_seconds(state.step) * (total - state.step))
        show(f"{row}  left {datetime.timedelta(seconds=seconds_left)}")
        if state.step == self.first_step:
            self._write_status(state.step, "")
            self.folder.report_node_losses(state.step)
        if self.profiler:
            self.profiler.step()

    def report_validation(
        self,
        step: int,
        total: LossMeasure,
        parts: dict[str, LossMeasure],
        share: float,
        seconds: float,
        samples: list[str],
    ) -> None:
        """Reports a validation.

        step: the number of steps that the model has been trained for. total: the result for all data. parts: the result
        for each source, if there are several. share: the share of the data that was read. seconds: how long the
        validation took. samples: texts that the model generated.
        """
        entry: dict = {
            "step": step,
            "val_loss": total.loss,
            "val_perplexity": total.perplexity,
            "val_tokens": total.tokens,
            "val_share": round(share, 6),
        }
        if total.bits_per_byte is not None:
            entry["val_bits_per_byte"] = total.bits_per_byte
        for name, part in parts.items():
            entry.setdefault("val_source_loss", {})[name] = part.loss
            if part.bits_per_byte is not None:
                entry.setdefault("val_source_bits_per_byte", {})[name] = part.bits_per_byte
        if samples:
            entry["samples"] = samples
        self._write(entry)
        self.console.print_line(
            f"step {step}: validation {total.describe()} ({describe_share(share)}, {seconds:.1f} s)"
        )
        longest = max(map(len, parts), default=0)
        for name, part in parts.items():
            self.console.print_line(f"  {name:<{longest}}  {part.describe()}")
        for sample in samples:
            self.console.print_line(f"sample     {sample!r}")

    def report_save_failure(self, step: int, in_a_row: int, reason: str, what_next: str) -> None:
        """Reports that the save after `step` failed.

        in_a_row: the number of failures since the last save that succeeded. what_next: when the next attempt follows.
        """
        self._write({"step": step, "failed_saves": in_a_row})
        self.console.print_line(f"warning    step {step}: saving failed: {reason}. {what_next}")
        if self.metrics:
            self.folder.add_event("failed_save", step, reason=reason, in_a_row=in_a_row)
        self._write_status(step, f"saving failed: {reason}")

    def report_save_recovery(self, step: int) -> None:
        """Reports that a save succeeded after one or more failures."""
        self._write({"step": step, "failed_saves": 0})
        self._write_status(step, "")

    def sync(self) -> None:
        """Waits until metrics.jsonl and steps.jsonl are on the disk.

        Only rank 0 calls it. Raises UserError if that fails.
        """
        assert self.metrics
        self.steps.sync()
        self.metrics.sync()

    def _write(self, entry: dict) -> None:
        if self.metrics:
            self.metrics.write(entry)
            for tracker in self.trackers:
                tracker.write(entry)
            self.on_record(entry)

    def _write_status(self, step: int, reason: str) -> None:
        if self.metrics and not self.metrics.failing:
            with contextlib.suppress(OSError, UserError):
                self.folder.write_status("running", step, reason)
