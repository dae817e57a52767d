"""Chooses the tokens that are held out for validation, in a single pass over the documents."""

from fractions import Fraction
from typing import Any

import numpy as np

from mamba_fsdp.data.sampler import splitmix64

SPANS = 16  # the approximate number of spans in the whole input
BYTES_PER_TOKEN = 4  # an estimate
MIN_SPAN = 64  # the smallest length of a span in tokens
MAX_SPAN = 1 << 16
DEFAULT_SPAN = 1 << 10  # used if the size of the input is not known
PART_OFFSET = 1 << 40  # larger than the number of stretches of any part of the work


def to_fraction(fraction: float) -> Fraction:
    """Converts a float to the simple fraction that the user meant, such as 1/100 for 0.01."""
    return Fraction(fraction).limit_denominator(10**6)


class Holdout:
    """Divides the tokens of the input into stretches of equal length, and holds out one span of each.

    A document is held out if it begins in a span. A document that is longer than a span is first split into units of the
    length of a span, so that one document can't make up all of the validation data, nor be absent from it. The position of
    a span in its stretch is a hash of the number of the stretch, because equal distances could coincide with a period of
    the input.
    """

    def __init__(self, fraction: float, input: dict[str, Any], part: int) -> None:
        """fraction: the fraction of the tokens to hold out. input: the result of `describe`. part: the index of the part of the
        work."""
        size = input.get("bytes")
        self.span = DEFAULT_SPAN
        if size is not None:
            wanted = int(size * fraction) // (BYTES_PER_TOKEN * SPANS)
            self.span = min(max(wanted, MIN_SPAN), MAX_SPAN)
        self.stretch = int(self.span / to_fraction(fraction))
        self.part = part

    def choose(
        self, ends: np.ndarray, position: int, open_tokens: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Divides consecutive tokens into units. Returns (the start of each unit (n,), whether it is held out (n,)).

        ends: (m,), the end of each document among these tokens; the last one is the number of tokens. position: the number
        of tokens before the given tokens. open_tokens: how many of those earlier tokens belong to the first document. If
        there are any, the first unit can have a negative start, because it began before the given tokens.
        """
        documents = np.append(-open_tokens, ends[:-1])
        units = -(-(ends - documents) // self.span)
        firsts = np.cumsum(units) - units
        numbers = np.arange(units.sum()) - np.repeat(firsts, units)
        starts = np.repeat(documents, units) + numbers * self.span
        starts = starts[np.append(starts[1:], ends[-1]) > 0]
        stretches, offsets = np.divmod(starts + position, self.stretch)
        # The first span is in the first half of its stretch, so that an input as short as half a stretch has a span.
        room = np.where(stretches == 0, max(self.stretch // 2, self.span), self.stretch) - self.span
        places = splitmix64(np.uint64(0), stretches + self.part * PART_OFFSET) % (room + 1).astype(
            np.uint64
        )
        inside = offsets - places.astype(np.int64)
        return starts, (inside >= 0) & (inside < self.span)
