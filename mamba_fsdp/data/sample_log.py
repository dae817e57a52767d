"""Which windows each step took: samples.jsonl in the run folder, written by rank 0, and the proof from it and from the
positions in the checkpoints that a run saw each window as often as its epochs say (`audit`).

    {"step": 40, "logged": true, "ranks": 4, "global_batch": 8, "position": {...}}    a start, which resumes from 40
    {"step": 41, "skipped": {"code": [10, 13]}, ...}    draws that a run passed over before step 41, after a loss spike
    {"step": 41, "draws": {"code": [13, 16], "text": [19, 24]}, "read": "9c5e..."}    draws 13, 14 of code ...

The position is what `Sampler.state_after` gives. "read" is no arithmetic of the order: it is the sum of `fingerprint`
over the windows in the batches that all ranks were handed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.data.loader import Batch, Loader
from mamba_fsdp.data.sampler import NOTHING, source_key, splitmix64, window_of
from mamba_fsdp.errors import UserError
from mamba_fsdp.report.records import Log, entries
from mamba_fsdp.untrusted import like

LINES = 100  # written at once: opening a file takes a round trip on a network file system
CHECKED_AT_ONCE = 1 << 20  # draws: arrays of some megabytes
Position = Mapping[str, Any]  # as Sampler.state_after gives it
POSITION = {
    "seq_length": 1,
    "drawn": {"": 0},
    "windows": {"": 1},
    "closed": [{"drawn": {"": 0}, "windows": {"": 1}}],
}


def fingerprint(name: str, windows: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each window (n,) of a source: (n,) uint64. Sums modulo 2**64 tell multisets of windows apart."""
    return splitmix64(np.uint64(source_key("windows", name)), windows)


def read_by(batches: Iterable[Batch]) -> int:
    """The sum of the fingerprints of what these batches hold, modulo 2**64."""
    windows: dict[str, list] = {}
    for batch in batches:
        for name, window in batch.samples:
            windows.setdefault(name, []).append(window)
    return sum(int(fingerprint(name, np.array(which)).sum()) for name, which in windows.items()) % (
        1 << 64
    )


class SampleLog:
    """The log of a start that resumes from `step`. logged: whether steps will be; False where a former start's log must
    say that this one's are missing. check: see `Log`."""

    def __init__(
        self,
        path: Path,
        step: int,
        loader: Loader,
        *,
        logged: bool,
        check: Callable[[Callable], object] = lambda trying: None,
    ) -> None:
        self.log, self.order, self.batch = (
            Log(path, step, check),
            loader.order,
            loader.split.global_batch,
        )
        self.logged, position = logged, loader.state_before(step)
        self.loader, self.drawn = (
            loader,
            np.array([position["drawn"][name] for name in self.order.names]),
        )
        position["drawn"] |= {name: first for name, (first, _) in loader.passed_over.items()}
        self.skipped = {"skipped": loader.passed_over} if loader.passed_over else {}
        self.waiting = [
            {
                "step": step,
                "logged": logged,
                "ranks": loader.split.world_size,
                "global_batch": self.batch,
                "position": position,
            }
        ]

    def add(self, step: int, read: int) -> None:
        """After each step. read: see `read_by`, of all ranks."""
        if self.logged:
            start = self.drawn
            self.drawn = start + self.order.counts_of(
                (step - 1 - self.loader.first_step) * self.batch, self.batch
            )
            ranges = zip(self.order.names, start.tolist(), self.drawn.tolist())
            draws, told = (
                {name: [first, end] for name, first, end in ranges if end > first},
                self.skipped,
            )
            self.waiting.append({"step": step, **told, "draws": draws, "read": f"{read:016x}"})
            self.skipped = {}
            if len(self.waiting) >= LINES:
                self.write()

    def write(self) -> None:
        """Raises as `Log.write` does."""
        self.log.write(*self.waiting)
        self.waiting = []

    def sync(self) -> None:
        """Returns when all steps so far are on the disk."""
        self.write()
        self.log.sync()


class Ledger:
    """Where a run stands in its data, followed from what is known first. A step that the log tells must take up each
    source where the step before left it, and have read the windows of these draws; of steps that no log tells only the
    positions before and after are known, and these must not fall.

    `step`, `position`: after what was met last. `starts`: ranks of each start. `logged`: samples that the log tells.
    `unlogged`: [(first step, last step)] that it does not. `inherited`: draws that are not of this run's samples.
    `passed_over`: draws that were skipped after loss spikes.
    """

    def __init__(self, log: Path) -> None:
        self.log, self.step, self.position, self.is_logged = log, -1, dict(NOTHING), False
        self.starts: list[int] = []
        self.unlogged: list[tuple[int, int]] = []
        self.logged = self.batch = self.inherited = self.passed_over = 0
        self.waiting: list[dict] = []  # steps to be held against what was read

    def take(self, entry: dict) -> None:
        """A step, as the log tells it."""
        step, drawn, skipped = entry["step"], self.position["drawn"], entry.get("skipped", {})
        self.passed_over += sum(end - first for first, end in skipped.values())
        for name, (first, end) in [*skipped.items(), *entry["draws"].items()]:
            if first != drawn.get(name, 0):
                raise self._fault(name, drawn.get(name, 0), first, f"step {step}")
            drawn[name] = end
        if step != self.step + 1:
            raise UserError(f"{self.log}: step {step} follows step {self.step}")
        if sum(end - first for first, end in entry["draws"].values()) != self.batch:
            raise UserError(
                f"{self.log}: step {step} has not the {self.batch} samples of its global batch"
            )
        self.step, self.logged = step, self.logged + self.batch
        self.waiting.append(entry)
        if len(self.waiting) * max(self.batch, 64) >= CHECKED_AT_ONCE:
            self.check()

    def meet(self, step: int, position: Position, who: str) -> None:
        """What a start or a checkpoint (`who`) says of the position after `step`."""
        self.check()
        like({"seq_length": 1, **position}, POSITION)
        exact, before, now = step == self.step, lives(self.position), lives(position)
        if step < self.step or self.is_logged and not exact:
            raise UserError(
                f"{self.log}: it ends at step {self.step}, but {who} is of step {step}: what the steps "
                "between read is not known"
            )
        for life in sorted(before.keys() | now.keys() if exact else before):
            drawn, meaning = before.get(life, (0, ()))
            there, other = now.get(life, (0, meaning))
            if drawn and other != meaning:
                raise UserError(
                    f"{who} (step {step}) has another seed or seq_length than what was drawn before from "
                    f"source {life[0]!r}, and has not closed it"
                )
            if there < drawn or exact and there > drawn:
                raise self._fault(life[0], drawn, there, f"{who} (step {step})")
        if not exact and step > 0:
            first = max(self.step, 0) + 1
            adjoins = bool(self.unlogged) and self.unlogged[-1][1] + 1 == first
            self.unlogged.append((self.unlogged.pop()[0] if adjoins else first, step))
        self.step, self.position = step, {**position, "drawn": dict(position["drawn"])}

    def check(self) -> None:
        """Holds the steps that wait against what their ranks read."""
        read, waiting, self.waiting = np.zeros(len(self.waiting), np.uint64), self.waiting, []
        for name in {name for entry in waiting for name in entry["draws"]}:
            places = [number for number, entry in enumerate(waiting) if name in entry["draws"]]
            first, end = np.array([waiting[number]["draws"][name] for number in places]).T
            sums = np.append(
                np.uint64(0),
                np.cumsum(fingerprint(name, self._windows(name, first[0], end[-1])[0])),
            )
            read[places] += sums[end - first[0]] - sums[first - first[0]]
        for entry, expected in zip(waiting, read.tolist()):
            if entry["read"] != f"{expected:016x}":
                name, (draw, _) = next(iter(entry["draws"].items()))
                raise UserError(
                    f"step {entry['step']}: its ranks read other windows than those of its draws, of which "
                    f"the first is {self._named(name, draw)}"
                )

    def _windows(self, name, first, end):
        windows, key = self.position["windows"][name], source_key(self.position["seed"], name)
        return window_of(
            np.arange(first, end),
            np.full(end - first, windows),
            self.position["seq_length"],
            np.full(end - first, key, np.uint64),
        )

    def _named(self, name, draw):
        window, epoch = (
            self._windows(name, draw, draw + 1)
            if name in self.position["windows"]
            else ([draw], ["?"])
        )
        return f"window {window[0]} of source {name!r}, epoch {epoch[0]}"

    def _fault(self, name, before, now, who):
        """The error of a source that `who` takes up at draw `now`, when it stood at draw `before`."""
        self.check()
        if now > before:
            return UserError(
                f"{self._named(name, before)}, was left out: {who} takes up its source at draw {now}, "
                f"which the steps up to {self.step} had left at {before}"
            )
        steps = (
            entry["step"]
            for entry, _ in entries(self.log)
            if entry["step"] <= self.step
            for first, end in [entry.get("draws", {}).get(name, (0, 0))]
            if first <= now < end
        )
        return UserError(
            f"{self._named(name, now)}, is seen twice: {who} takes up its source at draw {now}, which "
            f"step {max(steps, default='?')} had taken"
        )


def lives(position: Position) -> dict[tuple[str, int], tuple[int, tuple]]:
    """{(source, how often it had begun anew): (its draws then, what says which windows these are)}"""
    found, anew = {}, Counter[str]()
    for part in [*position["closed"], position]:
        for name, drawn in part["drawn"].items():
            found[name, anew[name]] = drawn, (part["seed"], part["seq_length"])
        anew.update(list(part["drawn"]))
    return found


def audit(log: Path, saved: Mapping[int, Mapping[str, Any]]) -> Ledger:
    """Replays the log, if there is one, and the checkpoints: {step: the train state that one saved}. Raises UserError
    where a window was seen once too often or too seldom, or what is written contradicts itself."""
    ledger, inherited = Ledger(log), set()
    try:
        for step, entry in _in_order(log, saved):
            if "draws" in entry:
                ledger.take(entry)
            elif "position" in entry:
                ledger.meet(step, entry["position"], "the start there")
                ledger.is_logged, ledger.batch = entry["logged"], entry["global_batch"]
                ledger.starts.append(entry["ranks"])
            else:
                position = {**NOTHING, **entry["data"]}
                ledger.meet(step, position, "the checkpoint")
                ledger.passed_over = max(ledger.passed_over, skipped := entry.get("passed_over", 0))
                inherited.add(
                    sum(drawn for drawn, _ in lives(position).values()) - entry["samples"] - skipped
                )
                if len(inherited) > 1 or min(inherited) < 0:
                    raise UserError(
                        f"the checkpoint of step {step} has {entry['samples']:,} samples, but the draws in "
                        "its position are not as many more as at the start of the run"
                    )
        ledger.check()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UserError(
            f"{log}: after step {ledger.step} stands what no run writes ({error})"
        ) from error
    ledger.inherited = max(inherited, default=0)
    return ledger


def _in_order(log: Path, saved: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
    """(step, line of the log or train state): a checkpoint stands behind its step and before the start from it."""
    left = sorted(saved)
    for entry, _ in entries(log):
        while left and left[0] < entry["step"] + ("position" in entry):
            yield left[0], saved[left.pop(0)]
        yield entry["step"], entry
    for step in left:
        yield step, saved[step]
