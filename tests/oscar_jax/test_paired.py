"""Intervals and tests of paired arms."""

import math

import numpy as np
import pytest

from oscar_jax import paired


def interval(*arguments, **options):
    found = paired.bootstrap(*arguments, **options)
    assert found is not None
    return found


def test_blocks_stay_within_windows_and_count_their_positions():
    x = np.arange(10.0).reshape(2, 5)
    sums, counts = paired.blocks(x, 3)
    assert sums.tolist() == [3, 7, 18, 17]
    assert counts.tolist() == [3, 2, 3, 2]


def test_the_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    counts = np.full(40, 64)
    hits = 0
    for trial in range(200):
        low, high = interval(64 * rng.exponential(size=40), counts, seed=trial)
        hits += low < 1 < high
    assert 0.88 <= hits / 200 <= 0.98


def test_a_paired_interval_is_far_narrower_than_the_unpaired_one():
    """Arms that share a text share its difficulty; only their difference counts."""
    rng = np.random.default_rng(1)
    difficulty, counts = rng.normal(3, 1, size=50), np.ones(50)
    other = difficulty + rng.normal(0.1, 0.01, size=50)
    low, high = interval(other - difficulty, counts)
    alone = interval(other, counts)
    assert 0.09 < low < 0.1 < high < 0.11
    assert alone[1] - alone[0] > 20 * (high - low)


def test_the_interval_repeats_and_needs_two_blocks():
    sums, counts = np.sqrt(np.arange(30.0)), np.ones(30)
    assert paired.bootstrap(sums, counts) == paired.bootstrap(sums, counts) != paired.bootstrap(sums, counts, seed=1)
    assert paired.bootstrap(sums[:1], counts[:1]) is None


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (1, 0), (5, 5), (1, 9), (12, 3)])
def test_mcnemar_is_the_exact_binomial_test(only_a, only_b):
    both, neither = 7, 4
    a = np.array([1] * both + [0] * neither + [1] * only_a + [0] * only_b, bool)
    b = np.array([1] * both + [0] * neither + [0] * only_a + [1] * only_b, bool)
    n, seen = only_a + only_b, abs(only_a - only_b)
    exact = sum(math.comb(n, i) for i in range(n + 1) if abs(2 * i - n) >= seen) / 2**n
    assert paired.mcnemar(a, b) == paired.mcnemar(b, a) == pytest.approx(exact)
