"""Products over packed slots on fp16 tensor cores, for nine to sixteen query rows: rows of an `mma` are full then.

Masked bytes are fp16 as they are, denormal ones (`ops.widened`). Queries are fp16 times 32000 over their maximum;
probabilities times their value's scale are fp16 up to 2^15, and what they are relative to counts the largest scale of a
tile in, so that outputs stay sums of products.

Nothing but scales and sums leaves its thread: with even and odd tokens in products of their own a thread holds four
neighbouring probabilities of a row, as the operand of the next product has them where values are bytes, and queries
lie in memory in the order of the operand's registers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import codec
from pallas_kernels.attention.triton import ops, tiles
from pallas_kernels.attention.triton.tiles import Partial, Query, Reads, Seen, Tile

HEADROOM = 15.0  # weights reach 2^15, half the largest fp16


def operand_place(row: jax.Array, byte: jax.Array) -> jax.Array:
    """Where a query's number for a byte of keys lies within its plane.

    Of an operand `[16, 32]`, whose four neighbours along a row come from one register of bytes, a thread holds rows r
    and r + 8, and of each bytes 4 c + 0 .. 3 and 16 + 4 c + 0 .. 3; pairs p of all four are one instruction's.
    """

    def digit(x: jax.Array, low: int, size: int) -> jax.Array:
        return ops.rem(ops.div(x, low), size)

    high, r = digit(row, 8, 2), digit(row, 1, 8)
    step, c, p, odd = digit(byte, 16, 2), digit(byte, 4, 4), digit(byte, 2, 2), digit(byte, 1, 2)
    return ((((p * 8 + r) * 4 + c) * 2 + step) * 2 + high) * 2 + odd


class State(NamedTuple):
    """Online softmax over history: fp32 `[R]`, and accumulators of the value planes `[R, N_v / 4]`."""

    maximum: jax.Array
    total: jax.Array
    scales: jax.Array  # sum of p scale
    offsets: jax.Array  # sum of p offset
    planes: tuple[jax.Array, ...]


class Halves:
    """Queries as rows of the products; even and odd tokens of a tile apart, `[R, tile / 2]`."""

    def __init__(self, plan: ops.Plan):
        self.plan, self.local = plan, ops.iota(plan.rows)

    def of_rows(self, x: jax.Array) -> jax.Array:
        """`[R]` numbers against logits."""
        return x[:, None]

    def of_tokens(self, x: jax.Array) -> list[jax.Array]:
        """`[tile]` numbers against logits."""
        return tiles.even_and_odd(x, self.plan.rows)

    def numbers(self, first: jax.Array) -> list[jax.Array]:
        """Of the tokens, against logits."""
        return tiles.even_and_odd_from(first, self.plan.tile)

    def planes(self, ref, *at) -> list[jax.Array]:
        """Queries as operands of each plane: sixteen bytes a load are four registers, as `operand_place` has them."""
        rows, size = self.plan.rows, self.plan.key_block

        def plane(i: int) -> jax.Array:
            x = plgpu.load(ref.at[(*at, pl.ds(i * rows * size // 8, rows * size // 8), slice(None))])
            return x.reshape(2, 8, 4, 2, 2, 2).transpose(4, 1, 3, 2, 0, 5).reshape(rows, size)

        return [plane(i) for i in range(ops.PLANES)]

    def initial(self) -> State:
        plan = self.plan
        zero = jnp.zeros((plan.rows,), jnp.float32)
        planes = (jnp.zeros((plan.rows, plan.value_block), jnp.float32),) * ops.PLANES
        return State(zero + ops.MASKED, zero, zero, zero, planes)

    def absorb(self, reads: Reads, state: State, at: Tile, query: Query, seen: Seen | None = None) -> State:
        plan, numbers = self.plan, query.numbers
        # Everything comes in units of a row, which then are the factor of a multiplication that is due anyway.
        unit = numbers.unit
        constant, sigma = (numbers.constant / unit)[:, None], (numbers.sigma / unit)[:, None]
        key_scale = self.of_tokens(at.key_scale)
        key_offset = None if at.key_offset is None else self.of_tokens(at.key_offset)
        logits = []
        for i in range(2):
            x = jnp.broadcast_to(constant, (plan.rows, plan.tile // 2))
            keys = reads.keys(at, plan.tile // 2, plan.key_block, jnp.int32(i))
            for a, b in zip(query.planes, ops.widened(plan, keys), strict=True):
                x += _product(a, b)
            x *= key_scale[i]
            if key_offset is not None:
                x = ops.fma(plan, key_offset[i], sigma, x)
            if plan.spec.softcap is not None:
                x = ops.fma(plan, x, unit[:, None], numbers.shift[:, None])
                x = plan.spec.softcap * ops.LOG2E * jnp.tanh(x)
            logits.append(x)
        unit = unit if plan.spec.softcap is None else jnp.ones_like(unit)
        if seen is not None:
            masked = (ops.MASKED / unit)[:, None]
            logits = [jnp.where(mask, x, masked) for mask, x in zip(seen.parts, logits, strict=True)]

        largest = jnp.max(jnp.abs(tiles.value_scales(at, seen)), axis=0) + ops.DENORMAL
        highest = jnp.max(jnp.maximum(*logits), axis=1)
        highest = ops.fma(plan, highest, unit, ops.log2(plan, jnp.zeros_like(unit) + largest) - HEADROOM)
        maximum = jnp.maximum(state.maximum, highest)
        rescale = ops.exp2(plan, state.maximum - maximum)
        value_scale = self.of_tokens(at.value_scale)
        value_offset = None if at.value_offset is None else self.of_tokens(at.value_offset)
        total, scaled, offsets = [], [], []
        for i, x in enumerate(logits):

            def kept(x: jax.Array, i: int = i) -> jax.Array:  # not multiply: scales of unused places may be NaN
                return x if seen is None else jnp.where(seen.parts[i], x, 0.0)

            x = kept(ops.exp2(plan, ops.fma(plan, x, unit[:, None], -maximum[:, None])))
            total.append(x)
            scaled.append(x * kept(value_scale[i]))
            if value_offset is not None:
                offsets.append(x * kept(value_offset[i]))
        operand = ops.weave(*(x.astype(jnp.float16) for x in scaled))

        def added(old: jax.Array, parts: list[jax.Array]) -> jax.Array:
            return old * rescale + jnp.sum(jnp.add(*parts), axis=1)

        def mixed(old: jax.Array, values: jax.Array) -> jax.Array:
            return old * rescale[:, None] + _product(operand, values)

        return State(
            maximum,
            added(state.total, total),
            added(state.scales, scaled),
            added(state.offsets, offsets) if offsets else state.offsets,
            tuple(map(mixed, state.planes, ops.widened(plan, reads.values(at)))),
        )

    def partial(self, state: State) -> Partial:
        plan = self.plan
        offset = state.offsets if plan.value_offset else codec.IMPLIED_OFFSET * state.scales
        outputs = []
        for i, x in enumerate(state.planes):
            slot = i * plan.value_block + ops.iota(plan.value_block)
            item = slot[None, :] * plan.rows + self.local[:, None]
            outputs.append((item, x * (4.0**-i / ops.DENORMAL) + offset[:, None]))
        return Partial(state.maximum, state.total, outputs)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
