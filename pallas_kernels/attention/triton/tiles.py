"""A tile of history: what `attend_history` hands to the forms of its products."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.triton import ops
from pallas_kernels.storage import loaded


class Tile(NamedTuple):
    """Where a tile lies, and what was read of it: `[tile]` numbers of its tokens."""

    page: jax.Array  # where pages are shorter than tiles, the number of the tile
    place: jax.Array  # token in the page
    key_scale: jax.Array
    value_scale: jax.Array
    key_offset: jax.Array | None
    value_offset: jax.Array | None


class Reads(NamedTuple):
    """How the slots of a tile are read."""

    keys: Callable[..., jax.Array]  # (tile, rows, bytes of a row, *further indices) to uint8 [rows, bytes]
    values: Callable[[Tile], jax.Array]  # uint8 [bytes, tile]


class Seen(NamedTuple):
    """At the edges of what is seen: bool against logits, part by part, and of the tokens that some row sees."""

    parts: list[jax.Array]
    tokens: jax.Array  # [tile]


def value_scales(at: Tile, seen: Seen | None) -> jax.Array:
    """fp32 `[tile]`, zero where no row sees the token: what lies there may be anything."""
    scales = loaded(at.value_scale).astype(jnp.float32)
    return scales if seen is None else jnp.where(seen.tokens, scales, 0.0)


def even_and_odd(x: jax.Array, rows: int) -> list[jax.Array]:
    """`[tile]` numbers of tokens as fp32 `[rows, tile / 2]` of the even and of the odd ones."""
    return list(ops.unweave(jnp.broadcast_to(loaded(x).astype(jnp.float32)[None, :], (rows, x.shape[0]))))


def even_and_odd_from(first: jax.Array, tile: int) -> list[jax.Array]:
    """Numbers `[1, tile / 2]` of the tokens of a tile, of the even and of the odd ones."""
    even = (first + 2 * ops.iota(tile // 2))[None, :]
    return [even, even + 1]


class Query(NamedTuple):
    """Of one bucket: operands of the planes, and numbers of the query rows."""

    planes: list[jax.Array]
    numbers: ops.Numbers


class Partial(NamedTuple):
    """Partial softmax: fp32 `[R]`, and of each plane the flat items of the output and what they hold."""

    maximum: jax.Array
    total: jax.Array
    outputs: list[tuple[jax.Array, jax.Array]]
