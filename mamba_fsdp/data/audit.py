"""The proof that a run saw each window as often as its epochs say: its samples.jsonl and the positions in its
checkpoints, replayed together. Whatever contradicts it raises a UserError that names the first window concerned."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fsdp.data.order import NOTHING, source_key, window_of
from mamba_fsdp.data.sample_log import fingerprint
from mamba_fsdp.errors import UserError
from mamba_fsdp.report.records import entries

CHECKED_AT_ONCE = 1 << 20  # draws: arrays of some megabytes

Position = Mapping[str, Any]  # as Order.state_after gives it


class Ledger:
    """Where a run stands in its data, followed from what is known first. A step that the log tells must take up each
    source where the step before left it, and have read the windows of these draws; of steps that no log tells only the
    positions before and after are known, and these must not fall.

    `step`, `position`: after what was met last. `starts`: ranks of each start. `logged`: samples that the log tells.
    `unlogged`: [(first step, last step)] that it does not. `inherited`: draws that are not of this run's samples.
    """

    def __init__(self, log: Path) -> None:
        self.log, self.step, self.position, self.is_logged = log, -1, dict(NOTHING), False
        self.starts: list[int] = []
        self.unlogged: list[tuple[int, int]] = []
        self.logged = self.batch = self.inherited = 0
        self.waiting: list[dict] = []  # steps to be held against what was read
        self.began: dict[str, int] = {}  # source -> the step from which on its draws count from 0, where that is not 0
        self.marks: dict[str, tuple[int, np.ndarray]] = {}  # source -> (epoch, which of its windows it has had)

    def start(self, entry: Mapping[str, Any]) -> None:
        """A start of the run, as the log tells it."""
        self.meet(entry["step"], entry["position"], "the start there")
        self.is_logged, self.batch = entry["logged"], entry["global_batch"]
        self.starts.append(entry["ranks"])

    def take(self, entry: dict) -> None:
        """A step, as the log tells it."""
        step, drawn = entry["step"], self.position["drawn"]
        for name, (first, end) in entry["draws"].items():
            if name not in drawn or first != drawn[name]:
                raise self._fault(name, drawn.get(name, 0), first, f"step {step}")
            drawn[name] = end
        if step != self.step + 1:
            raise UserError(f"{self.log}: step {step} follows step {self.step}")
        if sum(end - first for first, end in entry["draws"].values()) != self.batch:
            raise UserError(f"{self.log}: step {step} has not the {self.batch} samples of its global batch")
        self.step, self.logged = step, self.logged + self.batch
        self.waiting.append(entry)
        if len(self.waiting) * max(self.batch, 64) >= CHECKED_AT_ONCE:
            self.check()

    def meet(self, step: int, position: Position, who: str) -> None:
        """What a start or a checkpoint (`who`) says of the position after `step`."""
        self.check()
        exact = step == self.step
        if self.step >= 0:
            if step < self.step or self.is_logged and not exact:
                raise UserError(f"{self.log}: it ends at step {self.step}, but {who} is of step {step}: what the steps "
                                "between read is not known")
            who = f"{who} (step {step})"
            before = self._closed(position, exact, who, step)
            for name in before.keys() | position["drawn"].keys():
                self._compare(name, before.get(name, 0), position["drawn"].get(name, 0), exact, who)
        if not exact and step > 0:
            self.unlogged.append((max(self.step, 0) + 1, step))
        self.step, self.position = step, {**position, "drawn": dict(position["drawn"])}

    def check(self) -> None:
        """Holds the steps that wait against what their ranks read, and their windows against those of the epoch."""
        read, waiting, self.waiting = np.zeros(len(self.waiting), np.uint64), self.waiting, []
        for name in sorted({name for entry in waiting for name in entry["draws"]}):
            places = [number for number, entry in enumerate(waiting) if name in entry["draws"]]
            first, end = np.array([waiting[number]["draws"][name] for number in places]).T
            windows, epochs = self._windows(name, first[0], end[-1])
            self._mark(name, windows, epochs)
            sums = np.append(np.uint64(0), np.cumsum(fingerprint(name, windows)))
            read[places] += sums[end - first[0]] - sums[first - first[0]]
        for entry, expected in zip(waiting, read.tolist()):
            if entry["read"] != f"{expected:016x}":
                name, (draw, _) = next(iter(entry["draws"].items()))
                raise UserError(f"step {entry['step']}: its ranks read other windows than those of its draws, of which "
                                f"the first is {self._named(name, draw)}")

    def _closed(self, position, exact, who, step):
        """The draws of each source that are still open at `position`, which may have closed some."""
        known, before = self.position["closed"], dict(self.position["drawn"])
        if position["closed"][:len(known)] != known:
            raise UserError(f"{who} has forgotten a position that was closed before")
        for part in position["closed"][len(known):]:
            for name, drawn in part["drawn"].items():
                self._compare(name, before.pop(name, 0), drawn, exact, who)
                self.marks.pop(name, None)
                self.began[name] = step
        changed = any(position[field] != self.position.get(field) for field in ("seed", "seq_length"))
        if changed and any(before.values()):
            raise UserError(f"{who} has another seed or seq_length than what was drawn before, and has not closed it")
        return before

    def _compare(self, name, before, now, exact, who):
        if now < before or exact and now > before:
            raise self._fault(name, before, now, who)

    def _mark(self, name, windows, epochs):
        for epoch in np.unique(epochs).tolist():
            known, seen = self.marks.get(name, (-1, None))
            if known != epoch:
                seen = np.zeros(self.position["windows"][name], bool)
            which = windows[epochs == epoch]
            twice = which[seen[which]]
            seen[which] = True
            if len(twice) or len(np.unique(which)) < len(which):
                raise UserError(f"source {name!r}: the order names a window of epoch {epoch} twice")
            self.marks[name] = epoch, seen

    def _windows(self, name, first, end):
        count, seq_length = end - first, self.position["seq_length"]
        key = np.full(count, source_key(self.position["seed"], name), np.uint64)
        return window_of(np.arange(first, end), np.full(count, self.position["windows"][name]), seq_length, key)

    def _named(self, name, draw):
        window, epoch = self._windows(name, draw, draw + 1) if name in self.position["windows"] else ([draw], ["?"])
        return f"window {window[0]} of source {name!r}, epoch {epoch[0]}"

    def _fault(self, name, before, now, who):
        """The error of a source that `who` takes up at draw `now`, when it stood at draw `before`."""
        self.check()
        if now > before:
            return UserError(f"{self._named(name, before)}, was left out: {who} takes up its source at draw {now}, "
                             f"which the steps up to {self.step} had left at {before}")
        draws = ((entry["step"], entry["draws"].get(name, (0, 0))) for entry, _ in entries(self.log)
                 if "draws" in entry and entry["step"] > self.began.get(name, 0))
        earlier = next((step for step, (first, end) in draws if first <= now < end), None)
        return UserError(f"{self._named(name, now)}, is seen twice: {who} takes up its source at draw {now}, which "
                         f"{f'step {earlier}' if earlier else 'an earlier step'} had taken")


def audit(log: Path, saved: Mapping[int, Mapping[str, Any]]) -> Ledger:
    """Replays the log, if there is one, and the checkpoints: {step: the train state that one saved}. Raises UserError
    where a window was seen once too often or too seldom, or what is written contradicts itself."""
    ledger, inherited = Ledger(log), set()  # the draws of a run whose position this one took over
    try:
        for step, entry in _in_order(log, saved):
            if "position" in entry:
                ledger.start(entry)
            elif "draws" in entry:
                ledger.take(entry)
            else:
                position = {**NOTHING, **entry["data"]}
                ledger.meet(step, position, "the checkpoint")
                drawn = sum(sum(part["drawn"].values()) for part in [*position["closed"], position])
                inherited.add(drawn - entry["samples"])
                if len(inherited) > 1 or min(inherited) < 0:
                    raise UserError(f"the checkpoint of step {step} has {entry['samples']:,} samples, but {drawn:,} "
                                    "draws, which is another difference than at the start of the run")
        ledger.check()
        ledger.inherited = max(inherited, default=0)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UserError(f"{log}: after step {ledger.step} stands what no run writes ({error})") from error
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
