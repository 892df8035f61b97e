"""INT2 history: pages of stored rows, and the buckets that keys are encoded in (`pallas_kernels.write` fills pages).

A page holds `page` consecutive history tokens of one sequence, all KV heads; page i of a sequence covers positions
`[sink + i page, sink + (i + 1) page)`. Entries of a page table past a sequence's history are never trusted.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import codec
from pallas_kernels.rope import rotate, unrotate
from pallas_kernels.storage import loaded, storage_dtype, stored
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes


@partial(jax.tree_util.register_dataclass, data_fields=["slots", "scale", "offset"], meta_fields=["tokens_last"])
@dataclasses.dataclass(frozen=True)
class SidePages:
    """Pages of one side of all layers.

    Slots uint8 `[L, P, K, page, N/4]`, or `[L, P, K, N/4, page]` with `tokens_last`, the order that an implementation
    may want; scale and offset `[L, P, K, page]` in the storage dtype of the codes' `scale_dtype`
    (`pallas_kernels.storage`).
    """

    slots: jax.Array
    scale: jax.Array
    offset: jax.Array | None
    tokens_last: bool = False

    def laid_out(self, *, tokens_last: bool) -> SidePages:
        """The same pages in either order; `tokens_last=False` is the one that all implementations share."""
        slots = self.slots if tokens_last == self.tokens_last else self.slots.swapaxes(-1, -2)
        return dataclasses.replace(self, slots=slots, tokens_last=tokens_last)

    def take(self, layer: jax.Array, pages: jax.Array) -> codec.Encoded:
        """Rows of pages `[B, p]` as `[B, p, K, page, ...]`; ids out of range are clamped, so callers must mask."""
        pages = jnp.clip(pages, 0, self.scale.shape[1] - 1)
        scale, offset = (None if x is None else loaded(x[layer, pages]) for x in (self.scale, self.offset))
        slots = self.slots[layer, pages]
        return codec.Encoded(slots.swapaxes(-1, -2) if self.tokens_last else slots, scale, offset)  # type: ignore[arg-type]

    def put(self, layer: jax.Array, pages: jax.Array, offsets: jax.Array, rows: codec.Encoded) -> SidePages:
        """Stores rows `[B, M, K, ...]` at page ids and page offsets `[B, M]`; ids out of range are dropped."""
        pages = jnp.where(pages < 0, self.scale.shape[1], pages)  # a negative id would wrap around
        place = (layer, pages, slice(None), offsets)
        slots = self.slots.at[(*place[:3], slice(None), offsets) if self.tokens_last else place]
        return SidePages(
            slots.set(rows.slots, mode="drop"),
            self.scale.at[place].set(stored(rows.scale), mode="drop"),
            None if self.offset is None else self.offset.at[place].set(stored(rows.offset), mode="drop"),  # type: ignore[arg-type]
            self.tokens_last,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """Pages of both sides."""

    key: SidePages
    value: SidePages


def init_history(
    codes: TransformCodes,
    *,
    pages: int,
    page: int,
    keys_tokens_last: bool = False,
    values_tokens_last: bool = False,
) -> History:
    """Empty pages for every layer of `codes`."""

    def side(code, tokens_last: bool) -> SidePages:
        rows = (code.layers, pages, code.kv_heads, page)
        scale = jnp.zeros(rows, storage_dtype(codes.scale_dtype))
        width = code.slots // codec.PLANES
        slots = jnp.zeros((*rows[:3], width, page) if tokens_last else (*rows, width), jnp.uint8)
        return SidePages(slots, scale, jnp.zeros_like(scale) if code.has_offset else None, tokens_last)

    return History(side(codes.key, keys_tokens_last), side(codes.value, values_tokens_last))


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


def turn_factors(codes: TransformCodes, tiers: Tiers, length: int, width: int) -> tuple[np.ndarray, ...]:
    """Factors fp32 `[buckets, width]` of x and of its partner coordinate in `x R(-B)`; none without buckets.

    The origins B are those of `bucket_tables`; coordinates past the rotated ones, up to `width`, stay as they are.
    """
    tables = bucket_tables(codes, tiers, length, np.float32)
    if tables is None or codes.rotary is None:
        return ()
    cos, sin = tables
    size = codes.rotary.rotary_dim
    first, second = (
        (np.arange(0, size, 2), np.arange(1, size, 2))
        if codes.rotary.pairing == "interleaved"
        else (np.arange(size // 2), np.arange(size // 2, size))
    )
    own, partner = np.ones((len(cos), width), np.float32), np.zeros((len(cos), width), np.float32)
    own[:, first], own[:, second], partner[:, first], partner[:, second] = cos, cos, sin, -sin
    return own, partner
