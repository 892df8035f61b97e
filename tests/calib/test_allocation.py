"""Sizes of layers: the least error that a budget allows."""

import itertools

import numpy as np
import pytest

from calib.allocation import allocate


@pytest.mark.parametrize("budget", [8, 9, 13, 14, 22, 40, 100])
def test_the_choice_is_the_best_of_all(budget):
    rng = np.random.default_rng(budget)
    bits = np.array([10, 2, 5])
    errors = rng.exponential(size=(3, 4)) * np.array([[0.0], [1.0], [0.3]])
    chosen = allocate(errors, bits, budget)
    assert bits[chosen].sum() <= budget
    choices = [c for c in itertools.product(range(3), repeat=4) if bits[list(c)].sum() <= budget]
    best = min(errors[list(c), range(4)].sum() for c in choices)
    assert errors[chosen, range(4)].sum() == pytest.approx(best)


def test_requests_that_cannot_be_met_are_one_sentence():
    with pytest.raises(ValueError, match="budget=5: expected at least 6"):
        allocate(np.zeros((2, 3)), np.array([4, 2]), 5)
    with pytest.raises(ValueError, match="expected 2 numbers, one for each option"):
        allocate(np.zeros((2, 3)), np.array([4]), 50)
