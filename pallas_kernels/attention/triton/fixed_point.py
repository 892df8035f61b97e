"""Products over packed slots on integer tensor cores, for up to eight query rows.

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

import abc
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import codec
from pallas_kernels.attention.triton import ops, tiles
from pallas_kernels.attention.triton.tiles import Partial, Query, Reads, Seen, Tile
from pallas_kernels.storage import loaded

PART = 32  # tokens of a tile that go through softmax at a time: `[PART, R]` has the layout of the accumulators


class State(NamedTuple):
    """Online softmax over history: fp32 `[R]`, and accumulators of the value planes `[N_v / 4, R]`."""

    maximum: jax.Array
    total: jax.Array
    scales: jax.Array  # sum of p scale, of the rounded p scale
    offsets: jax.Array  # sum of p offset
    poison: jax.Array  # [tile], NaN where a value scale was: conversion to integers loses it
    planes: tuple[jax.Array, ...]


class _FixedPoint(abc.ABC):
    """What both forms have in common. Forms say how numbers lie against logits, and what operands look like."""

    plan: ops.Plan
    local: jax.Array  # the query row of a row of the softmax
    tokens: int  # of a tile that a row of the softmax sees
    bias = 0  # of probabilities as fixed point

    def initial(self) -> State:
        zero = jnp.zeros(self.local.shape, jnp.float32)
        planes = (jnp.zeros((self.plan.value_block, zero.size), jnp.float32),) * ops.PLANES
        return State(zero + ops.MASKED, zero, zero, zero, jnp.zeros((self.plan.tile,), jnp.float32), planes)

    def absorb(self, reads: Reads, state: State, at: Tile, query: Query, seen: Seen | None = None) -> State:
        plan, masks = self.plan, None if seen is None else seen.parts
        logits = _logits(self, self.products(reads, at, query.planes), query.numbers, at, masks)
        highest = self.over_tokens(jnp.max, functools.reduce(jnp.maximum, logits))
        maximum = jnp.maximum(state.maximum, highest)
        # Nothing is larger than the largest p times the largest scale. Its reciprocal goes into the exponent.
        scales = tiles.value_scales(at, seen)
        unit = ops.exp2(plan, highest - maximum) * jnp.max(jnp.abs(scales), axis=0) + ops.TINY
        unit *= 1 / ops.FULL  # step of p scale as fixed point
        base = maximum + ops.log2(plan, unit)  # what is taken off logits, so that `2^logit` comes in units
        rescale = ops.exp2(plan, state.maximum - maximum)
        total, whole, biased = [], [], []
        value_scale = self.of_tokens(at.value_scale)
        value_offset = None if at.value_offset is None else self.of_tokens(at.value_offset)
        for i, x in enumerate(logits):
            mask = None if masks is None else masks[i]

            def select(x, mask=mask):  # not multiply: scales of unused places may be NaN
                return x if mask is None else jnp.where(mask, x, 0.0)

            x = select(ops.exp2(plan, x - self.of_rows(base)))
            total.append(x)
            if value_offset is not None:
                biased.append(select(x * value_offset[i]))
            whole.append(ops.rounded(plan, x, select(value_scale[i]), self.bias))

        def added(old, parts, bits=0):
            new = self.over_tokens(functools.partial(jnp.sum, dtype=parts[0].dtype), functools.reduce(jnp.add, parts))
            new = (new - ops.wrapped(bits)).astype(jnp.float32) if bits else new
            return ops.fma(plan, new, unit, old * rescale)

        weights, values = self.weights(whole), reads.values(at)
        carried = rescale[None, :], (-ops.MAGIC * unit)[None, :]

        def mixed(i: int, x: jax.Array) -> jax.Array:
            low, high = self.bytes(ops.integers([(ops.plane(plan, values, i), weights)], plan.by_rows))
            return ops.join_bytes(plan, low, high, unit[None, :], ops.fma(plan, x, *carried))

        return State(
            maximum,
            added(state.total, total),
            added(state.scales, whole, self.tokens * (ops.MAGIC_BITS + self.bias)),
            added(state.offsets, biased) if biased else state.offsets,
            state.poison + 0.0 * scales,
            tuple(mixed(i, x) for i, x in enumerate(state.planes)),
        )

    def partial(self, state: State) -> Partial:
        plan = self.plan
        if plan.parted:
            state = _joined(plan, state)
        offset = state.offsets if plan.value_offset else codec.IMPLIED_OFFSET * state.scales
        outputs = []
        for i, x in enumerate(state.planes):
            flipped = x + 128.0 * state.scales[None, :] if i == 3 else x
            slot = i * plan.value_block + ops.iota(plan.value_block)
            item = slot[:, None] * plan.rows + ops.iota(plan.rows)[None, :]
            outputs.append((item, flipped * 4.0**-i + offset[None, :]))
        return Partial(state.maximum, state.total + jnp.sum(state.poison, axis=0), outputs)

    def planes(self, ref, *at) -> list[jax.Array]:
        """Queries as operands of each plane."""
        size = self.plan.key_block
        return [plgpu.load(ref.at[(*at, slice(None), pl.ds(size * i, size))]) for i in range(ops.PLANES)]

    @abc.abstractmethod
    def of_rows(self, x: jax.Array) -> jax.Array:
        """`[R]` numbers against logits."""

    @abc.abstractmethod
    def of_tokens(self, x: jax.Array) -> list[jax.Array]:
        """`[tile]` numbers against logits, part by part."""

    @abc.abstractmethod
    def over_tokens(self, reduce, x: jax.Array) -> jax.Array:
        """Reduces logits to `[R]`."""

    @abc.abstractmethod
    def numbers(self, first: jax.Array) -> list[jax.Array]:
        """Of the tokens, against logits."""

    @abc.abstractmethod
    def products(self, reads: Reads, at: Tile, query: list[jax.Array]) -> list:
        """Queries times keys: sums over low and over high bytes, part by part of the tile."""

    @abc.abstractmethod
    def bytes(self, sums: jax.Array) -> Sequence[jax.Array]:
        """Sums over low and over high bytes, of both."""

    @abc.abstractmethod
    def weights(self, fixed: list[jax.Array]) -> jax.Array:
        """Fixed-point probabilities of all parts as an operand."""


def _joined(plan: ops.Plan, state: State) -> State:
    """The state of query rows from that of rows of even and of odd tokens, in turns."""
    pairs = (plan.rows, 2)
    maximum = jnp.max(state.maximum.reshape(pairs), axis=1)
    factor = ops.exp2(plan, state.maximum - jnp.broadcast_to(maximum[:, None], pairs).reshape(-1))
    total, scales, offsets = (
        jnp.sum((x * factor).reshape(pairs), axis=1) for x in (state.total, state.scales, state.offsets)
    )
    planes = tuple(jnp.sum((x * factor[None, :]).reshape(-1, *pairs), axis=2) for x in state.planes)
    return State(maximum, total, scales, offsets, state.poison, planes)


class Columns(_FixedPoint):
    """Queries as columns of the products; tokens of a tile in parts `[PART, R]`."""

    def __init__(self, plan: ops.Plan):
        self.plan, self.local, self.tokens = plan, ops.iota(plan.rows), plan.tile

    def split(self, x: jax.Array) -> list[jax.Array]:
        return list(lax.split(x, (PART,) * (self.plan.tile // PART), axis=0))

    def of_tokens(self, x: jax.Array) -> list[jax.Array]:
        return self.split(loaded(x).astype(jnp.float32)[:, None])

    def of_rows(self, x: jax.Array) -> jax.Array:
        return x[None, :]

    def over_tokens(self, reduce, x: jax.Array) -> jax.Array:
        return reduce(x, axis=0)

    def numbers(self, first: jax.Array) -> list[jax.Array]:
        return self.split((first + ops.iota(self.plan.tile))[:, None])

    def products(self, reads: Reads, at: Tile, query: list[jax.Array]) -> list:
        plan = self.plan
        keys = reads.keys(at, plan.tile, plan.key_block)
        product = ops.integers([(ops.plane(plan, keys, i), query[i]) for i in range(ops.PLANES)], contract=1)
        return [self.bytes(part) for part in self.split(product)]

    def bytes(self, sums: jax.Array) -> Sequence[jax.Array]:
        return ops.unweave(sums)

    def weights(self, fixed: list[jax.Array]) -> jax.Array:
        """Operand `[tile, 2 R]`."""
        columns = [ops.weave(x.astype(jnp.int8), ((x + 128) >> 8).astype(jnp.int8)) for x in fixed]
        while len(columns) > 1:
            columns = [ops.stack_rows(*pair) for pair in zip(columns[::2], columns[1::2], strict=True)]
        return columns[0]


class Rows(_FixedPoint):
    """Queries as rows of the products; even and odd tokens of a tile apart, `[R, tile / 2]`."""

    bias = ops.BYTES_BIAS

    def __init__(self, plan: ops.Plan):
        self.plan = plan
        self.local = ops.div(ops.iota(2 * plan.rows), 2) if plan.parted else ops.iota(plan.rows)
        self.tokens = plan.tile // 2 if plan.parted else plan.tile
        self.even = (ops.rem(ops.iota(2 * plan.rows), 2) == 0)[:, None] if plan.parted else None

    def of_tokens(self, x: jax.Array) -> list[jax.Array]:
        parts = tiles.even_and_odd(x, self.local.size)
        return parts if self.even is None else [jnp.where(self.even, *parts)]

    def of_rows(self, x: jax.Array) -> jax.Array:
        return x[:, None]

    def over_tokens(self, reduce, x: jax.Array) -> jax.Array:
        return reduce(x, axis=1)

    def numbers(self, first: jax.Array) -> list[jax.Array]:
        parts = tiles.even_and_odd_from(first, self.plan.tile)
        return parts if self.even is None else [parts[0] + jnp.where(self.even, 0, 1)]

    def planes(self, ref, *at) -> list[jax.Array]:
        plan = self.plan
        size, count = plan.key_block, 2 * plan.rows
        if not plan.paired:
            return super().planes(ref, *at)
        row, byte = ops.iota(2 * count)[:, None], ops.iota(2 * size)[None, :]
        even = ops.rem(row, 2) == 0 if plan.parted else row < count
        row = ops.div(row, 2) if plan.parted else ops.rem(row, count)
        mask, byte = (byte < size) == even, ops.rem(byte, size)
        return [ops.load(ref, *at, row, size * i + byte, mask=mask) for i in range(ops.PLANES)]

    def products(self, reads: Reads, at: Tile, query: list[jax.Array]) -> list:
        plan = self.plan

        def product(keys: jax.Array) -> jax.Array:
            return ops.integers([(query[i], ops.plane(plan, keys, i)) for i in range(ops.PLANES)], contract=1)

        if plan.paired:
            both = product(reads.keys(at, plan.tile // 2, 2 * plan.key_block))
            products = [both] if plan.parted else ops.halves(both)
        else:
            products = [product(reads.keys(at, plan.tile // 2, plan.key_block, jnp.int32(j))) for j in range(2)]
        return [ops.halves(x) for x in products]

    def bytes(self, sums: jax.Array) -> Sequence[jax.Array]:
        return ops.halves(sums, axis=1)

    def weights(self, fixed: list[jax.Array]) -> jax.Array:
        """Operand `[2 R, tile]`."""
        if self.even is not None:
            zero = jnp.full_like(fixed[0], ops.MAGIC_BITS + ops.BYTES_BIAS)
            fixed = [jnp.where(self.even, fixed[0], zero), jnp.where(self.even, zero, fixed[0])]
        return ops.stack_rows(*ops.bytes_of(self.plan, ops.weave(*fixed)))


def _logits(form: _FixedPoint, sums, numbers: ops.Numbers, at: Tile, masks) -> list[jax.Array]:
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
