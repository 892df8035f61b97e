"""Writing history in plain `jax.numpy`: on every backend, and the definition for the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import codec
from pallas_kernels.attention.api import PlainTiers, plain_rows
from pallas_kernels.history import History, bucket_tables, to_bucket
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes


def write(
    history: History,
    k: jax.Array,
    v: jax.Array,
    *,
    layer: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    page_indices: jax.Array,
    codes: TransformCodes,
    tiers: Tiers,
) -> History:
    """See `pallas_kernels.write.write`."""
    index, pages, rows = encoded(k, v, history.key.scale.shape[1], layer, positions, valid, page_indices, codes, tiers)
    place = index % tiers.page
    key, value = (
        pool.put(layer, pages, place, each) for pool, each in zip((history.key, history.value), rows, strict=True)
    )
    return History(key, value)


def encoded(
    k: jax.Array, v: jax.Array, pool: int, layer, positions, valid, page_indices, codes: TransformCodes, tiers: Tiers
) -> tuple[jax.Array, jax.Array, tuple[codec.Encoded, codec.Encoded]]:
    """History index and page id `[B, M]` of each row, and the encoded rows `[B, M, K, ...]` of both sides.

    The page id is `pool`, the number of pages, where a row is not to be stored.
    """
    # A sink, or a position past the page table, has no page: it is dropped, never folded onto a live one.
    valid = valid & (positions >= tiers.sink) & (positions < tiers.sink + page_indices.shape[1] * tiers.page)
    index = jnp.where(valid, positions - tiers.sink, 0)
    pages = jnp.take_along_axis(page_indices, index // tiers.page, axis=1, mode="clip")
    pages = jnp.where(valid, pages, pool)
    compute = jnp.promote_types(k.dtype, jnp.float32)
    tables = bucket_tables(codes, tiers, tiers.sink + page_indices.shape[1] * tiers.page, compute)
    k, v = k.astype(compute), v.astype(compute)
    k = to_bucket(k, index // (codes.bucket or 1), tables, codes)
    key, value = (
        codec.encode(code.layer(layer), x, scale_dtype=codes.scale_dtype)
        for code, x in ((codes.key, k), (codes.value, v))
    )
    return index, pages, (key, value)


def demote(
    history: History,
    plain: PlainTiers,
    k: jax.Array,
    v: jax.Array,
    *,
    layer: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    page_indices: jax.Array,
    codes: TransformCodes,
    tiers: Tiers,
) -> History:
    """See `pallas_kernels.write.demote`."""
    k, v, positions, valid = leaving(plain, k, v, layer=layer, starts=starts, counts=counts, tiers=tiers)
    return write(
        history,
        k,
        v,
        layer=layer,
        positions=positions,
        valid=valid,
        page_indices=page_indices,
        codes=codes,
        tiers=tiers,
    )


def leaving(
    plain: PlainTiers, k: jax.Array, v: jax.Array, *, layer, starts: jax.Array, counts: jax.Array, tiers: Tiers
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows `[B, M, K, D]` that leave the recent window, of both sides; their positions and which are real `[B, M]`."""
    tokens, ring = k.shape[1], plain.recent_k.shape[2]
    begin, end = tiers.demoted(starts, counts)
    positions = begin[:, None] + jnp.arange(tiers.demoted_rows(tokens))
    valid = positions < end[:, None]
    old = positions < starts[:, None]
    source = jnp.where(old, positions % ring, ring + jnp.clip(positions - starts[:, None], 0, tokens - 1))

    def gather(recent: jax.Array, new: jax.Array) -> jax.Array:
        rows = jnp.concatenate([plain_rows(recent, layer, new.shape[2:]), new], axis=1)
        return jnp.take_along_axis(rows, source[:, :, None, None], axis=1, mode="clip")

    return gather(plain.recent_k, k), gather(plain.recent_v, v), positions, valid
