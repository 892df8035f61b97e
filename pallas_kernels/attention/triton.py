"""Three-tier decode attention on NVIDIA GPUs, through Pallas' Triton lowering.

Four launches, more for many splits. `_prepare` transforms every query once for each bucket; `_attend_plain` reads the
plain tokens; `_attend_history` reads packed slots, one span of tiles a program; `_merge` makes one of some splits;
`_finish` merges what is left and maps the slot accumulator back with E.

`_attend_history` runs on integer tensor cores. One logic operation on a 32-bit register of packed bytes yields four
int8 operands: plane i (bits 2i, 2i + 1 of every byte) left in place is `code 4^i`, plane 3 with its top bit flipped is
`64 code - 128`. Queries and probabilities are 16-bit fixed point against their own maximum, high and low byte in
neighbouring columns (`x = 256 hi + lo`), so four query rows fill the eight columns of an `mma`. A tile is up to 128
tokens; one warp holds `[tile, R]` logits and four `[N_v / 4, R]` accumulators in registers. Bytes read per token and KV
head: `(N_k + N_v) / 4`, and 2 for each scale and offset. Keys lie token-major in a page and values byte-major
(`pallas_kernels.history`), the orders that the `mma` wants.

Pallas' Triton lowering is deprecated from jax 0.11 on (still shipped in 0.12): only this file imports it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import codec
from pallas_kernels.attention.api import AttentionSpec, PlainTiers
from pallas_kernels.history import History, bucket_tables
from pallas_kernels.storage import loaded
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

MASKED = -1e30  # finite, so that differences of two masked logits are zero and not NaN
FULL = 32000.0  # largest fixed-point number: 16 bits with headroom for the borrow of the low byte
TINY = 1e-30
MAGIC = 1.5 * 2.0**23
MAGIC_BITS = 0x4B400000
LOG2E = math.log2(math.e)
PLANES = codec.PLANES
TILE = 128  # tokens of a tile of history
PART = 32  # tokens of a tile that go through softmax at a time: `[PART, R]` has the layout of the accumulators
PLAIN_TILE = 64  # plain tokens of a program
MAX_TOKENS = 16
MAX_ROWS = 16  # query rows of a program
MAX_HEAD_DIM = 256
QUERY_COLUMNS = 64
DEPTH = 32  # coordinates that `_prepare` contracts at a time
MERGE = 16  # splits that `_merge` makes one of
CHUNK = 8  # of which so many are read at a time
WAVE = 1584  # programs over history at once on an H200: 132 multiprocessors with 12 warps each
MULTIPROCESSORS = 96  # to share out smaller launches; an H100 has up to 132, an A100 108
LONG = 16  # tiles that are worth a program where programs abound
UNLIMITED = np.iinfo(np.int32).max // 2


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static facts of one call."""

    tokens: int  # T
    groups: int  # query heads a KV head
    rows: int  # R, query rows of a program, a power of two; row r is head r // T, token r % T
    row_blocks: int  # programs that share a KV head
    head_dim: int
    key_bytes: int  # N_k / 4
    value_bytes: int
    page: int  # tokens
    tile: int  # tokens
    span: int  # tiles of a program of history
    bucket: int  # tiles of a bucket, all of them without buckets
    buckets: int
    splits: int
    columns: int  # transformed queries of a program of `_prepare`
    ring: int  # tokens
    tiers: Tiers
    spec: AttentionSpec
    windowed: bool
    key_offset: bool
    value_offset: bool
    rotary: tuple[int, bool] | None  # rotated dimensions, whether neighbours are paired
    interpret: bool

    @property
    def dim(self) -> int:
        """Head size of a block."""
        return max(DEPTH, pl.next_power_of_2(self.head_dim))

    @property
    def key_block(self) -> int:
        """Bytes of a block of keys; the contraction of an int8 `mma` is 32 deep."""
        return max(32, pl.next_power_of_2(self.key_bytes))

    @property
    def value_block(self) -> int:
        return max(16, pl.next_power_of_2(self.value_bytes))

    @property
    def plain_splits(self) -> int:
        return self.sink_splits + self.ring_splits + 1

    @property
    def sink_splits(self) -> int:
        return pl.cdiv(self.tiers.sink, PLAIN_TILE)

    @property
    def ring_splits(self) -> int:
        return pl.cdiv(self.ring, PLAIN_TILE)

    @property
    def query_blocks(self) -> int:
        return pl.cdiv(self.buckets * self.rows, self.columns)

    @property
    def logit_scale(self) -> float:
        """Factor on q: logits come out as powers of two, or in units of the soft-cap."""
        return self.spec.scale * (LOG2E if self.spec.softcap is None else 1 / self.spec.softcap)


def unavailable() -> str | None:
    """Why these kernels cannot run here; None where they can."""
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU, the default backend is {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    major = capability.partition(".")[0]
    if not major.isdigit() or int(major) < 8:
        return f"needs an NVIDIA GPU of compute capability 8.0 or later, found {capability}"
    return None


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
    span: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.attention.attend`.

    Args:
        span: tiles of history that one program reads; by default from the shapes.
        interpret: run in Pallas' interpreter, on any device.
    """
    if history is None or codes is None:
        raise NotImplementedError("the cache is all plain")
    plan = _plan(q, k, plain, history, page_indices, codes, tiers, spec, window is not None, span, interpret)
    batch, heads = q.shape[0], k.shape[2] * plan.row_blocks
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    limit = jnp.asarray(UNLIMITED if window is None else window, jnp.int32).reshape(1)
    launch = functools.partial(_launch, plan)

    queries, numbers = launch(
        _prepare,
        (batch, heads, plan.query_blocks),
        [
            ((batch, heads, plan.buckets, PLANES * plan.key_block, 2 * plan.rows), jnp.int8),
            ((batch, heads, plan.buckets, len(_Numbers._fields), plan.rows), jnp.float32),
        ],
        (layer, q, codes.key.decode, codes.key.mu, *_turns(codes, tiers, plan)),
        warps=8 if plan.columns > 32 else 4,
    )
    partial = functools.partial(_partials, batch, heads, plan)
    offsets = [x for x in (history.key.offset, history.value.offset) if x is not None]
    lengths = (layer, limit, starts.astype(jnp.int32), counts.astype(jnp.int32))
    plain_output, plain_sums = launch(
        _attend_plain,
        (batch, heads, plan.plain_splits),
        [
            ((batch, heads, plan.plain_splits, plan.dim, plan.rows), jnp.float32),
            ((batch, heads, plan.plain_splits, 2, plan.rows), jnp.float32),
        ],
        (*lengths, q, k, v, *jax.tree.leaves(plain)),
        warps=4,
    )
    output, sums = launch(
        _attend_history,
        (batch, heads, plan.splits),
        partial(plan.splits),
        (
            *lengths, page_indices.astype(jnp.int32), queries, numbers,
            history.key.slots, history.key.scale, history.value.slots, history.value.scale, *offsets,
        ),
        warps=1,
        stages=3,
    )  # fmt: skip
    while output.shape[2] > 2 * MERGE:
        groups = pl.cdiv(output.shape[2], MERGE)
        output, sums = launch(_merge, (batch, heads, groups), partial(groups), (output, sums), warps=4)
    parts = plan.dim // DEPTH
    sinks = () if sink_logits is None else (sink_logits.astype(jnp.float32),)
    [out] = launch(
        functools.partial(_finish, parts=parts),
        (batch, heads, parts),
        [(q.shape, q.dtype)],
        (layer, output, sums, plain_output, plain_sums, codes.value.decode, codes.value.mu, *sinks),
        warps=4,
    )
    return out


def _launch(plan: _Plan, kernel, grid, outputs, operands, *, warps: int, stages: int = 2):
    body = functools.partial(kernel, plan=plan)
    name = (kernel.func if isinstance(kernel, functools.partial) else kernel).__name__
    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs],
        interpret=plan.interpret,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        name=f"oscar{name}",
    )(*map(jnp.asarray, operands))


def _partials(batch: int, heads: int, plan: _Plan, splits: int):
    """Outputs `[B, H, splits, N_v R]`, blocks of slots whole, and maxima and sums `[B, H, splits, 2, R]`."""
    return [
        ((batch, heads, splits, PLANES * plan.value_block * plan.rows), jnp.float32),
        ((batch, heads, splits, 2, plan.rows), jnp.float32),
    ]


def _plan(q, k, plain, history, page_indices, codes, tiers, spec, windowed, span, interpret) -> _Plan:
    batch, tokens, heads, dim = q.shape
    kv_heads, page, ring = k.shape[2], tiers.page, plain.recent_k.shape[2]
    plain_dtype = loaded(jnp.zeros((), plain.recent_k.dtype)).dtype
    for name, dtype in (("queries", q.dtype), ("plain tokens", plain_dtype)):
        if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise NotImplementedError(f"{name} of {dtype}: float32, bfloat16 and float16 are built")
    if dim > MAX_HEAD_DIM or max(codes.key.slots, codes.value.slots) > MAX_HEAD_DIM:
        raise NotImplementedError(f"head size {dim}: at most {MAX_HEAD_DIM} is built")
    if tokens > MAX_TOKENS:
        raise NotImplementedError(f"{tokens} query tokens a call: at most {MAX_TOKENS} are built")
    if not (16 <= page <= 256 and page & (page - 1) == 0):
        raise NotImplementedError(f"page={page}: 16, 32, 64, 128 and 256 are built")
    if history.key.tokens_last or not history.value.tokens_last:
        raise NotImplementedError("the history was laid out for another implementation")
    if any(2**31 <= side.slots.size <= 2**32 for side in (history.key, history.value)):
        # Pallas switches to 64-bit offsets at 2^32 bytes only, and 32-bit ones are signed.
        raise NotImplementedError("a pool of 2 to 4 GiB of slots: smaller and larger ones are built")
    capacity = page * page_indices.shape[1]
    tile = TILE if codes.bucket is None else math.gcd(TILE, codes.bucket)
    if tile < 32:
        raise NotImplementedError(f"bucket={codes.bucket}: multiples of 32 are built")
    total = pl.cdiv(capacity, tile)
    bucket = total if codes.bucket is None else codes.bucket // tile
    rows = tokens * (heads // kv_heads)
    block = min(MAX_ROWS, max(4, pl.next_power_of_2(rows)))
    row_blocks = pl.cdiv(rows, block)
    span = _span(total, bucket, batch * kv_heads * row_blocks) if span is None else span
    buckets = pl.cdiv(total, bucket)
    columns = max(16, min(QUERY_COLUMNS, pl.next_power_of_2(buckets * block)))
    while columns > 16 and batch * kv_heads * row_blocks * pl.cdiv(buckets * block, columns) < MULTIPROCESSORS:
        columns //= 2
    rotary = None
    if codes.bucket is not None and codes.rotary is not None:
        rotary = (codes.rotary.rotary_dim, codes.rotary.pairing == "interleaved")
    return _Plan(
        tokens=tokens, groups=heads // kv_heads, rows=block, row_blocks=row_blocks, head_dim=dim,
        key_bytes=codes.key.slots // PLANES, value_bytes=codes.value.slots // PLANES, page=page, tile=tile,
        span=span, bucket=bucket, buckets=buckets, splits=pl.cdiv(total, span), columns=columns, ring=ring, tiers=tiers,
        spec=spec, windowed=windowed, key_offset=codes.key.has_offset, value_offset=codes.value.has_offset,
        rotary=rotary, interpret=interpret,
    )  # fmt: skip


def _span(tiles: int, bucket: int, sequences: int) -> int:
    """Tiles of a program: an even part of a bucket, or whole buckets.

    As many as leave several waves of programs, so that the last one weighs little, or else as few as fit into one.
    """
    parts = [1 << i for i in range(tiles.bit_length())] if bucket >= tiles else range(1, bucket)
    spans = [d for d in parts if bucket >= tiles or bucket % d == 0]
    spans += range(bucket, max(bucket, tiles) + 1, bucket)
    programs = {span: sequences * pl.cdiv(tiles, span) for span in spans}
    several = [span for span in spans if programs[span] >= 2.5 * WAVE and span >= LONG]
    return max(several) if several else min((span for span in spans if programs[span] <= WAVE), default=spans[-1])


def _turns(codes: TransformCodes, tiers: Tiers, plan: _Plan) -> tuple[np.ndarray, ...]:
    """Factors `[buckets, D]` of x and of its partner coordinate in `x R(-B)`; none without buckets."""
    if plan.rotary is None:
        return ()
    tables = bucket_tables(codes, tiers, tiers.sink + plan.buckets * plan.bucket * plan.tile, np.float32)
    assert tables is not None
    cos, sin = tables
    size, neighbours = plan.rotary
    own, partner = np.ones((plan.buckets, plan.dim), np.float32), np.zeros((plan.buckets, plan.dim), np.float32)
    first, second = (
        (np.arange(0, size, 2), np.arange(1, size, 2))
        if neighbours
        else (np.arange(size // 2), np.arange(size // 2, size))
    )
    own[:, first], own[:, second], partner[:, first], partner[:, second] = cos, cos, sin, -sin
    return own, partner


# Kernels. Every operand is a whole array; programs index it themselves.


class _Numbers(NamedTuple):
    """What `_prepare` hands over for each bucket and query row, fp32 `[R]`.

    The logit of slots c under fixed-point query x is `(unit x . plane(c) + constant) scale + sigma offset + shift`,
    with `sigma offset` in `constant` where the offset is implied.
    """

    unit: jax.Array
    constant: jax.Array
    sigma: jax.Array
    shift: jax.Array


class _Rows(NamedTuple):
    """Query rows of a program: head within the group, token, and whether the row exists."""

    head: jax.Array
    token: jax.Array
    real: jax.Array


def _rows(plan: _Plan, block: jax.Array, local: jax.Array) -> _Rows:
    row = block * plan.rows + local
    real = (local < plan.rows) & (row < plan.groups * plan.tokens)
    row = jnp.where(real, row, 0)
    return _Rows(_div(row, plan.tokens), _rem(row, plan.tokens), real)


def _div(x: jax.Array, y: int) -> jax.Array:
    return x if y == 1 else lax.div(x, jnp.full_like(x, y))


def _rem(x: jax.Array, y: int) -> jax.Array:
    return jnp.zeros_like(x) if y == 1 else lax.rem(x, jnp.full_like(x, y))


def _iota(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def _program(plan: _Plan):
    """Sequence, KV head, block of query rows, index of the head in partial results, third index."""
    index = pl.program_id(1)
    return pl.program_id(0), _div(index, plan.row_blocks), _rem(index, plan.row_blocks), index, pl.program_id(2)


def _dot(plan: _Plan, a: jax.Array, b: jax.Array, *, exact: bool = True, contract=(1, 0)) -> jax.Array:
    """Product of fp32 arrays, as accurate as fp32 or, not `exact`, as fp16."""
    if plan.interpret:
        precision = lax.Precision.HIGHEST
    else:
        presets = lax.DotAlgorithmPreset
        precision = presets.TF32_TF32_F32_X3 if exact else presets.TF32_TF32_F32
    return lax.dot_general(
        a, b, ((contract[:1], contract[1:]), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip


def _integer_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


def _asm(instruction: str, *args: jax.Array) -> jax.Array:
    """One fp32 instruction on each element; `args` are of one shape."""
    operands = ", ".join(f"${i}" for i in range(len(args) + 1))
    [y] = plgpu.elementwise_inline_asm(
        f"{instruction} {operands};", args=args, constraints=",".join(["=f", *"f" * len(args)]), pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )  # fmt: skip
    return y


def _exp2(plan: _Plan, x: jax.Array) -> jax.Array:
    return jnp.exp2(x) if plan.interpret else _asm("ex2.approx.ftz.f32", x)


def _fma(plan: _Plan, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """`a b + c`, which XLA's Triton leaves as two instructions."""
    a, b, c = jnp.broadcast_arrays(a, b, c)
    return a * b + c if plan.interpret else _asm("fma.rn.f32", a, b, c)


def _plane(plan: _Plan, packed: jax.Array, i: int) -> jax.Array:
    """Bytes uint8 to int8 `code 4^i`, plane 3 to `64 code - 128`; four bytes an instruction."""
    if plan.interpret:
        return lax.bitcast_convert_type((packed & (3 << 2 * i)) ^ (0x80 if i == 3 else 0), jnp.int8)
    mask = 0x03030303 << 2 * i
    asm = f"and.b32 $0, $1, {mask:#x};" if i < 3 else f"lop3.b32 $0, $1, {mask:#x}, 0x80808080, 0x6a;"  # (a & b) ^ c
    [plane] = plgpu.elementwise_inline_asm(
        asm, args=[packed], constraints="=r,r", pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, jnp.int8)],
    )  # fmt: skip
    return plane


def _round(plan: _Plan, x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x factor` rounded to an integer below 2^22 in magnitude, plus `MAGIC_BITS`, int32.

    Adding 1.5 2^23 leaves the integer in the low bits of the sum, a fraction of the cost of a conversion.
    """
    return lax.bitcast_convert_type(_fma(plan, x, factor, jnp.full_like(x, MAGIC)), jnp.int32)


def _split_bytes(x: jax.Array) -> jax.Array:
    """Low 16 bits of int32 `[n, R]`, signed, to int8 `[n, 2 R]`: `256 high + low`, high and low neighbours."""
    low, high = x.astype(jnp.int8), ((x + 128) >> 8).astype(jnp.int8)
    return jnp.stack([high, low], axis=-1).reshape(x.shape[0], 2 * x.shape[1])


def _stack_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    """`[n, m]` twice to `[2 n, m]`; a concatenation that Pallas' Triton lowering knows."""
    return jnp.stack([a, b], axis=-1).transpose(2, 0, 1).reshape(2 * a.shape[0], a.shape[1])


def _wrapped(x: int) -> np.int32:
    """x modulo 2^32."""
    return np.int32((x + 2**31) % 2**32 - 2**31)


def _join_bytes(x: jax.Array) -> jax.Array:
    """int32 `[n, 2 R]` products of neighbouring bytes to fp32 `[n, R]`."""
    high, low = lax.split(x.reshape(x.shape[0], x.shape[1] // 2, 2), (1, 1), axis=2)
    return (high * 256 + low).reshape(x.shape[0], x.shape[1] // 2).astype(jnp.float32)


def _prepare(layer_ref, q_ref, decode_ref, mu_ref, *refs, plan: _Plan):
    """Queries relative to some buckets, times E, as fixed point."""
    *turn_refs, queries_ref, numbers_ref = refs
    batch, head, block, index, third = _program(plan)
    layer = layer_ref[0]
    column = third * plan.columns + _iota(plan.columns)
    bucket = _div(column, plan.rows)
    local = _rem(column, plan.rows)
    rows = _rows(plan, block, local)
    inside = bucket < plan.buckets
    real, source = rows.real & inside, jnp.where(inside, bucket, 0)
    size, count = plan.key_block, plan.key_bytes

    def query_of(d, far):
        """Coordinates `[columns, d]` of the scaled queries; `far` names the partner that rotation mixes them with."""

        def coordinate(d):
            at = _at(q_ref, batch, rows.token[:, None], (head * plan.groups + rows.head)[:, None], d[None, :])
            x = plgpu.load(at, mask=real[:, None] & (d < plan.head_dim)[None, :], other=0)
            return x.astype(jnp.float32) * plan.logit_scale

        query = coordinate(d)
        if plan.rotary is None:
            return query
        own, partner = (plgpu.load(_at(ref, source[:, None], d[None, :])) for ref in turn_refs)
        return query * own + coordinate(far) * partner

    def absorb(i, carry):
        """Some coordinates of the query at a time: all of them would not fit into registers."""
        shift, *planes = carry
        d = i * DEPTH + _iota(DEPTH)
        far = d
        if plan.rotary is not None:
            turned, neighbours = plan.rotary
            far = d ^ 1 if neighbours else jnp.where(d < turned // 2, d + turned // 2, d - turned // 2)
            far = jnp.where(d < turned, far, d)
        query, known = query_of(d, far), d < plan.head_dim
        mu = plgpu.load(_at(mu_ref, layer, head, jnp.where(known, d, 0)), mask=known, other=0)
        kept = (_iota(size) < count)[:, None] & known[None, :]
        slot, d = jnp.where(kept, _iota(size)[:, None], 0), jnp.where(known, d, 0)[None, :]
        for j, x in enumerate(planes):
            part = plgpu.load(_at(decode_ref, layer, head, j * count + slot, d), mask=kept, other=0)
            if q_ref.dtype == jnp.float32:
                planes[j] = x + _dot(plan, part, query, contract=(1, 1))
            else:  # fp16 holds both: E is a rotation of the order of one, queries stay far below its range
                half = (part.astype(jnp.float16), query.astype(jnp.float16))
                planes[j] = x + lax.dot_general(*half, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return shift + jnp.sum(query * mu[None, :], axis=1), *planes

    zero = jnp.zeros((size, plan.columns), jnp.float32)
    initial = (jnp.zeros((plan.columns,), jnp.float32), *(zero,) * PLANES)
    shift, *planes = lax.fori_loop(0, plan.dim // DEPTH, absorb, initial)
    weighted = [x * 4.0**-i for i, x in enumerate(planes)]
    top = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), axis=0) for x in weighted])
    unit = (top + TINY) * (1 / FULL)
    fixed = [_round(plan, x, (FULL / (top + TINY))[None, :]) for x in weighted]
    integers = [x - MAGIC_BITS for x in fixed]
    sigma = jnp.sum(
        functools.reduce(jnp.add, [x << (2 * i) for i, x in enumerate(integers)]), axis=0, dtype=jnp.int32
    ).astype(jnp.float32)
    flipped = 128.0 * jnp.sum(integers[3], axis=0, dtype=jnp.int32).astype(jnp.float32)
    constant = flipped if plan.key_offset else flipped + codec.IMPLIED_OFFSET * sigma
    numbers = _Numbers(unit, constant * unit, sigma * unit, shift)
    for j, number in enumerate(numbers):
        lead = (jnp.broadcast_to(x, column.shape) for x in (batch, index, bucket, jnp.int32(j)))
        plgpu.store(numbers_ref.at[(*lead, local)], number, mask=inside)

    byte = third * (2 * plan.columns) + _iota(2 * plan.columns)
    bucket, place = _div(byte, 2 * plan.rows), _rem(byte, 2 * plan.rows)
    for i, x in enumerate(fixed):
        full = (size, 2 * plan.columns)
        indices = (batch, index, bucket[None, :], i * size + _iota(size)[:, None], place[None, :])
        plgpu.store(
            queries_ref.at[tuple(jnp.broadcast_to(x, full) for x in indices)],
            _split_bytes(x),
            mask=jnp.broadcast_to((bucket < plan.buckets)[None, :], full),
        )


def _attend_plain(layer_ref, window_ref, starts_ref, counts_ref, q_ref, k_ref, v_ref, *refs, plan: _Plan):
    """Softmax over at most `PLAIN_TILE` plain tokens: of the sinks, then of the ring, at last the new ones."""
    *plain_refs, output_ref, sums_ref = refs
    batch, head, block, index, split = _program(plan)
    layer, start, count = layer_ref[0], starts_ref[batch], counts_ref[batch]
    sink, ring, size = plan.tiers.sink, plan.ring, max(8, plan.rows)
    d, local = _iota(plan.dim), _iota(size)
    rows = _rows(plan, block, local)
    query_head = head * plan.groups + rows.head
    known = d < plan.head_dim
    query = plgpu.load(
        _at(q_ref, batch, rows.token[None, :], query_head[None, :], d[:, None]),
        mask=rows.real[None, :] & known[:, None],
        other=0,
    )
    t = (start + rows.token)[None, :]
    end = _history_end(plan, start, count, t)

    def product(a, b, contract):
        if a.dtype != b.dtype or a.dtype == jnp.float32:
            return _dot(plan, a.astype(jnp.float32), b.astype(jnp.float32), contract=(contract, 0))
        return lax.dot_general(a, b, (((contract,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    sink_splits, new_split = plan.sink_splits, plan.sink_splits + plan.ring_splits
    is_sink, is_new = split < sink_splits, split == new_split
    before = jnp.int32(sink_splits) * (split >= sink_splits) + jnp.int32(plan.ring_splits) * is_new
    place = (split - before) * PLAIN_TILE + _iota(PLAIN_TILE)
    held = start - 1 - _rem(start - 1 - place + ring, ring)
    position = jnp.where(is_sink, place, jnp.where(is_new, start + place, held))
    usable = jnp.where(is_sink, (place < sink) & (place < start), (place < ring) & (held >= sink))
    usable = jnp.where(is_new, place < count, usable)

    def gather(sink_ref, ring_ref, new_ref):
        def read(ref, *lead):
            at = _at(ref, *lead, jnp.where(usable, place, 0)[:, None], head, d[None, :])
            return loaded(plgpu.load(at, mask=usable[:, None] & known[None, :], other=0))

        def stored_tokens():
            if sink_splits == 0:
                return read(ring_ref, layer, batch)
            return lax.cond(is_sink, lambda: read(sink_ref, layer, batch), lambda: read(ring_ref, layer, batch))

        return lax.cond(is_new, lambda: read(new_ref, batch), stored_tokens)

    logits = product(gather(plain_refs[0], plain_refs[2], k_ref), query, 1) * plan.logit_scale
    if plan.spec.softcap is not None:
        logits = plan.spec.softcap * LOG2E * jnp.tanh(logits)
    j = position[:, None]
    seen = usable[:, None] & (j <= t) & ((j < sink) | (j >= end))
    if plan.windowed:
        seen &= j > t - window_ref[0]
    logits = jnp.where(seen, logits, MASKED)
    maximum = jnp.max(logits, axis=0)
    probabilities = jnp.where(seen, _exp2(plan, logits - maximum[None, :]), 0.0)
    values = gather(plain_refs[1], plain_refs[3], v_ref)
    output, total = product(values, probabilities.astype(values.dtype), 0), jnp.sum(probabilities, axis=0)
    kept = local < plan.rows
    for i, x in enumerate((maximum, total)):
        plgpu.store(_at(sums_ref, batch, index, split, i, local), x, mask=kept)
    at = _at(output_ref, batch, index, split, d[:, None], local[None, :])
    plgpu.store(at, output, mask=jnp.broadcast_to(kept[None, :], output.shape))


def _history_end(plan: _Plan, start: jax.Array, count: jax.Array, position: jax.Array) -> jax.Array:
    """First plain position after the history that queries at `position` see."""
    end = plan.tiers.history_end(position)
    if plan.spec.exact_chunk:
        end = jnp.minimum(end, jnp.maximum(start, plan.tiers.sink))
    return jnp.minimum(end, plan.tiers.history_end(start + count - 1))


class _State(NamedTuple):
    """Online softmax over history: fp32 `[R]`, and accumulators of the value planes `[N_v / 4, R]`."""

    maximum: jax.Array
    total: jax.Array
    scales: jax.Array  # sum of p scale, of the rounded p scale
    offsets: jax.Array  # sum of p offset
    poison: jax.Array  # [tile], NaN where a value scale was: conversion to integers loses it
    planes: tuple[jax.Array, ...]


class _Tile(NamedTuple):
    """Where a tile lies, a page and place (scalars, or `[tile]` where pages are shorter), and what was read of it."""

    page: jax.Array
    place: jax.Array
    key_scale: jax.Array
    value_scale: jax.Array
    key_offset: jax.Array | None
    value_offset: jax.Array | None


def _attend_history(
    layer_ref, window_ref, starts_ref, counts_ref, table_ref, queries_ref, numbers_ref,
    key_ref, key_scale_ref, value_ref, value_scale_ref, *refs, plan: _Plan,
):  # fmt: skip
    """Partial softmax over the raw slots of one span of tiles."""
    *offset_refs, output_ref, sums_ref = refs
    key_offset_ref = offset_refs.pop(0) if plan.key_offset else None
    value_offset_ref = offset_refs.pop(0) if plan.value_offset else None
    batch, head, block, index, split = _program(plan)
    layer, start, count = layer_ref[0], starts_ref[batch], counts_ref[batch]
    tile, sink = plan.tile, plan.tiers.sink
    rows = _rows(plan, block, _iota(plan.rows))

    def end_of(position):  # in history, not in the sequence
        return _history_end(plan, start, count, position) - sink

    def low_of(position):
        return jnp.maximum(position - window_ref[0] + 1 - sink, 0) if plan.windowed else jnp.zeros_like(position)

    row_end, row_low = end_of(start + rows.token), low_of(start + rows.token)
    begin = jnp.maximum(split * plan.span, _div(low_of(start), tile))
    end = jnp.minimum((split + 1) * plan.span, _div(end_of(start + plan.tokens - 1) + tile - 1, tile))
    # Tiles that every row sees whole need no mask.
    full_begin = _div(low_of(start + plan.tokens - 1) + tile - 1, tile)
    full_end = _div(end_of(start), tile)

    fast = plan.page >= tile
    entries, pool = table_ref.shape[1], key_ref.shape[1]

    def locate(i):
        token = i * tile if fast else i * tile + _iota(tile)
        entry = jnp.minimum(_div(token, plan.page), entries - 1)
        entries_of = table_ref.at[batch if fast else jnp.full_like(entry, 0) + batch, entry]
        page = jnp.clip(plgpu.load(entries_of), 0, pool - 1)
        return page, _rem(token, plan.page)

    def parameters(page, place) -> _Tile:
        def read(ref):
            if ref is None:
                return None
            if fast:
                rows = pl.ds(0, tile) if plan.page == tile else pl.ds(pl.multiple_of(place, tile), tile)
                return plgpu.load(ref.at[layer, page, head, rows])
            return plgpu.load(ref.at[tuple(jnp.broadcast_to(x, (tile,)) for x in (layer, page, head, place))])

        return _Tile(
            page,
            place,
            *(read(ref) for ref in (key_scale_ref, value_scale_ref, key_offset_ref, value_offset_ref)),  # type: ignore[arg-type]
        )

    def packed(ref, at: _Tile, size: int, count: int, *, tokens_last: bool):
        if fast and size == count:
            rows = pl.ds(0, tile) if plan.page == tile else pl.ds(pl.multiple_of(at.place, tile), tile)
            return plgpu.load(ref.at[(layer, at.page, head, *((slice(None), rows) if tokens_last else (rows,)))])
        shape = (size, tile) if tokens_last else (tile, size)
        byte = jnp.broadcast_to(_iota(size)[:, None] if tokens_last else _iota(size)[None, :], shape)
        place = at.place + _iota(tile) if fast else at.place
        page = at.page if fast else (at.page[None, :] if tokens_last else at.page[:, None])
        place = place[None, :] if tokens_last else place[:, None]
        lead = [jnp.broadcast_to(x, shape) for x in (layer, page, head)]
        place, kept = jnp.broadcast_to(place, shape), byte < count
        byte = jnp.where(kept, byte, 0)
        return plgpu.load(ref.at[(*lead, *((byte, place) if tokens_last else (place, byte)))], mask=kept, other=0)

    def absorb(state: _State, at: _Tile, query, numbers: _Numbers, mask=None, usable=None) -> _State:
        parts = tile // PART

        def column(x):  # [tile] to `parts` of [PART, 1]
            x = loaded(x).astype(jnp.float32)[:, None]
            return lax.split(x, (PART,) * parts, axis=0)

        key = packed(key_ref, at, plan.key_block, plan.key_bytes, tokens_last=False)
        value = packed(value_ref, at, plan.value_block, plan.value_bytes, tokens_last=True)
        product = _integer_dot(_plane(plan, key, 0), query[0])
        for i in range(1, PLANES):
            product += _integer_dot(_plane(plan, key, i), query[i])
        masks = [None] * parts if mask is None else lax.split(mask, (PART,) * parts, axis=0)
        logits = []
        for i, x in enumerate(lax.split(_join_bytes(product), (PART,) * parts, axis=0)):
            x = _fma(plan, x, numbers.unit[None, :], numbers.constant[None, :]) * column(at.key_scale)[i]
            if at.key_offset is not None:
                x = _fma(plan, column(at.key_offset)[i], numbers.sigma[None, :], x)
            if plan.spec.softcap is not None:
                x = plan.spec.softcap * LOG2E * jnp.tanh(x + numbers.shift[None, :])
            logits.append(x if mask is None else jnp.where(masks[i], x, MASKED))  # type: ignore[arg-type]
        maximum = jnp.maximum(state.maximum, jnp.max(functools.reduce(jnp.maximum, logits), axis=0))
        rescale = _exp2(plan, state.maximum - maximum)

        def select(x, i):  # not multiply: scales of unused places may be NaN
            return x if mask is None else jnp.where(masks[i], x, 0.0)

        probabilities = [select(_exp2(plan, x - maximum[None, :]), i) for i, x in enumerate(logits)]
        weighted = [select(x * column(at.value_scale)[i], i) for i, x in enumerate(probabilities)]
        top = jnp.max(functools.reduce(jnp.maximum, [jnp.abs(x) for x in weighted]), axis=0) + TINY
        fixed = [_round(plan, x, (FULL / top)[None, :]) for x in weighted]
        columns = [_split_bytes(x) for x in fixed]
        while len(columns) > 1:
            columns = [_stack_rows(*pair) for pair in zip(columns[::2], columns[1::2], strict=True)]
        unit = top * (1 / FULL)
        whole = jnp.sum(functools.reduce(jnp.add, fixed), axis=0, dtype=jnp.int32) - _wrapped(tile * MAGIC_BITS)
        offsets = state.offsets
        if at.value_offset is not None:
            biased = [select(x * column(at.value_offset)[i], i) for i, x in enumerate(probabilities)]
            offsets = offsets * rescale + jnp.sum(functools.reduce(jnp.add, biased), axis=0)
        value_scale = loaded(at.value_scale).astype(jnp.float32)
        return _State(
            maximum,
            state.total * rescale + jnp.sum(functools.reduce(jnp.add, probabilities), axis=0),
            state.scales * rescale + whole.astype(jnp.float32) * unit,
            offsets,
            state.poison + 0.0 * (value_scale if usable is None else jnp.where(usable, value_scale, 0.0)),
            tuple(
                _fma(plan, _join_bytes(_integer_dot(_plane(plan, value, i), columns[0])), unit[None, :], x * rescale)
                for i, x in enumerate(state.planes)
            ),
        )

    def run(state: _State, bucket, begin, end) -> _State:
        """Absorbs tiles `begin` to `end` of one bucket: whole ones first, then those at the edges."""
        size = plan.key_block
        query = [plgpu.load(queries_ref.at[batch, index, bucket, pl.ds(size * i, size), :]) for i in range(PLANES)]
        numbers = _Numbers(
            *(plgpu.load(numbers_ref.at[batch, index, bucket, jnp.int32(j), :]) for j in range(len(_Numbers._fields)))
        )
        shift = jnp.zeros_like(numbers.shift) if plan.spec.softcap is not None else numbers.shift
        state = state._replace(maximum=state.maximum - shift)
        first = jnp.clip(full_begin, begin, jnp.maximum(begin, end))
        last = jnp.clip(full_end, first, jnp.maximum(first, end))

        def whole(i, carry):
            state, at = carry
            following = parameters(*locate(i + 1))
            return absorb(state, at, query, numbers), following

        def edge(i, state):
            i = jnp.where(begin + i < first, begin + i, last + begin + i - first)
            token = i * tile + _iota(tile)
            mask = (token[:, None] < row_end[None, :]) & (token[:, None] >= row_low[None, :])
            usable = token < end_of(start + plan.tokens - 1)
            return absorb(state, parameters(*locate(i)), query, numbers, mask, usable)

        state, _ = lax.fori_loop(first, last, whole, (state, parameters(*locate(first))))
        edges = first - begin + jnp.maximum(end - last, 0)
        state = lax.fori_loop(jnp.zeros_like(edges), edges, edge, state)
        return state._replace(maximum=state.maximum + shift)

    zero = jnp.zeros((plan.rows,), jnp.float32)
    planes = (jnp.zeros((plan.value_block, plan.rows), jnp.float32),) * PLANES
    state = _State(zero + MASKED, zero, zero, zero, jnp.zeros((tile,), jnp.float32), planes)
    if plan.span <= plan.bucket:
        state = run(state, _div(split * plan.span, plan.bucket), begin, jnp.maximum(begin, end))
    else:

        def visit(bucket, state):
            low = jnp.maximum(begin, bucket * plan.bucket)
            return run(state, bucket, low, jnp.maximum(low, jnp.minimum(end, (bucket + 1) * plan.bucket)))

        last = _div(jnp.maximum(end, begin) + plan.bucket - 1, plan.bucket)
        state = lax.fori_loop(_div(begin, plan.bucket), last, visit, state)

    plgpu.store(sums_ref.at[batch, index, split, jnp.int32(0), :], state.maximum)
    total = state.total + jnp.sum(state.poison, axis=0)
    plgpu.store(sums_ref.at[batch, index, split, jnp.int32(1), :], total)

    offset = state.offsets if plan.value_offset else codec.IMPLIED_OFFSET * state.scales
    for i, x in enumerate(state.planes):
        flipped = x + 128.0 * state.scales[None, :] if i == 3 else x
        item = (i * plan.value_block + _iota(plan.value_block)[:, None]) * plan.rows + _iota(plan.rows)[None, :]
        plgpu.store(_at(output_ref, batch, index, split, item), flipped * 4.0**-i + offset[None, :])


def _at(ref, *indices):
    """`ref.at` with index arrays that broadcast against each other."""
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in indices))
    return ref.at[tuple(jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in indices)]


def _mix(plan: _Plan, output_ref, sums_ref, batch, index, first, count: int):
    """Merges `count` partial softmaxes from `first` on.

    Returns:
        Maximum and sum `[R]`, and the flat accumulator `[slots R]`.
    """
    splits, size = output_ref.shape[2], PLANES * plan.value_block * plan.rows
    known, rows = jnp.minimum(first + count, splits), _iota(plan.rows)
    each = first + _iota(pl.next_power_of_2(count))[:, None]
    inside = jnp.broadcast_to(each < known, (each.shape[0], plan.rows))
    each = jnp.minimum(each, splits - 1)
    maximum = plgpu.load(_at(sums_ref, batch, index, each, 0, rows[None, :]), mask=inside, other=MASKED)
    total = plgpu.load(_at(sums_ref, batch, index, each, 1, rows[None, :]), mask=inside, other=0)
    top = jnp.max(maximum, axis=0)
    total = jnp.sum(_exp2(plan, maximum - top[None, :]) * total, axis=0)

    # A chunk of splits at a time, items along the threads: the sum over splits stays within a thread, loads are wide.
    items = _iota(size)[None, :]
    flat_top = jnp.broadcast_to(top[None, :], (size // plan.rows, plan.rows)).reshape(1, size)

    def absorb(i, output):
        each = first + i * CHUNK + _iota(CHUNK)[:, None]
        inside = jnp.broadcast_to(each < known, (CHUNK, size))
        each = jnp.minimum(each, splits - 1)
        at = _at(sums_ref, batch, index, each, 0, _rem(items, plan.rows))
        weights = _exp2(plan, plgpu.load(at, mask=inside, other=2 * MASKED) - flat_top)
        return output + jnp.sum(weights * plgpu.load(_at(output_ref, batch, index, each, items)), axis=0)

    return top, total, lax.fori_loop(0, pl.cdiv(count, CHUNK), absorb, jnp.zeros((size,), jnp.float32))


def _merge(output_ref, sums_ref, merged_ref, merged_sums_ref, *, plan: _Plan):
    """Makes one partial softmax of `MERGE` neighbouring ones."""
    batch, _, _, index, group = _program(plan)
    top, total, output = _mix(plan, output_ref, sums_ref, batch, index, group * MERGE, MERGE)
    for kind, x in enumerate((top, total)):
        plgpu.store(_at(merged_sums_ref, batch, index, group, kind, _iota(plan.rows)), x)
    plgpu.store(_at(merged_ref, batch, index, group, _iota(output.shape[0])), output)


def _finish(
    layer_ref, output_ref, sums_ref, plain_ref, plain_sums_ref, decode_ref, mu_ref, *refs, plan: _Plan, parts: int
):
    """Merges history and plain tokens, maps slots back with E, divides; one of `parts` of the coordinates."""
    *sink_refs, out_ref = refs
    batch, head, block, index, piece = _program(plan)
    layer = layer_ref[0]
    width, slots = plan.dim // parts, PLANES * plan.value_block
    local, slot, d = _iota(plan.rows), _iota(slots), piece * width + _iota(width)
    rows = _rows(plan, block, local)
    query_head = head * plan.groups + rows.head
    known = d < plan.head_dim

    past_top, past, mixed = _mix(plan, output_ref, sums_ref, batch, index, 0, output_ref.shape[2])
    number = _div(slot, plan.value_block) * plan.value_bytes + _rem(slot, plan.value_block)
    kept = known[:, None] & (_rem(slot, plan.value_block) < plan.value_bytes)[None, :]
    at = _at(decode_ref, layer, head, jnp.where(kept, number[None, :], 0), jnp.where(kept, d[:, None], 0))
    mixed = mixed.reshape(slots, plan.rows)
    # Four rows are fewer columns than a product takes: a second column for each, of zeros.
    columns = jnp.stack([mixed, jnp.zeros_like(mixed)], axis=-1).reshape(slots, 2 * plan.rows)
    product = _dot(plan, plgpu.load(at, mask=kept, other=0), columns, exact=out_ref.dtype == jnp.float32)
    output, _ = lax.split(product.reshape(width, plan.rows, 2), (1, 1), axis=2)
    mu = plgpu.load(_at(mu_ref, layer, head, jnp.where(known, d, 0)), mask=known, other=0)
    output = output.reshape(width, plan.rows) + mu[:, None] * past[None, :]

    def add(state, maximum, total, x):
        top = jnp.maximum(state[0], maximum)
        old, new = _exp2(plan, state[0] - top), _exp2(plan, maximum - top)
        return top, state[1] * old + total * new, state[2] * old[None, :] + x * new[None, :]

    def add_plain(split, state):
        maximum, total = (plgpu.load(_at(plain_sums_ref, batch, index, split, kind, local)) for kind in range(2))
        return add(state, maximum, total, plgpu.load(_at(plain_ref, batch, index, split, d[:, None], local[None, :])))

    state = lax.fori_loop(0, plan.plain_splits, add_plain, (past_top, past, output))
    for ref in sink_refs:
        sink = plgpu.load(ref.at[query_head]) * LOG2E
        state = add(state, sink, jnp.ones_like(sink), 0.0)
    _, denominator, output = state
    empty = denominator <= 0
    output = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, denominator))[None, :] * output
    token = jnp.where(rows.real, rows.token, plan.tokens)  # what is masked must not name a place twice: interpreter
    at = _at(out_ref, batch, token[None, :], query_head[None, :], d[:, None])
    plgpu.store(at, output.astype(out_ref.dtype), mask=known[:, None] & rows.real[None, :])
