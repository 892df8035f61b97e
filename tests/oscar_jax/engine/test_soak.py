"""Random requests on a random model against themselves alone; the short form of `python -m oscar_jax.engine.soak`."""

from __future__ import annotations

import pytest

from oscar_jax.engine.soak import soak


@pytest.mark.slow
def test_three_hundred_random_requests_equal_themselves_alone():
    result = soak(300)
    assert (result["mismatches"], result["leaked_pages"], result["compilations"]) == (0, 0, 0)
    assert result["ties"] <= 1
    assert result["preemptions"]
    assert result["cancelled"]
    assert result["prefix_hits"]
