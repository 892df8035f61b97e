"""INT2 history: pages of stored rows, and the buckets that keys are encoded in (`pallas_kernels.write` fills pages).

A page holds `page` consecutive history tokens of one sequence, all KV heads; page i of a sequence covers positions
`[sink + i page, sink + (i + 1) page)`. Entries of a page table past a sequence's history are never trusted.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import codec
from pallas_kernels.rope import rotate, unrotate
from pallas_kernels.storage import loaded, storage_dtype, stored
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

LANES = 128  # of a TPU's registers
# Bytes of a pool that Triton kernels of Pallas cannot address: it switches to 64-bit offsets at 2^32 only, and 32-bit
# ones are signed.
UNADDRESSED = range(2**31, 2**32 + 1)


@partial(jax.tree_util.register_dataclass, data_fields=["slots", "scale", "offset"], meta_fields=["tokens_last"])
@dataclasses.dataclass(frozen=True)
class SidePages:
    """Pages of one side of all layers.

    Slots uint8 `[L, P, K, page, N/4]`, or `[L, P, K, N/4, page]` with `tokens_last`, the order that an implementation
    may want, or int32 words `[L, P, K/h, R, 128]` (`short_page`), which fill TPU lanes where pages are shorter; scale
    and offset `[L, P, K, page]` in the storage dtype of the codes' `scale_dtype` (`pallas_kernels.storage`).
    """

    slots: jax.Array
    scale: jax.Array
    offset: jax.Array | None
    tokens_last: bool = False

    @property
    def words(self) -> bool:
        """Whether slots are int32 words."""
        return self.slots.dtype == jnp.int32

    def laid_out(self, *, tokens_last: bool) -> SidePages:
        """The same pages in either order of bytes; `tokens_last=False` is the one that all implementations share."""
        rows = self._rows_of(self.slots)
        return dataclasses.replace(self, slots=rows.swapaxes(-1, -2) if tokens_last else rows, tokens_last=tokens_last)

    def as_words(self) -> SidePages:
        """The same pages as words; `short_page` says whether their size allows it."""
        slots = self._rows_of(self.slots)
        kv_heads, page, width = slots.shape[2:]
        size = short_page(codec.PLANES * width, page, kv_heads)
        assert size is not None
        words = _row_words(slots).swapaxes(-1, -2)  # [.., K, N/16, page]
        words = words.reshape(*slots.shape[:2], kv_heads // size.heads, size.pages, size.rows, page).swapaxes(3, 4)
        return dataclasses.replace(self, slots=words.reshape(*words.shape[:4], LANES), tokens_last=False)

    def _rows_of(self, slots: jax.Array) -> jax.Array:
        """Slots of pages in any of the layouts as rows uint8 `[.., K, page, N/4]`."""
        if not self.words:
            return slots.swapaxes(-1, -2) if self.tokens_last else slots
        kv_heads, page = self.scale.shape[2:]
        lead, (units, rows) = slots.shape[:-3], slots.shape[-3:-1]
        words = slots.reshape(*lead, units, rows, LANES // page, page).swapaxes(-2, -3)
        words = words.reshape(*lead, kv_heads, -1, page).swapaxes(-1, -2)
        return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*lead, kv_heads, page, -1)

    def take(self, layer: jax.Array, pages: jax.Array) -> codec.Encoded:
        """Rows of pages `[B, p]` as `[B, p, K, page, ...]`; ids out of range are clamped, so callers must mask."""
        pages = jnp.clip(pages, 0, self.scale.shape[1] - 1)
        scale, offset = (None if x is None else loaded(x[layer, pages]) for x in (self.scale, self.offset))
        return codec.Encoded(self._rows_of(self.slots[layer, pages]), scale, offset)  # type: ignore[arg-type]

    def put(self, layer: jax.Array, pages: jax.Array, offsets: jax.Array, rows: codec.Encoded) -> SidePages:
        """Stores rows `[B, M, K, ...]` at page ids and page offsets `[B, M]`; ids out of range are dropped."""
        pages = jnp.where(pages < 0, self.scale.shape[1], pages)  # a negative id would wrap around
        place, new = (layer, pages, slice(None), offsets), rows.slots
        if self.words:
            page = self.scale.shape[3]
            lanes = offsets[..., None] + page * np.arange(LANES // page)
            place = (layer, pages[..., None], slice(None), slice(None), lanes)
            units, count = self.slots.shape[2:4]
            new = jnp.moveaxis(_row_words(new).reshape(*new.shape[:2], units, -1, count), 3, 2)
        elif self.tokens_last:
            place = (*place[:3], slice(None), offsets)

        def put(pool: jax.Array, numbers: jax.Array | None) -> jax.Array:
            assert numbers is not None
            return pool.at[layer, pages, :, offsets].set(stored(numbers, pool.dtype), mode="drop")

        return SidePages(
            self.slots.at[place].set(new, mode="drop"),
            put(self.scale, rows.scale),
            None if self.offset is None else put(self.offset, rows.offset),
            self.tokens_last,
        )


class ShortPage(NamedTuple):
    """How a page of fewer than 128 tokens lies in words of 128 lanes.

    Four bytes of a token are a word; a unit of h heads has h N/16 words a token. Word w of token t of the page is in
    row `w mod R` and lane `page (w div R) + t`: as many word rows side by side as pages make 128 tokens.
    """

    heads: int  # h, of a unit: as few as fill a row of lanes
    pages: int  # of 128 tokens
    rows: int  # R, of a unit


def short_page(slots: int, page: int, kv_heads: int) -> ShortPage | None:
    """The layout in words of pages of `slots` slots a row and head; None where whole rows of lanes are not filled."""
    if page >= LANES or LANES % page or slots % (4 * codec.PLANES):
        return None
    words = slots // (4 * codec.PLANES) * page  # of a head
    heads = max(1, LANES // words)
    return (
        None if heads * words % LANES or kv_heads % heads else ShortPage(heads, LANES // page, heads * words // LANES)
    )


def _row_words(rows: jax.Array) -> jax.Array:
    """Bytes uint8 `[.., N/4]` as int32 `[.., N/16]`."""
    return jax.lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], -1, 4), jnp.int32)


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
    values_tokens_last: bool = False,
    tpu_heads: int | None = None,
) -> History:
    """Empty pages for every layer of `codes`.

    Args:
        tpu_heads: KV heads of a device, for the layout of the TPU kernels: bytes with tokens last or, of pages that
            `short_page` takes, words; float16 scales as int16.
    """

    def side(code, tokens_last: bool) -> SidePages:
        rows = (code.layers, pages, code.kv_heads, page)
        dtype = storage_dtype(codes.scale_dtype)
        scale = jnp.zeros(rows, jnp.int16 if tpu_heads and dtype == jnp.float16 else dtype)
        offset = jnp.zeros_like(scale) if code.has_offset else None
        if tpu_heads and (size := short_page(code.slots, page, tpu_heads)):
            shape = (*rows[:2], code.kv_heads // size.heads, size.rows, LANES)
            return SidePages(jnp.zeros(shape, jnp.int32), scale, offset)
        width = code.slots // codec.PLANES
        slots = jnp.zeros((*rows[:3], width, page) if tokens_last else (*rows, width), jnp.uint8)
        return SidePages(slots, scale, offset, tokens_last)

    for_tpu = tpu_heads is not None
    return History(side(codes.key, for_tpu), side(codes.value, for_tpu or values_tokens_last))


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
