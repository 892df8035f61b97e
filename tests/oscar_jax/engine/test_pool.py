"""Page ids: what is refused changes nothing."""

from __future__ import annotations

import pytest

from oscar_jax.engine.pool import OutOfPages, Pool


def state(pool: Pool):
    return list(pool.free), list(pool.uses), list(pool.keeps), pool.idle


def test_a_page_is_free_again_only_without_owners():
    pool = Pool(2)
    page = pool.acquire()
    pool.use(page)
    pool.keep(page)
    assert pool.shared(page)
    pool.release(page)
    pool.release(page)
    assert pool.idle == 1
    assert page not in pool.free
    assert not pool.shared(page)
    pool.use(page)
    assert pool.idle == 0
    pool.drop(page)
    assert not pool.shared(page)
    pool.release(page)
    assert page in pool.free
    assert pool.idle == 0


@pytest.mark.parametrize("name", ["use", "release", "keep", "drop"])
@pytest.mark.parametrize("page", [-1, 2, 1])
def test_pages_of_another_pool_and_free_pages_are_refused(name, page):
    pool = Pool(2)
    assert pool.acquire() == 0
    before = state(pool)
    with pytest.raises(ValueError, match=rf"page {page} is .*expected"):
        getattr(pool, name)(page)
    assert state(pool) == before


def test_fault_c9_a_double_free_is_refused():
    pool = Pool(2)
    page = pool.acquire()
    pool.release(page)
    before = state(pool)
    with pytest.raises(ValueError, match=rf"page {page} is used by no sequence.*released before"):
        pool.release(page)
    assert state(pool) == before


def test_an_exhausted_pool_is_an_error():
    pool = Pool(1)
    pool.acquire()
    with pytest.raises(OutOfPages, match=r"none of 1 pages is free"):
        pool.acquire()
    with pytest.raises(ValueError, match=r"size=-1: expected at least 0"):
        Pool(-1)
