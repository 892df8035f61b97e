"""What waits for no other kernel: the transform of the queries, and attention to the plain tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import codec
from pallas_kernels.attention.triton import ops
from pallas_kernels.attention.triton.halves import operand_place
from pallas_kernels.storage import loaded

MAX_TOKENS = 16
PLAIN_TILE = 16  # plain tokens at a time
DEPTH = {16: 32, 32: 16}  # coordinates that `_prepare` contracts at a time, by queries of a program: registers


def begin(
    layer_ref, window_ref, starts_ref, counts_ref, q_ref, k_ref, v_ref, sink_k_ref, sink_v_ref, recent_k_ref,
    recent_v_ref, decode_ref, mu_ref, *refs, plan: ops.Plan,
):  # fmt: skip
    """What waits for nothing: the transform of the queries, and the plain tokens."""
    *turn_refs, plain_output_ref, plain_sums_ref, queries_ref, numbers_ref = refs
    *here, third = ops.program(plan)
    split = third - plan.query_blocks

    def plain(split, recent: bool):
        _attend_plain(
            layer_ref, window_ref, starts_ref, counts_ref, q_ref, k_ref, v_ref, sink_k_ref, sink_v_ref, recent_k_ref,
            recent_v_ref, plain_output_ref, plain_sums_ref, plan=plan, here=here, split=split, recent=recent,
        )  # fmt: skip

    @pl.when(split < 0)
    def _():
        refs = (*turn_refs, queries_ref, numbers_ref)
        _prepare(layer_ref, q_ref, decode_ref, mu_ref, *refs, plan=plan, here=here, third=third)

    @pl.when(split == 0)
    def _():
        plain(split, False)

    @pl.when(split > 0)
    def _():
        plain(split - 1, True)


def _prepare(layer_ref, q_ref, decode_ref, mu_ref, *refs, plan: ops.Plan, here, third: jax.Array):
    """Queries relative to some buckets, times E, as fixed point or fp16."""
    *turn_refs, queries_ref, numbers_ref = refs
    batch, head, block, index = here
    layer = layer_ref[0]
    count = plan.queries // plan.rows
    bucket, local = third * count + ops.iota(count), ops.iota(plan.rows)
    rows = ops.rows_of(plan, block, local)
    exists = None if plan.buckets % count == 0 else bucket < plan.buckets
    real = None if plan.groups * plan.tokens == plan.rows * plan.row_blocks else rows.real[None, :, None]
    source = bucket if exists is None else jnp.where(exists, bucket, 0)
    query_head = head * plan.groups + rows.head
    slots, depth = ops.Slots.of(plan.key_block, plan.key_bytes), min(DEPTH[plan.queries], plan.dim)

    def query_of(d, known):  # [1, R, d]
        known = None if known is None else known[None]
        at = (batch, rows.token[None, :, None], query_head[None, :, None], d[None, None, :])
        return ops.load(q_ref, *at, mask=ops.both(real, known)).astype(jnp.float32)

    def absorb(i, carry):
        """Some coordinates at a time: the loads of all of them would not fit into registers."""
        shifts, product = carry
        d = i * depth + ops.iota(depth)
        known = None if plan.dim == plan.head_dim else (d < plan.head_dim)[None, :]
        d = d if known is None else jnp.where(d < plan.head_dim, d, 0)
        query = query_of(d, known)
        full = (count, plan.rows, depth)
        if plan.rotary is None:
            query = jnp.broadcast_to(query * plan.logit_scale, full)
        else:
            size, neighbours = plan.rotary
            # A remainder keeps neighbours neighbours, so that loads stay wide; a choice would not.
            partner = d ^ 1 if neighbours else ops.rem(d + size // 2, size)
            if size < plan.head_dim:
                partner = jnp.where(d < size, partner, d)
            own, other = (ops.load(ref, source[:, None, None], d[None, None, :]) for ref in turn_refs)
            query = ops.fma(plan, query_of(partner, known), other, query * own)
        mu = ops.load(mu_ref, layer, head, d[None, None, :], mask=None if known is None else known[None])
        shifts = ops.fma(plan, query, mu, shifts)
        query = query.reshape(plan.queries, depth)
        matrix = ops.load(
            decode_ref, layer, head, slots.number[:, None], d[None, :], mask=ops.both(slots.column, known)
        )
        if matrix.dtype == jnp.float32:
            return shifts, product + ops.dot(plan, query, matrix, contract=(1, 1))
        half = (query.astype(jnp.float16), matrix)
        return shifts, product + lax.dot_general(*half, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    shapes = (count, plan.rows, depth), (plan.queries, ops.PLANES * plan.key_block)
    initial = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    # A number of steps that the compiler does not know, as layers are never negative: unrolled, this spills.
    shifts, product = lax.fori_loop(layer >> 31, jnp.int32(plan.dim // depth), absorb, initial)
    top = jnp.max(jnp.abs(product), axis=1) + ops.TINY
    whole, unit = (ops.FULL / top)[:, None], top * (1 / ops.FULL)
    if plan.halves:
        fixed = (product * whole).astype(jnp.float16)
    else:
        fixed = ops.rounded(plan, product, whole, ops.BYTES_BIAS)

    def total(factors: tuple[int, ...]):
        """Sum of the rounded numbers, each times its plane's factor; exact where those are whole."""
        factor = jnp.full_like(slots.plane, factors[0])
        for i in range(1, ops.PLANES):
            factor = jnp.where(slots.plane == i, factors[i], factor)
        if plan.halves:
            return jnp.sum(fixed.astype(jnp.float32) * factor.astype(jnp.float32)[None, :], axis=1) * unit
        bias = ops.wrapped(plan.key_block * sum(factors) * (ops.MAGIC_BITS + ops.BYTES_BIAS))
        return (jnp.sum(fixed * factor[None, :], axis=1, dtype=jnp.int32) - bias).astype(jnp.float32) * unit

    weights = tuple(4**i for i in range(ops.PLANES))
    flipped = 0 if plan.halves else 256  # twice what the flipped top bit of plane 3 takes away
    if plan.key_offset:
        constant, sigma = 0.5 * total((0, 0, 0, flipped)), total(weights)
    else:
        offsets = [round(2 * codec.IMPLIED_OFFSET) * x for x in weights]
        constant, sigma = 0.5 * total((*offsets[:3], offsets[3] + flipped)), jnp.zeros_like(unit)
    column = ops.iota(plan.queries)
    bucket, local = third * count + ops.div(column, plan.rows), ops.rem(column, plan.rows)
    inside = None if exists is None else bucket < plan.buckets
    shift = jnp.sum(shifts, axis=2).reshape(plan.queries)
    scale = unit * (1 / ops.DENORMAL) if plan.halves else unit
    for j, number in enumerate(ops.Numbers(scale, constant, sigma, shift)):
        plgpu.store(ops.at(numbers_ref, batch, index, bucket, j, local), number, mask=inside)
    slot = ops.iota(ops.PLANES * plan.key_block)[None, :]
    mask = None if inside is None else jnp.broadcast_to(inside[:, None], product.shape)
    if plan.halves:
        plane = slots.plane[None, :] * (plan.rows * plan.key_block)
        place = plane + operand_place(local[:, None], ops.rem(slot, plan.key_block))
        at = ops.at(queries_ref, batch, index, bucket[:, None], ops.div(place, 8), ops.rem(place, 8))
        plgpu.store(at, fixed, mask=mask)
        return
    # With the bias and the flip, the two bytes are the low and the high one, both signed.
    words = fixed ^ ops.BYTES_BIAS
    for j in range(2):
        row = j * plan.rows + local if plan.by_rows else 2 * local + j
        at = ops.at(queries_ref, batch, index, bucket[:, None], row[:, None], slot)
        plgpu.store(at, (words >> 8 * j).astype(jnp.int8), mask=mask)


def _attend_plain(
    layer_ref, window_ref, starts_ref, counts_ref, q_ref, k_ref, v_ref, sink_k_ref, sink_v_ref, recent_k_ref,
    recent_v_ref, output_ref, sums_ref, *, plan: ops.Plan, here, split: jax.Array, recent: bool,
):  # fmt: skip
    """Partial softmax over plain tokens: sinks and new tokens, or `ops.PLAIN_SPAN` places of the ring.

    Queries lie along the rows of the products here, so that probabilities become an operand without leaving their
    registers.
    """
    batch, head, block, index = here
    layer, start, count = layer_ref[0], starts_ref[batch], counts_ref[batch]
    sink, ring, size = plan.tiers.sink, plan.ring, max(16, plan.rows)
    local, (d, known) = ops.iota(size), ops.bounded(plan.dim, plan.head_dim)
    rows = ops.rows_of(plan, block, local)
    at = (batch, rows.token[:, None], (head * plan.groups + rows.head)[:, None], d[None, :])
    query = ops.load(q_ref, *at, mask=ops.both(rows.real[:, None], known))
    t = (start + rows.token)[:, None]
    end = ops.history_end(plan, start, count, t)

    def product(a, b, contract):
        if a.dtype != b.dtype or a.dtype == jnp.float32:
            return ops.dot(plan, a.astype(jnp.float32), b.astype(jnp.float32), contract=(1, contract))
        return lax.dot_general(a, b, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)

    def absorb(state, key_ref, value_ref, lead, place, position, usable, seen):
        maximum, total, output = state
        keys, values = (
            loaded(ops.load(ref, *lead, place[:, None], head, d[None, :], mask=ops.both(usable[:, None], known)))
            for ref in (key_ref, value_ref)
        )
        logits = product(query, keys, 1) * plan.logit_scale
        if plan.spec.softcap is not None:
            logits = plan.spec.softcap * ops.LOG2E * jnp.tanh(logits)
        if plan.windowed:
            seen &= position[None, :] > t - window_ref[0]
        logits = jnp.where(seen, logits, ops.MASKED)
        top = jnp.maximum(maximum, jnp.max(logits, axis=1))
        rescale = ops.exp2(plan, maximum - top)
        probabilities = jnp.where(seen, ops.exp2(plan, logits - top[:, None]), 0.0)
        output = output * rescale[:, None] + product(probabilities.astype(values.dtype), values, 0)
        return top, total * rescale + jnp.sum(probabilities, axis=1), output

    def inside(position):
        """Whether some row's window may hold it: what lies before may be anything."""
        return position > start - window_ref[0] if plan.windowed else position >= 0

    def over(state, first, last, visit):
        return lax.fori_loop(ops.div(first, PLAIN_TILE), ops.div(last + PLAIN_TILE - 1, PLAIN_TILE), visit, state)

    def sinks(i, state):
        place = i * PLAIN_TILE + ops.iota(PLAIN_TILE)
        usable = inside(place) & (place < jnp.minimum(start, sink))
        return absorb(state, sink_k_ref, sink_v_ref, (layer, batch), place, place, usable, usable[None, :])

    turn = ops.rem(start, ring)  # places from here on hold tokens of the turn before

    def recents(i, state):
        place = i * PLAIN_TILE + ops.iota(PLAIN_TILE)
        held = start - turn + place - jnp.where(place < turn, 0, ring)
        usable = inside(held) & (place < ring) & (held >= sink)
        seen = usable[None, :] & (held[None, :] >= end)
        return absorb(state, recent_k_ref, recent_v_ref, (layer, batch), place, held, usable, seen)

    zero = jnp.zeros((size,), jnp.float32)
    state = (zero + ops.MASKED, zero, jnp.zeros((size, plan.dim), jnp.float32))
    if recent:
        first, last = split * ops.PLAIN_SPAN, jnp.minimum(ring, start)
        state = over(state, first, jnp.clip(last, first, first + ops.PLAIN_SPAN), recents)
    else:
        if sink:
            state = over(state, jnp.zeros_like(start), jnp.minimum(start, sink), sinks)
        place = ops.iota(MAX_TOKENS)
        usable, j = place < count, (start + place)[None, :]
        seen = usable[None, :] & (j <= t) & ((j < sink) | (j >= end))
        state = absorb(state, k_ref, v_ref, (batch,), place, start + place, usable, seen)
    maximum, total, output = state
    split = split + plan.plain_splits - plan.ring_splits if recent else split
    real = None if size == plan.rows else local < plan.rows
    for i, x in enumerate((maximum, total)):
        plgpu.store(ops.at(sums_ref, batch, index, split, i, local), x, mask=real)
    # Rows that are masked name places of the next coordinate: in this order the interpreter, too, writes those last.
    at = ops.at(output_ref, batch, index, split, ops.iota(plan.dim)[:, None] * plan.rows + local[None, :])
    plgpu.store(at, output.T, mask=None if real is None else jnp.broadcast_to(real[None, :], output.T.shape))
