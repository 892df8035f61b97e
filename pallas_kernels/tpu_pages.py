"""Short pages inside TPU kernels: words of several pages, and words that have the tokens of all on their lanes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.history import LANES, SidePages, short_page

PAGES = (16, 32, 64, 128)
SCALAR_MEMORY = 2**20 - 2**15  # bytes; a program's table must leave some for the other numbers


def check(pool: SidePages, slots: int, page: int) -> None:
    """Raises NotImplementedError for pages that the kernels do not read and write, or of another layout."""
    if page not in PAGES:
        raise NotImplementedError(f"page={page}: {', '.join(map(str, PAGES))} are built")
    kv_heads = pool.scale.shape[2]
    if page < LANES and short_page(slots, page, kv_heads) is None:
        raise NotImplementedError(
            f"page={page} with {kv_heads} KV heads of {slots} slots: a page of a head is half a row of lanes, so their "
            f"number must be even, or the page at least {2 * page}"
        )
    if not (pool.words if page < LANES else pool.tokens_last):
        raise NotImplementedError("the history was laid out for another implementation")


def gathers_scales(kv_heads: int, page: int) -> bool:
    """Whether XLA reads and writes scales, since it would lay out the whole pool anew for a kernel, in every call.

    It does of pages, or numbers of heads, that do not fill tiles of 8 rows (of 2 or 4, the least there are) and lanes.
    """
    return page < LANES or not (kv_heads in (2, 4) or kv_heads % 8 == 0)


def check_table(batch: int, entries: int) -> None:
    """Raises NotImplementedError for a page table that does not fit into a core's scalar memory."""
    if 4 * batch * entries > SCALAR_MEMORY:
        raise NotImplementedError(
            f"page_indices of {batch} sequences of {entries} pages: at most {SCALAR_MEMORY // 4} entries fit into "
            "scalar memory; larger pages or fewer sequences a device need fewer"
        )


def exchange(words: jax.Array, page: int) -> jax.Array:
    """Words int32 of one unit of as many pages as make 128 tokens, to or from tokens on lanes; its own inverse.

    Both sides are `[h N/16, 128]`. In memory row `p R + r` and lane `page g + t` hold word `g R + r` of token t of page
    p (`pallas_kernels.history.ShortPage`); with tokens on lanes, row w and lane `page p + t` do. So p and g change
    places, a bit at a time: what both bits tell apart moves by rows and lanes at once.
    """
    count = LANES // page
    rows = words.shape[0] // count
    p = lax.broadcasted_iota(jnp.int32, words.shape, 0) // rows
    g = lax.broadcasted_iota(jnp.int32, words.shape, 1) // page
    bit = count // 2
    while bit:
        other = _moved(words, bit * rows, -bit * page)
        if 2 * bit < count:  # by half of both axes the two directions are one
            other = jnp.where((p & bit) > 0, other, _moved(words, -bit * rows, bit * page))
        words = jnp.where((p & bit) == (g & bit), words, other)
        bit //= 2
    return words


def _moved(words: jax.Array, rows: int, lanes: int) -> jax.Array:
    return pltpu.roll(pltpu.roll(words, rows % words.shape[0], 0), lanes % LANES, 1)
