"""Three-tier decode attention on TPUs, through Mosaic: one kernel, a program for each sequence and block of KV heads.

No TPU has run this file. It is compiled for real chips by libtpu and simulated with race detection (`docs/tpu.md`).

A program first reads the plain tokens, then walks the pages of its sequence, `pages` at a time through `depth`
buffers: while one set of pages is computed on, the next are on their way. Pages of 128 lie `[K, N/4, page]`, tokens on
the 128 lanes, so a page of all its heads is one piece of memory; shorter ones lie in words, of which several pages make
128 tokens (`pallas_kernels.tpu_pages`); scales are copied with their pages, or XLA gathers them. Lists of pages and
lengths are scalars that are there before the program starts.

Bytes become numbers without a conversion. Four sublanes of bytes seen as one 32-bit word hold two 16-bit words of eight
slots each; `word >> shift & mask | 0x4300` is, as two bfloat16 numbers, `128 + 4^k c`: three logic operations turn
1024 words into 2048 operands of the MXU. The 4^k go into the rows of E, the 128 come out after the sum. Field f of
16-bit word w is slot `(f mod 4) N/4 + 2 w + (f > 3)`, an order that only the rows of E know. Queries of a bucket
(`q' = E q_B`) and probabilities enter as two bfloat16 parts each, upper and lower rows of one operand, which costs
nothing below eight rows; so both are good to 16 bits. Queries of fp32 ask for more: three parts, and the 128 are taken
off before the product, where they would cost 6 of 24 bits. Bytes read per token and KV head: `(N_k + N_v) / 4`, and 2
for each scale and offset.
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
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import codec, tpu_pages
from pallas_kernels.attention.api import (
    AttentionSpec,
    PlainTiers,
    check_dtypes,
    plain_rows,
    ring_positions,
    window_limit,
)
from pallas_kernels.history import LANES, History, short_page, turn_factors
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

MASKED = -1e30  # finite, so that differences of two masked logits are zero and not NaN
SUBLANES = 8
MAX_TOKENS = 16
MAX_ROWS = 256  # query heads a KV head times query tokens
HEAD_DIMS = (64, 128, 256)
STEP_TOKENS = 512  # of history that a program computes on at a time, at most
DEPTH = 3  # buffers of so many tokens
VMEM = 12 * 2**20  # bytes that a program of several heads plans with
MAX_VMEM = 16 * 2**20  # of one head; all that v4 has, and what libtpu gives a program of v5e and v5p
NOWHERE = np.iinfo(np.int32).max  # position of a place without a token
# Field f of a 16-bit word: the shift that brings it to where bfloat16's 7-bit mantissa can hold it, and the power of 4
# that it then carries.
SHIFTS = (0, 0, 0, 2, 8, 8, 8, 10)
POWERS = (0, 1, 2, 2, 0, 1, 2, 2)
FIELDS = len(SHIFTS)
BIAS = 128.0
ONE_PLUS = 0x43004300  # exponents of two bfloat16 numbers whose last bit is worth 1
HIGHEST = lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static facts of one call."""

    rows: int  # query rows of a KV head, padded to sublanes; row r is head r // T, token r % T
    kv_heads: int
    heads: int  # KV heads of a program
    head_dim: int
    key_slots: int
    value_slots: int
    page: int  # tokens
    together: int  # pages that make a block of 128 tokens
    blocks: int  # of a step
    depth: int  # buffers
    parts: int  # bfloat16 numbers of a query or probability; three are fp32
    bucket: int  # steps of a bucket, 0 without buckets
    table: int  # page-table entries of a sequence
    plain: int  # places of plain tokens, padded to lanes
    plain_bytes: int  # of a number of them; float16 goes as fp32, because Mosaic has none
    sink: int
    spec: AttentionSpec
    windowed: bool
    key_offset: bool
    value_offset: bool
    turned: bool
    sinks: bool
    scale_dtype: str

    @property
    def gathered(self) -> bool:
        """Whether XLA gathers scales."""
        return tpu_pages.gathers_scales(self.kv_heads, self.page)

    @property
    def bias(self) -> float:
        """What slots have too much as operands of products."""
        return BIAS if self.parts == 2 else 0.0

    @property
    def pages(self) -> int:
        """Pages of a step."""
        return self.blocks * self.together

    @property
    def step(self) -> int:
        """Tokens of a step."""
        return self.blocks * LANES


class _Inputs(NamedTuple):
    """Arrays outside the kernel, references to the program's part of them inside; None where absent."""

    query: Any  # f32 [B, K, Q, D], scaled
    partner: Any  # f32 [B, K, Q, D], coordinates swapped as the rotation pairs them
    bounds: Any  # int32 [B, 2, Q, 1], position of each row and the end of its history
    sink_logits: Any  # f32 [K, Q, 1]
    plain_key: Any  # [B, K, D, n]
    plain_value: Any
    plain_positions: Any  # int32 [B, 1, n], NOWHERE where there is no token
    decode: Any  # f32 [K, N, D], rows of E in the order of fields, over their powers of 4
    key_mean: Any  # f32 [K, 1, D]
    value_mean: Any
    turns: Any  # two of f32 [buckets, D]
    key: Any  # uint8 [L, P, K, N/4, page], or of short pages int32 [L, P, K/h, R, 128]
    value: Any
    numbers: Any  # 16-bit words [L, P, K, page], gathered [B, steps, K, step]: scales of keys and values, then offsets


class _Scratch(NamedTuple):
    key: Any  # uint8 [depth, blocks, heads, N/4, page], or int32 [depth, blocks, heads/h, h N/16, 128]
    value: Any
    numbers: Any  # list of [depth, pages, K, page] or [depth, 1, K, step]
    arrived: Any  # DMA semaphores [depth, arrays]
    query: Any  # bf16 [heads, parts Q, N], high parts first
    constants: Any  # f32 [3, heads, Q, 1]: bias of the products, sum of q', logit of the mean
    wide: Any  # f32 [arrays, K, step], numbers of the step
    sums: Any  # f32 [6, heads, Q, 1], a `_Sums`


class _Sums(NamedTuple):
    """Softmax state of the query rows `[Q, 1]`."""

    maximum: jax.Array  # of logits so far
    plain: jax.Array  # of those of plain tokens, which the output is relative to until the end
    total: jax.Array  # of probabilities
    weight: jax.Array  # of those of history
    scaled: jax.Array  # sum of p times the scale of values
    offsets: jax.Array  # sum of p times their offset


def unavailable() -> str | None:
    """Why these kernels cannot run here; None where they can."""
    absent = jax.sharding.get_abstract_mesh().abstract_device  # compiling for a TPU that is not here
    if jax.default_backend() == "tpu" or (absent is not None and absent.platform == "tpu"):
        return None
    return f"needs a TPU, the default backend is {jax.default_backend()}"


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
    interpret: Any = False,
) -> jax.Array:
    """See `pallas_kernels.attention.attend`.

    Args:
        interpret: True for Pallas' interpreter, or `pltpu.InterpretParams` for the TPU's, on any device.
    """
    if history is None or codes is None:
        raise NotImplementedError("the cache is all plain")
    _check(q, k, plain, history, codes, tiers)
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    plan = _plan(q, k, plain, page_indices, codes, tiers, spec, window is not None, sink_logits is not None)
    tpu_pages.check_table(batch, plan.table)
    starts, counts = starts.astype(jnp.int32), counts.astype(jnp.int32)

    rows = _rows(plan, q.astype(jnp.float32) * spec.scale, kv_heads)
    positions = starts[:, None] + jnp.tile(jnp.arange(tokens, dtype=jnp.int32), heads // kv_heads)
    ends = tiers.history_end(positions)
    if spec.exact_chunk:
        ends = jnp.minimum(ends, jnp.maximum(starts, tiers.sink)[:, None])
    padding = ((0, 0), (0, plan.rows - positions.shape[1]))
    bounds = jnp.stack([jnp.pad(positions, padding, constant_values=-1), jnp.pad(ends, padding)], axis=1)[..., None]

    # Scalars: where history ends, and the first step that a query can see.
    layer, limit = jnp.asarray(layer, jnp.int32).reshape(1), window_limit(window)
    stored = jnp.maximum(tiers.history_end(starts + counts - 1) - tiers.sink, 0)
    stored = jnp.minimum(stored, page_indices.shape[1] * tiers.page)  # what lies past the table belongs to others
    first = jnp.zeros_like(starts) if window is None else jnp.maximum(starts - limit + 1 - tiers.sink, 0) // plan.step
    pool = history.key.scale.shape[1]
    table = jnp.pad(page_indices.astype(jnp.int32), ((0, 0), (0, plan.table - page_indices.shape[1])))
    table = _in_range(table, pool)
    scalars = (layer, limit, first, stored, table.reshape(-1))

    plain_key, plain_value, plain_positions = _plain(plan, k, v, plain, layer[0], starts, counts, tiers, window)
    turns = turn_factors(codes, tiers, tiers.sink + plan.table * plan.page, dim)
    key, value = codes.key.layer(layer[0]), codes.value.layer(layer[0])
    order = field_order(plan.key_slots)
    powers = np.repeat(4.0 ** -np.array(POWERS), plan.key_slots // FIELDS).astype(np.float32)
    words = [x for side in ("scale", "offset") for x in (getattr(history.key, side), getattr(history.value, side))]
    inputs = _Inputs(
        query=rows,
        partner=_partner(rows, codes) if plan.turned else None,
        bounds=bounds,
        sink_logits=_sink_rows(plan, sink_logits, kv_heads, tokens),
        plain_key=plain_key,
        plain_value=plain_value,
        plain_positions=plain_positions,
        decode=key.decode[:, order] * powers[:, None],
        key_mean=key.mu[:, None],
        value_mean=value.mu[:, None],
        turns=tuple(jnp.asarray(x) for x in turns) if plan.turned else None,
        key=history.key.slots,
        value=history.value.slots,
        numbers=[_numbers(plan, x, layer[0], table) for x in words if x is not None],
    )
    output, slots = _call(plan, scalars, inputs, interpret)
    decode = value.decode[:, field_order(plan.value_slots)]
    output = output + jnp.einsum("bkqn,knd->bkqd", slots, decode, precision="highest")
    output = output[:, :, : tokens * (heads // kv_heads)].reshape(batch, kv_heads, heads // kv_heads, tokens, dim)
    return output.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def field_order(slots: int) -> np.ndarray:
    """Stored slot of every row that `_fields` makes, `[N]`: field by field, word by word."""
    field, word = np.divmod(np.arange(slots), slots // FIELDS)
    return (field % codec.PLANES) * (slots // codec.PLANES) + 2 * word + field // codec.PLANES


def _check(q, k, plain, history, codes, tiers) -> None:
    dim, tokens, rows = q.shape[3], q.shape[1], q.shape[1] * (q.shape[2] // k.shape[2])
    check_dtypes(q, plain)
    if dim not in HEAD_DIMS:
        raise NotImplementedError(f"head size {dim}: {', '.join(map(str, HEAD_DIMS))} are built")
    if (codes.key.slots, codes.value.slots) != (dim, dim):
        raise NotImplementedError(
            f"{codes.key.slots} and {codes.value.slots} slots a row: only {dim}, one each, is built"
        )
    if tokens > MAX_TOKENS:
        raise NotImplementedError(f"{tokens} query tokens a call: at most {MAX_TOKENS} are built")
    if rows > MAX_ROWS:
        raise NotImplementedError(f"{rows} query rows a KV head: at most {MAX_ROWS} are built")
    for pool in (history.key, history.value):
        tpu_pages.check(pool, dim, tiers.page)
    if codes.bucket is not None and codes.bucket % LANES:
        raise NotImplementedError(f"buckets of {codes.bucket} tokens: multiples of {LANES} are built")


def _plan(q, k, plain, page_indices, codes, tiers, spec, windowed, sinks) -> _Plan:
    dim, tokens, kv_heads = q.shape[3], q.shape[1], k.shape[2]
    together, per_bucket = LANES // tiers.page, 0 if codes.bucket is None else codes.bucket // LANES
    blocks = min(STEP_TOKENS // LANES, pl.next_power_of_2(max(1, pl.cdiv(page_indices.shape[1], together))))
    blocks = math.gcd(blocks, per_bucket)
    pages = blocks * together
    plan = _Plan(
        rows=-(-tokens * (q.shape[2] // kv_heads) // SUBLANES) * SUBLANES, kv_heads=kv_heads, heads=kv_heads,
        head_dim=dim, key_slots=codes.key.slots, value_slots=codes.value.slots, page=tiers.page, together=together,
        blocks=blocks, depth=DEPTH, parts=3 if q.dtype == jnp.float32 else 2, bucket=per_bucket // blocks,
        table=max(1, pl.cdiv(page_indices.shape[1], pages)) * pages,
        plain=pl.cdiv(tiers.sink + tokens + plain.recent_k.shape[2], LANES) * LANES,
        plain_bytes=2 if k.dtype == jnp.bfloat16 else 4, sink=tiers.sink, spec=spec, windowed=windowed,
        key_offset=codes.key.has_offset, value_offset=codes.value.has_offset,
        turned=codes.bucket is not None and codes.rotary is not None, sinks=sinks, scale_dtype=codes.scale_dtype,
    )  # fmt: skip
    size = short_page(plan.key_slots, plan.page, kv_heads)
    unit = size.heads if size else 1
    divisors = [n for n in range(kv_heads, 0, -1) if kv_heads % n == 0 and n % unit == 0]
    fitting = (n for n in divisors if vmem_bytes(dataclasses.replace(plan, heads=n)) <= VMEM)
    plan = dataclasses.replace(plan, heads=next(fitting, unit))
    if (size := vmem_bytes(plan)) > MAX_VMEM:
        raise NotImplementedError(
            f"{plan.plain} plain tokens and {plan.rows} query rows of size {dim} a KV head take {size / 2**20:.1f} MiB "
            f"of VMEM: at most {MAX_VMEM // 2**20} are built; a smaller recent, fewer query tokens or larger buckets "
            "take less"
        )
    return plan


def vmem_bytes(plan: _Plan) -> int:
    """Bytes of VMEM of a program: operands and results twice, scratch once, and what a head spills from registers."""
    lanes = -(-plan.head_dim // LANES) * LANES
    rows, numbers = plan.rows, 2 + plan.key_offset + plan.value_offset
    blocks = 4 * (rows * (4 * lanes + 2 * LANES) + plan.key_slots * lanes)
    blocks += 2 * plan.head_dim * plan.plain * plan.plain_bytes
    scratch = plan.depth * plan.step * (plan.key_slots + plan.value_slots) // codec.PLANES
    scratch += 2 * plan.parts * rows * plan.key_slots + 4 * 8 * rows * LANES
    shared = plan.depth * numbers * plan.step * max(plan.kv_heads, SUBLANES) * 2
    shared += 4 * numbers * plan.step * plan.kv_heads + 2 * 4 * SUBLANES * plan.plain
    if plan.turned:
        buckets = pl.cdiv(plan.table * plan.page, plan.bucket * plan.step)
        shared += 2 * 4 * pl.cdiv(buckets, SUBLANES) * SUBLANES * lanes
    # Logits of plain tokens, in as many copies as libtpu makes of them, then those of a step and its operands.
    copies = 4 if plan.plain_bytes == 2 else 6
    spilled = max(4 * rows * copies * plan.plain, 4 * rows * 8 * plan.step + 8 * plan.step * plan.key_slots)
    return plan.heads * (2 * blocks + scratch) + shared + spilled


def _in_range(pages: jax.Array, pool: int) -> jax.Array:
    """Page ids that a copy may follow; what a table holds past a sequence's history is never trusted."""
    return jnp.clip(pages, 0, pool - 1)


def _numbers(plan: _Plan, words: jax.Array, layer: jax.Array, table: jax.Array) -> jax.Array:
    """Scales or offsets as the kernel copies them: pages, or gathered in the order of the sequences."""
    words = lax.bitcast_convert_type(words, jnp.int16) if words.dtype == jnp.float16 else words
    if not plan.gathered:
        return words
    # A row for each page, or XLA would pad what it gathers from to 128 lanes a head.
    words = words[layer].reshape(words.shape[1], -1)[table]
    words = words.reshape(len(table), -1, plan.pages, plan.kv_heads, plan.page)
    return words.swapaxes(2, 3).reshape(*words.shape[:2], plan.kv_heads, plan.step)


def _rows(plan: _Plan, q: jax.Array, kv_heads: int) -> jax.Array:
    """`[B, T, N, D]` to `[B, K, Q, D]`, the G heads of a group and the T tokens flattened, padded with zeros."""
    batch, tokens, heads, dim = q.shape
    rows = q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, -1, dim)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, plan.rows - rows.shape[2]), (0, 0)))


def _sink_rows(plan: _Plan, sink_logits: jax.Array | None, kv_heads: int, tokens: int) -> jax.Array | None:
    if sink_logits is None:
        return None
    rows = jnp.repeat(sink_logits.astype(jnp.float32).reshape(kv_heads, -1), tokens, axis=1)
    return jnp.pad(rows, ((0, 0), (0, plan.rows - rows.shape[1])))[..., None]


def _partner(rows: jax.Array, codes: TransformCodes) -> jax.Array:
    """Of each coordinate, the one that the rotation mixes with it; itself where there is none.

    No gather: of many heads XLA keeps its result in VMEM, which it can outgrow.
    """
    assert codes.rotary is not None
    size = codes.rotary.rotary_dim
    turned, rest = rows[..., :size], rows[..., size:]
    if codes.rotary.pairing == "interleaved":
        turned = jnp.where(np.arange(size) % 2 == 0, jnp.roll(turned, -1, axis=-1), jnp.roll(turned, 1, axis=-1))
    else:
        turned = jnp.roll(turned, size // 2, axis=-1)
    return jnp.concatenate([turned, rest], axis=-1)


def _plain(plan: _Plan, k, v, plain: PlainTiers, layer, starts, counts, tiers: Tiers, window):
    """Sinks, new tokens and recents of one layer with tokens on lanes `[B, K, D, n]`, and positions `[B, 1, n]`."""
    batch, tokens = k.shape[:2]
    length = starts[:, None]
    held = ring_positions(length, plain.recent_k.shape[2])
    sink, new = (jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n)) for n in (tiers.sink, tokens))
    positions = jnp.concatenate([sink, length + new, held], axis=1)
    usable = jnp.concatenate([sink < length, new < counts[:, None], held >= tiers.sink], axis=1)
    if window is not None:
        usable &= positions > length - window
    pad = plan.plain - positions.shape[1]

    def tokens_last(sinks: jax.Array, new: jax.Array, recent: jax.Array) -> jax.Array:
        sinks, recent = (plain_rows(tier, layer, new.shape[2:]) for tier in (sinks, recent))
        x = jnp.concatenate([sinks, new, recent], axis=1)
        # Unused places may hold NaN, and 0 * NaN is NaN: select before the product.
        x = jnp.where(usable[:, :, None, None], x, 0).transpose(0, 2, 3, 1)
        x = x.astype(jnp.float32) if x.dtype == jnp.float16 else x  # Mosaic has no float16
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, pad)))

    positions = jnp.pad(jnp.where(usable, positions, NOWHERE), ((0, 0), (0, pad)), constant_values=NOWHERE)
    keys = tokens_last(plain.sink_k, k, plain.recent_k)
    return keys, tokens_last(plain.sink_v, v, plain.recent_v), positions[:, None]


def _call(plan: _Plan, scalars, inputs: _Inputs, interpret) -> tuple[jax.Array, jax.Array]:
    """Outputs of everything but the slots of values `[B, K, Q, D]`, and those `[B, K, Q, N]`, fp32."""
    batch = inputs.query.shape[0]
    heads, rows = plan.heads, plan.rows

    def by_head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, *shape), lambda b, h, *_: (b, h, 0, 0))

    def by_sequence(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda b, h, *_: (b, *(0,) * len(shape)))

    def of_layer(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((heads, *shape), lambda b, h, *_: (h, 0, 0))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    specs = _Inputs(
        query=by_head(rows, plan.head_dim),
        partner=by_head(rows, plan.head_dim),
        bounds=by_sequence(2, rows, 1),
        sink_logits=of_layer(rows, 1),
        plain_key=by_head(plan.head_dim, plan.plain),
        plain_value=by_head(plan.head_dim, plan.plain),
        plain_positions=by_sequence(1, plan.plain),
        decode=of_layer(plan.key_slots, plan.head_dim),
        key_mean=of_layer(1, plan.head_dim),
        value_mean=of_layer(1, plan.head_dim),
        turns=(pl.BlockSpec(memory_space=pltpu.VMEM),) * 2,
        key=anywhere,
        value=anywhere,
        numbers=[anywhere] * len(inputs.numbers),
    )
    specs = _Inputs(*(None if x is None else spec for x, spec in zip(inputs, specs, strict=True)))

    def slot_buffers(pool: jax.Array) -> Any:
        units, rows, lanes = pool.shape[2:]
        shape = (units * heads // plan.kv_heads, rows * plan.together, lanes)
        return pltpu.VMEM((plan.depth, plan.blocks, *shape), pool.dtype)

    scratch = _Scratch(
        key=slot_buffers(inputs.key),
        value=slot_buffers(inputs.value),
        numbers=[
            pltpu.VMEM((plan.depth, plan.step // x.shape[3], plan.kv_heads, x.shape[3]), x.dtype)
            for x in inputs.numbers
        ],
        arrived=pltpu.SemaphoreType.DMA((plan.depth, 2 + len(inputs.numbers))),
        query=pltpu.VMEM((heads, plan.parts * rows, plan.key_slots), jnp.bfloat16),
        constants=pltpu.VMEM((3, heads, rows, 1), jnp.float32),
        wide=pltpu.VMEM((len(inputs.numbers), plan.kv_heads, plan.step), jnp.float32),
        sums=pltpu.VMEM((len(_Sums._fields), heads, rows, 1), jnp.float32),
    )
    kernel = pl.pallas_call(
        functools.partial(_attend, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, plan.kv_heads // heads),
            in_specs=[specs],
            out_specs=[by_head(rows, plan.head_dim), by_head(rows, plan.value_slots)],
            scratch_shapes=[scratch],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, plan.kv_heads, rows, size), jnp.float32)
            for size in (plan.head_dim, plan.value_slots)
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="oscar_attend",
    )
    with jax.enable_x64(False):  # Mosaic has no 64-bit numbers, which indices would be
        return kernel(*scalars, inputs)


# The kernel.


def _attend(layer, limit, first, stored, table, inputs: _Inputs, output, slots, scratch: _Scratch, *, plan: _Plan):
    sequence, heads_block = pl.program_id(0), pl.program_id(1)
    tokens, begin = stored[sequence], first[sequence]
    pages = lax.div(tokens + plan.page - 1, jnp.int32(plan.page))
    end = lax.div(pages + plan.pages - 1, jnp.int32(plan.pages))

    def each(step, action: str) -> None:
        """Starts the copies of a step into its buffer, or waits for them."""
        place = lax.rem(step, jnp.int32(plan.depth))

        def copy(array: int, source, target) -> None:
            getattr(pltpu.make_async_copy(source, target, scratch.arrived.at[place, array]), action)()

        @pl.loop(0, plan.blocks, unroll=plan.together == 1)
        def _(block):
            for i in range(plan.together):
                entry = step * plan.pages + block * plan.together + i

                @pl.when((step < end) & (entry < pages))
                def _(i=i, entry=entry):
                    page = table[sequence * plan.table + entry]
                    for array, (pool, buffer) in enumerate(((inputs.key, scratch.key), (inputs.value, scratch.value))):
                        units, rows = buffer.shape[2], pool.shape[3]
                        copy(
                            array,
                            pool.at[layer[0], page, pl.ds(heads_block * units, units)],
                            buffer.at[place, block, :, pl.ds(i * rows, rows)],
                        )
                    if not plan.gathered:
                        for array, (pool, buffer) in enumerate(zip(inputs.numbers, scratch.numbers, strict=True), 2):
                            copy(array, pool.at[layer[0], page], buffer.at[place, block])

        if plan.gathered:

            @pl.when(step < end)
            def _():
                for array, (rows, buffer) in enumerate(zip(inputs.numbers, scratch.numbers, strict=True), 2):
                    copy(array, rows.at[sequence, step], buffer.at[place, 0])

    @pl.loop(begin, begin + plan.depth - 1)
    def _(step):
        each(step, "start")

    @pl.loop(0, plan.heads)
    def _(head):
        _read_plain(plan, inputs, scratch, output, limit[0], head)
        slots[head] = jnp.zeros(slots.shape[1:], jnp.float32)

    @pl.loop(begin, end)
    def _(step):
        each(step + plan.depth - 1, "start")

        @pl.when((step == begin) | (plan.bucket > 0 and lax.rem(step, jnp.int32(plan.bucket)) == 0))
        def _():
            bucket = lax.div(step, jnp.int32(plan.bucket)) if plan.bucket else jnp.int32(0)
            pl.loop(0, plan.heads)(functools.partial(_transform, plan, inputs, scratch, bucket))

        each(step, "wait")
        place = lax.rem(step, jnp.int32(plan.depth))
        index = step * plan.step + lax.broadcasted_iota(jnp.int32, (1, plan.step), 1)
        usable = index < tokens  # what no query of the call sees may be NaN
        if plan.windowed:
            usable &= plan.sink + index > inputs.bounds[0][:1] - limit[0]
        for i, words in enumerate(scratch.numbers):
            numbers = jnp.concatenate([_number(plan, words[place, page]) for page in range(words.shape[1])], axis=1)
            scratch.wide[i] = jnp.where(usable, numbers, 0.0)

        @pl.loop(0, plan.heads)
        def _(head):
            _read_history(plan, inputs, scratch, slots, limit[0], plan.sink + index, tokens, place, heads_block, head)

    @pl.loop(0, plan.heads)
    def _(head):
        sums = _Sums(*(scratch.sums[i, head] for i in range(len(_Sums._fields))))
        share = jnp.where(sums.total > 0, 1 / jnp.where(sums.total > 0, sums.total, 1.0), 0.0)
        kept = output[head] * jnp.exp(sums.plain - sums.maximum)
        output[head] = (kept + sums.weight * inputs.value_mean[head]) * share
        by_power = (slots[head] - plan.bias * sums.scaled) / _powers(plan.value_slots)
        slots[head] = (by_power + sums.offsets) * share


def _read_plain(plan: _Plan, inputs: _Inputs, scratch: _Scratch, output, limit, head) -> None:
    """Softmax state and output of the plain tokens."""
    logits = _cap(plan, _product(plan, inputs.query[head], inputs.plain_key[head], 0))
    position, history_end = inputs.bounds[0], inputs.bounds[1]
    j = inputs.plain_positions[...]
    mask = (j <= position) & ((j < plan.sink) | (j >= history_end))
    if plan.windowed:
        mask &= j > position - limit
    logits = jnp.where(mask, logits, MASKED)
    maximum = jnp.max(logits, axis=1, keepdims=True)
    if inputs.sink_logits is not None:
        maximum = jnp.maximum(maximum, inputs.sink_logits[head])
    probabilities = jnp.where(mask, jnp.exp(logits - maximum), 0.0)
    total = jnp.sum(probabilities, axis=1, keepdims=True)
    if inputs.sink_logits is not None:
        total += jnp.exp(inputs.sink_logits[head] - maximum)
    output[head] = _product(plan, probabilities, inputs.plain_value[head], 1)
    zero = jnp.zeros_like(total)
    for i, x in enumerate(_Sums(maximum, maximum, total, zero, zero, zero)):
        scratch.sums[i, head] = x


def _transform(plan: _Plan, inputs: _Inputs, scratch: _Scratch, bucket, head) -> None:
    """The queries of a bucket, `q' = E q R(-B)`, in parts, and what its logits take besides the product."""
    query = inputs.query[head]
    if plan.turned:
        own, partner = (turn[pl.ds(bucket, 1), :] for turn in inputs.turns)
        query = query * own + inputs.partner[head] * partner
    x = lax.dot_general(
        query, inputs.decode[head], (((1,), (1,)), ((), ())), precision=HIGHEST, preferred_element_type=jnp.float32
    )  # fmt: skip
    scratch.query[head], rounded = _parts(plan, x)
    bias = plan.bias * jnp.sum(rounded, axis=1, keepdims=True)
    sigma = jnp.sum(rounded * _powers(plan.key_slots), axis=1, keepdims=True)
    if not plan.key_offset:
        bias -= codec.IMPLIED_OFFSET * sigma
    mean = jnp.sum(query * inputs.key_mean[head], axis=1, keepdims=True)
    for i, constant in enumerate((bias, sigma, mean)):
        scratch.constants[i, head] = constant


def _read_history(plan: _Plan, inputs, scratch: _Scratch, slots, limit, j, tokens, place, heads_block, head) -> None:
    """Adds the tokens of a step, at positions j `[1, step]`."""
    row = pl.ds(heads_block * plan.heads + head, 1)
    numbers = [scratch.wide[i, row, :] for i in range(len(scratch.numbers))]
    bias, sigma, mean = (scratch.constants[i, head] for i in range(3))
    sums = _Sums(*(scratch.sums[i, head] for i in range(len(_Sums._fields))))

    def fields(slots) -> jax.Array:
        words = (_words(plan, slots.at[place, block], head) for block in range(plan.blocks))
        x = jnp.concatenate([_fields(x) for x in words], axis=1)
        return x if plan.bias else (x.astype(jnp.float32) - BIAS).astype(jnp.bfloat16)  # v5e has no bfloat16 sums

    logits = _sum_of_parts(plan, _dot(scratch.query[head], fields(scratch.key), 0))
    logits = numbers[0] * (logits - bias) + mean
    if plan.key_offset:
        logits += numbers[2] * sigma
    position, history_end = inputs.bounds[0], inputs.bounds[1]
    mask = (j < history_end) & (j < plan.sink + tokens)
    if plan.windowed:
        mask &= j > position - limit
    logits = jnp.where(mask, _cap(plan, logits), MASKED)
    maximum = jnp.maximum(sums.maximum, jnp.max(logits, axis=1, keepdims=True))
    probabilities = jnp.where(mask, jnp.exp(logits - maximum), 0.0)
    rescale = jnp.exp(sums.maximum - maximum)
    operand, rounded = _parts(plan, probabilities * numbers[1])
    scaled = jnp.sum(rounded, axis=1, keepdims=True)
    if plan.value_offset:
        offsets = jnp.sum(probabilities * numbers[2 + plan.key_offset], axis=1, keepdims=True)
    else:
        offsets = codec.IMPLIED_OFFSET * scaled
    added = _sum_of_parts(plan, _dot(operand, fields(scratch.value), 1))
    slots[head] = slots[head] * rescale + added
    weight = jnp.sum(probabilities, axis=1, keepdims=True)
    after = _Sums(
        maximum, sums.plain, sums.total * rescale + weight, sums.weight * rescale + weight,
        sums.scaled * rescale + scaled, sums.offsets * rescale + offsets,
    )  # fmt: skip
    for i, x in enumerate(after):
        scratch.sums[i, head] = x


def _words(plan: _Plan, slots, head) -> jax.Array:
    """Words int32 `[N/16, 128]` of a head, from the slots of a block in its buffer."""
    if plan.together == 1:
        return pltpu.bitcast(slots[head], jnp.int32)
    heads = plan.heads // slots.shape[0]  # of a unit
    words = tpu_pages.exchange(slots[lax.div(head, jnp.int32(heads))], plan.page)
    if heads == 1:
        return words
    rows = words.shape[0] // heads
    return jnp.where(lax.rem(head, jnp.int32(2)) == 0, words[:rows], words[rows:])


def _fields(words: jax.Array) -> jax.Array:
    """Slots c of words int32 `[N/16, tokens]` as bfloat16 `128 + 4^power c`, `[N, tokens]` in `field_order`."""
    fields = []
    for shift, power in zip(SHIFTS, POWERS, strict=True):
        here = words >> shift if shift else words
        fields.append(pltpu.bitcast(here & (0x00030003 << 2 * power) | ONE_PLUS, jnp.bfloat16))
    return jnp.concatenate(fields, axis=0)


def _powers(slots: int) -> jax.Array:
    """4 to the power that each field carries, fp32 `[1, N]`."""
    field = lax.broadcasted_iota(jnp.int32, (1, slots), 1) // (slots // FIELDS)
    plane = field & (codec.PLANES - 1)
    return jnp.where(plane == 0, 1.0, jnp.where(plane == 1, 4.0, 16.0))


def _number(plan: _Plan, words: jax.Array) -> jax.Array:
    """16-bit floats, given as their bits, in fp32; of float16 every Inf and NaN as NaN."""
    words = words.astype(jnp.int32)
    if plan.scale_dtype == "bfloat16":
        return pltpu.bitcast(words << 16, jnp.float32)
    magnitude = words & 0x7FFF
    normal = pltpu.bitcast((magnitude << 13) + (112 << 23), jnp.float32)
    x = jnp.where(magnitude < 0x0400, magnitude.astype(jnp.float32) * 2.0**-24, normal)
    x = jnp.where(magnitude < 0x7C00, x, jnp.nan)
    return jnp.where(words < 0, -x, x)


def _cap(plan: _Plan, logits: jax.Array) -> jax.Array:
    softcap = plan.spec.softcap
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _product(plan: _Plan, a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Product of fp32 `[Q, X]` with b over its axis `axis`."""
    if b.dtype == jnp.bfloat16:
        return _sum_of_parts(plan, _dot(_parts(plan, a)[0], b, axis))
    return lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=HIGHEST, preferred_element_type=jnp.float32
    )  # fmt: skip


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _parts(plan: _Plan, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bfloat16 `[parts Q, X]`, highest first, whose sum is fp32 x `[Q, X]` to 8 bits a part; and that sum, fp32."""
    parts = [rounded := _rounded(x)]
    while len(parts) < plan.parts:
        parts.append(_rounded(x - rounded))
        rounded = rounded + parts[-1]
    return jnp.concatenate(parts, axis=0).astype(jnp.bfloat16), rounded


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _sum_of_parts(plan: _Plan, x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.add, jnp.split(x, plan.parts))
