"""Three-tier attention of many query tokens on NVIDIA GPUs, through Pallas' Triton lowering.

One launch. A program holds `rows` query rows, tokens by the heads of one KV group, next to each other: row r is token
`r // G`, head `r % G`, so that rows of a program see nearly the same keys. It walks over history a bucket at a time:
`q' = E (q R(-B))` once, then tiles of packed slots, which are widened to `scale c + offset` in fp16 and multiplied in
slot space; the slot accumulator is mapped back with E once, after history. Sinks, ring and the new tokens follow as
they are. So no dequantized row of the prefix ever exists in memory, and the two products with E cost `D / bucket` of
the attention itself.

Products run on tensor cores with fp32 accumulation: fp16 over history (codes are exact in it, keys and values round
once), the plain dtype over plain tokens; fp32 queries take three TF32 products each. A quarter of keys and values is
what is multiplied, so that the largest stored scale stays in fp16's range.

Tiles that no row of a program sees are not visited; over history only the tiles at the edges are masked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import codec
from pallas_kernels.attention.api import UNLIMITED, AttentionSpec, PlainTiers, window_limit
from pallas_kernels.attention.triton import ops
from pallas_kernels.history import History, turn_factors
from pallas_kernels.storage import loaded
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCode, TransformCodes

QUARTER = 0.25
MAX_EXACT_HEAD_DIM = 128  # a larger decode matrix in fp32 does not fit into shared memory
PLAIN_TILE = 32  # plain tokens at a time; their pipeline takes most of the shared memory
DEPTH = 32  # coordinates that the query transform contracts at a time
PLANES = codec.PLANES
Operand = Any  # an array; in the kernel, a reference to it


@dataclasses.dataclass(frozen=True)
class Block:
    """What one program works on: query rows, keys of a tile, warps, and stages of its software pipelines."""

    rows: int
    tile: int
    warps: int
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static facts of one call."""

    block: Block
    tokens: int  # T
    groups: int  # query heads a KV head
    head_dim: int
    key_bytes: int  # N_k / 4
    value_bytes: int
    page: int  # tokens
    tile: int  # tokens of a tile of history
    bucket: int  # tiles of a bucket, all of them without buckets
    buckets: int
    ring: int  # tokens
    tiers: Tiers
    spec: AttentionSpec
    windowed: bool
    exact: bool  # products as accurate as fp32
    rotary: tuple[int, bool] | None  # rotated dimensions, whether neighbours are paired
    interpret: bool

    @property
    def dim(self) -> int:
        """Head size of a block."""
        return max(DEPTH, pl.next_power_of_2(self.head_dim))

    @property
    def key_block(self) -> int:
        """Bytes of a block of keys."""
        return max(16, pl.next_power_of_2(self.key_bytes))

    @property
    def value_block(self) -> int:
        return max(16, pl.next_power_of_2(self.value_bytes))

    @property
    def blocks(self) -> int:
        """Programs of a sequence and KV head."""
        return pl.cdiv(self.tokens * self.groups, self.block.rows)

    @property
    def compute(self) -> jnp.dtype:
        """Dtype of the products over history."""
        return jnp.dtype(jnp.float32 if self.exact else jnp.float16)

    @property
    def logit_scale(self) -> float:
        """Factor on q: logits come out as powers of two, or in units of the soft-cap."""
        return self.spec.scale * (ops.LOG2E if self.spec.softcap is None else 1 / self.spec.softcap)


class _Operands(NamedTuple):
    """What a call reads."""

    layer: Operand  # [1]
    window: Operand  # [1]
    starts: Operand
    counts: Operand
    table: Operand
    q: Operand
    k: Operand
    v: Operand
    plain: Operand  # PlainTiers
    history: Operand  # History
    key_decode: Operand  # [K, slots of a block, D of a block]
    key_mu: Operand  # [K, D of a block]
    value_decode: Operand
    value_mu: Operand
    turns: tuple[Operand, ...]  # factors `[buckets, D of a block]` of `turn_factors`
    sink_logits: Operand  # or None


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
    block: Block | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.attention.attend`; any number of query tokens.

    Args:
        block: what one program works on; by default from the shapes.
        interpret: run in Pallas' interpreter, on any device.
    """
    if history is None or codes is None:
        raise NotImplementedError("the cache is all plain")
    plan = _plan(q, k, plain, history, page_indices, codes, tiers, spec, window is not None, block, interpret)
    key, value = codes.key.layer(layer), codes.value.layer(layer)
    operands = _Operands(
        layer=jnp.asarray(layer, jnp.int32).reshape(1),
        window=window_limit(window),
        starts=starts.astype(jnp.int32),
        counts=counts.astype(jnp.int32),
        table=page_indices.astype(jnp.int32),
        q=q, k=k, v=v, plain=plain, history=history,
        key_decode=_blocks_of(plan, key, plan.key_block),
        key_mu=_padded(plan, key.mu),
        value_decode=_blocks_of(plan, value, plan.value_block),
        value_mu=_padded(plan, value.mu),
        turns=turn_factors(codes, tiers, tiers.sink + plan.buckets * plan.bucket * plan.tile, plan.dim),
        sink_logits=None if sink_logits is None else sink_logits.astype(jnp.float32),
    )  # fmt: skip
    return pl.pallas_call(
        functools.partial(_attend, plan=plan),
        grid=(q.shape[0], k.shape[2], plan.blocks),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=plan.block.warps, num_stages=plan.block.stages),
        name="oscar_prefill",
    )(jax.tree.map(jnp.asarray, operands))


def _plan(q, k, plain, history, page_indices, codes, tiers, spec, windowed, block, interpret) -> _Plan:
    _, tokens, heads, dim = q.shape
    page = tiers.page
    ops.check(q, plain, history, codes, tiers)
    exact = q.dtype == jnp.float32
    if exact and max(dim, codes.key.slots, codes.value.slots) > MAX_EXACT_HEAD_DIM:
        raise NotImplementedError(f"float32 queries of head size {dim}: at most {MAX_EXACT_HEAD_DIM} is built")
    block = block or _block(dim, exact)
    tile = block.tile if codes.bucket is None else math.gcd(block.tile, codes.bucket)
    if tile < 32:
        raise NotImplementedError(f"bucket={codes.bucket}: multiples of 32 are built")
    total = pl.cdiv(page * page_indices.shape[1], tile)
    bucket = total if codes.bucket is None else codes.bucket // tile
    return _Plan(
        block=block, tokens=tokens, groups=heads // k.shape[2], head_dim=dim, key_bytes=codes.key.slots // PLANES,
        value_bytes=codes.value.slots // PLANES, page=page, tile=tile, bucket=bucket, buckets=pl.cdiv(total, bucket),
        ring=plain.recent_k.shape[2], tiers=tiers, spec=spec, windowed=windowed, exact=exact,
        rotary=ops.rotary_of(codes), interpret=interpret,
    )  # fmt: skip


def _block(dim: int, exact: bool) -> Block:
    """64 rows are the fewest that the large tensor core instruction takes; two programs share a multiprocessor.

    Beyond 128 coordinates the decode matrix fills most of the shared memory: no pipeline.
    """
    if exact:
        return Block(64, 32, 8, stages=1)
    return Block(64, 64, 4, stages=3) if dim <= 128 else Block(64, 64, 8, stages=1)


def _blocks_of(plan: _Plan, code: TransformCode, block: int) -> jax.Array:
    """E of one layer as `[K, slots of a block, D of a block]`, rows of missing bytes zero."""
    kv_heads, slots, dim = code.decode.shape
    planes = jnp.asarray(code.decode, plan.compute).reshape(kv_heads, PLANES, slots // PLANES, dim)
    planes = jnp.pad(planes, ((0, 0), (0, 0), (0, block - slots // PLANES), (0, plan.dim - dim)))
    return planes.reshape(kv_heads, PLANES * block, plan.dim)


def _padded(plan: _Plan, mu: jax.Array) -> jax.Array:
    return jnp.pad(jnp.asarray(mu, jnp.float32), ((0, 0), (0, plan.dim - plan.head_dim)))


class _Program(NamedTuple):
    """What one program is about: scalars, and int32 or bool `[rows]`."""

    batch: jax.Array
    head: jax.Array  # KV head
    layer: jax.Array
    start: jax.Array
    count: jax.Array
    first: jax.Array  # position of the first row
    last: jax.Array  # of the last one that is asked for; -1 where none is
    token: jax.Array
    query_head: jax.Array
    real: jax.Array
    position: jax.Array
    end: jax.Array  # first plain position after the history that the row sees
    low: jax.Array  # first position that the row sees


class _State(NamedTuple):
    """Online softmax: fp32 maximum and sum `[rows]`, unnormalised output `[rows, X]`."""

    maximum: jax.Array
    total: jax.Array
    output: jax.Array


def _attend(operands: _Operands, out_ref, *, plan: _Plan):
    program = _program(plan, operands)
    state = _map_back(plan, operands, program, _over_history(plan, operands, program))
    state = _over_plain(plan, operands, program, state)
    if operands.sink_logits is not None:
        sink = plgpu.load(operands.sink_logits.at[program.query_head]) * ops.LOG2E
        maximum = jnp.maximum(state.maximum, sink)
        rescale = _exp2(plan, state.maximum - maximum)
        total = state.total * rescale + _exp2(plan, sink - maximum)
        state = _State(maximum, total, state.output * rescale[:, None])
    output = state.output * _inverse(state.total)[:, None]
    d = ops.iota(plan.dim)
    # What is masked must not name a place twice: the interpreter writes it all the same.
    token = jnp.where(program.real, program.token, plan.tokens)
    at = ops.at(out_ref, program.batch, token[:, None], program.query_head[:, None], d[None, :])
    plgpu.store(at, output.astype(out_ref.dtype), mask=program.real[:, None] & (d < plan.head_dim)[None, :])


def _program(plan: _Plan, operands: _Operands) -> _Program:
    batch, head = pl.program_id(0), pl.program_id(1)
    start, count = operands.starts[batch], operands.counts[batch]
    # The last rows of a chunk see most: they begin first, so that the launch ends evenly.
    base = (plan.blocks - 1 - pl.program_id(2)) * plan.block.rows
    rows = plan.groups * plan.tokens
    row = base + ops.iota(plan.block.rows)
    real = row < rows
    row = jnp.where(real, row, base)
    token = ops.div(row, plan.groups)
    first = ops.div(base, plan.groups)
    last = jnp.minimum(ops.div(jnp.minimum(base + plan.block.rows, rows) - 1, plan.groups), count - 1)
    last = jnp.where(last < first, -1, start + last)
    position = jnp.minimum(start + token, last)
    return _Program(
        batch, head, operands.layer[0], start, count, start + first, last, token,
        head * plan.groups + ops.rem(row, plan.groups), real, position,
        _end_of(plan, start, position), _low_of(plan, operands, position),
    )  # fmt: skip


def _end_of(plan: _Plan, start: jax.Array, position: jax.Array) -> jax.Array:
    end = plan.tiers.history_end(position)
    return jnp.minimum(end, jnp.maximum(start, plan.tiers.sink)) if plan.spec.exact_chunk else end


def _low_of(plan: _Plan, operands: _Operands, position: jax.Array) -> jax.Array:
    return jnp.maximum(position - operands.window[0] + 1, 0) if plan.windowed else jnp.zeros_like(position)


def _over_history(plan: _Plan, operands: _Operands, program: _Program) -> _State:
    """Softmax over packed slots; the output is a quarter of the sum, in slot space `[rows, value slots]`."""
    tile, sink, rows = plan.tile, plan.tiers.sink, plan.block.rows
    first, last = jnp.minimum(program.first, program.last), program.last

    def tiles(position, *, up: bool):  # of history below a position
        return ops.div(jnp.maximum(position - sink, 0) + (tile - 1 if up else 0), tile)

    begin = tiles(_low_of(plan, operands, first), up=False)
    end = tiles(_end_of(plan, program.start, last), up=True)
    # Tiles that every row sees whole need no mask.
    full_begin = tiles(_low_of(plan, operands, last), up=True)
    full_end = tiles(_end_of(plan, program.start, first), up=False)
    usable_begin, usable_end = _low_of(plan, operands, first), _end_of(plan, program.start, last)

    def visit(bucket, state: _State) -> _State:
        query, shift = _query(plan, operands, program, bucket)
        inside = jnp.zeros_like(shift) if plan.spec.softcap is not None else shift

        def absorb(i, state: _State, stored: _Tile, *, edge: bool) -> _State:
            position = sink + i * tile + ops.iota(tile)
            usable = (position >= usable_begin) & (position < usable_end) if edge else None
            key, value = _widened(plan, stored, usable)
            logits = _dot(plan, query, key, contract=1)
            if plan.spec.softcap is not None:
                logits = plan.spec.softcap * ops.LOG2E * jnp.tanh(logits + shift[:, None])
            mask = position[None, :] < program.end[:, None] if edge else None
            if plan.windowed and edge:
                mask &= position[None, :] >= program.low[:, None]
            return _absorb(plan, state, logits, value, mask, contract=1)

        def whole(i, carry):
            """A tile is loaded while the one before it is worked on, and its page is known a tile before that."""
            state, stored, page = carry
            following = _tile(plan, operands, program, i + 1, page), _page(plan, operands, program, i + 2)
            return absorb(i, state, stored, edge=False), *following

        low = jnp.maximum(begin, bucket * plan.bucket)
        high = jnp.maximum(low, jnp.minimum(end, (bucket + 1) * plan.bucket))
        whole_begin = jnp.clip(full_begin, low, high)
        whole_end = jnp.clip(full_end, whole_begin, high)
        before = whole_begin - low

        def tile_of(i) -> _Tile:
            return _tile(plan, operands, program, i, _page(plan, operands, program, i))

        def at_edge(i, state: _State) -> _State:
            i = jnp.where(i < before, low + i, whole_end + i - before)
            return absorb(i, state, tile_of(i), edge=True)

        # q . mu is the same for all keys of a bucket: it moves the maximum instead of every logit.
        state = state._replace(maximum=state.maximum - inside)
        carry = (state, tile_of(whole_begin), _page(plan, operands, program, whole_begin + 1))
        state, *_ = lax.fori_loop(whole_begin, whole_end, whole, carry)
        edges = before + high - whole_end
        state = lax.fori_loop(jnp.zeros_like(edges), edges, at_edge, state)
        return state._replace(maximum=state.maximum + inside)

    zero = jnp.zeros((rows,), jnp.float32)
    state = _State(zero + ops.MASKED, zero, jnp.zeros((rows, PLANES * plan.value_block), jnp.float32))
    last_bucket = ops.div(jnp.maximum(end, begin) + plan.bucket - 1, plan.bucket)
    return lax.fori_loop(ops.div(begin, plan.bucket), last_bucket, visit, state)


def _map_back(plan: _Plan, operands: _Operands, program: _Program, state: _State) -> _State:
    """The same softmax with its output in head space."""
    mean = (state.output * _inverse(state.total)[:, None]).astype(plan.compute)
    decode = operands.value_decode[program.head]
    output = _dot(plan, mean, decode, contract=0) * (1 / QUARTER) + operands.value_mu[program.head][None, :]
    return state._replace(output=output * state.total[:, None])


def _over_plain(plan: _Plan, operands: _Operands, program: _Program, state: _State) -> _State:
    """Goes on over sinks, ring and the new tokens."""
    plain, sink, ring, tile = operands.plain, plan.tiers.sink, plan.ring, PLAIN_TILE
    start, first, last = program.start, program.first, program.last
    d = ops.iota(plan.dim)
    known = d < plan.head_dim
    row = (program.batch, program.token[:, None], program.query_head[:, None], d[None, :])
    query = plgpu.load(ops.at(operands.q, *row), mask=known[None, :], other=0)

    def read(ref, lead, place, usable):
        at = ops.at(ref, *lead, jnp.where(usable, place, 0)[:, None], program.head, d[None, :])
        x = loaded(plgpu.load(at, mask=usable[:, None] & known[None, :], other=0))
        return x if x.dtype == query.dtype else x.astype(jnp.float32)

    visible = _low_of(plan, operands, jnp.minimum(first, last))  # what lies before it may be anything

    def absorb(state: _State, refs, lead, place, position, usable) -> _State:
        usable &= position >= visible
        keys, values = (read(ref, lead, place, usable) for ref in refs)
        logits = _dot(plan, query.astype(keys.dtype), keys, contract=1) * plan.logit_scale
        if plan.spec.softcap is not None:
            logits = plan.spec.softcap * ops.LOG2E * jnp.tanh(logits)
        # Two comparisons an element: what is not usable lies behind every query, a sink behind all history.
        seen = jnp.where(usable, position, UNLIMITED)[None, :] <= program.position[:, None]
        seen &= jnp.where(position < sink, UNLIMITED, position)[None, :] >= program.end[:, None]
        if plan.windowed:
            seen &= position[None, :] >= program.low[:, None]
        return _absorb(plan, state, logits, values, seen, contract=0)

    def over_sinks(i, state: _State) -> _State:
        place = i * tile + ops.iota(tile)
        usable = place < jnp.minimum(sink, start)
        return absorb(state, (plain.sink_k, plain.sink_v), (program.layer, program.batch), place, place, usable)

    lowest = jnp.maximum(_end_of(plan, start, first), _low_of(plan, operands, first))
    kept = jnp.maximum(jnp.maximum(lowest, sink), start - ring)  # first position that is read from the ring

    def over_ring(i, state: _State) -> _State:
        position = kept + i * tile + ops.iota(tile)
        return absorb(
            state, (plain.recent_k, plain.recent_v), (program.layer, program.batch), ops.rem(position, ring), position,
            position < start,
        )  # fmt: skip

    sinks = ops.div(jnp.maximum(sink - start, 0) + tile - 1, tile)  # tiles of new tokens that are sinks
    behind = jnp.maximum(sinks, ops.div(jnp.maximum(lowest - start, 0), tile))

    def over_new(i, state: _State) -> _State:
        place = jnp.where(i < sinks, i, behind + i - sinks) * tile + ops.iota(tile)
        usable = place < program.count
        return absorb(state, (operands.k, operands.v), (program.batch,), place, start + place, usable)

    def tiles(tokens):
        return jnp.where(last < 0, 0, ops.div(jnp.maximum(tokens, 0) + tile - 1, tile))

    new = tiles(last + 1 - start)
    new = jnp.minimum(new, sinks) + jnp.maximum(new - behind, 0)
    loops = [(tiles(start - kept), over_ring), (new, over_new)]
    if sink > 0:
        loops.append((tiles(jnp.minimum(sink, start)), over_sinks))
    for count, visit in loops:
        state = lax.fori_loop(jnp.zeros_like(count), count, visit, state)
    return state


def _query(plan: _Plan, operands: _Operands, program: _Program, bucket) -> tuple[jax.Array, jax.Array]:
    """`q' = E (q R(-B))` for keys in quarters, `[rows, key slots]`, and `q . mu`, fp32 `[rows]`."""

    def coordinates(d):
        at = ops.at(operands.q, program.batch, program.token[:, None], program.query_head[:, None], d[None, :])
        return plgpu.load(at, mask=(d < plan.head_dim)[None, :], other=0).astype(jnp.float32)

    def absorb(i, carry):
        """Some coordinates at a time: all of them would not fit into registers beside the accumulators."""
        shift, product = carry
        d = i * DEPTH + ops.iota(DEPTH)
        query = coordinates(d)
        if plan.rotary is not None:
            turned, neighbours = plan.rotary
            far = d ^ 1 if neighbours else jnp.where(d < turned // 2, d + turned // 2, d - turned // 2)
            own, partner = (plgpu.load(ops.at(ref, bucket, d)) for ref in operands.turns)
            query = query * own[None, :] + coordinates(jnp.where(d < turned, far, d)) * partner[None, :]
        query *= plan.logit_scale
        mu = plgpu.load(ops.at(operands.key_mu, program.head, d))
        at = ops.at(operands.key_decode, program.head, ops.iota(product.shape[1])[:, None], d[None, :])
        product += _dot(plan, query.astype(plan.compute), plgpu.load(at), contract=1)
        return shift + jnp.sum(query * mu[None, :], axis=1), product

    rows = plan.block.rows
    zero = (jnp.zeros((rows,), jnp.float32), jnp.zeros((rows, PLANES * plan.key_block), jnp.float32))
    shift, product = lax.fori_loop(0, plan.dim // DEPTH, absorb, zero)
    return (product * (1 / QUARTER)).astype(plan.compute), shift


class _Tile(NamedTuple):
    """A tile of history as it is stored: packed keys `[tile, bytes]` and values `[bytes, tile]`, numbers `[tile]`."""

    key: jax.Array
    value: jax.Array
    key_scale: jax.Array | None
    value_scale: jax.Array | None
    key_offset: jax.Array | None
    value_offset: jax.Array | None


def _page(plan: _Plan, operands: _Operands, program: _Program, i) -> jax.Array:
    """Page of tile i, `[tile]` where pages are shorter; any page where there is no such tile."""
    token = i * plan.tile if plan.page >= plan.tile else i * plan.tile + ops.iota(plan.tile)
    entry = jnp.minimum(ops.div(token, plan.page), operands.table.shape[1] - 1)
    page = plgpu.load(operands.table.at[jnp.zeros_like(entry) + program.batch, entry])
    return jnp.clip(page, 0, operands.history.key.slots.shape[1] - 1)


def _tile(plan: _Plan, operands: _Operands, program: _Program, i, page) -> _Tile:
    """Loads tile i, which lies in `page`."""
    tile, lead = plan.tile, (program.layer, page, program.head)
    within = plan.page >= tile
    first = pl.multiple_of(ops.rem(i * tile, plan.page), tile) if plan.page > tile else 0
    place = ops.iota(tile) + first if within else ops.rem(ops.iota(tile), plan.page)

    def numbers(ref):
        if ref is None:
            return None
        return plgpu.load(ref.at[(*lead, pl.ds(first, tile))] if within else ops.at(ref, *lead, place))

    def packed(ref, size: int, count: int, *, tokens_last: bool):
        if within and size == count:
            rows = (slice(None), pl.ds(first, tile)) if tokens_last else (pl.ds(first, tile), slice(None))
            return plgpu.load(ref.at[(*lead, *rows)])
        kept = ops.iota(size) < count
        byte, token = jnp.where(kept, ops.iota(size), 0), place[None, :] if tokens_last else place[:, None]
        byte, kept = (x[:, None] if tokens_last else x[None, :] for x in (byte, kept))
        each = page if within else page[None, :] if tokens_last else page[:, None]
        at = ops.at(ref, program.layer, each, program.head, *((byte, token) if tokens_last else (token, byte)))
        return plgpu.load(at, mask=jnp.broadcast_to(kept, (size, tile) if tokens_last else (tile, size)), other=0)

    key, value = operands.history.key, operands.history.value
    return _Tile(
        packed(key.slots, plan.key_block, plan.key_bytes, tokens_last=False),
        packed(value.slots, plan.value_block, plan.value_bytes, tokens_last=True),
        *map(numbers, (key.scale, value.scale, key.offset, value.offset)),
    )


def _widened(plan: _Plan, stored: _Tile, usable) -> tuple[jax.Array, jax.Array]:
    """Quarters of keys `[tile, slots]` and values `[slots, tile]`, in slot space."""

    def quarter(x):
        if x is None:
            return None
        x = loaded(x).astype(jnp.float32) * QUARTER
        # Select before the product: places past the history may hold NaN, and 0 NaN is NaN.
        return (x if usable is None else jnp.where(usable, x, 0)).astype(plan.compute)

    key_scale, value_scale, key_offset, value_offset = map(quarter, stored[2:])
    return (
        _widen(plan, stored.key, *(None if x is None else x[:, None] for x in (key_scale, key_offset)), axis=1),
        _widen(plan, stored.value, *(None if x is None else x[None, :] for x in (value_scale, value_offset)), axis=0),
    )


def _widen(plan: _Plan, packed: jax.Array, scale, offset, *, axis: int) -> jax.Array:
    """`scale c + offset` of packed bytes `[m, n]`, four times as long along `axis`, a plane after the other.

    Without an offset it is the implied one, `-1.5 scale`.
    """
    numbers = [jnp.broadcast_to(x, packed.shape) for x in (scale, offset) if x is not None]
    if plan.interpret or plan.exact:
        codes = [(packed >> (2 * i) & 3).astype(plan.compute) for i in range(PLANES)]
        centred = [x + codec.IMPLIED_OFFSET for x in codes] if offset is None else codes
        planes = [x * numbers[0] + (0 if offset is None else numbers[1]) for x in centred]
    else:
        low, high = (
            _assembly(f"prmt.b32 $0, $2, 0, {a:#x}; prmt.b32 $1, $2, 0, {b:#x};", 4, jnp.int16, packed)
            for a, b in ((0x4140, 0x4342), (0x1404, 0x3424))
        )  # a byte in the low or high half of 16 bits
        planes = [
            _assembly(_widening(i, offset is not None), 2, jnp.float16, low if i else high, *numbers)
            for i in range(PLANES)
        ]
    m, n = packed.shape
    pairs = [jnp.stack(planes[i : i + 2], axis=-1) for i in (0, 2)]
    stacked = jnp.stack(pairs, axis=-1)  # [m, n, 2, 2], plane i at [..., i % 2, i // 2]
    if axis == 0:
        return stacked.transpose(3, 2, 0, 1).reshape(PLANES * m, n)
    return stacked.transpose(0, 3, 2, 1).reshape(m, PLANES * n)


def _assembly(text: str, pack: int, dtype, *args: jax.Array) -> jax.Array:
    """PTX on `pack` elements of each of `args` at a time, in 32-bit registers; the result has 16 bits an element.

    What `jnp.stack` takes needs `pack=2`: XLA's Triton (jax 0.11.2 and 0.12; PyPI's 3.6 does not) interleaves results
    of `pack=4` two elements at a time under a layout that says one, which swaps elements between planes.
    """
    registers = [pack * x.dtype.itemsize // 4 for x in args]
    [y] = plgpu.elementwise_inline_asm(
        f"{{ {text} }}", args=args, constraints=",".join(["=&r"] * (pack // 2) + ["r"] * sum(registers)), pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )  # fmt: skip
    return y


def _widening(plane: int, with_offset: bool) -> str:
    """PTX from two bytes, spread to 16 bits, to fp16 fields of one plane times the scale.

    A field of a byte, put into the fraction of an fp16 number of a fixed exponent by one logic operation, is
    `base + step c`; one fused multiply-add makes it c, or `c - 1.5`, exactly. Fields 1 to 3 lie in the low byte under
    exponent 2^10, where a step is one; field 0 in the high byte under 2^0, where -1.5 can still be told apart.
    """
    field, magic, base, step = (
        (0x0300, 0x3C00, 1.0, 0.25) if plane == 0 else (3 << 2 * plane, 0x6400, 1024.0, 4.0**plane)
    )
    centre = 0.0 if with_offset else codec.IMPLIED_OFFSET
    return " ".join([
        ".reg .b32 f, c;", f"mov.b32 f, {_twice(1 / step)};", f"mov.b32 c, {_twice(centre - base / step)};",
        f"lop3.b32 $0, $1, {field * 0x10001:#x}, {magic * 0x10001:#x}, 0xea;",  # (a & b) | c
        "fma.rn.f16x2 $0, $0, f, c;",
        "fma.rn.f16x2 $0, $0, $2, $3;" if with_offset else "mul.rn.f16x2 $0, $0, $2;",
    ])  # fmt: skip


def _twice(x: float) -> str:
    """fp16 x in both halves of a register."""
    return f"{int(np.float16(x).view(np.uint16)) * 0x10001:#x}"


def _absorb(plan: _Plan, state: _State, logits, values, mask, *, contract: int) -> _State:
    """Adds keys with `logits` `[rows, tile]`; tokens are axis `contract` of their values."""
    if mask is not None:
        logits = jnp.where(mask, logits, ops.MASKED)
    maximum = jnp.maximum(state.maximum, jnp.max(logits, axis=1))
    rescale = _exp2(plan, state.maximum - maximum)
    probabilities = _exp2(plan, logits - maximum[:, None])
    if mask is not None:
        probabilities = jnp.where(mask, probabilities, 0.0)
    total = state.total * rescale + jnp.sum(probabilities, axis=1)
    mixed = _dot(plan, probabilities.astype(values.dtype), values, contract=contract)
    return _State(maximum, total, state.output * rescale[:, None] + mixed)


def _exp2(plan: _Plan, x: jax.Array) -> jax.Array:
    return jnp.exp2(x) if plan.interpret else ops.asm("ex2.approx.ftz.f32", x)


def _inverse(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1.0), 0.0)


def _dot(plan: _Plan, a: jax.Array, b: jax.Array, *, contract: int) -> jax.Array:
    """Product over the last axis of a and axis `contract` of b, in fp32."""
    precision = None
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if plan.interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return lax.dot_general(
        a, b, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip
