"""Three-tier decode attention on NVIDIA GPUs, through Pallas' Triton lowering.

Three launches, more for many splits. `_begin` transforms every query once for each bucket and reads the plain tokens;
`_attend_history` reads packed slots, one span of tiles a program; `_merge` makes one of some splits; `_finish` merges
what is left and maps the slot accumulator back with E.

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
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import codec
from pallas_kernels.attention.api import AttentionSpec, PlainTiers
from pallas_kernels.history import History, turn_factors
from pallas_kernels.storage import loaded
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

MASKED = -1e30  # finite, so that differences of two masked logits are zero and not NaN
FULL = 32000.0  # largest fixed-point number: 16 bits with headroom for the borrow of the low byte
TINY = 1e-30
MAGIC = 1.5 * 2.0**23
MAGIC_BITS = 0x4B400000
BYTES_BIAS = 128
LOG2E = math.log2(math.e)
PLANES = codec.PLANES
TILE = 128  # tokens of a tile of history
PART = 32  # tokens of a tile that go through softmax at a time: `[PART, R]` has the layout of the accumulators
PLAIN_SPAN = 96  # places of the ring that a program reads
PLAIN_TILE = 16  # of which so many at a time
MAX_TOKENS = 16
MAX_ROWS = 8  # query rows of a program; 16 would need more registers than there are
MAX_HEAD_DIM = 256
QUERY_COLUMNS = 16  # transformed queries of a program
DEPTH = 32  # coordinates that `_prepare` contracts at a time
PIECE = 32  # coordinates of a program of `_finish` where there are few programs
MERGE = 16  # splits that `_merge` makes one of
CHUNK = 8  # of which so many are read at a time
WAVE = 132  # multiprocessors of an H200, to choose spans by
WARPS, WARPS_OF_MANY_ROWS = 12, 8  # of `_attend_history` on one of them, with four query rows and with more
LATENT, OVERHEAD = 7.7, 1.5
MULTIPROCESSORS = 96  # to share out smaller launches; an H100 has up to 132, an A100 108
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
        return max(32, pl.next_power_of_2(self.head_dim))

    @property
    def key_block(self) -> int:
        """Bytes of a block of keys; the contraction of an int8 `mma` is 32 deep."""
        return max(32, pl.next_power_of_2(self.key_bytes))

    @property
    def value_block(self) -> int:
        return max(16, pl.next_power_of_2(self.value_bytes))

    @property
    def ring_splits(self) -> int:
        return pl.cdiv(self.ring, PLAIN_SPAN)

    @property
    def plain_splits(self) -> int:
        """The first of sinks and new tokens, the others of the ring."""
        return 1 + self.ring_splits

    @property
    def query_blocks(self) -> int:
        return pl.cdiv(self.buckets * self.rows, QUERY_COLUMNS)

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

    partial = functools.partial(_partials, batch, heads, plan)
    # Rows of E without the factor 4^i of their plane. fp16 holds them: a rotation, of the order of one. XLA lifts this
    # out of a loop over layers.
    planes = np.repeat(np.float32(4.0) ** -np.arange(PLANES, dtype=np.float32), plan.key_bytes)
    decode = (jnp.asarray(codes.key.decode) * planes[:, None]).astype(
        jnp.float32 if q.dtype == jnp.float32 else jnp.float16
    )
    lengths = (layer, limit, starts.astype(jnp.int32), counts.astype(jnp.int32))
    plain_output, plain_sums, queries, numbers = launch(
        _begin,
        (batch, heads, plan.query_blocks + plan.plain_splits),
        [
            *partial(plan.plain_splits, plan.dim),
            ((batch, heads, plan.buckets, 2 * plan.rows, PLANES * plan.key_block), jnp.int8),
            ((batch, heads, plan.buckets, len(_Numbers._fields), plan.rows), jnp.float32),
        ],
        (*lengths, q, k, v, *jax.tree.leaves(plain), decode, codes.key.mu, *_turns(codes, tiers, plan)),
        warps=1,
        stages=3,
    )
    offsets = [x for x in (history.key.offset, history.value.offset) if x is not None]
    output, sums = launch(
        _attend_history,
        (batch, heads, plan.splits),
        partial(plan.splits, PLANES * plan.value_block),
        (
            *lengths, page_indices.astype(jnp.int32), queries, numbers,
            history.key.slots, history.key.scale, history.value.slots, history.value.scale, *offsets,
        ),
        warps=1,
        stages=3 if plan.rows < 8 else 2,
    )  # fmt: skip
    while output.shape[2] > 2 * MERGE:
        groups = pl.cdiv(output.shape[2], MERGE)
        output, sums = launch(
            _merge, (batch, heads, groups), partial(groups, PLANES * plan.value_block), (output, sums), warps=4
        )
    parts = 1 if batch * heads >= MULTIPROCESSORS else plan.dim // PIECE
    sinks = () if sink_logits is None else (sink_logits.astype(jnp.float32),)
    [out] = launch(
        functools.partial(_finish, parts=parts),
        (batch, heads, parts),
        [(q.shape, q.dtype)],
        (layer, output, sums, plain_output, plain_sums, codes.value.decode, codes.value.mu, *sinks),
        warps=8 if parts == 1 else 4,
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


def _partials(batch: int, heads: int, plan: _Plan, splits: int, width: int):
    """Unnormalised outputs `[B, H, splits, width R]`, and maxima and sums `[B, H, splits, 2, R]`."""
    return [
        ((batch, heads, splits, width * plan.rows), jnp.float32),
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
    span = _span(total, bucket, batch * kv_heads * row_blocks, block) if span is None else span
    buckets = pl.cdiv(total, bucket)
    rotary = None
    if codes.bucket is not None and codes.rotary is not None:
        rotary = (codes.rotary.rotary_dim, codes.rotary.pairing == "interleaved")
    return _Plan(
        tokens=tokens, groups=heads // kv_heads, rows=block, row_blocks=row_blocks, head_dim=dim,
        key_bytes=codes.key.slots // PLANES, value_bytes=codes.value.slots // PLANES, page=page, tile=tile,
        span=span, bucket=bucket, buckets=buckets, splits=pl.cdiv(total, span), ring=ring, tiers=tiers,
        spec=spec, windowed=windowed, key_offset=codes.key.has_offset, value_offset=codes.value.has_offset,
        rotary=rotary, interpret=interpret,
    )  # fmt: skip


def _span(tiles: int, bucket: int, sequences: int, rows: int) -> int:
    """Tiles of a program, an even part of a bucket or whole buckets: those that should end first.

    Programs come in waves of as many warps as fit. A tile takes in proportion to the warps at work, but never less than
    with `LATENT` of them; what a program does besides takes as long as `OVERHEAD` tiles (fitted to an H200).
    """
    parts = [1 << i for i in range(tiles.bit_length())] if bucket >= tiles else range(1, bucket)
    spans = [d for d in parts if bucket >= tiles or bucket % d == 0]
    spans += range(bucket, max(bucket, tiles) + 1, bucket)
    warps = WARPS if rows < 8 else WARPS_OF_MANY_ROWS

    def cost(span: int) -> tuple[float, int]:
        full, rest = divmod(sequences * pl.cdiv(tiles, span), WAVE * warps)
        last = max(LATENT, rest / WAVE) if rest else 0
        return (span + OVERHEAD) * (full * warps + last), -span

    return min(spans, key=cost)


def _turns(codes: TransformCodes, tiers: Tiers, plan: _Plan) -> tuple[np.ndarray, ...]:
    """`turn_factors` of all buckets, times the factor on logits; none without buckets."""
    factors = turn_factors(codes, tiers, tiers.sink + plan.buckets * plan.bucket * plan.tile, plan.dim)
    return tuple(np.float32(plan.logit_scale) * x for x in factors)


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


class _Slots(NamedTuple):
    """Slots of a block in the order of its planes, padded: which plane, which stored slot, whether it exists."""

    plane: jax.Array
    number: jax.Array
    row: jax.Array | None  # whether it exists, `[1, slots]`; None where all do
    column: jax.Array | None

    @classmethod
    def of(cls, block: int, count: int) -> _Slots:
        slot = _iota(PLANES * block)
        plane, byte = _div(slot, block), _rem(slot, block)
        if block == count:
            return cls(plane, slot, None, None)
        kept = byte < count
        return cls(plane, jnp.where(kept, plane * count + byte, 0), kept[None, :], kept[:, None])


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


def _bounded(size: int, count: int) -> tuple[jax.Array, jax.Array | None]:
    """Indices below `count`, padded with zeros to `size`, and which exist `[1, size]`; None where all do."""
    index = _iota(size)
    return (index, None) if size == count else (jnp.where(index < count, index, 0), (index < count)[None, :])


def _both(*masks: jax.Array | None) -> jax.Array | None:
    known = [mask for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, known) if known else None


def _load(ref, *indices, mask: jax.Array | None = None) -> jax.Array:
    """Elements at index arrays that broadcast against each other; zeros where masked."""
    at = _at(ref, *indices)
    if mask is None:
        return plgpu.load(at)
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in indices))
    return plgpu.load(at, mask=jnp.broadcast_to(mask, shape), other=0)


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


def _integers(pairs: Sequence[tuple[jax.Array, jax.Array]], contract: int = 0) -> jax.Array:
    """Sum of int8 products below 2^22 in magnitude, plus `MAGIC_BITS`, int32: the bits of a float 1.5 2^23 larger."""
    total = jnp.full((pairs[0][0].shape[0], pairs[0][1].shape[1 - contract]), MAGIC_BITS, jnp.int32)
    for a, b in pairs:
        total += lax.dot_general(a, b, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.int32)
    return total


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


def _log2(plan: _Plan, x: jax.Array) -> jax.Array:
    return jnp.log2(x) if plan.interpret else _asm("lg2.approx.ftz.f32", x)


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


def _round(plan: _Plan, x: jax.Array, factor: jax.Array, bias: int = 0) -> jax.Array:
    """`x factor` rounded to an integer below 2^22 in magnitude, plus `MAGIC_BITS + bias`, int32.

    Adding 1.5 2^23 leaves the integer in the low bits of the sum, a fraction of the cost of a conversion.
    """
    return lax.bitcast_convert_type(_fma(plan, x, factor, jnp.full_like(x, MAGIC + bias)), jnp.int32)


def _split_bytes(x: jax.Array) -> jax.Array:
    """Low 16 bits of int32 `[n, R]`, signed, to int8 `[n, 2 R]`: `256 high + low`, low and high neighbours."""
    low, high = x.astype(jnp.int8), ((x + 128) >> 8).astype(jnp.int8)
    return jnp.stack([low, high], axis=-1).reshape(x.shape[0], 2 * x.shape[1])


def _stack_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    """`[n, m]` twice to `[2 n, m]`; a concatenation that Pallas' Triton lowering knows."""
    return jnp.stack([a, b], axis=-1).transpose(2, 0, 1).reshape(2 * a.shape[0], a.shape[1])


def _wrapped(x: int) -> np.int32:
    """x modulo 2^32."""
    return np.int32((x + 2**31) % 2**32 - 2**31)


def _join_bytes(plan: _Plan, x: jax.Array, unit: jax.Array, add: jax.Array) -> jax.Array:
    """fp32 `[n, R]` of `unit (256 high + low) + add`, from neighbouring int32 sums that `_integers` made, `[n, 2 R]`.

    The sums are read as the floats that their bits are, 1.5 2^23 larger. `add` comes with that taken away for the low
    ones, `MAGIC unit`, a rounding of less than one unit; for the high ones it would be one of two hundred.
    """
    bits = lax.bitcast_convert_type(x, jnp.float32).reshape(x.shape[0], x.shape[1] // 2, 2)
    low, high = (y.reshape(y.shape[:2]) for y in lax.split(bits, (1, 1), axis=2))
    unit = unit[None, :]
    return _fma(plan, high - MAGIC, 256 * unit, _fma(plan, low, unit, add))


def _begin(
    layer_ref, window_ref, starts_ref, counts_ref, q_ref, k_ref, v_ref, sink_k_ref, sink_v_ref, recent_k_ref,
    recent_v_ref, decode_ref, mu_ref, *refs, plan: _Plan,
):  # fmt: skip
    """What waits for nothing: the transform of the queries, and the plain tokens."""
    *turn_refs, plain_output_ref, plain_sums_ref, queries_ref, numbers_ref = refs
    *here, third = _program(plan)
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


def _prepare(layer_ref, q_ref, decode_ref, mu_ref, *refs, plan: _Plan, here, third: jax.Array):
    """Queries relative to some buckets, times E, as fixed point."""
    *turn_refs, queries_ref, numbers_ref = refs
    batch, head, block, index = here
    layer = layer_ref[0]
    count = QUERY_COLUMNS // plan.rows
    bucket, local = third * count + _iota(count), _iota(plan.rows)
    rows = _rows(plan, block, local)
    exists = None if plan.buckets % count == 0 else bucket < plan.buckets
    real = None if plan.groups * plan.tokens == plan.rows * plan.row_blocks else rows.real[None, :, None]
    source = bucket if exists is None else jnp.where(exists, bucket, 0)
    query_head = head * plan.groups + rows.head
    slots, depth = _Slots.of(plan.key_block, plan.key_bytes), min(DEPTH, plan.dim)

    def query_of(d, known):  # [1, R, d]
        known = None if known is None else known[None]
        at = (batch, rows.token[None, :, None], query_head[None, :, None], d[None, None, :])
        return _load(q_ref, *at, mask=_both(real, known)).astype(jnp.float32)

    def absorb(i, carry):
        """Some coordinates at a time: the loads of all of them would not fit into registers."""
        shifts, product = carry
        d = i * depth + _iota(depth)
        known = None if plan.dim == plan.head_dim else (d < plan.head_dim)[None, :]
        d = d if known is None else jnp.where(d < plan.head_dim, d, 0)
        query = query_of(d, known)
        full = (count, plan.rows, depth)
        if plan.rotary is None:
            query = jnp.broadcast_to(query * plan.logit_scale, full)
        else:
            size, neighbours = plan.rotary
            # A remainder keeps neighbours neighbours, so that loads stay wide; a choice would not.
            partner = d ^ 1 if neighbours else _rem(d + size // 2, size)
            if size < plan.head_dim:
                partner = jnp.where(d < size, partner, d)
            own, other = (_load(ref, source[:, None, None], d[None, None, :]) for ref in turn_refs)
            query = _fma(plan, query_of(partner, known), other, query * own)
        mu = _load(mu_ref, layer, head, d[None, None, :], mask=None if known is None else known[None])
        shifts = _fma(plan, query, mu, shifts)
        query = query.reshape(QUERY_COLUMNS, depth)
        matrix = _load(decode_ref, layer, head, slots.number[:, None], d[None, :], mask=_both(slots.column, known))
        if matrix.dtype == jnp.float32:
            return shifts, product + _dot(plan, query, matrix, contract=(1, 1))
        half = (query.astype(jnp.float16), matrix)
        return shifts, product + lax.dot_general(*half, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    shapes = (count, plan.rows, depth), (QUERY_COLUMNS, PLANES * plan.key_block)
    initial = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    # A number of steps that the compiler does not know, as layers are never negative: unrolled, this spills.
    shifts, product = lax.fori_loop(layer >> 31, jnp.int32(plan.dim // depth), absorb, initial)
    top = jnp.max(jnp.abs(product), axis=1) + TINY
    fixed, unit = _round(plan, product, (FULL / top)[:, None], BYTES_BIAS), top * (1 / FULL)

    def total(factors: tuple[int, ...]):
        """Sum of whole numbers, each times its plane's factor: exact."""
        factor = jnp.full_like(slots.plane, factors[0])
        for i in range(1, PLANES):
            factor = jnp.where(slots.plane == i, factors[i], factor)
        bias = _wrapped(plan.key_block * sum(factors) * (MAGIC_BITS + BYTES_BIAS))
        return (jnp.sum(fixed * factor[None, :], axis=1, dtype=jnp.int32) - bias).astype(jnp.float32) * unit

    weights = tuple(4**i for i in range(PLANES))
    flipped = 256  # twice what the flipped top bit of plane 3 takes away
    if plan.key_offset:
        constant, sigma = 0.5 * total((0, 0, 0, flipped)), total(weights)
    else:
        offsets = [round(2 * codec.IMPLIED_OFFSET) * x for x in weights]
        constant, sigma = 0.5 * total((*offsets[:3], offsets[3] + flipped)), jnp.zeros_like(unit)
    column = _iota(QUERY_COLUMNS)
    bucket, local = third * count + _div(column, plan.rows), _rem(column, plan.rows)
    inside = None if exists is None else bucket < plan.buckets
    shift = jnp.sum(shifts, axis=2).reshape(QUERY_COLUMNS)
    for j, number in enumerate(_Numbers(unit, constant, sigma, shift)):
        plgpu.store(_at(numbers_ref, batch, index, bucket, j, local), number, mask=inside)
    # With the bias and the flip, the two bytes are the low and the high one of `_split_bytes`.
    words, slot = fixed ^ BYTES_BIAS, _iota(PLANES * plan.key_block)[None, :]
    for j in range(2):
        at = _at(queries_ref, batch, index, bucket[:, None], 2 * local[:, None] + j, slot)
        mask = None if inside is None else jnp.broadcast_to(inside[:, None], words.shape)
        plgpu.store(at, (words >> 8 * j).astype(jnp.int8), mask=mask)


def _attend_plain(
    layer_ref, window_ref, starts_ref, counts_ref, q_ref, k_ref, v_ref, sink_k_ref, sink_v_ref, recent_k_ref,
    recent_v_ref, output_ref, sums_ref, *, plan: _Plan, here, split: jax.Array, recent: bool,
):  # fmt: skip
    """Partial softmax over plain tokens: sinks and new tokens, or `PLAIN_SPAN` places of the ring.

    Queries lie along the rows of the products here, so that probabilities become an operand without leaving their
    registers.
    """
    batch, head, block, index = here
    layer, start, count = layer_ref[0], starts_ref[batch], counts_ref[batch]
    sink, ring, size = plan.tiers.sink, plan.ring, max(16, plan.rows)
    local, (d, known) = _iota(size), _bounded(plan.dim, plan.head_dim)
    rows = _rows(plan, block, local)
    at = (batch, rows.token[:, None], (head * plan.groups + rows.head)[:, None], d[None, :])
    query = _load(q_ref, *at, mask=_both(rows.real[:, None], known))
    t = (start + rows.token)[:, None]
    end = _history_end(plan, start, count, t)

    def product(a, b, contract):
        if a.dtype != b.dtype or a.dtype == jnp.float32:
            return _dot(plan, a.astype(jnp.float32), b.astype(jnp.float32), contract=(1, contract))
        return lax.dot_general(a, b, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)

    def absorb(state, key_ref, value_ref, lead, place, position, usable, seen):
        maximum, total, output = state
        keys, values = (
            loaded(_load(ref, *lead, place[:, None], head, d[None, :], mask=_both(usable[:, None], known)))
            for ref in (key_ref, value_ref)
        )
        logits = product(query, keys, 1) * plan.logit_scale
        if plan.spec.softcap is not None:
            logits = plan.spec.softcap * LOG2E * jnp.tanh(logits)
        if plan.windowed:
            seen &= position[None, :] > t - window_ref[0]
        logits = jnp.where(seen, logits, MASKED)
        top = jnp.maximum(maximum, jnp.max(logits, axis=1))
        rescale = _exp2(plan, maximum - top)
        probabilities = jnp.where(seen, _exp2(plan, logits - top[:, None]), 0.0)
        output = output * rescale[:, None] + product(probabilities.astype(values.dtype), values, 0)
        return top, total * rescale + jnp.sum(probabilities, axis=1), output

    def over(state, first, last, visit):
        return lax.fori_loop(_div(first, PLAIN_TILE), _div(last + PLAIN_TILE - 1, PLAIN_TILE), visit, state)

    def sinks(i, state):
        place = i * PLAIN_TILE + _iota(PLAIN_TILE)
        usable = place < jnp.minimum(start, sink)
        return absorb(state, sink_k_ref, sink_v_ref, (layer, batch), place, place, usable, usable[None, :])

    turn = _rem(start, ring)  # places from here on hold tokens of the turn before

    def recents(i, state):
        place = i * PLAIN_TILE + _iota(PLAIN_TILE)
        held = start - turn + place - jnp.where(place < turn, 0, ring)
        usable = (place < ring) & (held >= sink)
        seen = usable[None, :] & (held[None, :] >= end)
        return absorb(state, recent_k_ref, recent_v_ref, (layer, batch), place, held, usable, seen)

    zero = jnp.zeros((size,), jnp.float32)
    state = (zero + MASKED, zero, jnp.zeros((size, plan.dim), jnp.float32))
    if recent:
        first, last = split * PLAIN_SPAN, jnp.minimum(ring, start)
        state = over(state, first, jnp.clip(last, first, first + PLAIN_SPAN), recents)
    else:
        if sink:
            state = over(state, jnp.zeros_like(start), jnp.minimum(start, sink), sinks)
        place = _iota(MAX_TOKENS)
        usable, j = place < count, (start + place)[None, :]
        seen = usable[None, :] & (j <= t) & ((j < sink) | (j >= end))
        state = absorb(state, k_ref, v_ref, (batch,), place, start + place, usable, seen)
    maximum, total, output = state
    split = split + plan.plain_splits - plan.ring_splits if recent else split
    real = None if size == plan.rows else local < plan.rows
    for i, x in enumerate((maximum, total)):
        plgpu.store(_at(sums_ref, batch, index, split, i, local), x, mask=real)
    # Rows that are masked name places of the next coordinate: in this order the interpreter, too, writes those last.
    at = _at(output_ref, batch, index, split, _iota(plan.dim)[:, None] * plan.rows + local[None, :])
    plgpu.store(at, output.T, mask=None if real is None else jnp.broadcast_to(real[None, :], output.T.shape))


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

        def split(x):  # [tile, ...] to `parts` of [PART, ...]
            return lax.split(x, (PART,) * parts, axis=0)

        def column(x):
            return split(loaded(x).astype(jnp.float32)[:, None])

        key = packed(key_ref, at, plan.key_block, plan.key_bytes, tokens_last=False)
        product = _integers([(_plane(plan, key, i), query[i]) for i in range(PLANES)], contract=1)
        key_scale, value_scale = column(at.key_scale), column(at.value_scale)
        masks = [None] * parts if mask is None else split(mask)
        constant, logits = numbers.constant - MAGIC * numbers.unit, []
        for i, x in enumerate(split(product)):
            x = _join_bytes(plan, x, numbers.unit, constant[None, :]) * key_scale[i]
            if at.key_offset is not None:
                x = _fma(plan, column(at.key_offset)[i], numbers.sigma[None, :], x)
            if plan.spec.softcap is not None:
                x = plan.spec.softcap * LOG2E * jnp.tanh(x + numbers.shift[None, :])
            logits.append(x if mask is None else jnp.where(masks[i], x, MASKED))  # type: ignore[arg-type]
        highest = jnp.max(functools.reduce(jnp.maximum, logits), axis=0)
        maximum = jnp.maximum(state.maximum, highest)
        rescale = _exp2(plan, state.maximum - maximum)

        # `unit` is the step of p scale as fixed point: nothing is larger than the largest p times the largest scale.
        # Its reciprocal goes into the exponent.
        scales = loaded(at.value_scale).astype(jnp.float32)
        scales = scales if usable is None else jnp.where(usable, scales, 0.0)
        unit = (_exp2(plan, highest - maximum) * jnp.max(jnp.abs(scales), axis=0) + TINY) * (1 / FULL)
        base = maximum + _log2(plan, unit)

        def select(x, i):  # not multiply: scales of unused places may be NaN
            return x if mask is None else jnp.where(masks[i], x, 0.0)

        total, whole, biased, columns = [], [], [], []
        for i, x in enumerate(logits):
            x = select(_exp2(plan, x - base[None, :]), i)
            total.append(x)
            if at.value_offset is not None:
                biased.append(select(x * column(at.value_offset)[i], i))
            fixed = _round(plan, x, value_scale[i] if mask is None else jnp.where(masks[i], value_scale[i], 0.0))  # type: ignore[arg-type]
            whole.append(fixed)
            columns.append(_split_bytes(fixed))
        while len(columns) > 1:
            columns = [_stack_rows(*pair) for pair in zip(columns[::2], columns[1::2], strict=True)]

        def added(old, parts, bits=0):
            new = jnp.sum(functools.reduce(jnp.add, parts), axis=0, dtype=parts[0].dtype)
            return _fma(plan, (new - _wrapped(bits)).astype(jnp.float32) if bits else new, unit, old * rescale)

        value = packed(value_ref, at, plan.value_block, plan.value_bytes, tokens_last=True)
        carried = rescale[None, :], (-MAGIC * unit)[None, :]
        return _State(
            maximum,
            added(state.total, total),
            added(state.scales, whole, tile * MAGIC_BITS),
            added(state.offsets, biased) if biased else state.offsets,
            state.poison + 0.0 * scales,
            tuple(
                _join_bytes(plan, _integers([(_plane(plan, value, i), columns[0])]), unit, _fma(plan, x, *carried))
                for i, x in enumerate(state.planes)
            ),
        )

    def run(state: _State, bucket, begin, end) -> _State:
        """Absorbs tiles `begin` to `end` of one bucket: whole ones first, then those at the edges."""
        size = plan.key_block
        query = [plgpu.load(queries_ref.at[batch, index, bucket, :, pl.ds(size * i, size)]) for i in range(PLANES)]
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


def _sums(sums_ref, batch, index, first, count: int):
    """Maxima and sums `[n, R]` of `count` partial softmaxes from `first` on, as far as there are so many."""
    _, _, splits, _, rows = sums_ref.shape
    size = pl.next_power_of_2(count)
    each = (first + _iota(size))[:, None]
    inside = None if splits % size == 0 else jnp.broadcast_to(each < jnp.minimum(first + count, splits), (size, rows))
    each = jnp.minimum(each, splits - 1)
    at = [_at(sums_ref, batch, index, each, kind, _iota(rows)[None, :]) for kind in range(2)]
    if inside is None:
        return plgpu.load(at[0]), plgpu.load(at[1])
    return plgpu.load(at[0], mask=inside, other=MASKED), plgpu.load(at[1], mask=inside, other=0)


def _mix(plan: _Plan, output_ref, sums_ref, batch, index, first, count: int, items: jax.Array, top: jax.Array):
    """Sum of `count` partial outputs from `first` on at flat `items`, weighted relative to the maximum `top` `[R]`."""
    splits, size, rows = output_ref.shape[2], items.shape[0], plan.rows
    known = jnp.minimum(first + count, splits)
    flat_top = jnp.broadcast_to(top[None, :], (size // rows, rows)).reshape(1, size)
    items = items[None, :]
    chunk = min(CHUNK, pl.next_power_of_2(count))

    def absorb(i, output):
        each = (first + i * chunk + _iota(chunk))[:, None]
        inside = None if splits % chunk == 0 else jnp.broadcast_to(each < known, (chunk, size))
        each = jnp.minimum(each, splits - 1)
        at = _at(sums_ref, batch, index, each, 0, _rem(items, rows))
        maximum = plgpu.load(at) if inside is None else plgpu.load(at, mask=inside, other=2 * MASKED)
        return _fma(plan, _exp2(plan, maximum - flat_top), _load(output_ref, batch, index, each, items), output)

    # Items lie along the threads, and the sum over splits within a chunk is left to the end.
    output = jnp.zeros((chunk, size), jnp.float32)
    steps = pl.cdiv(count, chunk)
    output = absorb(jnp.int32(0), output) if steps == 1 else lax.fori_loop(0, steps, absorb, output)
    return jnp.sum(output, axis=0)


def _merge(output_ref, sums_ref, merged_ref, merged_sums_ref, *, plan: _Plan):
    """Makes one partial softmax of `MERGE` neighbouring ones."""
    batch, _, _, index, group = _program(plan)
    items = _iota(output_ref.shape[3])
    maximum, total = _sums(sums_ref, batch, index, group * MERGE, MERGE)
    top = jnp.max(maximum, axis=0)
    output = _mix(plan, output_ref, sums_ref, batch, index, group * MERGE, MERGE, items, top)
    total = jnp.sum(_exp2(plan, maximum - top[None, :]) * total, axis=0)
    for kind, x in enumerate((top, total)):
        plgpu.store(_at(merged_sums_ref, batch, index, group, kind, _iota(plan.rows)), x)
    plgpu.store(_at(merged_ref, batch, index, group, items), output)


def _finish(
    layer_ref, output_ref, sums_ref, plain_ref, plain_sums_ref, decode_ref, mu_ref, *refs, plan: _Plan, parts: int
):
    """Merges history and plain tokens, maps slots back with E, divides; one of `parts` of the coordinates."""
    *sink_refs, out_ref = refs
    batch, head, block, index, piece = _program(plan)
    layer, local = layer_ref[0], _iota(plan.rows)
    width = plan.dim // parts
    rows = _rows(plan, block, local)
    query_head = head * plan.groups + rows.head
    slots = _Slots.of(plan.value_block, plan.value_bytes)
    place = piece * width + _iota(width)
    known = None if plan.dim == plan.head_dim else (place < plan.head_dim)[:, None]
    d = place if known is None else jnp.where(place < plan.head_dim, place, 0)

    splits, plain_splits = output_ref.shape[2], plan.plain_splits
    past, past_total = _sums(sums_ref, batch, index, 0, splits)
    plain, plain_total = _sums(plain_sums_ref, batch, index, 0, plain_splits)
    top = jnp.maximum(jnp.max(past, axis=0), jnp.max(plain, axis=0))
    sinks = [plgpu.load(ref.at[query_head]) * LOG2E for ref in sink_refs]
    for sink in sinks:
        top = jnp.maximum(top, sink)
    past_total = jnp.sum(_exp2(plan, past - top[None, :]) * past_total, axis=0)
    denominator = past_total + jnp.sum(_exp2(plan, plain - top[None, :]) * plain_total, axis=0)
    for sink in sinks:
        denominator += _exp2(plan, sink - top)

    matrix = _load(decode_ref, layer, head, slots.number[None, :], d[:, None], mask=_both(slots.row, known))
    items = _iota(output_ref.shape[3])
    mixed = _mix(plan, output_ref, sums_ref, batch, index, 0, splits, items, top).reshape(-1, plan.rows)
    if plan.rows < 8:  # four rows are fewer columns than a product takes: a second column for each, of zeros
        mixed = jnp.stack([mixed, jnp.zeros_like(mixed)], axis=-1).reshape(-1, 2 * plan.rows)
    output = _dot(plan, matrix, mixed, exact=out_ref.dtype == jnp.float32)
    if plan.rows < 8:
        output, _ = lax.split(output.reshape(width, plan.rows, 2), (1, 1), axis=2)
        output = output.reshape(width, plan.rows)
    items = piece * width * plan.rows + _iota(width * plan.rows)
    output += _mix(plan, plain_ref, plain_sums_ref, batch, index, 0, plain_splits, items, top).reshape(output.shape)
    output += _load(mu_ref, layer, head, d[:, None], mask=known) * past_total[None, :]
    empty = denominator <= 0
    output = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, denominator))[None, :] * output
    token = jnp.where(rows.real, rows.token, plan.tokens)  # what is masked must not name a place twice: interpreter
    at = _at(out_ref, batch, token[None, :], query_head[None, :], d[:, None])
    mask = rows.real[None, :] if known is None else rows.real[None, :] & known
    plgpu.store(at, output.astype(out_ref.dtype), mask=jnp.broadcast_to(mask, output.shape))
