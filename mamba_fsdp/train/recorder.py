"""What a run tells while it trains: metrics.jsonl and the tracker, the live line, the profile; and the clock behind
them."""

import math

import torch

from config import resolve
from config.train_config import TrainConfig
from mamba_fsdp.model.spec import flops_per_token
from mamba_fsdp.parallel.world import World
from mamba_fsdp.report.display import Display
from mamba_fsdp.report.records import Metrics
from mamba_fsdp.report.trackers import make_tracker
from mamba_fsdp.train.clock import Clock, device_peak, stragglers
from mamba_fsdp.train.profile import Profiler
from mamba_fsdp.train.run_folder import RunFolder
from mamba_fsdp.train.setup import Plan
from mamba_fsdp.train.state import TrainState


class Recorder:
    """A context manager around the loop. All ranks call every method at the same place; rank 0 alone writes."""

    def __init__(self, settings: TrainConfig, world: World, folder: RunFolder, plan: Plan, step: int) -> None:
        """step: the one that the run resumes from, which starts the clock; what was written after it is dropped."""
        self.world, self.folder, self.plan = world, folder, plan
        self.flops_per_token = flops_per_token(settings.model, settings.data.seq_length)
        peak = device_peak(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
        self.peak_flops = peak and peak * world.size
        self.display = Display(plan.total_steps, enabled=world.rank == 0)
        self.profiler = Profiler(folder.path, world.rank, step) if settings.report.use_profiler else None
        self.metrics = Metrics(folder.path, step) if world.rank == 0 else None
        self.tracker = None if world.rank else make_tracker(
            settings.report.tracker, folder.path, resolve.as_dict(settings), step)
        self.clock = Clock(step)

    def report(self, state: TrainState, loss: float, learning_rate: float, gradient_norm: float, *, due: bool) -> None:
        """After a step: the live line, and when a report is due, its entry in the metrics."""
        seconds, busy = self.clock.seconds_per_step(state.step)
        rate = self.plan.tokens_per_step / seconds
        mfu = rate * self.flops_per_token / self.peak_flops if self.peak_flops else None
        if due:
            compared = stragglers(self.world.gather_objects(busy)) if self.world.size > 1 else {}
            self._write({"step": state.step, "tokens": state.tokens, "loss": loss, "learning_rate": learning_rate,
                         "grad_norm": gradient_norm, "skipped_steps": state.skipped_steps,
                         "tokens_per_second": round(rate, 1), **({"mfu": round(mfu, 4)} if mfu else {}), **compared})
        self.display.step(state.step, loss=loss, learning_rate=learning_rate, tokens_per_second=rate, mfu=mfu,
                          seconds_left=self.clock.seconds_left(state.step, self.plan.total_steps), report=due)
        if due:
            self.clock.next_interval(state.step)
        if self.profiler:
            self.profiler.step(state.step)

    def validated(self, step: int, loss: float, seconds: float) -> None:
        """The validation loss (nats per token) after `step`, which took so long."""
        perplexity = math.exp(min(loss, 700.0))
        self._write({"step": step, "val_loss": loss, "val_perplexity": perplexity})
        self.display.line(f"step {step}: validation loss {loss:.4f}, perplexity {perplexity:,.2f} ({seconds:.1f} s)")

    def sync(self) -> None:
        """Return when what was written lies on the disk."""
        if self.metrics:
            self.metrics.sync()

    def _write(self, entry: dict) -> None:
        if self.metrics:
            self.folder.lease.check()
            self.metrics.write(entry)
        if self.tracker:
            self.tracker.write(entry)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        for part in (self.display, self.profiler, self.metrics, self.tracker):
            if part:
                part.close()
