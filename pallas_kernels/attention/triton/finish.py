"""Merges of partial softmaxes, and the way back from slots to coordinates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention.triton import ops

MERGE = 16  # splits that `merge` makes one of
CHUNK = 8  # of which so many are read at a time


def _sums(sums_ref, batch, index, first, count: int):
    """Maxima and sums `[n, R]` of `count` partial softmaxes from `first` on, as far as there are so many."""
    _, _, splits, _, rows = sums_ref.shape
    size = pl.next_power_of_2(count)
    each = (first + ops.iota(size))[:, None]
    inside = None if splits % size == 0 else jnp.broadcast_to(each < jnp.minimum(first + count, splits), (size, rows))
    each = jnp.minimum(each, splits - 1)
    at = [ops.at(sums_ref, batch, index, each, kind, ops.iota(rows)[None, :]) for kind in range(2)]
    if inside is None:
        return plgpu.load(at[0]), plgpu.load(at[1])
    return plgpu.load(at[0], mask=inside, other=ops.MASKED), plgpu.load(at[1], mask=inside, other=0)


def _mix(plan: ops.Plan, output_ref, sums_ref, batch, index, first, count: int, items: jax.Array, top: jax.Array):
    """Sum of `count` partial outputs from `first` on at flat `items`, weighted relative to the maximum `top` `[R]`."""
    splits, size, rows = output_ref.shape[2], items.shape[0], plan.rows
    known = jnp.minimum(first + count, splits)
    flat_top = jnp.broadcast_to(top[None, :], (size // rows, rows)).reshape(1, size)
    items = items[None, :]
    chunk = min(CHUNK, pl.next_power_of_2(count))

    def absorb(i, output):
        each = (first + i * chunk + ops.iota(chunk))[:, None]
        inside = None if splits % chunk == 0 else jnp.broadcast_to(each < known, (chunk, size))
        each = jnp.minimum(each, splits - 1)
        at = ops.at(sums_ref, batch, index, each, 0, ops.rem(items, rows))
        maximum = plgpu.load(at) if inside is None else plgpu.load(at, mask=inside, other=2 * ops.MASKED)
        return ops.fma(
            plan, ops.exp2(plan, maximum - flat_top), ops.load(output_ref, batch, index, each, items), output
        )

    # Items lie along the threads, and the sum over splits within a chunk is left to the end.
    output = jnp.zeros((chunk, size), jnp.float32)
    steps = pl.cdiv(count, chunk)
    output = absorb(jnp.int32(0), output) if steps == 1 else lax.fori_loop(0, steps, absorb, output)
    return jnp.sum(output, axis=0)


def merge(output_ref, sums_ref, merged_ref, merged_sums_ref, *, plan: ops.Plan):
    """Makes one partial softmax of `MERGE` neighbouring ones."""
    batch, _, _, index, group = ops.program(plan)
    items = ops.iota(output_ref.shape[3])
    maximum, total = _sums(sums_ref, batch, index, group * MERGE, MERGE)
    top = jnp.max(maximum, axis=0)
    output = _mix(plan, output_ref, sums_ref, batch, index, group * MERGE, MERGE, items, top)
    total = jnp.sum(ops.exp2(plan, maximum - top[None, :]) * total, axis=0)
    for kind, x in enumerate((top, total)):
        plgpu.store(ops.at(merged_sums_ref, batch, index, group, kind, ops.iota(plan.rows)), x)
    plgpu.store(ops.at(merged_ref, batch, index, group, items), output)


def finish(
    layer_ref, output_ref, sums_ref, plain_ref, plain_sums_ref, decode_ref, mu_ref, *refs, plan: ops.Plan, parts: int
):
    """Merges history and plain tokens, maps slots back with E, divides; one of `parts` of the coordinates."""
    *sink_refs, out_ref = refs
    batch, head, block, index, piece = ops.program(plan)
    layer, local = layer_ref[0], ops.iota(plan.rows)
    width = plan.dim // parts
    rows = ops.rows_of(plan, block, local)
    query_head = head * plan.groups + rows.head
    slots = ops.Slots.of(plan.value_block, plan.value_bytes)
    place = piece * width + ops.iota(width)
    known = None if plan.dim == plan.head_dim else (place < plan.head_dim)[:, None]
    d = place if known is None else jnp.where(place < plan.head_dim, place, 0)

    splits, plain_splits = output_ref.shape[2], plan.plain_splits
    past, past_total = _sums(sums_ref, batch, index, 0, splits)
    plain, plain_total = _sums(plain_sums_ref, batch, index, 0, plain_splits)
    top = jnp.maximum(jnp.max(past, axis=0), jnp.max(plain, axis=0))
    sinks = [plgpu.load(ref.at[query_head]) * ops.LOG2E for ref in sink_refs]
    for sink in sinks:
        top = jnp.maximum(top, sink)
    past_total = jnp.sum(ops.exp2(plan, past - top[None, :]) * past_total, axis=0)
    denominator = past_total + jnp.sum(ops.exp2(plan, plain - top[None, :]) * plain_total, axis=0)
    for sink in sinks:
        denominator += ops.exp2(plan, sink - top)

    matrix = ops.load(decode_ref, layer, head, slots.number[None, :], d[:, None], mask=ops.both(slots.row, known))
    items = ops.iota(output_ref.shape[3])
    mixed = _mix(plan, output_ref, sums_ref, batch, index, 0, splits, items, top).reshape(-1, plan.rows)
    if plan.rows < 8:  # four rows are fewer columns than a product takes: a second column for each, of zeros
        mixed = jnp.stack([mixed, jnp.zeros_like(mixed)], axis=-1).reshape(-1, 2 * plan.rows)
    output = ops.dot(plan, matrix, mixed, exact=out_ref.dtype == jnp.float32)
    if plan.rows < 8:
        output, _ = lax.split(output.reshape(width, plan.rows, 2), (1, 1), axis=2)
        output = output.reshape(width, plan.rows)
    items = piece * width * plan.rows + ops.iota(width * plan.rows)
    output += _mix(plan, plain_ref, plain_sums_ref, batch, index, 0, plain_splits, items, top).reshape(output.shape)
    output += ops.load(mu_ref, layer, head, d[:, None], mask=known) * past_total[None, :]
    empty = denominator <= 0
    output = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, denominator))[None, :] * output
    mask = rows.real[None, :] if known is None else rows.real[None, :] & known
    token = jnp.where(mask, rows.token[None, :], plan.tokens)  # masked ones must not name a place twice: interpreter
    at = ops.at(out_ref, batch, token, query_head[None, :], d[:, None])
    plgpu.store(at, output.astype(out_ref.dtype), mask=jnp.broadcast_to(mask, output.shape))
