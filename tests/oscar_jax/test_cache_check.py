"""The checked mode: what it finds in a damaged cache, and how it names it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.cache import advance
from oscar_jax.cache_check import check_cache
from tests.oscar_jax.cache_runs import BASE, Tokens, base_codes, pages, run, schedule


def filled():
    tokens, codes = Tokens.random(seed=20), base_codes()
    return run(schedule((60, 40), 24), width=24, tokens=tokens, codes=codes)[1]


@pytest.mark.parametrize("bad", (-1, 16, 10**6))
def test_fault_c5_a_page_id_out_of_range_raises_in_the_checked_mode(bad):
    """Past a sequence's history such entries mean nothing; within, XLA would clamp them silently."""
    cache = filled()
    used = BASE.tiers.history_pages(40)
    beyond = dataclasses.replace(cache, page_indices=cache.page_indices.at[1, used:].set(bad))
    check_cache(beyond, BASE)
    within = dataclasses.replace(cache, page_indices=cache.page_indices.at[1, used - 1].set(bad))
    with pytest.raises(ValueError, match=f"sequence 1: page table entry {used - 1} is {bad}.*0 to 15"):
        check_cache(within, BASE)


def test_checked_mode_names_what_is_wrong():
    cache = filled()
    twice = dataclasses.replace(cache, page_indices=cache.page_indices.at[0, 1].set(cache.page_indices[0, 0]))
    with pytest.raises(ValueError, match="sequence 0: its page table names a page twice"):
        check_cache(twice, BASE)
    with pytest.raises(ValueError, match="sequence 1: 73 stored tokens, expected 0 to max_length=72"):
        check_cache(advance(cache, jnp.array([0, 33])), BASE)
    page = int(cache.page_indices[0, 2])
    for value, shown in ((np.nan, "nan"), (65504, "65504")):
        scale = pages(cache).key.scale.at[1, page, 1, 3].set(value)
        history = dataclasses.replace(pages(cache), key=dataclasses.replace(pages(cache).key, scale=scale))
        where = f"sequence 0, layer 1, head 1, position {4 + 2 * 8 + 3}: key scale is {shown}"
        with pytest.raises(ValueError, match=where):
            check_cache(dataclasses.replace(cache, history=history), BASE)


def test_a_saturated_row_raises_in_the_checked_mode():
    tokens, codes = Tokens.random(seed=21), base_codes()
    tokens.v[:, 0, 10] *= 1e7
    _, cache = run(schedule((60, 40), 24), width=24, tokens=tokens, codes=codes)
    with pytest.raises(ValueError, match=r"sequence 0, layer 0, head 0, position 10: value scale is 65504"):
        check_cache(cache, BASE)
