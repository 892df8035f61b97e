"""What the kernels of decode attention share: the facts of a call, and operations as Triton likes them."""

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
from pallas_kernels.attention.api import AttentionSpec, PlainTiers, check_dtypes
from pallas_kernels.history import UNADDRESSED, History
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

MASKED = -1e30  # finite, so that differences of two masked logits are zero and not NaN
FULL = 32000.0  # largest fixed-point number: 16 bits with headroom for the borrow of the low byte
TINY = 1e-30
MAGIC = 1.5 * 2.0**23
MAGIC_BITS = 0x4B400000
BYTES_BIAS = 128
DENORMAL = 2.0**-24  # the smallest positive fp16
PLAIN_SPAN = 96  # places of the ring that a program reads
MAX_HEAD_DIM = 256
MAX_ROWS = 8  # query rows of a program, of bytes; 16 would need more registers than there are
LOG2E = math.log2(math.e)
PLANES = codec.PLANES


@dataclasses.dataclass(frozen=True)
class Plan:
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
    queries: int  # transformed queries of a program
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
    def halves(self) -> bool:
        """Whether products over history are of fp16 instead of bytes: `Halves`."""
        return self.rows > MAX_ROWS

    @property
    def by_rows(self) -> bool:
        """Whether queries are rows of the products over history, and tokens columns: `fixed_point`."""
        return not self.halves and (self.rows == MAX_ROWS or self.paired)

    @property
    def paired(self) -> bool:
        """Whether two tokens' keys are one row of the products, whose contraction is 32 bytes deep."""
        return self.key_bytes == 16

    @property
    def parted(self) -> bool:
        """Whether each query row is two of the products over history: of even and of odd tokens."""
        return self.paired and self.rows < 8

    @property
    def key_block(self) -> int:
        """Bytes of a block of keys."""
        return 16 if self.paired else max(32, pl.next_power_of_2(self.key_bytes))

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
        return pl.cdiv(self.buckets * self.rows, self.queries)

    @property
    def logit_scale(self) -> float:
        """Factor on q: logits come out as powers of two, or in units of the soft-cap."""
        return self.spec.scale * (LOG2E if self.spec.softcap is None else 1 / self.spec.softcap)


def check(q: jax.Array, plain: PlainTiers, history: History, codes: TransformCodes, tiers: Tiers) -> None:
    """Raises NotImplementedError for what neither decode nor prefill attention takes."""
    check_dtypes(q, plain)
    dim, page = q.shape[3], tiers.page
    if dim > MAX_HEAD_DIM or max(codes.key.slots, codes.value.slots) > MAX_HEAD_DIM:
        raise NotImplementedError(f"head size {dim}: at most {MAX_HEAD_DIM} is built")
    if not (16 <= page <= 256 and page & (page - 1) == 0):
        raise NotImplementedError(f"page={page}: 16, 32, 64, 128 and 256 are built")
    if history.key.tokens_last or not history.value.tokens_last:
        raise NotImplementedError("the history was laid out for another implementation")
    if any(side.slots.size in UNADDRESSED for side in (history.key, history.value)):
        raise NotImplementedError("a pool of 2 to 4 GiB of slots: smaller and larger ones are built")


def rotary_of(codes: TransformCodes) -> tuple[int, bool] | None:
    """Rotated dimensions and whether neighbours are paired; None where queries are not turned to a bucket."""
    if codes.bucket is None or codes.rotary is None:
        return None
    return codes.rotary.rotary_dim, codes.rotary.pairing == "interleaved"


class Numbers(NamedTuple):
    """What `_prepare` hands over for each bucket and query row, fp32 `[R]`.

    The logit of slots c under a rounded query x is `(unit x . plane(c) + constant) scale + sigma offset + shift`,
    with `sigma offset` in `constant` where the offset is implied.
    """

    unit: jax.Array
    constant: jax.Array
    sigma: jax.Array
    shift: jax.Array


class Slots(NamedTuple):
    """Slots of a block in the order of its planes, padded: which plane, which stored slot, whether it exists."""

    plane: jax.Array
    number: jax.Array
    row: jax.Array | None  # whether it exists, `[1, slots]`; None where all do
    column: jax.Array | None

    @classmethod
    def of(cls, block: int, count: int) -> Slots:
        slot = iota(PLANES * block)
        plane, byte = div(slot, block), rem(slot, block)
        if block == count:
            return cls(plane, slot, None, None)
        kept = byte < count
        return cls(plane, jnp.where(kept, plane * count + byte, 0), kept[None, :], kept[:, None])


class Rows(NamedTuple):
    """Query rows of a program: head within the group, token, and whether the row exists."""

    head: jax.Array
    token: jax.Array
    real: jax.Array


def rows_of(plan: Plan, block: jax.Array, local: jax.Array) -> Rows:
    row = block * plan.rows + local
    real = (local < plan.rows) & (row < plan.groups * plan.tokens)
    row = jnp.where(real, row, 0)
    return Rows(div(row, plan.tokens), rem(row, plan.tokens), real)


def div(x: jax.Array, y: int) -> jax.Array:
    return x if y == 1 else lax.div(x, jnp.full_like(x, y))


def rem(x: jax.Array, y: int) -> jax.Array:
    return jnp.zeros_like(x) if y == 1 else lax.rem(x, jnp.full_like(x, y))


def iota(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def bounded(size: int, count: int) -> tuple[jax.Array, jax.Array | None]:
    """Indices below `count`, padded with zeros to `size`, and which exist `[1, size]`; None where all do."""
    index = iota(size)
    return (index, None) if size == count else (jnp.where(index < count, index, 0), (index < count)[None, :])


def both(*masks: jax.Array | None) -> jax.Array | None:
    known = [mask for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, known) if known else None


def load(ref, *indices, mask: jax.Array | None = None) -> jax.Array:
    """Elements at index arrays that broadcast against each other; zeros where masked."""
    if mask is None:
        return plgpu.load(at(ref, *indices))
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in indices))
    return plgpu.load(at(ref, *indices), mask=jnp.broadcast_to(mask, shape), other=0)


def program(plan: Plan):
    """Sequence, KV head, block of query rows, index of the head in partial results, third index."""
    index = pl.program_id(1)
    return pl.program_id(0), div(index, plan.row_blocks), rem(index, plan.row_blocks), index, pl.program_id(2)


def dot(plan: Plan, a: jax.Array, b: jax.Array, *, exact: bool = True, contract=(1, 0)) -> jax.Array:
    """Product of fp32 arrays, as accurate as fp32 or, not `exact`, as fp16."""
    if plan.interpret:
        precision = lax.Precision.HIGHEST
    else:
        presets = lax.DotAlgorithmPreset
        precision = presets.TF32_TF32_F32_X3 if exact else presets.TF32_TF32_F32
    return lax.dot_general(
        a, b, ((contract[:1], contract[1:]), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip


def integers(pairs: Sequence[tuple[jax.Array, jax.Array]], contract: int = 0) -> jax.Array:
    """Sum of int8 products below 2^22 in magnitude, plus `MAGIC_BITS`, int32: the bits of a float 1.5 2^23 larger."""
    total = jnp.full((pairs[0][0].shape[0], pairs[0][1].shape[1 - contract]), MAGIC_BITS, jnp.int32)
    for a, b in pairs:
        total += lax.dot_general(a, b, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.int32)
    return total


def asm(instruction: str, *args: jax.Array) -> jax.Array:
    """One fp32 instruction on each element; `args` are of one shape."""
    operands = ", ".join(f"${i}" for i in range(len(args) + 1))
    [y] = plgpu.elementwise_inline_asm(
        f"{instruction} {operands};", args=args, constraints=",".join(["=f", *"f" * len(args)]), pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )  # fmt: skip
    return y


def exp2(plan: Plan, x: jax.Array) -> jax.Array:
    return jnp.exp2(x) if plan.interpret else asm("ex2.approx.ftz.f32", x)


def log2(plan: Plan, x: jax.Array) -> jax.Array:
    return jnp.log2(x) if plan.interpret else asm("lg2.approx.ftz.f32", x)


def fma(plan: Plan, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """`a b + c`, which XLA's Triton leaves as two instructions."""
    a, b, c = jnp.broadcast_arrays(a, b, c)
    return a * b + c if plan.interpret else asm("fma.rn.f32", a, b, c)


def plane(plan: Plan, packed: jax.Array, i: int) -> jax.Array:
    """Bytes uint8 to int8 `code 4^i`, plane 3 to `64 code - 128`; four bytes an instruction."""
    if plan.interpret:
        return lax.bitcast_convert_type((packed & (3 << 2 * i)) ^ (0x80 if i == 3 else 0), jnp.int8)
    mask = 0x03030303 << 2 * i
    text = f"and.b32 $0, $1, {mask:#x};" if i < 3 else f"lop3.b32 $0, $1, {mask:#x}, 0x80808080, 0x6a;"  # (a & b) ^ c
    return _packed(text, packed)


def _packed(text: str, x: jax.Array) -> jax.Array:
    """An instruction on the registers of four neighbours that makes one register of four int8."""
    inputs = 1 if x.dtype.itemsize == 1 else 4
    [y] = plgpu.elementwise_inline_asm(
        text, args=[x], constraints=",".join(["=r", *"r" * inputs]), pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.int8)],
    )  # fmt: skip
    return y


def widened(plan: Plan, packed: jax.Array) -> Sequence[jax.Array]:
    """Bytes uint8 to the four planes as fp16 `code 4^i 2^-24`.

    These are the denormal numbers whose bits are those of the codes in their place: two instructions bring the bytes
    into halves of registers, one for each pair of numbers masks the others. Tensor cores multiply denormals exactly.
    """
    if plan.interpret:
        planes = ((packed & (3 << 2 * i)).astype(jnp.float32) * DENORMAL for i in range(PLANES))
        return [x.astype(jnp.float16) for x in planes]
    [wide] = plgpu.elementwise_inline_asm(
        "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;", args=[packed], constraints="=r,=r,r", pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, jnp.int16)],
    )  # fmt: skip

    def masked(mask: int) -> jax.Array:
        [plane] = plgpu.elementwise_inline_asm(
            f"and.b32 $0, $1, {mask:#x};", args=[wide], constraints="=r,r", pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, jnp.float16)],
        )  # fmt: skip
        return plane

    return [masked(0x00030003 << 2 * i) for i in range(PLANES)]


def rounded(plan: Plan, x: jax.Array, factor: jax.Array, bias: int = 0) -> jax.Array:
    """`x factor` rounded to an integer below 2^22 in magnitude, plus `MAGIC_BITS + bias`, int32.

    Adding 1.5 2^23 leaves the integer in the low bits of the sum, a fraction of the cost of a conversion.
    """
    return lax.bitcast_convert_type(fma(plan, x, factor, jnp.full_like(x, MAGIC + bias)), jnp.int32)


def bytes_of(plan: Plan, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The low and the high byte, both signed, of sums that `rounded` made with `BYTES_BIAS`: `256 high + low`."""
    if plan.interpret:
        x ^= BYTES_BIAS
        return x.astype(jnp.int8), (x >> 8).astype(jnp.int8)

    def gathered(pair: str, then: str = "") -> jax.Array:
        pairs = f"prmt.b32 t0, $1, $2, {pair}; prmt.b32 t1, $3, $4, {pair};"
        return _packed(f"{{ .reg .b32 t<2>; {pairs} prmt.b32 $0, t0, t1, 0x5410; {then} }}", x)

    return gathered("0x40", "xor.b32 $0, $0, 0x80808080;"), gathered("0x51")


# Splits and joins of two take the last axis alone, and an axis of one beside it would cost a conversion of layouts.


def weave(a: jax.Array, b: jax.Array) -> jax.Array:
    """`[n, m]` twice to `[n, 2 m]`, in turns."""
    return jnp.stack([a, b], axis=-1).reshape(a.shape[0], 2 * a.shape[1])


def unweave(x: jax.Array) -> Sequence[jax.Array]:
    """`[n, 2 m]` to `[n, m]` of even and `[n, m]` of odd columns."""
    rows, columns = x.shape
    return lax.split(x.reshape(rows, columns // 2, 2).transpose(2, 0, 1).reshape(2 * rows, -1), (rows, rows), axis=0)


def halves(x: jax.Array, axis: int = 0) -> Sequence[jax.Array]:
    """The first and the second half along an axis."""
    return lax.split(x, (x.shape[axis] // 2,) * 2, axis=axis)


def stack_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    """`[n, m]` twice to `[2 n, m]`; a concatenation that Pallas' Triton lowering knows."""
    return jnp.stack([a, b], axis=-1).transpose(2, 0, 1).reshape(2 * a.shape[0], a.shape[1])


def wrapped(x: int) -> np.int32:
    """x modulo 2^32."""
    return np.int32((x + 2**31) % 2**32 - 2**31)


def join_bytes(plan: Plan, low: jax.Array, high: jax.Array, unit: jax.Array, add: jax.Array) -> jax.Array:
    """fp32 `unit (256 high + low) + add` of int32 sums that `integers` made.

    The sums are read as the floats that their bits are, 1.5 2^23 larger. `add` comes with that taken away for the low
    ones, `MAGIC unit`, a rounding of less than one unit; for the high ones it would be one of two hundred.
    """
    low, high = (lax.bitcast_convert_type(x, jnp.float32) for x in (low, high))
    return fma(plan, high - MAGIC, 256 * unit, fma(plan, low, unit, add))


def history_end(plan: Plan, start: jax.Array, count: jax.Array, position: jax.Array) -> jax.Array:
    """First plain position after the history that queries at `position` see."""
    end = plan.tiers.history_end(position)
    if plan.spec.exact_chunk:
        end = jnp.minimum(end, jnp.maximum(start, plan.tiers.sink))
    return jnp.minimum(end, plan.tiers.history_end(start + count - 1))


def at(ref, *indices):
    """`ref.at` with index arrays that broadcast against each other."""
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in indices))
    return ref.at[tuple(jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in indices)]
