"""Chooses the tokens that are held out for validation, while documents stream by."""

from fractions import Fraction
from typing import Any

import numpy as np

from mamba_fsdp.data.sampler import splitmix64

SPANS = 16  # the approximate number of spans in the whole input
BYTES_A_TOKEN = 4  # an estimate
MIN_SPAN = 64  # tokens
MAX_SPAN = 1 << 16
USUAL_SPAN = 1 << 10  # the span if the size of the input is not known
PART = 1 << 40  # more spans than one part of the work has


def exact(fraction: float) -> Fraction:
    """Returns the fraction that a user wrote, such as 1/100 for 0.01."""
    return Fraction(fraction).limit_denominator(10**6)


class Holdout:
    """Spans of tokens, one in each stretch of the input, that together are `fraction` of it.

    A document is held out if it begins in a span. A document that is longer than a span is cut into units of that
    length first, so that it neither fills validation nor is absent from it. A hash of the stretch's number places its
    span, so that the choice has no period that the input could share.
    """

    def __init__(self, fraction: float, input: dict[str, Any], part: int) -> None:
        """input: as `describe` returns it. part: the number of the part of the work."""
        size = input.get("bytes")
        self.span = USUAL_SPAN
        if size is not None:
            wanted = int(size * fraction) // (BYTES_A_TOKEN * SPANS)
            self.span = min(max(wanted, MIN_SPAN), MAX_SPAN)
        self.stretch = int(self.span / exact(fraction))
        self.part = part

    def choose(
        self, ends: np.ndarray, position: int, open_tokens: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the starts of units (n,), whether each is held out (n,)) for consecutive tokens.

        ends: (m,), where documents end among these tokens, and their count. position: the number of tokens before them.
        open_tokens: how many of those belong to the first document; its unit can start before these tokens.
        """
        documents = np.append(-open_tokens, ends[:-1])
        units = -(-(ends - documents) // self.span)
        firsts = np.cumsum(units) - units
        numbers = np.arange(units.sum()) - np.repeat(firsts, units)
        starts = np.repeat(documents, units) + numbers * self.span
        starts = starts[np.append(starts[1:], ends[-1]) > 0]
        stretches, offsets = np.divmod(starts + position, self.stretch)
        # The first span is in the first half of its stretch, so that an input of half a stretch has one.
        room = np.where(stretches == 0, max(self.stretch // 2, self.span), self.stretch) - self.span
        places = splitmix64(np.uint64(0), stretches + self.part * PART) % (room + 1).astype(
            np.uint64
        )
        inside = offsets - places.astype(np.int64)
        return starts, (inside >= 0) & (inside < self.span)
