"""Tiers: the visibility rule, its counts, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.tiers import Tiers
from tests.pallas_kernels.attention_definition import history_end

sizes = st.builds(
    lambda sink, recent, group, pages: Tiers(sink, recent, group, group * pages),
    st.integers(0, 70), st.integers(1, 70), st.integers(1, 16), st.integers(1, 8),
)  # fmt: skip


@given(sizes, st.integers(-1, 400))
def test_history_end_equals_the_definition(tiers, position):
    assert tiers.history_end(position) == history_end(position, tiers)


@pytest.mark.parametrize("tiers", (Tiers(), Tiers(0, 1, 1, 1), Tiers(4, 8, 4, 8), Tiers(100, 3, 5, 10)))
def test_integers_numpy_and_jax_agree(tiers):
    positions = np.arange(-1, 700, dtype=np.int32)
    expected = [history_end(int(t), tiers) for t in positions]
    np.testing.assert_array_equal(tiers.history_end(positions), expected)
    traced = jax.jit(tiers.history_end)(jnp.asarray(positions))
    np.testing.assert_array_equal(traced, expected)
    assert traced.dtype == jnp.int32
    assert int(jax.jit(tiers.history_end)(jnp.int32(500))) == history_end(500, tiers)


@given(sizes, st.integers(0, 400))
def test_counts_follow_from_the_rule(tiers, length):
    history = history_end(length - 1, tiers) - tiers.sink
    recents = length - min(length, tiers.sink) - history
    assert tiers.history_tokens(length) == history
    assert tiers.plain_tokens(length) == length - history
    assert tiers.history_pages(length) == -(-history // tiers.page)
    assert history % tiers.group == 0
    if length >= tiers.sink + tiers.recent:
        assert tiers.recent <= recents <= tiers.recent + tiers.group - 1
    else:
        assert (history, recents) == (0, max(0, length - tiers.sink))


@given(sizes, st.integers(1, 16), st.integers(0, 400))
def test_the_ring_holds_what_any_query_of_a_step_reads_after_its_tokens_are_written(tiers, step, start):
    """The lowest recent of the step's first query is still there when its last token has been stored."""
    lowest, last = max(history_end(start, tiers), tiers.sink), start + step - 1
    assert last - lowest + 1 <= tiers.ring(step)


def test_a_step_demotes_at_most_its_tokens_rounded_up_to_groups():
    for tiers in (Tiers(4, 8, 4, 8), Tiers(0, 1, 8, 8)):
        for start in range(60):
            for tokens in range(1, 20):
                demoted = history_end(start + tokens - 1, tiers) - history_end(start - 1, tiers)
                assert 0 <= demoted <= tiers.group * -(-tokens // tiers.group)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sink": -1}, "sink=-1: expected a whole number of tokens, at least 0"),
        ({"recent": 0}, "recent=0: expected a whole number of tokens, at least 1"),
        ({"group": 2.5}, "group=2.5"),
        ({"page": 0}, "page=0"),
        ({"page": 12}, "page=12: expected a multiple of the demotion group 8; the nearest is 16"),
        ({"page": 3}, "the nearest is 8"),
    ],
)
def test_sizes_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Tiers(**changes)
