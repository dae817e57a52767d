"""Computes the source and the window of sample k of a run. They are a function of (seed, sources, weights, k), so no table
of the samples is needed.

Window j of a source consists of its tokens [j * L, j * L + L], where L is seq_length: L inputs, and the same tokens shifted
by one as labels. A repeated pattern, in which each source occurs evenly and in proportion to its weight, determines the
source of sample k. The number of earlier samples from that source is the sample index n. Sample n is at position n % windows
of epoch n // windows. A permutation, chosen by the seed, the name of the source and the epoch, maps the position to a window.
Therefore, each epoch contains every window exactly once, and the position of a run in the data is just the number of samples
taken from each source."""

import hashlib
import math
from collections.abc import Callable, Mapping

import numpy as np

from mamba_fsdp.data.source import Source
from mamba_fsdp.errors import UserError
from mamba_fsdp.text import format_count

# First, blocks of about a million tokens (2 to 4 MB) are permuted: reads of this size reach the full bandwidth of Lustre and
# disks. Then the windows are permuted within groups of 64 blocks. A group (up to 256 MB) stays in the page cache while it is
# used, and windows that are neighbours in the store, often parts of one document, end up far apart.
BLOCK_TOKENS = 1 << 20
GROUP_BLOCKS = 64
# The maximal length of the pattern of sources. Weights are therefore rounded to about one in a million. A mixture only has to
# be accurate to 1e-4.
PATTERN_LENGTH = 1 << 20
# The number of rounds of the Feistel network. With four or more, its permutations can't be distinguished from random ones
# (Luby and Rackoff, 1988).
ROUNDS = 4


class Sampler:
    """The order of samples.

    weights: {name of a source: its sampling weight}; they need not sum to 1, and a source with weight 0 is left out. state: a
    result of `state_after`, to resume from; sample 0 is then the next sample. The weights, the batch size and the set of
    sources can differ from their values in the state, because each source resumes after its own samples.

    Raises UserError for a state with another seed, seq_length or content of a source, because the order or the windows would
    then differ. Also raises UserError for a weight that is too small for the pattern, and for a source shorter than one
    window."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Mapping[str, float],
        seq_length: int,
        seed: int,
        state: dict | None = None,
    ):
        self.names = sorted(sources)  # so that the order in which sources are listed has no effect
        self.seq_length = seq_length
        self.seed = seed
        self.identity = {name: sources[name].identity for name in self.names}
        for name, source in sources.items():
            if source.token_count <= seq_length:
                raise UserError(
                    f"source {name!r} has {format_count(source.token_count, 'token')}, but one window of seq_length "
                    f"{seq_length} needs {seq_length + 1}; give more data or a smaller seq_length"
                )
        token_counts = np.array([sources[name].token_count for name in self.names])
        self.windows = (token_counts - 1) // seq_length
        self.keys = np.array([source_key(seed, name) for name in self.names], dtype=np.uint64)

        self.counts = _pattern_counts(self.names, weights)
        self.period = int(self.counts.sum())
        owner: np.ndarray = np.repeat(np.arange(len(self.names)), self.counts)
        nth = np.concatenate([np.arange(count) for count in self.counts])
        spread = np.argsort((nth + 0.5) / self.counts[owner], kind="stable")
        self.pattern = owner[spread].astype(np.int16)  # the source at each position of the pattern
        # The number of earlier positions in the pattern with the same source.
        self.nth = nth[spread].astype(np.int32)

        self.start = 0  # the position of sample 0 in the pattern
        self.before = state or {}
        # The number of samples from each source before sample 0.
        self.drawn = np.zeros(len(self.names), np.int64)
        if state:
            self._check_position(state)
            self.drawn += [state["drawn"].get(name, 0) for name in self.names]
            if state["pattern"] == self._shares():
                self.start = state["pattern_position"]

    def samples(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the samples [first, first + count) as two int64 arrays (count,): the index of the source in `names`, and the
        index of the window in the source."""
        place = self.start + first + np.arange(count)
        cycle, place = np.divmod(place, self.period)
        source = self.pattern[place].astype(np.int64)
        before = self.drawn - self._occurrences(self.start)
        index = before[source] + cycle * self.counts[source] + self.nth[place]
        windows = self.windows[source]
        epoch, position = np.divmod(index, windows)
        block_windows = max(1, BLOCK_TOKENS // self.seq_length)
        key = splitmix64(self.keys[source], epoch)
        return source, permuted_window(position, windows, block_windows, key)

    def state_after(self, samples: int) -> dict:
        """Returns the position after `samples` samples of this order, as an object for JSON. Sources that are in the state
        but not in the current mixture keep their positions."""
        end = self.start + samples
        drawn = self.drawn + self._occurrences(end) - self._occurrences(self.start)
        of_sources = {
            "drawn": dict(zip(self.names, drawn.tolist())),
            "identity": self.identity,
            "windows": dict(zip(self.names, self.windows.tolist())),
        }
        return {
            "seed": self.seed,
            "seq_length": self.seq_length,
            "pattern": self._shares(),
            "pattern_position": int(end % self.period),
            **{field: self.before.get(field, {}) | new for field, new in of_sources.items()},
        }

    @property
    def epoch_windows(self) -> int:
        """Returns the number of samples in an epoch of a run: the number of windows of all sources in the mixture."""
        return int(self.windows[self.counts > 0].sum())

    def _shares(self) -> dict[str, int]:
        return dict(zip(self.names, self.counts.tolist()))

    def _occurrences(self, position: int) -> np.ndarray:
        """Returns how often each source occurs in the first `position` samples of the endlessly repeated pattern."""
        cycles, rest = divmod(position, self.period)
        return cycles * self.counts + np.bincount(self.pattern[:rest], minlength=len(self.names))

    def _check_position(self, state: dict) -> None:
        """Raises UserError if the earlier samples of the state would be other windows in this order."""
        anew = "or start the data from its beginning in another run folder: load_ckpt_path=RUN without resuming_dataset"
        for name, value in (("seed", self.seed), ("seq_length", self.seq_length)):
            if state[name] != value:
                raise UserError(
                    f"{name} is {value}, but the data's position was saved with {name} {state[name]}, and the order of "
                    f"the data depends on it; set {name}={state[name]}, {anew}"
                )
        for name, identity in self.identity.items():
            if state["identity"].get(name, identity) != identity:
                raise UserError(
                    f"source {name!r} contains other data than when its position was saved; restore the "
                    f"former data, give the new data another name, {anew}"
                )


def progress_by_source(position: dict) -> dict[str, dict]:
    """Returns the numbers of tokens and epochs of each source that the run has read. position: a result of
    `Sampler.state_after`."""
    drawn = position["drawn"]
    windows = position["windows"]
    return {
        "source_tokens": {name: count * position["seq_length"] for name, count in drawn.items()},
        "source_epochs": {name: round(count / windows[name], 6) for name, count in drawn.items()},
    }


def _pattern_counts(names: list[str], weights: Mapping[str, float]) -> np.ndarray:
    """Returns how often each source occurs in one period of the pattern, as an int64 array reduced by the greatest common
    divisor. Weights are rounded with the largest remainder method. Raises UserError for a weight that is rounded to 0."""
    values = np.array([weights[name] for name in names], dtype=np.float64)
    shares = values / values.sum() * PATTERN_LENGTH
    counts = np.floor(shares).astype(np.int64)
    largest_first = np.argsort(counts - shares, kind="stable")
    counts[largest_first[: PATTERN_LENGTH - counts.sum()]] += 1
    for name, value, count in zip(names, values, counts):
        if value and not count:
            raise UserError(
                f"weights: the share of source {name!r} is below 1 in {PATTERN_LENGTH}; raise its weight or set it to 0"
            )
    return counts // math.gcd(*counts.tolist())


def permuted_window(
    position: np.ndarray, windows: np.ndarray, block_windows: int, key: np.ndarray
) -> np.ndarray:
    """Returns the window at each position of an epoch.

    position, windows, key: arrays of the same length, with the position, the number of windows of the source, and the key
    (uint64) that chooses the permutation. Blocks of block_windows windows are permuted, then the windows within each group of
    GROUP_BLOCKS blocks. The last block can reach beyond the last window; `_cycle_walk` corrects this."""

    def permuted(position: np.ndarray, windows: np.ndarray, key: np.ndarray) -> np.ndarray:
        block = np.minimum(block_windows, windows)
        blocks = -(-windows // block)
        group, within = np.divmod(position, GROUP_BLOCKS * block)
        first_block = group * GROUP_BLOCKS
        group_windows = np.minimum(GROUP_BLOCKS, blocks - first_block) * block
        within = permute(within, group_windows, splitmix64(key, group + 1))
        shuffled = first_block * block + within
        return permute(shuffled // block, blocks, key) * block + shuffled % block

    return _cycle_walk(permuted, position, windows, key)


def permute(x: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Applies the permutation of range(size) that `key` chooses to each element of `x`. All arrays have the shape (n,); x and
    size are int64, key is uint64."""
    return _cycle_walk(_feistel, x, size, key)


def _feistel(x: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Applies a Feistel network to the two digits of x in base ceil(sqrt(size)). The network is a permutation of
    range(base**2), and therefore a few results are not below `size`."""
    base = np.ceil(np.sqrt(size)).astype(np.int64)
    left, right = np.divmod(x, base)
    for round_ in range(ROUNDS):
        scrambled = (splitmix64(key, right * ROUNDS + round_) >> np.uint64(1)).astype(np.int64)
        left, right = right, (left + scrambled % base) % base
    return left * base + right


def _cycle_walk(
    permuted: Callable[..., np.ndarray], x: np.ndarray, size: np.ndarray, key: np.ndarray
) -> np.ndarray:
    """Applies a permutation of range(size) to `x`. This permutation is made from `permuted`, a permutation of a slightly
    larger range, by cycle walking: results outside range(size) are permuted again until they are inside (Black and Rogaway,
    Ciphers with Arbitrary Finite Domains, 2002)."""
    result = np.empty_like(x)
    remaining = np.arange(len(x))
    while remaining.size:
        x = permuted(x, size, key)
        inside = x < size
        result[remaining[inside]] = x[inside]
        outside = ~inside
        remaining = remaining[outside]
        x = x[outside]
        size = size[outside]
        key = key[outside]
    return result


def source_key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def splitmix64(key: np.ndarray | np.uint64, number: np.ndarray) -> np.ndarray:
    """Hashes integers to 64 bits with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).

    key: a uint64 array (n,), or one uint64. number: an integer array (n,). Returns a uint64 array (n,)."""
    x = key + (number.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
