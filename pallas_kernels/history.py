"""INT2 history: pages of stored rows, and the write that fills them (demotion and prefill alike).

A page holds `page` consecutive history tokens of one sequence, all KV heads; page i of a sequence covers positions
`[sink + i page, sink + (i + 1) page)`. Entries of a page table past a sequence's history are never trusted.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import codec
from pallas_kernels.rope import rotate, unrotate
from pallas_kernels.storage import loaded, storage_dtype, stored
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SidePages:
    """Pages of one side of all layers.

    Slots uint8 `[L, P, K, page, N/4]`; scale and offset `[L, P, K, page]` in the storage dtype of the codes'
    `scale_dtype` (`pallas_kernels.storage`).
    """

    slots: jax.Array
    scale: jax.Array
    offset: jax.Array | None

    def take(self, layer: jax.Array, pages: jax.Array) -> codec.Encoded:
        """Rows of pages `[B, p]` as `[B, p, K, page, ...]`; ids out of range are clamped, so callers must mask."""
        pages = jnp.clip(pages, 0, self.scale.shape[1] - 1)
        scale, offset = (None if x is None else loaded(x[layer, pages]) for x in (self.scale, self.offset))
        return codec.Encoded(self.slots[layer, pages], scale, offset)  # type: ignore[arg-type]

    def put(self, layer: jax.Array, pages: jax.Array, offsets: jax.Array, rows: codec.Encoded) -> SidePages:
        """Stores rows `[B, M, K, ...]` at page ids and page offsets `[B, M]`; ids out of range are dropped."""
        pages = jnp.where(pages < 0, self.scale.shape[1], pages)  # a negative id would wrap around
        written = (
            None if pool is None else pool.at[layer, pages, :, offsets].set(row, mode="drop")
            for pool, row in (
                (self.slots, rows.slots),
                (self.scale, stored(rows.scale)),
                (self.offset, None if rows.offset is None else stored(rows.offset)),
            )
        )
        return SidePages(*written)  # type: ignore[arg-type]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """Pages of both sides."""

    key: SidePages
    value: SidePages


def init_history(codes: TransformCodes, *, pages: int, page: int) -> History:
    """Empty pages for every layer of `codes`."""

    def side(code) -> SidePages:
        rows = (code.layers, pages, code.kv_heads, page)
        scale = jnp.zeros(rows, storage_dtype(codes.scale_dtype))
        slots = jnp.zeros((*rows, code.slots // codec.PLANES), jnp.uint8)
        return SidePages(slots, scale, jnp.zeros_like(scale) if code.has_offset else None)

    return History(side(codes.key), side(codes.value))


def bucket_tables(codes: TransformCodes, tiers: Tiers, length: int, dtype) -> tuple[np.ndarray, np.ndarray] | None:
    """Cosines and sines `[buckets, rotary_dim / 2]` of the bucket origins below `length`; None without buckets."""
    if codes.bucket is None or codes.rotary is None:
        return None
    count = max(1, -(-max(0, length - tiers.sink) // codes.bucket))
    return codes.rotary.tables(tiers.sink + codes.bucket * np.arange(count), dtype)


def to_bucket(x: jax.Array, bucket: jax.Array, tables, codes: TransformCodes) -> jax.Array:
    """`x R(-B)` for rows x `[..., K, D]` of buckets `[...]`: keys and queries relative to a bucket's origin."""
    if tables is None or codes.rotary is None:
        return x
    cos, sin = (jnp.asarray(table)[bucket][..., None, :] for table in tables)
    return unrotate(x, cos, sin, pairing=codes.rotary.pairing)


def from_bucket(x: jax.Array, bucket: jax.Array, tables, codes: TransformCodes) -> jax.Array:
    """Inverse of `to_bucket`."""
    if tables is None or codes.rotary is None:
        return x
    cos, sin = (jnp.asarray(table)[bucket][..., None, :] for table in tables)
    return rotate(x, cos, sin, pairing=codes.rotary.pairing)


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
    """Encodes rows and stores them in their pages.

    Args:
        k, v: `[B, M, K, D]` in the cache's plain dtype, after rotary positions.
        layer: int32 `[]`.
        positions: int32 `[B, M]`, each at least `tiers.sink` where valid.
        valid: bool `[B, M]`; other rows are not stored.
        page_indices: int32 `[B, pages of a sequence]`.
    """
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
