"""Partial softmax over packed slots, on integer tensor cores.

One logic operation on a 32-bit register of packed bytes yields four int8 operands: plane i (bits 2i, 2i + 1 of every
byte) left in place is `code 4^i`, plane 3 with its top bit flipped is `64 code - 128`. Queries and probabilities are
16-bit fixed point against their own maximum, `x = 256 high + low`, both bytes operands. Of a tile of up to 128 tokens
one warp holds logits and four `[N_v / 4, R]` accumulators in registers.

Four query rows are columns of `keys x queries`, with low and high bytes in neighbouring columns: eight columns fill an
`mma`. Eight are rows of `queries x keys`, low bytes above high ones. Then a thread holds, of a query, two neighbouring
columns, and with even and odd tokens in products of their own those are four neighbouring tokens: what it has to hold
of the next product's operand, so that probabilities never leave their thread. Where a row of keys is 16 bytes (D = 64)
even and odd tokens are one row of 32, and queries are twice there, with zeros in place of the other half. Four query
rows then are eight, of which one half sees the even tokens and the other the odd ones, and become four in the end.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import codec
from pallas_kernels.attention.triton import ops
from pallas_kernels.storage import loaded

PART = 32  # tokens of a tile that go through softmax at a time: `[PART, R]` has the layout of the accumulators


def key_rows(plan: ops.Plan, slots: jax.Array) -> jax.Array:
    """Slots of keys `[L, pages, K, page, bytes]` with as many axes as `attend_history` indexes; no copy."""
    if not plan.by_rows:
        return slots
    *lead, page, size = slots.shape
    return slots.reshape(*lead, page // 2, *((2 * size,) if plan.paired else (2, size)))


class _State(NamedTuple):
    """Online softmax over history: fp32 `[R]`, and accumulators of the value planes `[N_v / 4, R]`."""

    maximum: jax.Array
    total: jax.Array
    scales: jax.Array  # sum of p scale, of the rounded p scale
    offsets: jax.Array  # sum of p offset
    poison: jax.Array  # [tile], NaN where a value scale was: conversion to integers loses it
    planes: tuple[jax.Array, ...]


class _Tile(NamedTuple):
    """Where a tile lies, and what was read of it: `[tile]` numbers of its tokens."""

    page: jax.Array  # where pages are shorter than tiles, the number of the tile
    place: jax.Array  # token in the page
    key_scale: jax.Array
    value_scale: jax.Array
    key_offset: jax.Array | None
    value_offset: jax.Array | None


class _Softmax(NamedTuple):
    """What probabilities of a tile are relative to, fp32 `[R]`."""

    maximum: jax.Array  # of the logits so far
    rescale: jax.Array  # of what was summed before
    unit: jax.Array  # step of p scale as fixed point
    base: jax.Array  # what is taken off logits, so that `2^logit` comes in units


def attend_history(
    layer_ref, window_ref, starts_ref, counts_ref, table_ref, queries_ref, numbers_ref,
    key_ref, key_scale_ref, value_ref, value_scale_ref, *refs, plan: ops.Plan,
):  # fmt: skip
    """Partial softmax over the raw slots of one span of tiles."""
    *offset_refs, output_ref, sums_ref = refs
    key_offset_ref = offset_refs.pop(0) if plan.key_offset else None
    value_offset_ref = offset_refs.pop(0) if plan.value_offset else None
    batch, head, block, index, split = ops.program(plan)
    layer, start, count = layer_ref[0], starts_ref[batch], counts_ref[batch]
    tile, sink = plan.tile, plan.tiers.sink
    form = _Rows(plan) if plan.by_rows else _Columns(plan)
    rows = ops.rows_of(plan, block, form.local)
    bias = ops.BYTES_BIAS if plan.by_rows else 0  # of probabilities as fixed point

    def end_of(position):  # in history, not in the sequence
        return ops.history_end(plan, start, count, position) - sink

    def low_of(position):
        return jnp.maximum(position - window_ref[0] + 1 - sink, 0) if plan.windowed else jnp.zeros_like(position)

    row_end, row_low = end_of(start + rows.token), low_of(start + rows.token)
    begin = jnp.maximum(split * plan.span, ops.div(low_of(start), tile))
    end = jnp.minimum((split + 1) * plan.span, ops.div(end_of(start + plan.tokens - 1) + tile - 1, tile))
    # Tiles that every row sees whole need no mask.
    full_begin = ops.div(low_of(start + plan.tokens - 1) + tile - 1, tile)
    full_end = ops.div(end_of(start), tile)

    fast = plan.page >= tile
    entries, pool = table_ref.shape[1], key_ref.shape[1]

    def page_of(token):
        entry = jnp.minimum(ops.div(token, plan.page), entries - 1)
        return jnp.clip(plgpu.load(ops.at(table_ref, batch, entry)), 0, pool - 1)

    def places(at: _Tile, count: int):
        """Page (a scalar where it is one) and place, in units of the distance, of `count` tokens evenly far apart."""
        step = tile // count
        if fast:
            return at.page, ops.div(at.place, step) + ops.iota(count)
        token = at.page * tile + step * ops.iota(count)
        return page_of(token), ops.div(ops.rem(token, plan.page), step)

    def slice_of(at: _Tile, count: int):
        place = ops.div(at.place, tile // count)
        return pl.ds(0, count) if plan.page == tile else pl.ds(pl.multiple_of(place, count), count)

    def read_tile(i) -> _Tile:
        at = (page_of(i * tile), ops.rem(i * tile, plan.page)) if fast else (i, i)
        tile_at = _Tile(*at, *4 * (None,))  # type: ignore[arg-type]

        def read(ref):
            if ref is None:
                return None
            if fast:
                return plgpu.load(ref.at[layer, tile_at.page, head, slice_of(tile_at, tile)])
            page, place = places(tile_at, tile)
            return plgpu.load(ops.at(ref, layer, page, head, place))

        refs = (key_scale_ref, value_scale_ref, key_offset_ref, value_offset_ref)
        return _Tile(*at, *map(read, refs))  # type: ignore[arg-type]

    def read_keys(at: _Tile, count: int, size: int, *tail) -> jax.Array:
        """Bytes of `count` rows of keys `[count, size]`, past the end of a row zeros."""
        real = key_ref.shape[-1]
        if fast and size == real:
            return plgpu.load(key_ref.at[(layer, at.page, head, slice_of(at, count), *tail)])
        page, place = places(at, count)
        page = page if fast else page[:, None]
        byte = ops.iota(size)[None, :]
        return ops.load(
            key_ref, layer, page, head, place[:, None], *tail, jnp.where(byte < real, byte, 0), mask=byte < real
        )

    def read_values(at: _Tile) -> jax.Array:
        size, real = plan.value_block, plan.value_bytes
        if fast and size == real:
            return plgpu.load(value_ref.at[layer, at.page, head, :, slice_of(at, tile)])
        page, place = places(at, tile)
        page = page if fast else page[None, :]
        byte = ops.iota(size)[:, None]
        return ops.load(value_ref, layer, page, head, jnp.where(byte < real, byte, 0), place[None, :], mask=byte < real)

    def absorb(state: _State, at: _Tile, query, numbers: ops.Numbers, masks=None, usable=None) -> _State:
        logits = form.logits(query, numbers, at, read_keys, masks)
        highest = form.over_tokens(jnp.max, functools.reduce(jnp.maximum, logits))
        maximum = jnp.maximum(state.maximum, highest)
        # Nothing is larger than the largest p times the largest scale. Its reciprocal goes into the exponent.
        scales = loaded(at.value_scale).astype(jnp.float32)
        scales = scales if usable is None else jnp.where(usable, scales, 0.0)
        unit = ops.exp2(plan, highest - maximum) * jnp.max(jnp.abs(scales), axis=0) + ops.TINY
        unit *= 1 / ops.FULL
        base = maximum + ops.log2(plan, unit)
        softmax = _Softmax(maximum, ops.exp2(plan, state.maximum - maximum), unit, base)
        total, whole, biased = [], [], []
        value_scale = form.of_tokens(at.value_scale)
        value_offset = None if at.value_offset is None else form.of_tokens(at.value_offset)
        for i, x in enumerate(logits):
            mask = None if masks is None else masks[i]

            def select(x, mask=mask):  # not multiply: scales of unused places may be NaN
                return x if mask is None else jnp.where(mask, x, 0.0)

            x = select(ops.exp2(plan, x - form.of_rows(softmax.base)))
            total.append(x)
            if value_offset is not None:
                biased.append(select(x * value_offset[i]))
            whole.append(ops.rounded(plan, x, select(value_scale[i]), bias))

        def added(old, parts, bits=0):
            new = form.over_tokens(functools.partial(jnp.sum, dtype=parts[0].dtype), functools.reduce(jnp.add, parts))
            new = (new - ops.wrapped(bits)).astype(jnp.float32) if bits else new
            return ops.fma(plan, new, softmax.unit, old * softmax.rescale)

        weights, values = form.weights(whole), read_values(at)
        carried = softmax.rescale[None, :], (-ops.MAGIC * unit)[None, :]

        def mixed(i: int, x: jax.Array) -> jax.Array:
            low, high = form.bytes(ops.integers([(ops.plane(plan, values, i), weights)], plan.by_rows))
            return ops.join_bytes(plan, low, high, unit[None, :], ops.fma(plan, x, *carried))

        return _State(
            maximum,
            added(state.total, total),
            added(state.scales, whole, form.tokens * (ops.MAGIC_BITS + bias)),
            added(state.offsets, biased) if biased else state.offsets,
            state.poison + 0.0 * scales,
            tuple(mixed(i, x) for i, x in enumerate(state.planes)),
        )

    def run(state: _State, bucket, begin, end) -> _State:
        """Absorbs tiles `begin` to `end` of one bucket: whole ones first, then those at the edges."""
        query = form.query(queries_ref, batch, index, bucket)
        numbers = ops.Numbers(
            *(
                ops.load(numbers_ref, batch, index, bucket, jnp.int32(j), form.local)
                for j in range(len(ops.Numbers._fields))
            )
        )
        shift = jnp.zeros_like(numbers.shift) if plan.spec.softcap is not None else numbers.shift
        state = state._replace(maximum=state.maximum - shift)
        first = jnp.clip(full_begin, begin, jnp.maximum(begin, end))
        last = jnp.clip(full_end, first, jnp.maximum(first, end))

        def whole(i, carry):
            state, at = carry
            following = read_tile(i + 1)
            return absorb(state, at, query, numbers), following

        def edge(i, state):
            i = jnp.where(begin + i < first, begin + i, last + begin + i - first)
            seen = [
                (token < form.of_rows(row_end)) & (token >= form.of_rows(row_low)) for token in form.numbers(i * tile)
            ]
            token = i * tile + ops.iota(tile)
            usable = (token < end_of(start + plan.tokens - 1)) & (token >= low_of(start))
            return absorb(state, read_tile(i), query, numbers, seen, usable)

        state, _ = lax.fori_loop(first, last, whole, (state, read_tile(first)))
        edges = first - begin + jnp.maximum(end - last, 0)
        state = lax.fori_loop(jnp.zeros_like(edges), edges, edge, state)
        return state._replace(maximum=state.maximum + shift)

    zero = jnp.zeros(form.local.shape, jnp.float32)
    planes = (jnp.zeros((plan.value_block, zero.size), jnp.float32),) * ops.PLANES
    state = _State(zero + ops.MASKED, zero, zero, zero, jnp.zeros((tile,), jnp.float32), planes)
    if plan.span <= plan.bucket:
        state = run(state, ops.div(split * plan.span, plan.bucket), begin, jnp.maximum(begin, end))
    else:

        def visit(bucket, state):
            low = jnp.maximum(begin, bucket * plan.bucket)
            return run(state, bucket, low, jnp.maximum(low, jnp.minimum(end, (bucket + 1) * plan.bucket)))

        last = ops.div(jnp.maximum(end, begin) + plan.bucket - 1, plan.bucket)
        state = lax.fori_loop(ops.div(begin, plan.bucket), last, visit, state)
    if plan.parted:
        state = _joined(plan, state)

    plgpu.store(sums_ref.at[batch, index, split, jnp.int32(0), :], state.maximum)
    total = state.total + jnp.sum(state.poison, axis=0)
    plgpu.store(sums_ref.at[batch, index, split, jnp.int32(1), :], total)

    offset = state.offsets if plan.value_offset else codec.IMPLIED_OFFSET * state.scales
    for i, x in enumerate(state.planes):
        flipped = x + 128.0 * state.scales[None, :] if i == 3 else x
        item = (i * plan.value_block + ops.iota(plan.value_block)[:, None]) * plan.rows + ops.iota(plan.rows)[None, :]
        plgpu.store(ops.at(output_ref, batch, index, split, item), flipped * 4.0**-i + offset[None, :])


def _joined(plan: ops.Plan, state: _State) -> _State:
    """The state of query rows from that of rows of even and of odd tokens, in turns."""
    pairs = (plan.rows, 2)
    maximum = jnp.max(state.maximum.reshape(pairs), axis=1)
    factor = ops.exp2(plan, state.maximum - jnp.broadcast_to(maximum[:, None], pairs).reshape(-1))
    total, scales, offsets = (
        jnp.sum((x * factor).reshape(pairs), axis=1) for x in (state.total, state.scales, state.offsets)
    )
    planes = tuple(jnp.sum((x * factor[None, :]).reshape(-1, *pairs), axis=2) for x in state.planes)
    return _State(maximum, total, scales, offsets, state.poison, planes)


class _Columns:
    """Queries as columns of the products; tokens of a tile in parts `[PART, R]`."""

    def __init__(self, plan: ops.Plan):
        self.plan, self.local, self.tokens = plan, ops.iota(plan.rows), plan.tile

    def split(self, x: jax.Array) -> list[jax.Array]:
        return list(lax.split(x, (PART,) * (self.plan.tile // PART), axis=0))

    def of_tokens(self, x: jax.Array) -> list[jax.Array]:
        """`[tile]` numbers against logits."""
        return self.split(loaded(x).astype(jnp.float32)[:, None])

    def of_rows(self, x: jax.Array) -> jax.Array:
        """`[R]` numbers against logits."""
        return x[None, :]

    def over_tokens(self, reduce, x: jax.Array) -> jax.Array:
        return reduce(x, axis=0)

    def numbers(self, first: jax.Array) -> list[jax.Array]:
        """Of the tokens, against logits."""
        return self.split((first + ops.iota(self.plan.tile))[:, None])

    def query(self, ref, batch, index, bucket) -> list[jax.Array]:
        """Operands of each plane."""
        size = self.plan.key_block
        return [plgpu.load(ref.at[batch, index, bucket, :, pl.ds(size * i, size)]) for i in range(ops.PLANES)]

    def logits(self, query, numbers: ops.Numbers, at: _Tile, read_keys, masks) -> list[jax.Array]:
        plan = self.plan
        keys = read_keys(at, plan.tile, plan.key_block)
        product = ops.integers([(ops.plane(plan, keys, i), query[i]) for i in range(ops.PLANES)], contract=1)
        parts = [self.bytes(part) for part in self.split(product)]
        return _logits(self, parts, numbers, at, masks)

    def bytes(self, sums: jax.Array):
        """Sums over low and over high bytes, of both."""
        return ops.unweave(sums)

    def weights(self, fixed: list[jax.Array]) -> jax.Array:
        """Fixed-point probabilities of all parts as operand `[tile, 2 R]`."""
        columns = [ops.weave(x.astype(jnp.int8), ((x + 128) >> 8).astype(jnp.int8)) for x in fixed]
        while len(columns) > 1:
            columns = [ops.stack_rows(*pair) for pair in zip(columns[::2], columns[1::2], strict=True)]
        return columns[0]


class _Rows:
    """Queries as rows of the products; even and odd tokens of a tile apart, `[R, tile / 2]`.

    `local` is the query row of a row of the softmax, `tokens` are those of a tile that it sees.
    """

    def __init__(self, plan: ops.Plan):
        self.plan = plan
        self.local = ops.div(ops.iota(2 * plan.rows), 2) if plan.parted else ops.iota(plan.rows)
        self.tokens = plan.tile // 2 if plan.parted else plan.tile
        self.even = (ops.rem(ops.iota(2 * plan.rows), 2) == 0)[:, None] if plan.parted else None

    def of_tokens(self, x: jax.Array) -> list[jax.Array]:
        shape = (self.local.size, self.plan.tile)
        parts = ops.unweave(jnp.broadcast_to(loaded(x).astype(jnp.float32)[None, :], shape))
        return list(parts) if self.even is None else [jnp.where(self.even, *parts)]

    def of_rows(self, x: jax.Array) -> jax.Array:
        return x[:, None]

    def over_tokens(self, reduce, x: jax.Array) -> jax.Array:
        return reduce(x, axis=1)

    def numbers(self, first: jax.Array) -> list[jax.Array]:
        each = (first + 2 * ops.iota(self.plan.tile // 2))[None, :]
        return [each, each + 1] if self.even is None else [each + jnp.where(self.even, 0, 1)]

    def query(self, ref, batch, index, bucket) -> list[jax.Array]:
        plan = self.plan
        size, count = plan.key_block, 2 * plan.rows
        if not plan.paired:
            return [plgpu.load(ref.at[batch, index, bucket, :, pl.ds(size * i, size)]) for i in range(ops.PLANES)]
        row, byte = ops.iota(2 * count)[:, None], ops.iota(2 * size)[None, :]
        even = ops.rem(row, 2) == 0 if plan.parted else row < count
        row = ops.div(row, 2) if plan.parted else ops.rem(row, count)
        mask, byte = (byte < size) == even, ops.rem(byte, size)
        return [ops.load(ref, batch, index, bucket, row, size * i + byte, mask=mask) for i in range(ops.PLANES)]

    def logits(self, query, numbers: ops.Numbers, at: _Tile, read_keys, masks) -> list[jax.Array]:
        plan = self.plan

        def product(keys: jax.Array) -> jax.Array:
            return ops.integers([(query[i], ops.plane(plan, keys, i)) for i in range(ops.PLANES)], contract=1)

        if plan.paired:
            both = product(read_keys(at, plan.tile // 2, 2 * plan.key_block))
            products = [both] if plan.parted else ops.halves(both)
        else:
            products = [product(read_keys(at, plan.tile // 2, plan.key_block, jnp.int32(j))) for j in range(2)]
        return _logits(self, [ops.halves(x) for x in products], numbers, at, masks)

    def bytes(self, sums: jax.Array):
        return ops.halves(sums, axis=1)

    def weights(self, fixed: list[jax.Array]) -> jax.Array:
        """As operand `[2 R, tile]`."""
        if self.even is not None:
            zero = jnp.full_like(fixed[0], ops.MAGIC_BITS + ops.BYTES_BIAS)
            fixed = [jnp.where(self.even, fixed[0], zero), jnp.where(self.even, zero, fixed[0])]
        return ops.stack_rows(*ops.bytes_of(self.plan, ops.weave(*fixed)))


def _logits(form: _Columns | _Rows, sums, numbers: ops.Numbers, at: _Tile, masks) -> list[jax.Array]:
    """Logits of the parts of a tile from `(low, high)` sums of each."""
    plan = form.plan
    key_scale = form.of_tokens(at.key_scale)
    key_offset = None if at.key_offset is None else form.of_tokens(at.key_offset)
    unit, constant = form.of_rows(numbers.unit), form.of_rows(numbers.constant - ops.MAGIC * numbers.unit)
    logits = []
    for i, (low, high) in enumerate(sums):
        x = ops.join_bytes(plan, low, high, unit, constant) * key_scale[i]
        if key_offset is not None:
            x = ops.fma(plan, key_offset[i], form.of_rows(numbers.sigma), x)
        if plan.spec.softcap is not None:
            x = plan.spec.softcap * ops.LOG2E * jnp.tanh(x + form.of_rows(numbers.shift))
        logits.append(x if masks is None else jnp.where(masks[i], x, ops.MASKED))
    return logits
