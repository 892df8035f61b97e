"""Statistics of arms that were measured on the same tokens or the same samples."""

from __future__ import annotations

import math

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


def blocks(x: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts, each `[n]`, over blocks of `size` neighbouring positions of x `[windows, positions]`.

    A window's last block may be shorter; no block spans two windows.
    """
    starts = np.arange(0, x.shape[1], size)
    counts = np.diff(np.append(starts, x.shape[1]))
    return np.add.reduceat(x, starts, axis=1).ravel(), np.tile(counts, x.shape[0])


def bootstrap(sums: np.ndarray, counts: np.ndarray, *, seed: int = 0) -> tuple[float, float] | None:
    """Percentile interval of the mean `sum(sums) / sum(counts)` over resampled blocks, at `LEVEL`.

    For a paired comparison pass the sums of differences: both arms are then resampled alike. The same seed and number
    of blocks draws the same blocks for every arm.

    Args:
        sums, counts: float and int `[n]`, of blocks far enough apart to count as independent.

    Returns:
        The interval's ends; None for fewer than two blocks.
    """
    if len(sums) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mcnemar(a: np.ndarray, b: np.ndarray) -> float:
    """Two-sided exact p of McNemar's test: whether two arms succeed equally often on the same samples.

    Args:
        a, b: bool `[n]`, success of each arm at each sample.

    Returns:
        The binomial probability, under equal odds, of a split of the samples where they differ at least as uneven as
        the one seen; 1 where they never differ.
    """
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    differing = only_a + only_b
    tail = sum(math.comb(differing, i) for i in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**differing)
