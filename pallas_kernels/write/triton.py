"""Writes history rows on NVIDIA GPUs, through Pallas' Triton lowering: one launch a side, pools in place.

A program takes a tile of rows of one KV head, `[tile, D]` in registers. It reads them where they lie (an array of rows;
or, by position, the ring of recents and the new tokens), turns keys into their bucket, subtracts the mean, multiplies
by M, quantizes, splits into slots, packs, and stores slots, scale and offset in their pages. Bytes a row and head: D
plain elements in, N / 4 and two or four out; M is read once a tile. A program without a row to store ends at once, so
one launch over all layers costs little where few sequences demote.

Numbers are those of `pallas_kernels.codec`: the product in three bfloat16 parts is as accurate as fp32; from the same
y, slots and scale are bit-equal, because sums have the same order, products are rounded before they are added, and
divisions and roots are IEEE's (Triton's own are approximate). Coordinates are not gathered, which the lowering cannot:
slots of a plane are `levels @ one_hot >> shift & 3`, exact in fp16 because levels are below 64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import codec
from pallas_kernels.attention.api import PlainTiers
from pallas_kernels.attention.triton import ops, unavailable
from pallas_kernels.history import UNADDRESSED, History, SidePages, turn_factors
from pallas_kernels.storage import loaded, stored
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import SLOT_BITS, TransformCode, TransformCodes

__all__ = ["demote", "demote_ahead", "unavailable", "write"]

MAX_HEAD_DIM = 256
DEPTH = 16  # coordinates of x contracted at a time; more spill
MIN_DIM = 32  # coordinates of a block
ELEMENTS = 4096  # of y in a program, at most: more need registers of which few programs fit a multiprocessor
MIN_TILE = 16  # rows of the smallest tensor-core product
LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static facts of one launch."""

    rows: int  # of a sequence
    total: int  # rows of all sequences
    tile: int  # rows of a program, a power of two
    head_dim: int
    bytes: int  # N / 4
    tiers: Tiers
    bucket: int  # tokens
    rotary: tuple[int, bool] | None  # rotated dimensions, whether neighbours are paired
    tokens_last: bool
    kind: str
    clip: str
    rank: int
    scale_dtype: str
    interpret: bool

    @property
    def dim(self) -> int:
        """Head size of a block."""
        return max(MIN_DIM, pl.next_power_of_2(self.head_dim))

    @property
    def warps(self) -> int:
        """At most 16 elements of y a thread by default."""
        return 8 if self.tile * self.dim >= ELEMENTS else 4

    @property
    def byte_block(self) -> int:
        return max(16, pl.next_power_of_2(self.bytes))


Leaf = Any  # an array outside the kernel, a reference to it inside; None where absent


class _Code(NamedTuple):
    """Leaves `[L, K, ...]` of a transform code that encoding needs."""

    mu: Leaf
    encode: Leaf
    owner: Leaf
    shift: Leaf
    bits: Leaf
    delta: Leaf
    weight: Leaf
    gain: Leaf
    threshold: Leaf


class _Rows(NamedTuple):
    """Where rows come from: `new` at `positions`; or `ring`, and `new` if given, by the position."""

    new: Leaf = None  # [B, M, K, D]
    positions: Leaf = None  # int32 [B, M], negative where there is nothing to store
    ring: Leaf = None  # [L, B, R, K, D]
    starts: Leaf = None  # int32 [B]
    counts: Leaf = None


class _Inputs(NamedTuple):
    layer: Leaf  # int32 [1], the first of the grid
    table: Leaf
    rows: _Rows
    code: _Code
    turns: tuple[Leaf, ...]


class _Places(NamedTuple):
    """Of each row of a tile `[tile]`: sequence, row within it, position, and whether it is stored."""

    sequence: jax.Array
    index: jax.Array
    position: jax.Array
    valid: jax.Array


def write(
    history: History,
    k: jax.Array,
    v: jax.Array,
    *,
    layer: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    page_indices: jax.Array,
    codes: TransformCodes,
    tiers: Tiers,
    tile: int | None = None,
    interpret: bool = False,
) -> History:
    """See `pallas_kernels.write.write`.

    Args:
        tile: rows of a program, a power of two from 16 on; by default from the shapes.
        interpret: run in Pallas' interpreter, on any device.
    """
    positions = jnp.where(valid, positions, -1).astype(jnp.int32)
    key, value = _Rows(k, positions), _Rows(v, positions)
    return _launch(history, key, value, layer, k.shape[1], page_indices, codes, tiers, tile, interpret)


def demote(
    history: History,
    plain: PlainTiers,
    k: jax.Array,
    v: jax.Array,
    *,
    layer: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    page_indices: jax.Array,
    codes: TransformCodes,
    tiers: Tiers,
    tile: int | None = None,
    interpret: bool = False,
) -> History:
    """See `pallas_kernels.write.demote`."""
    lengths = (starts.astype(jnp.int32), counts.astype(jnp.int32))
    key, value = _Rows(k, None, plain.recent_k, *lengths), _Rows(v, None, plain.recent_v, *lengths)
    rows = tiers.demoted_rows(k.shape[1])
    return _launch(history, key, value, layer, rows, page_indices, codes, tiers, tile, interpret)


def demote_ahead(
    history: History,
    plain: PlainTiers,
    *,
    tokens: int,
    starts: jax.Array,
    counts: jax.Array,
    page_indices: jax.Array,
    codes: TransformCodes,
    tiers: Tiers,
    tile: int | None = None,
    interpret: bool = False,
) -> History:
    """See `pallas_kernels.write.demote_ahead`."""
    lengths = (starts.astype(jnp.int32), counts.astype(jnp.int32))
    key, value = (_Rows(None, None, ring, *lengths) for ring in (plain.recent_k, plain.recent_v))
    rows = tiers.demoted_rows(tokens)
    return _launch(history, key, value, None, rows, page_indices, codes, tiers, tile, interpret)


def _launch(
    history: History,
    key_rows: _Rows,
    value_rows: _Rows,
    layer: jax.Array | None,
    rows: int,
    page_indices: jax.Array,
    codes: TransformCodes,
    tiers: Tiers,
    tile: int | None,
    interpret: bool,
) -> History:
    """Both sides, in one layer or (None) in all."""
    total = page_indices.shape[0] * rows
    width = max(MIN_DIM, pl.next_power_of_2(codes.head_dim))
    turns = turn_factors(codes, tiers, tiers.sink + page_indices.shape[1] * tiers.page, width)
    first = jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)
    sides = []
    for pool, code, source, turn in (
        (history.key, codes.key, key_rows, turns),
        (history.value, codes.value, value_rows, ()),
    ):
        _check(pool, code, source)
        plan = _Plan(
            rows=rows, total=total, tile=tile or _tile(rows, width), head_dim=code.head_dim,
            bytes=code.slots // codec.PLANES, tiers=tiers, bucket=codes.bucket or 0,
            rotary=(codes.rotary.rotary_dim, codes.rotary.pairing == "interleaved") if turn and codes.rotary else None,
            tokens_last=pool.tokens_last, kind=code.kind, clip=code.clip,
            rank=codec.clip_rank(code.clip_ratio, code.head_dim), scale_dtype=codes.scale_dtype, interpret=interpret,
        )  # fmt: skip
        leaves = _Code(
            code.mu, code.encode, code.slot_owner, code.slot_shift, code.bits, code.delta, code.weight, code.gain,
            code.clip_threshold,
        )  # fmt: skip
        inputs = _Inputs(first, page_indices.astype(jnp.int32), source, leaves, turn)
        grid = (pl.cdiv(total, plan.tile), code.kv_heads, code.layers if layer is None else 1)
        sides.append(_call(plan, grid, pool, jax.tree.map(jnp.asarray, inputs)))
    return History(*sides)


def _tile(rows: int, width: int) -> int:
    """No more than one sequence's: where few sequences demote, the programs of the others end at once."""
    return max(MIN_TILE, min(ELEMENTS // width, pl.next_power_of_2(rows)))


def _call(plan: _Plan, grid: tuple[int, ...], pool: SidePages, inputs: _Inputs) -> SidePages:
    pools = [x for x in (pool.slots, pool.scale, pool.offset) if x is not None]
    slots, scale, *offset = pl.pallas_call(
        functools.partial(_write_rows, plan=plan),
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={i: i for i in range(len(pools))},
        interpret=plan.interpret,
        compiler_params=plgpu.CompilerParams(num_warps=plan.warps, num_stages=2),
        name="oscar_write_rows",
    )(pools, inputs)
    return dataclasses.replace(pool, slots=slots, scale=scale, offset=offset[0] if offset else None)


def _check(pool: SidePages, code: TransformCode, rows: _Rows) -> None:
    for x in (rows.new, rows.ring):
        if x is not None and (dtype := loaded(jnp.zeros((), x.dtype)).dtype) not in (
            jnp.float32, jnp.bfloat16, jnp.float16,
        ):  # fmt: skip
            raise NotImplementedError(f"plain tokens of {dtype}: float32, bfloat16 and float16 are built")
    if code.metric is not None:
        raise NotImplementedError("error feedback rounds one coordinate after another")
    if max(code.head_dim, code.slots) > MAX_HEAD_DIM:
        raise NotImplementedError(f"head size {code.head_dim}, {code.slots} slots: at most {MAX_HEAD_DIM} is built")
    if pool.slots.size in UNADDRESSED:
        raise NotImplementedError("a pool of 2 to 4 GiB of slots: smaller and larger ones are built")


# The kernel. Every operand is a whole array; programs index it themselves.


def _write_rows(pools, inputs: _Inputs, *outputs, plan: _Plan):
    del pools  # the outputs are the same memory
    slots_ref, scale_ref, *offset_refs = outputs
    head, layer = pl.program_id(1), inputs.layer[0] + pl.program_id(2)
    places = _places(plan, inputs)

    @pl.when(jnp.max(places.valid.astype(jnp.int32)) > 0)
    def _():
        page, there = _pages(plan, inputs, places, slots_ref.shape[1])
        y = _transform(plan, inputs, places, layer, head)
        finite = jnp.sum((jnp.abs(y) <= LARGEST).astype(jnp.int32), axis=1, dtype=jnp.int32) == plan.dim
        y = jnp.where(finite[:, None], y, 0.0)
        quantize = _quantize_minmax if plan.kind == "minmax" else _quantize_levels
        levels, scale, offset, usable = quantize(plan, inputs.code, y, layer, head)
        finite = finite & usable
        packed = _pack(plan, inputs.code, jnp.where(finite[:, None], levels, 0.0), layer, head)
        byte = _iota(plan.byte_block)
        place = _rem(places.position - plan.tiers.sink, plan.tiers.page)
        if plan.tokens_last:
            at = ops.at(slots_ref, layer, page[None, :], head, byte[:, None], place[None, :])
            plgpu.store(at, packed.T, mask=(byte < plan.bytes)[:, None] & there[None, :])
        else:
            at = ops.at(slots_ref, layer, page[:, None], head, place[:, None], byte[None, :])
            plgpu.store(at, packed, mask=there[:, None] & (byte < plan.bytes)[None, :])
        for ref, x in zip((scale_ref, *offset_refs), (scale, offset), strict=False):
            x = jnp.where(finite, jnp.clip(x, -codec.SCALE_LIMIT, codec.SCALE_LIMIT), jnp.nan)
            at = ops.at(ref, layer, page, head, place)
            plgpu.store(at, stored(x.astype(plan.scale_dtype)), mask=there)


def _places(plan: _Plan, inputs: _Inputs) -> _Places:
    rows, sink = inputs.rows, plan.tiers.sink
    flat = pl.program_id(0) * plan.tile + _iota(plan.tile)
    inside = flat < plan.total
    flat = jnp.where(inside, flat, 0)
    sequence, index = _div(flat, plan.rows), _rem(flat, plan.rows)
    if rows.positions is not None:
        position = plgpu.load(rows.positions.at[sequence, index])
        valid = inside & (position >= sink)
    else:
        begin, end = plan.tiers.demoted(*(plgpu.load(ref.at[sequence]) for ref in (rows.starts, rows.counts)))
        position = begin + index
        valid = inside & (position < end)
    # A position past the page table has no page: it is dropped, never folded onto a live one.
    valid = valid & (position < sink + inputs.table.shape[1] * plan.tiers.page)
    return _Places(sequence, index, jnp.where(valid, position, sink), valid)


def _pages(plan: _Plan, inputs: _Inputs, places: _Places, pool: int) -> tuple[jax.Array, jax.Array]:
    """Page of each row `[tile]`, and whether it is there."""
    entry = _div(places.position - plan.tiers.sink, plan.tiers.page)
    page = plgpu.load(inputs.table.at[places.sequence, entry])
    there = places.valid & (page >= 0) & (page < pool)
    # What is masked must not name a live place: the interpreter writes there what it read.
    return jnp.where(there, page, pool), there


def _transform(plan: _Plan, inputs: _Inputs, places: _Places, layer, head) -> jax.Array:
    """`y = (x - mu) M`, `[tile, D]`, some coordinates of x at a time; x of rows that are not stored is zero."""
    rows, columns = inputs.rows, _iota(plan.dim)

    def coordinates(d):
        known = places.valid[:, None] & (d < plan.head_dim)[None, :]
        d = jnp.where(d < plan.head_dim, d, 0)[None, :]

        def read(ref, lead, mask):
            at = ops.at(ref, *lead, head, d)
            return loaded(plgpu.load(at, mask=mask, other=0)).astype(jnp.float32)

        sequence, index = places.sequence[:, None], places.index[:, None]
        if rows.ring is None:
            return read(rows.new, (sequence, index), known)
        place = _rem(places.position, rows.ring.shape[2])[:, None]
        if rows.new is None:
            return read(rows.ring, (layer, sequence, place), known)
        age = places.position - plgpu.load(rows.starts.at[places.sequence])
        old, index = (age < 0)[:, None], jnp.maximum(age, 0)[:, None]
        ring = read(rows.ring, (layer, sequence, place), known & old)
        return jnp.where(old, ring, read(rows.new, (sequence, index), known & (age >= 0)[:, None]))

    def turned(d):
        x = coordinates(d)
        if plan.rotary is None:
            return x
        size, neighbours = plan.rotary
        far = d ^ 1 if neighbours else jnp.where(d < size // 2, d + size // 2, d - size // 2)
        bucket = _div(places.position - plan.tiers.sink, plan.bucket)[:, None]
        own, partner = (plgpu.load(ops.at(ref, bucket, d[None, :])) for ref in inputs.turns)
        return x * own + coordinates(jnp.where(d < size, far, d)) * partner

    def absorb(i, y):
        d = i * DEPTH + _iota(DEPTH)
        x = turned(d) - _vector(plan, inputs.code.mu, layer, head, d)[None, :]
        known = (d < plan.head_dim)[:, None] & (columns < plan.head_dim)[None, :]
        row, column = (jnp.where(known, i, 0) for i in (d[:, None], columns[None, :]))
        matrix = plgpu.load(ops.at(inputs.code.encode, layer, head, row, column), mask=known, other=0)
        return _add_product(y, x, matrix)

    zero = jnp.zeros((plan.tile, plan.dim), jnp.float32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(plan.head_dim, DEPTH)), absorb, zero)


def _quantize_levels(plan: _Plan, code: _Code, y: jax.Array, layer, head):
    """Levels of coordinates as fp32 `[tile, D]`, scale `[tile]`, no offset, and whether the row has them."""
    d = _iota(plan.dim)
    read = functools.partial(_vector, plan, layer=layer, head=head, d=d)
    half = ((1 << read(code.bits).astype(jnp.int32)) >> 1).astype(jnp.float32)
    delta, weight = read(code.delta, other=1.0), read(code.weight)
    kept = half > 0
    y = jnp.where(kept[None, :], y, 0.0)
    count = jnp.sum(kept.astype(jnp.int32), dtype=jnp.int32).astype(jnp.float32)
    mean_square = _divide(plan, _pairwise_sum(_product(plan, y, y)), count)
    usable = mean_square <= LARGEST
    sigma = _root(plan, jnp.where(usable, mean_square, 1.0) + codec.SIGMA_EPSILON)
    y = jnp.where(usable[:, None], y, 0.0)
    z = y * _reciprocal(plan, sigma)[:, None] * _reciprocal(plan, delta)[None, :]
    index = jnp.clip(jnp.floor(z), -half[None, :], jnp.maximum(half - 1.0, 0.0)[None, :])
    level = jnp.where(kept[None, :], delta[None, :] * (index + 0.5), 0.0)
    weighted = _product(plan, weight[None, :], level)
    dot, norm = (_pairwise_sum(_product(plan, weighted, x)) for x in (y, level))
    gain = plgpu.load(code.gain.at[layer, head])
    return index + half[None, :], _divide(plan, gain * dot, jnp.where(norm > 0, norm, 1.0)), None, usable


def _quantize_minmax(plan: _Plan, code: _Code, y: jax.Array, layer, head):
    """As `_quantize_levels`, with an offset."""
    known = jnp.broadcast_to((_iota(plan.dim) < plan.head_dim)[None, :], y.shape)
    threshold = None
    if plan.clip == "rank":
        threshold = _order_statistic(plan, jnp.where(known, jnp.abs(y), LARGEST))
    elif plan.clip == "static":
        threshold = jnp.zeros((plan.tile,), jnp.float32) + plgpu.load(code.threshold.at[layer, head])
    if threshold is not None:
        y = jnp.clip(y, -threshold[:, None], threshold[:, None])
    low = jnp.min(jnp.where(known, y, LARGEST), axis=1)
    high = jnp.max(jnp.where(known, y, -LARGEST), axis=1)
    scale = jnp.minimum(_divide(plan, high - low, 3.0), LARGEST)
    constant = scale < float(np.finfo(np.float32).tiny)
    step = jnp.broadcast_to(jnp.where(constant, 1.0, scale)[:, None], y.shape)
    level = jnp.clip(jnp.floor(_divide(plan, y - low[:, None], step) + 0.5), 0.0, 3.0)
    level = jnp.where(constant[:, None] | ~known, 0.0, level)
    return level, jnp.where(constant, 0.0, scale), low, jnp.ones_like(constant)


def _order_statistic(plan: _Plan, magnitude: jax.Array) -> jax.Array:
    """Element `plan.rank` of each row in ascending order, 0-based; of finite numbers that are not negative.

    Their bits are in the order of the numbers, so it is the largest word that at most `rank` elements lie below, found
    bit by bit.
    """
    words = lax.bitcast_convert_type(magnitude, jnp.int32)

    def choose(i, found):
        candidate = found | (jnp.int32(1) << (jnp.int32(30) - i))
        below = jnp.sum((words < candidate[:, None]).astype(jnp.int32), axis=1, dtype=jnp.int32)
        return jnp.where(below <= plan.rank, candidate, found)

    found = lax.fori_loop(jnp.int32(0), jnp.int32(31), choose, jnp.zeros((plan.tile,), jnp.int32))
    return lax.bitcast_convert_type(found, jnp.float32)


def _pack(plan: _Plan, code: _Code, levels: jax.Array, layer, head) -> jax.Array:
    """Bytes uint8 `[tile, N / 4]` of levels `[tile, D]`."""
    byte, d = _iota(plan.byte_block), _iota(plan.dim)
    levels = levels.astype(jnp.float16)

    def add(plane, packed):  # a loop, because four planes side by side take four times the registers
        at = (layer, head, plane * plan.bytes + jnp.where(byte < plan.bytes, byte, 0))
        owner, shift = (plgpu.load(ops.at(ref, *at)) for ref in (code.owner, code.shift))
        choice = (owner[None, :] == d[:, None]).astype(jnp.float32).astype(jnp.float16)
        chosen = lax.dot_general(levels, choice, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        slots = (chosen.astype(jnp.int32) >> jnp.broadcast_to(shift[None, :], chosen.shape)) & 3
        return packed | slots << SLOT_BITS * plane

    zero = jnp.zeros((plan.tile, plan.byte_block), jnp.int32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(codec.PLANES), add, zero).astype(jnp.uint8)


def _vector(plan: _Plan, ref, layer, head, d: jax.Array, other: float = 0) -> jax.Array:
    """`ref[layer, head, d]`, `other` past the head."""
    known = d < plan.head_dim
    return plgpu.load(ops.at(ref, layer, head, jnp.where(known, d, 0)), mask=known, other=other)


def _pairwise_sum(x: jax.Array) -> jax.Array:
    """`codec.pairwise_sum` of `[tile, D]`."""
    while x.shape[1] > 1:
        x = jnp.sum(x.reshape(x.shape[0], 2, x.shape[1] // 2), axis=1)
    return x.reshape(x.shape[0])


def _product(plan: _Plan, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product, never fused into the addition that follows."""
    a, b = jnp.broadcast_arrays(a, b)
    return codec.rounded(a * b) if plan.interpret else _exact("mul", a, b)


def _add_product(y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """`y + a @ b` of fp32 matrices, as accurate as fp32."""
    a_parts, b_parts = _parts(a), _parts(b)
    for i, j in ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)):  # the others are below fp32's rounding
        y += lax.dot_general(
            a_parts[i], b_parts[j], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )  # fmt: skip
    return y


def _parts(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 numbers that sum to x, the largest first."""
    parts = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


def _divide(plan: _Plan, a: jax.Array | float, b: jax.Array | float) -> jax.Array:
    a, b = jnp.broadcast_arrays(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    return codec.quotient(a, b) if plan.interpret else _exact("div", a, b)


def _reciprocal(plan: _Plan, x: jax.Array) -> jax.Array:
    """`1 / x` of normal numbers below 2^126, rounded to nearest; without the branch for others that `div.rn` has."""
    if plan.interpret:
        return codec.quotient(jnp.ones_like(x), x)
    return _assembly(
        "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; neg.f32 e, $1; fma.rn.f32 e, e, r, 0f3F800000; "
        "fma.rn.f32 $0, r, e, r; }",
        x,
    )


def _root(plan: _Plan, x: jax.Array) -> jax.Array:
    # The lower bound never binds; `codec` says what it is for.
    return jnp.maximum(jnp.sqrt(x), 1e-7) if plan.interpret else _exact("sqrt", x)


def _exact(operation: str, *args: jax.Array) -> jax.Array:
    """An fp32 instruction that rounds to nearest, on each element."""
    operands = ", ".join(f"${i}" for i in range(len(args) + 1))
    return _assembly(f"{operation}.rn.f32 {operands};", *args)


def _assembly(code: str, *args: jax.Array) -> jax.Array:
    [y] = plgpu.elementwise_inline_asm(
        code, args=args, constraints=",".join(["=f", *"f" * len(args)]), pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )  # fmt: skip
    return y


def _iota(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def _div(x: jax.Array, y: int) -> jax.Array:
    return x if y == 1 else lax.div(x, jnp.full_like(x, y))


def _rem(x: jax.Array, y: int) -> jax.Array:
    return jnp.zeros_like(x) if y == 1 else lax.rem(x, jnp.full_like(x, y))
