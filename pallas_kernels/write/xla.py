"""Writing history in plain `jax.numpy`: on every backend, and the definition for the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import codec
from pallas_kernels.attention.api import PlainTiers
from pallas_kernels.history import History, bucket_tables, to_bucket
from pallas_kernels.storage import loaded
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
    # A position past the page table has no page: it is dropped, never folded onto a live one.
    valid = valid & (positions < tiers.sink + page_indices.shape[1] * tiers.page)
    index = jnp.where(valid, positions - tiers.sink, 0)
    pages = jnp.take_along_axis(page_indices, index // tiers.page, axis=1, mode="clip")
    pages = jnp.where(valid, pages, history.key.scale.shape[1])
    compute = jnp.promote_types(k.dtype, jnp.float32)
    tables = bucket_tables(codes, tiers, tiers.sink + page_indices.shape[1] * tiers.page, compute)
    k, v = k.astype(compute), v.astype(compute)
    k = to_bucket(k, index // (codes.bucket or 1), tables, codes)
    sides = []
    for pool, code, rows in ((history.key, codes.key, k), (history.value, codes.value, v)):
        encoded = codec.encode(code.layer(layer), rows, scale_dtype=codes.scale_dtype)
        sides.append(pool.put(layer, pages, index % tiers.page, encoded))
    return History(*sides)


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
    tokens, ring = k.shape[1], plain.recent_k.shape[2]
    begin, end = tiers.demoted(starts, counts)
    positions = begin[:, None] + jnp.arange(tiers.demoted_rows(tokens))
    valid = positions < end[:, None]
    old = positions < starts[:, None]
    source = jnp.where(old, positions % ring, ring + jnp.clip(positions - starts[:, None], 0, tokens - 1))

    def gather(recent: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.take_along_axis(
            jnp.concatenate([loaded(recent[layer]), new], axis=1), source[:, :, None, None], axis=1, mode="clip"
        )

    return write(
        history,
        gather(plain.recent_k, k),
        gather(plain.recent_v, v),
        layer=layer,
        positions=positions,
        valid=valid,
        page_indices=page_indices,
        codes=codes,
        tiers=tiers,
    )
