"""A 64-bit hash of numbers: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""

import numpy as np


def splitmix64(key: np.ndarray | np.uint64, number: np.ndarray) -> np.ndarray:
    """A uint64 for each of the integers `number` (n,), another one for every `key`, uint64 (n,) or one. It wraps."""
    x = key + (number.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
