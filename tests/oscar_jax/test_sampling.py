"""Choosing tokens: greedy, the drawn distribution, seeds, ties, settings out of range."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.sampling import Sampling, choose

PROBABILITIES = np.asarray([0.05, 0.4, 0.1, 0.25, 0.2])
DRAWS = 8000


def drawn(settings: Sampling, logits=None) -> np.ndarray:
    """Counts of each token over many indices of one sequence."""
    logits = np.log(PROBABILITIES) if logits is None else logits
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (DRAWS, 1))
    return np.bincount(choose(rows, [settings] * DRAWS, np.arange(DRAWS)), minlength=len(logits))


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square within four standard deviations of its mean, nothing drawn where the probability is zero."""
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = DRAWS * probabilities[possible] / probabilities.sum()
    degrees = possible.sum() - 1
    assert ((counts[possible] - expected) ** 2 / expected).sum() <= degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_tempered_distribution(temperature):
    assert_distributed(drawn(Sampling(temperature, seed=3)), PROBABILITIES ** (1 / temperature))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (Sampling(1.0, top_k=2), [1, 3]),
        (Sampling(1.0, top_k=99), [0, 1, 2, 3, 4]),
        (Sampling(1.0, top_p=0.6), [1, 3]),
        (Sampling(1.0, top_p=0.7), [1, 3, 4]),
        (Sampling(1.0, top_p=1e-6), [1]),
        (Sampling(1.0, top_k=3, top_p=0.7), [1, 3]),  # of the three, .47 + .29 reach .7
    ],
)
def test_top_k_and_top_p_keep_the_most_likely_tokens(settings, kept):
    assert_distributed(drawn(settings), np.where(np.isin(np.arange(5), kept), PROBABILITIES, 0))


def test_top_k_one_and_temperature_zero_are_greedy_and_take_the_first_of_equals():
    logits = jnp.asarray(np.random.default_rng(0).integers(0, 4, (64, 9)), jnp.float32)
    expected = np.asarray(logits).argmax(1)
    for settings in (Sampling(), Sampling(5.0, top_k=1, seed=9), Sampling(0.0, top_p=0.5), Sampling(3.0, top_p=1e-9)):
        np.testing.assert_array_equal(choose(logits, [settings] * 64, [0] * 64), expected)


def test_a_draw_depends_on_its_own_logits_seed_and_index_only():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 50)), jnp.float32)
    settings = [Sampling(1.0, seed=5), Sampling(0.0), Sampling(0.7, top_k=9, seed=6)]
    mixed = [[int(x) for x in choose(logits, settings, [i, 0, i])] for i in range(40)]
    for row in (0, 2):
        alone = [int(choose(logits[row : row + 1], [settings[row]], [i])[0]) for i in range(40)]
        assert [tokens[row] for tokens in mixed] == alone
        assert len(set(alone)) > 3
    assert {tokens[1] for tokens in mixed} == {int(logits[1].argmax())}
    other = [int(choose(logits[:1], [Sampling(1.0, seed=7)], [i])[0]) for i in range(40)]
    assert other != [tokens[0] for tokens in mixed]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1: expected a finite number of at least 0"),
        ({"temperature": float("nan")}, r"temperature=nan"),
        ({"temperature": float("inf")}, r"temperature=inf"),
        ({"top_k": -1}, r"top_k=-1: expected a whole number from 0 to 2147483647"),
        ({"top_k": 2**40}, r"top_k=1099511627776"),
        ({"top_k": 1.5}, r"top_k=1.5"),
        ({"top_p": 0.0}, r"top_p=0.0: expected above 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p=1.1"),
        ({"seed": -1}, r"seed=-1: expected a whole number from 0"),
    ],
)
def test_settings_out_of_range_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_one_setting_for_each_sequence():
    with pytest.raises(ValueError, match=r"settings for 1 sequences: expected 2"):
        choose(jnp.zeros((2, 4)), [Sampling()], [0])
