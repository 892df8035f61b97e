"""Three-tier attention in plain XLA: right on every device, and the oracle of the kernels.

Keys are visited in tiles with an online softmax, so nothing larger than a tile of dequantized history exists. Few
query tokens read the stored slots directly with transformed queries, `q . x_hat = scale (q' . c) + offset sum(q') +
q . mu` with `q' = E q_B`, and map the accumulator back once; many query tokens dequantize tiles of rows instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import codec
from pallas_kernels.attention.api import AttentionSpec, PlainTiers, plain_rows, ring_positions, softmax_dtype
from pallas_kernels.history import History, bucket_tables, from_bucket
from pallas_kernels.rope import unrotate
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

MASKED = -1e30  # finite, so that differences of two masked logits are zero and not NaN
TILE_TOKENS = 512
SLOT_READ_TOKENS = 16  # up to this many query tokens a call read slots; above, rows are cheaper


class Partial(NamedTuple):
    """Softmax state over some keys: running maximum and sum `[B, K, Q]`, unnormalised output `[B, K, Q, X]`."""

    maximum: jax.Array
    total: jax.Array
    output: jax.Array


class _Queries(NamedTuple):
    """Queries grouped by KV head, the G heads of a group and the T tokens flattened to Q = G T rows."""

    rows: jax.Array  # [B, K, Q, D], scaled
    positions: jax.Array  # [B, Q]
    history_end: jax.Array  # [B, Q]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plain: PlainTiers,
    history: History | None,
    *,
    layer: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    page_indices: jax.Array,
    codes: TransformCodes | None,
    tiers: Tiers,
    spec: AttentionSpec,
    window: jax.Array | None = None,
    sink_logits: jax.Array | None = None,
) -> jax.Array:
    """See `pallas_kernels.attention.attend`."""
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    compute = softmax_dtype(q)
    queries = _group(q.astype(compute) * jnp.asarray(spec.scale, compute), kv_heads, starts, tiers, spec.exact_chunk)

    def visible(positions: jax.Array, usable: jax.Array) -> jax.Array:
        """Which keys `[B, s]` at `positions` each query sees, `[B, 1, Q, s]`, tier boundaries left aside."""
        t, j = queries.positions[:, :, None], positions[:, None, :]
        mask = usable[:, None, :] & (j <= t)
        if window is not None:
            mask &= j > t - window
        return mask[:, None]

    def is_plain(positions: jax.Array) -> jax.Array:
        j = positions[:, None, :]
        return ((j < tiers.sink) | (j >= queries.history_end[:, :, None]))[:, None]

    def plain_tile(state: Partial, keys, values, positions, usable) -> Partial:
        mask = visible(positions, usable) & is_plain(positions)
        keys, values = (_select(x, usable).astype(compute).swapaxes(1, 2) for x in (keys, values))
        logits = jnp.einsum("bkqd,bksd->bkqs", queries.rows, keys, precision="highest")
        probabilities, state = _absorb(state, _cap(logits, spec.softcap), mask)
        return state._replace(output=state.output + _mix(probabilities, values))

    state = _empty(batch, kv_heads, queries.rows.shape[2], dim, compute)
    if sink_logits is not None:
        logit = jnp.repeat(sink_logits.astype(compute).reshape(1, kv_heads, heads // kv_heads), tokens, axis=2)
        state = state._replace(maximum=jnp.broadcast_to(logit, state.maximum.shape), total=jnp.ones_like(state.total))

    lowest = jnp.zeros_like(starts) if window is None else starts - window + 1
    state = _over_plain(state, k, v, plain, layer, starts, counts, tiers, lowest, plain_tile)
    if history is not None and codes is not None:
        read = _read_slots if tokens <= SLOT_READ_TOKENS else _read_rows
        past = read(
            queries, history, layer, page_indices, codes, tiers, spec, visible, starts + counts - 1, lowest,
        )  # fmt: skip
        state = _merge(state, past)
    output = jnp.where(state.total > 0, 1 / jnp.where(state.total > 0, state.total, 1), 0)[..., None] * state.output
    output = output.reshape(batch, kv_heads, heads // kv_heads, tokens, dim)
    return output.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads, dim).astype(q.dtype)


def _group(q: jax.Array, kv_heads: int, starts: jax.Array, tiers: Tiers, exact_chunk: bool) -> _Queries:
    batch, tokens, heads, dim = q.shape
    groups = heads // kv_heads
    rows = q.reshape(batch, tokens, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4)
    positions = jnp.tile(starts[:, None] + jnp.arange(tokens), (1, groups))
    history_end = tiers.history_end(positions)
    if exact_chunk:
        history_end = jnp.minimum(history_end, jnp.maximum(starts, tiers.sink)[:, None])
    return _Queries(rows.reshape(batch, kv_heads, groups * tokens, dim), positions, history_end)


def _empty(batch: int, kv_heads: int, rows: int, width: int, dtype) -> Partial:
    shape = (batch, kv_heads, rows)
    return Partial(jnp.full(shape, MASKED, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, width), dtype))


def _absorb(state: Partial, logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, Partial]:
    """Unnormalised probabilities of a tile, and the state rescaled to the new maximum with the tile's sum added."""
    logits = jnp.where(mask, logits, MASKED)
    maximum = jnp.maximum(state.maximum, logits.max(-1))
    probabilities = jnp.where(mask, jnp.exp(logits - maximum[..., None]), 0)
    rescale = jnp.exp(state.maximum - maximum)
    total = state.total * rescale + probabilities.sum(-1)
    return probabilities, Partial(maximum, total, state.output * rescale[..., None])


def _merge(a: Partial, b: Partial) -> Partial:
    maximum = jnp.maximum(a.maximum, b.maximum)
    scale_a, scale_b = jnp.exp(a.maximum - maximum), jnp.exp(b.maximum - maximum)
    return Partial(
        maximum,
        a.total * scale_a + b.total * scale_b,
        a.output * scale_a[..., None] + b.output * scale_b[..., None],
    )


def _mix(probabilities: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.einsum("bkqs,bksd->bkqd", probabilities, values, precision="highest")


def _cap(logits: jax.Array, softcap: float | None) -> jax.Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _select(x: jax.Array, usable: jax.Array) -> jax.Array:
    # Unused places may hold NaN, and 0 * NaN is NaN: select before the product, masking after it is too late.
    return jnp.where(usable[:, :, None, None], x, 0)


def _over_plain(
    state: Partial, k, v, plain: PlainTiers, layer, starts: jax.Array, counts: jax.Array, tiers: Tiers, lowest, tile
) -> Partial:
    """Folds `tile(state, keys, values, positions, usable)` over sinks, new tokens and recents, from `lowest` on."""
    batch, tokens = k.shape[:2]
    ring, length = plain.recent_k.shape[2], starts[:, None]
    held = ring_positions(length, ring)
    sink, new = (jnp.broadcast_to(jnp.arange(n), (batch, n)) for n in (tiers.sink, tokens))
    positions = jnp.concatenate([sink, length + new, held], axis=1)
    usable = jnp.concatenate([sink < length, new < counts[:, None], held >= tiers.sink], axis=1)
    usable &= positions >= lowest[:, None]

    def joined(sinks: jax.Array, new: jax.Array, recent: jax.Array) -> jax.Array:
        sinks, recent = (plain_rows(tier, layer, new.shape[2:]) for tier in (sinks, recent))
        return jnp.concatenate([sinks, new, recent], axis=1)

    keys, values = joined(plain.sink_k, k, plain.recent_k), joined(plain.sink_v, v, plain.recent_v)
    rows = (keys, values, positions, usable)
    total = tiers.sink + tokens + ring
    if total <= 2 * TILE_TOKENS or tokens <= SLOT_READ_TOKENS:  # logits of few queries are small whatever the ring
        return tile(state, *rows)
    pad = -total % TILE_TOKENS
    rows = tuple(jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2))) for x in rows)

    def visit(i, state):
        return tile(state, *(jax.lax.dynamic_slice_in_dim(x, i * TILE_TOKENS, TILE_TOKENS, axis=1) for x in rows))

    filled = tiers.sink + tokens + jnp.minimum(starts.max(), ring)
    return jax.lax.fori_loop(0, -(-filled // TILE_TOKENS), visit, state)


class _Tile(NamedTuple):
    """Some pages of every sequence: rows by side, bucket and position of each page and token, usable tokens."""

    key: codec.Encoded
    value: codec.Encoded
    bucket: jax.Array  # [p]
    positions: jax.Array  # [B, p * page]
    usable: jax.Array  # [B, p * page]


def _over_history(
    state: Partial, history: History, layer, page_indices, codes, tiers: Tiers, last, lowest, visit: Callable
) -> Partial:
    """Folds `visit(state, tile)` over the pages that any query of the batch can see.

    last, lowest: `[B]`, position of each sequence's last query, and the first that any of its queries sees.
    """
    batch, count = page_indices.shape
    pages = min(count, max(1, TILE_TOKENS // tiers.page))
    page_indices = jnp.pad(page_indices, ((0, 0), (0, -count % pages)))
    tokens = pages * tiers.page
    ends = tiers.history_end(last)

    def one(i, state):
        ids = jax.lax.dynamic_slice_in_dim(page_indices, i * pages, pages, axis=1)
        index = i * tokens + jnp.arange(tokens)
        positions = jnp.broadcast_to(tiers.sink + index, (batch, tokens))
        usable = (positions >= lowest[:, None]) & (positions < ends[:, None])
        key, value = (_clean(side.take(layer, ids), usable) for side in (history.key, history.value))
        bucket = (i * tokens + jnp.arange(pages) * tiers.page) // (codes.bucket or 1)
        return visit(state, _Tile(key, value, bucket if codes.bucket else jnp.zeros_like(bucket), positions, usable))

    first = jnp.maximum(lowest.min() - tiers.sink, 0) // tokens
    return jax.lax.fori_loop(first, -(-(ends.max() - tiers.sink) // tokens), one, state)


def _clean(rows: codec.Encoded, usable: jax.Array) -> codec.Encoded:
    """Scale and offset of unused places set to zero: they may be NaN."""
    mask = usable.reshape(usable.shape[0], rows.scale.shape[1], 1, -1)
    return rows._replace(
        scale=jnp.where(mask, rows.scale, 0),
        offset=None if rows.offset is None else jnp.where(mask, rows.offset, 0),
    )


def _tokens(x: jax.Array) -> jax.Array:
    """`[B, p, K, page, ...]` to `[B, K, p page, ...]`."""
    x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def _history_mask(queries: _Queries, tile: _Tile, visible: Callable) -> jax.Array:
    return visible(tile.positions, tile.usable) & (tile.positions[:, None] < queries.history_end[:, :, None])[:, None]


def _read_rows(
    queries: _Queries, history, layer, page_indices, codes: TransformCodes, tiers, spec, visible, last, lowest
) -> Partial:
    """History partial from dequantized tiles."""
    compute = queries.rows.dtype
    tables = bucket_tables(codes, tiers, tiers.sink + page_indices.shape[1] * tiers.page, compute)
    key_code, value_code = codes.key.layer(layer), codes.value.layer(layer)

    def rows(code, encoded: codec.Encoded) -> jax.Array:
        token_major = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 2, 3), encoded)
        return codec.decode(code, token_major, dtype=compute)  # [B, p, page, K, D]

    def visit(state: Partial, tile: _Tile) -> Partial:
        keys = from_bucket(rows(key_code, tile.key), tile.bucket[:, None], tables, codes)
        keys, values = (_tokens(jnp.moveaxis(x, 3, 2)) for x in (keys, rows(value_code, tile.value)))
        logits = jnp.einsum("bkqd,bksd->bkqs", queries.rows, keys, precision="highest")
        probabilities, state = _absorb(state, _cap(logits, spec.softcap), _history_mask(queries, tile, visible))
        return state._replace(output=state.output + _mix(probabilities, values))

    batch, kv_heads, count, dim = queries.rows.shape
    state = _empty(batch, kv_heads, count, dim, compute)
    return _over_history(state, history, layer, page_indices, codes, tiers, last, lowest, visit)


def _read_slots(
    queries: _Queries, history, layer, page_indices, codes: TransformCodes, tiers, spec, visible, last, lowest
) -> Partial:
    """History partial from raw slots with one transformed query a bucket, as the fused kernels compute it."""
    compute = queries.rows.dtype
    tables = bucket_tables(codes, tiers, tiers.sink + page_indices.shape[1] * tiers.page, compute)
    key_code, value_code = codes.key.layer(layer), codes.value.layer(layer)
    mu_k, mu_v, decode_k, decode_v = (
        jnp.asarray(leaf, compute) for leaf in (key_code.mu, value_code.mu, key_code.decode, value_code.decode)
    )
    relative = queries.rows[..., None, :]  # one query a bucket: [B, K, Q, buckets, D]
    if tables is not None and codes.rotary is not None:
        relative = unrotate(relative, *tables, pairing=codes.rotary.pairing)
    transformed = jnp.einsum("bkqud,knd->bkqun", relative, decode_k, precision="highest")
    constant = jnp.einsum("bkqud,kd->bkqu", relative, mu_k, precision="highest")
    total = transformed.sum(-1)

    def parameters(rows: codec.Encoded) -> tuple[jax.Array, jax.Array]:
        scale = _tokens(rows.scale).astype(compute)[:, :, None]
        return scale, codec.IMPLIED_OFFSET * scale if rows.offset is None else _tokens(rows.offset).astype(compute)[
            :, :, None
        ]

    def visit(state: Partial, tile: _Tile) -> Partial:
        page = tile.key.scale.shape[3]
        slots = codec.unpack(tile.key.slots).astype(compute)  # [B, p, K, page, N]
        product = jnp.einsum("bkqpn,bpksn->bkqps", transformed[:, :, :, tile.bucket], slots, precision="highest")
        product = product.reshape(*product.shape[:3], -1)
        scale, offset = parameters(tile.key)
        per_token = np.repeat(np.arange(tile.bucket.shape[0]), page)
        sums, constants = (x[..., tile.bucket][..., per_token] for x in (total, constant))
        logits = _cap(scale * product + offset * sums + constants, spec.softcap)
        probabilities, state = _absorb(state, logits, _history_mask(queries, tile, visible))
        scale, offset = parameters(tile.value)
        slots = _tokens(codec.unpack(tile.value.slots)).astype(compute)
        mixed = _mix(probabilities * scale, slots) + (probabilities * offset).sum(-1)[..., None]
        return state._replace(output=state.output + mixed)

    batch, kv_heads, count, _ = queries.rows.shape
    state = _empty(batch, kv_heads, count, decode_v.shape[-2], compute)
    state = _over_history(state, history, layer, page_indices, codes, tiers, last, lowest, visit)
    output = jnp.einsum("bkqn,knd->bkqd", state.output, decode_v, precision="highest")
    return state._replace(output=output + state.total[..., None] * mu_v[:, None])
