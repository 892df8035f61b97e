"""Partial softmax over packed slots, a span of tiles a program.

What is read and who sees it is here; how keys and values are multiplied, and the softmax in the order that suits it,
is a form's: `fixed_point` for up to eight query rows, `halves` for more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention.triton import ops
from pallas_kernels.attention.triton.fixed_point import Columns, Rows
from pallas_kernels.attention.triton.halves import Halves
from pallas_kernels.attention.triton.tiles import Query, Reads, Seen, Tile


def key_rows(plan: ops.Plan, slots: jax.Array) -> jax.Array:
    """Slots of keys `[L, pages, K, page, bytes]` with as many axes as `attend_history` indexes; no copy."""
    if not (plan.by_rows or plan.halves):
        return slots
    *lead, page, size = slots.shape
    return slots.reshape(*lead, page // 2, *((2 * size,) if plan.paired else (2, size)))


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
    form = (Halves if plan.halves else Rows if plan.by_rows else Columns)(plan)
    rows = ops.rows_of(plan, block, form.local)

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

    def places(at: Tile, count: int):
        """Page (a scalar where it is one) and place, in units of the distance, of `count` tokens evenly far apart."""
        step = tile // count
        if fast:
            return at.page, ops.div(at.place, step) + ops.iota(count)
        token = at.page * tile + step * ops.iota(count)
        return page_of(token), ops.div(ops.rem(token, plan.page), step)

    def slice_of(at: Tile, count: int):
        place = ops.div(at.place, tile // count)
        return pl.ds(0, count) if plan.page == tile else pl.ds(pl.multiple_of(place, count), count)

    def read_tile(i) -> Tile:
        at = (page_of(i * tile), ops.rem(i * tile, plan.page)) if fast else (i, i)
        tile_at = Tile(*at, *4 * (None,))  # type: ignore[arg-type]

        def read(ref):
            if ref is None:
                return None
            if fast:
                return plgpu.load(ref.at[layer, tile_at.page, head, slice_of(tile_at, tile)])
            page, place = places(tile_at, tile)
            return plgpu.load(ops.at(ref, layer, page, head, place))

        refs = (key_scale_ref, value_scale_ref, key_offset_ref, value_offset_ref)
        return Tile(*at, *map(read, refs))  # type: ignore[arg-type]

    def read_keys(at: Tile, count: int, size: int, *tail) -> jax.Array:
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

    def read_values(at: Tile) -> jax.Array:
        size, real = plan.value_block, plan.value_bytes
        if fast and size == real:
            return plgpu.load(value_ref.at[layer, at.page, head, :, slice_of(at, tile)])
        page, place = places(at, tile)
        page = page if fast else page[None, :]
        byte = ops.iota(size)[:, None]
        return ops.load(value_ref, layer, page, head, jnp.where(byte < real, byte, 0), place[None, :], mask=byte < real)

    reads = Reads(read_keys, read_values)

    def run(state, bucket, begin, end):
        """Absorbs tiles `begin` to `end` of one bucket: whole ones first, then those at the edges."""
        numbers = ops.Numbers(
            *(
                ops.load(numbers_ref, batch, index, bucket, jnp.int32(j), form.local)
                for j in range(len(ops.Numbers._fields))
            )
        )
        query = Query(form.planes(queries_ref, batch, index, bucket), numbers)
        shift = jnp.zeros_like(numbers.shift) if plan.spec.softcap is not None else numbers.shift
        state = state._replace(maximum=state.maximum - shift)
        first = jnp.clip(full_begin, begin, jnp.maximum(begin, end))
        last = jnp.clip(full_end, first, jnp.maximum(first, end))

        def whole(i, carry):
            state, at = carry
            following = read_tile(i + 1)
            return form.absorb(reads, state, at, query), following

        def edge(i, state):
            i = jnp.where(begin + i < first, begin + i, last + begin + i - first)
            seen = [
                (token < form.of_rows(row_end)) & (token >= form.of_rows(row_low)) for token in form.numbers(i * tile)
            ]
            token = i * tile + ops.iota(tile)
            usable = (token < end_of(start + plan.tokens - 1)) & (token >= low_of(start))
            return form.absorb(reads, state, read_tile(i), query, Seen(seen, usable))

        state, _ = lax.fori_loop(first, last, whole, (state, read_tile(first)))
        edges = first - begin + jnp.maximum(end - last, 0)
        state = lax.fori_loop(jnp.zeros_like(edges), edges, edge, state)
        return state._replace(maximum=state.maximum + shift)

    state = form.initial()
    if plan.span <= plan.bucket:
        state = run(state, ops.div(split * plan.span, plan.bucket), begin, jnp.maximum(begin, end))
    else:

        def visit(bucket, state):
            low = jnp.maximum(begin, bucket * plan.bucket)
            return run(state, bucket, low, jnp.maximum(low, jnp.minimum(end, (bucket + 1) * plan.bucket)))

        last = ops.div(jnp.maximum(end, begin) + plan.bucket - 1, plan.bucket)
        state = lax.fori_loop(ops.div(begin, plan.bucket), last, visit, state)

    partial = form.partial(state)
    for kind, x in enumerate((partial.maximum, partial.total)):
        plgpu.store(sums_ref.at[batch, index, split, jnp.int32(kind), :], x)
    for item, x in partial.outputs:
        plgpu.store(ops.at(output_ref, batch, index, split, item), x)
