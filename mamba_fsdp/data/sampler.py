"""Which window of which source is sample k of the run: arithmetic on (seed, sources, weights, k), no table of the data.

Window j of a source covers its tokens [j*L, j*L + L], L = seq_length: L inputs, and the same shifted by one as labels.
An evenly spread pattern of the weights says which source sample k comes from, and which draw n of that source it is.
Draw n is position n % windows of epoch n // windows; a permutation chosen by seed, source name and epoch says which
window that is. So an epoch has every window exactly once, and a position in the run is the draws made from each source.
"""

import hashlib
import math
from collections.abc import Mapping

import numpy as np

from mamba_fsdp.data.source import Source
from mamba_fsdp.errors import UserError

# Windows move in blocks of about a million tokens (2 to 4 MB), the size from which Lustre and disks read at full rate,
# and are then shuffled within groups of 64 blocks: a group (up to 256 MB) stays in the page cache while it is used, and
# neighbours in the store, often of one document, end up far apart.
BLOCK_TOKENS = 1 << 20
GROUP_BLOCKS = 64
# Shares are rounded to one in a million, far below the 1e-4 that a mixture is asked to meet.
PATTERN_LENGTH = 1 << 20
NOTHING: dict = {
    "pattern": {},
    "drawn": {},
    "identity": {},
    "windows": {},
    "closed": [],
}  # the position at the start
ROUNDS = 4  # of the Feistel network: from four on its permutations pass for random ones (Luby and Rackoff, 1988)


class Sampler:
    """The order of samples.

    weights: {name of a source: its share}, which need not sum to 1; 0 leaves the source out. state: what `state_after`
    returned; sample 0 is then the one after it. It may come from other weights, batch sizes or sets of sources, since
    each source resumes with its own draws. Where it comes from another seed, seq_length or content of a source, its
    draws mean nothing any more: with new_epoch they are closed, as `closed` says, and these sources begin anew. Raises
    UserError without, for weights that make no mixture, and for a source shorter than one window.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Mapping[str, float],
        seq_length: int,
        seed: int,
        state: dict | None = None,
        new_epoch: bool = False,
    ):
        self.names = sorted(
            sources
        )  # so that the order in which sources are listed changes nothing
        self.seq_length, self.seed = seq_length, seed
        self.identity = {name: sources[name].identity for name in self.names}
        for name, source in sources.items():
            if source.token_count <= seq_length:
                raise UserError(
                    f"source {name!r} has {source.token_count} tokens, but one window of seq_length "
                    f"{seq_length} needs {seq_length + 1}; give more data or a smaller seq_length"
                )
        self.windows = np.array(
            [(sources[name].token_count - 1) // seq_length for name in self.names]
        )
        self.keys = np.array([source_key(seed, name) for name in self.names], dtype=np.uint64)
        self.counts = _pattern_counts(self.names, weights)
        self.shares = dict(zip(self.names, self.counts.tolist()))
        self.period = int(self.counts.sum())
        owner: np.ndarray = np.repeat(np.arange(len(self.names)), self.counts)
        nth = np.concatenate([np.arange(count) for count in self.counts])
        spread = np.argsort((nth + 0.5) / self.counts[owner], kind="stable")
        self.pattern, self.nth = owner[spread].astype(np.int16), nth[spread].astype(np.int32)
        self.closed: dict = {}
        self.before = (
            self._resumed({"windows": {}, "closed": [], **state}, new_epoch) if state else NOTHING
        )
        self.start = self.before["pattern_position"] if self.before["pattern"] == self.shares else 0
        self.drawn = np.array([self.before["drawn"].get(name, 0) for name in self.names])

    def samples(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Samples [first, first + count) as three int64 arrays (count,): index into `names`, window, epoch."""
        cycle, place = np.divmod(self.start + first + np.arange(count), self.period)
        source = self.pattern[place].astype(np.int64)
        draw = (
            (self.drawn - self._draws(self.start))[source]
            + cycle * self.counts[source]
            + self.nth[place]
        )
        return source, *window_of(draw, self.windows[source], self.seq_length, self.keys[source])

    def counts_of(self, first: int, count: int) -> np.ndarray:
        """How many of the samples [first, first + count) are of each source, int64 (sources,)."""
        return np.bincount(
            self.pattern[(self.start + first + np.arange(count)) % self.period],
            minlength=len(self.names),
        )

    def state_after(self, samples: int) -> dict:
        """The position after `samples` samples of this order, for JSON. Sources not in the mixture keep their draws."""
        end = self.start + samples
        drawn = self.drawn + self._draws(end) - self._draws(self.start)
        return {
            "seed": self.seed,
            "seq_length": self.seq_length,
            "pattern": self.shares,
            "pattern_position": int(end % self.period),
            "drawn": {**self.before["drawn"], **dict(zip(self.names, drawn.tolist()))},
            "identity": {**self.before["identity"], **self.identity},
            "windows": {**self.before["windows"], **dict(zip(self.names, self.windows.tolist()))},
            "closed": self.before["closed"],
        }

    @property
    def epoch_windows(self) -> int:
        """Windows of all sources of the mixture together: the samples of an epoch of a run."""
        return int(self.windows[self.counts > 0].sum())

    def _draws(self, position):
        """How often each source occurs in the first `position` places of the endlessly repeated pattern."""
        cycles, rest = divmod(position, self.period)
        return cycles * self.counts + np.bincount(self.pattern[:rest], minlength=len(self.names))

    def _resumed(self, state, new_epoch):
        """The position to resume from: `state`, of which what means nothing any more is closed or refused."""
        gone, fault = set(state["drawn"]), ""
        for name, now in (("seed", self.seed), ("seq_length", self.seq_length)):
            if state[name] != now:
                fault = fault or (
                    f"{name} is {now}, but the data's position was saved with {name} {state[name]}, "
                    f"which cuts or orders the data otherwise; set {name}={state[name]}, or let every "
                    "source"
                )
        if not fault:
            gone = {
                name
                for name in self.names
                if state["identity"].get(name) not in (None, self.identity[name])
            }
            fault = gone and (
                f"source {min(gone)!r} holds other data than when its position was saved; put the former "
                "data back, give the new data another name, or let it"
            )
        if not fault:
            return state
        if not new_epoch:
            raise UserError(f"{fault} begin anew: new_epoch=true")
        closed, kept = (
            {
                field: {
                    name: value
                    for name, value in state[field].items()
                    if (name in gone) == is_closed
                }
                for field in ("drawn", "identity", "windows")
            }
            for is_closed in (True, False)
        )
        self.closed = {"seed": state["seed"], "seq_length": state["seq_length"], **closed}
        return {**state, **kept, "closed": [*state["closed"], self.closed]}


def seen(position: dict) -> dict[str, dict]:
    """What a position, as `Sampler.state_after` returns it, has of each source, closed positions too: tokens, epochs."""
    tokens: dict[str, int] = {}
    epochs: dict[str, float] = {}
    for part in [*position["closed"], position]:
        for name, drawn in part["drawn"].items():
            tokens[name] = tokens.get(name, 0) + drawn * part["seq_length"]
            if windows := part["windows"].get(name):  # older positions don't say it
                epochs[name] = round(epochs.get(name, 0.0) + drawn / windows, 6)
    return {"source_tokens": tokens, "source_epochs": epochs}


def _pattern_counts(names, weights):
    """Occurrences of each source in one period of the pattern, as int64 in lowest terms, by largest remainder."""
    if set(weights) != set(names):
        raise UserError(
            f"weights are given for {', '.join(sorted(weights))}, but the sources are {', '.join(names)}"
        )
    values = np.array([weights[name] for name in names], dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise UserError(
            f"weights {dict(weights)} make no mixture: each has to be at least 0, and one above 0"
        )
    shares = values / values.sum() * PATTERN_LENGTH
    counts = np.floor(shares).astype(np.int64)
    largest_first = np.argsort(counts - shares, kind="stable")
    counts[largest_first[: PATTERN_LENGTH - counts.sum()]] += 1
    for name, value, count in zip(names, values, counts):
        if value and not count:
            raise UserError(
                f"weights: the share of source {name!r} is below 1 in {PATTERN_LENGTH}; raise it or give 0"
            )
    return counts // math.gcd(*counts.tolist())


def window_of(
    draw: np.ndarray, windows: np.ndarray, seq_length: int, key: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(window, epoch) of draws (n,) from sources of so many windows (n,); key (n,) uint64 is the source's."""
    epoch, position = np.divmod(draw, windows)
    return permuted_window(
        position, windows, max(1, BLOCK_TOKENS // seq_length), splitmix64(key, epoch)
    ), epoch


def permuted_window(
    position: np.ndarray, windows: np.ndarray, block_windows: int, key: np.ndarray
) -> np.ndarray:
    """The window at each position of an epoch. All arrays have one length; `key` (uint64) chooses the permutation.

    Blocks of block_windows windows are permuted, then the windows within each group of GROUP_BLOCKS blocks. The last
    block may reach past the end.
    """

    def in_whole_blocks(position, windows, key):
        block = np.minimum(block_windows, windows)
        blocks = -(-windows // block)
        group, within = np.divmod(position, GROUP_BLOCKS * block)
        group_windows = np.minimum(GROUP_BLOCKS, blocks - group * GROUP_BLOCKS) * block
        shuffled = group * GROUP_BLOCKS * block + permute(
            within, group_windows, splitmix64(key, group + 1)
        )
        return permute(shuffled // block, blocks, key) * block + shuffled % block

    return _walk(in_whole_blocks, position, windows, key)


def permute(x: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """A bijection of range(size), chosen by `key`, at each x: a Feistel network on two digits of base ceil(sqrt(size)),
    of which few results lie in [size, base**2). All arrays (n,): x, size int64; key uint64."""

    def of_two_digits(x, size, key):
        base = np.ceil(np.sqrt(size)).astype(np.int64)
        left, right = np.divmod(x, base)
        for round_ in range(ROUNDS):
            scrambled = (splitmix64(key, right * ROUNDS + round_) >> np.uint64(1)).astype(np.int64)
            left, right = right, (left + scrambled % base) % base
        return left * base + right

    return _walk(of_two_digits, x, size, key)


def _walk(permuted, x, size, key):
    """permuted(x, size, key), a bijection of a little more than range(size), and what falls outside once more until it
    lands inside: a bijection of range(size). Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002)."""
    result, open_ = np.empty_like(x), np.arange(len(x))
    while open_.size:
        x = permuted(x, size, key)
        inside = x < size
        result[open_[inside]] = x[inside]
        open_, x, size, key = (array[~inside] for array in (open_, x, size, key))
    return result


def source_key(seed, name):
    return int.from_bytes(
        hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little"
    )


def splitmix64(key: np.ndarray | np.uint64, number: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each of the integers `number` (n,) with `key`, uint64 (n,) or one: (n,) uint64, the finaliser of
    SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = key + (number.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
