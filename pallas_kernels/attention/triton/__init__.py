"""Three-tier decode attention on NVIDIA GPUs, through Pallas' Triton lowering.

Three launches, more for many splits. `begin` transforms every query once for each bucket and reads the plain tokens;
`attend_history` reads packed slots, one span of tiles a program; `merge` makes one of some splits; `finish` merges
what is left and maps the slot accumulator back with E. Bytes read per token and KV head: `(N_k + N_v) / 4`, and 2 for
each scale and offset. Keys lie token-major in a page and values byte-major (`pallas_kernels.history`), the orders that
an `mma` wants.

Pallas' Triton lowering is deprecated from jax 0.11 on, and still shipped in 0.12.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention.api import AttentionSpec, PlainTiers, window_limit
from pallas_kernels.attention.triton import ops
from pallas_kernels.attention.triton.begin import MAX_TOKENS, begin
from pallas_kernels.attention.triton.finish import MERGE, finish, merge
from pallas_kernels.attention.triton.history import attend_history, key_rows
from pallas_kernels.history import History, turn_factors
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

TILE, TILE_OF_HALVES = 128, 64
MAX_HALVES = 16  # query rows of a program, of fp16
HALVES_SLOTS = range(65, 129)  # of keys and of values, for fp16: fewer are half an operand, more do not fit
PIECE, WIDEST = 32, 128  # coordinates of a program of `finish` where there are few, and at most: shared memory
WAVE = 132  # multiprocessors of an H200, to choose spans by
WARPS, WARPS_OF_MANY_ROWS = 12, 8  # of `attend_history` on one of them, with four query rows and with more
LATENT, OVERHEAD = 7.7, 1.5
MULTIPROCESSORS = 96  # to share out smaller launches; an H100 has up to 132, an A100 108


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
    tile: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.attention.attend`.

    Args:
        span: tiles of history that one program reads; by default from the shapes.
        tile: tokens of a tile, 32, 64 or 128, or fewer where buckets are shorter; by default from the shapes.
        interpret: run in Pallas' interpreter, on any device.
    """
    if history is None or codes is None:
        raise NotImplementedError("the cache is all plain")
    plan = _plan(q, k, plain, history, page_indices, codes, tiers, spec, window is not None, span, tile, interpret)
    batch, heads = q.shape[0], k.shape[2] * plan.row_blocks
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    launch = functools.partial(_launch, plan)

    partial = functools.partial(_partials, batch, heads, plan)
    # Rows of E without the factor 4^i of their plane. fp16 holds them: a rotation, of the order of one. XLA lifts this
    # out of a loop over layers.
    planes = np.repeat(np.float32(4.0) ** -np.arange(ops.PLANES, dtype=np.float32), plan.key_bytes)
    decode = (jnp.asarray(codes.key.decode) * planes[:, None]).astype(
        jnp.float32 if q.dtype == jnp.float32 else jnp.float16
    )
    lengths = (layer, window_limit(window), starts.astype(jnp.int32), counts.astype(jnp.int32))
    plain_output, plain_sums, queries, numbers = launch(
        begin,
        (batch, heads, plan.query_blocks + plan.plain_splits),
        [
            *partial(plan.plain_splits, plan.dim),
            _queries(plan, batch, heads),
            ((batch, heads, plan.buckets, len(ops.Numbers._fields), plan.rows), jnp.float32),
        ],
        (*lengths, q, k, v, *jax.tree.leaves(plain), decode, codes.key.mu, *_turns(codes, tiers, plan)),
        warps=1,
        stages=3,
    )
    offsets = [x for x in (history.key.offset, history.value.offset) if x is not None]
    output, sums = launch(
        attend_history,
        (batch, heads, plan.splits),
        partial(plan.splits, ops.PLANES * plan.value_block),
        (
            *lengths, page_indices.astype(jnp.int32), queries, numbers,
            key_rows(plan, history.key.slots), history.key.scale, history.value.slots, history.value.scale, *offsets,
        ),
        warps=1,
        stages=2 if plan.by_rows else 3,
    )  # fmt: skip
    while output.shape[2] > 2 * MERGE:
        groups = pl.cdiv(output.shape[2], MERGE)
        output, sums = launch(
            merge, (batch, heads, groups), partial(groups, ops.PLANES * plan.value_block), (output, sums), warps=4
        )
    many = batch * heads >= MULTIPROCESSORS
    parts = plan.dim // (min(plan.dim, WIDEST) if many else PIECE)
    sinks = () if sink_logits is None else (sink_logits.astype(jnp.float32),)
    [out] = launch(
        functools.partial(finish, parts=parts),
        (batch, heads, parts),
        [(q.shape, q.dtype)],
        (layer, output, sums, plain_output, plain_sums, codes.value.decode, codes.value.mu, *sinks),
        warps=8 if many else 4,
    )
    return out


def _launch(plan: ops.Plan, kernel, grid, outputs, operands, *, warps: int, stages: int = 2):
    body = functools.partial(kernel, plan=plan)
    name = (kernel.func if isinstance(kernel, functools.partial) else kernel).__name__
    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs],
        interpret=plan.interpret,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        name=f"oscar_{name}",
    )(*map(jnp.asarray, operands))


def _partials(batch: int, heads: int, plan: ops.Plan, splits: int, width: int):
    """Unnormalised outputs `[B, H, splits, width R]`, and maxima and sums `[B, H, splits, 2, R]`."""
    return [
        ((batch, heads, splits, width * plan.rows), jnp.float32),
        ((batch, heads, splits, 2, plan.rows), jnp.float32),
    ]


def _queries(plan: ops.Plan, batch: int, heads: int):
    """What `begin` makes of the queries: low and high bytes, or fp16 in the order of `halves.operand_place`."""
    slots = ops.PLANES * plan.key_block
    if plan.halves:
        return (batch, heads, plan.buckets, plan.rows * slots // 8, 8), jnp.float16
    return (batch, heads, plan.buckets, 2 * plan.rows, slots), jnp.int8


def _plan(q, k, plain, history, page_indices, codes, tiers, spec, windowed, span, tile, interpret) -> ops.Plan:
    batch, tokens, heads, dim = q.shape
    kv_heads, page, ring = k.shape[2], tiers.page, plain.recent_k.shape[2]
    ops.check(q, plain, history, codes, tiers)
    if tokens > MAX_TOKENS:
        raise NotImplementedError(f"{tokens} query tokens a call: at most {MAX_TOKENS} are built")
    capacity = page * page_indices.shape[1]
    rows = tokens * (heads // kv_heads)
    halves = rows > ops.MAX_ROWS and q.dtype.itemsize == 2
    halves &= all(code.slots in HALVES_SLOTS for code in (codes.key, codes.value))
    tile = tile or (TILE_OF_HALVES if halves else TILE)
    tile = tile if codes.bucket is None else math.gcd(tile, codes.bucket)
    if tile < 32:
        raise NotImplementedError(f"bucket={codes.bucket}: multiples of 32 are built")
    total = pl.cdiv(capacity, tile)
    bucket = total if codes.bucket is None else codes.bucket // tile
    block = min(MAX_HALVES if halves else ops.MAX_ROWS, max(4, pl.next_power_of_2(rows)))
    row_blocks = pl.cdiv(rows, block)
    span = _span(total, bucket, batch * kv_heads * row_blocks, block) if span is None else span
    buckets = pl.cdiv(total, bucket)
    # With more queries a program reads E less often and takes longer: for launches of several waves of programs.
    waves = batch * kv_heads * row_blocks * pl.cdiv(buckets * block, 16) / (WAVE * WARPS_OF_MANY_ROWS)
    # Larger ones have no registers left.
    queries = 32 if waves > 1 and max(dim, codes.key.slots) <= 128 else 16
    return ops.Plan(
        tokens=tokens, groups=heads // kv_heads, rows=block, row_blocks=row_blocks, head_dim=dim,
        key_bytes=codes.key.slots // ops.PLANES, value_bytes=codes.value.slots // ops.PLANES, page=page, tile=tile,
        span=span, bucket=bucket, buckets=buckets, queries=queries, splits=pl.cdiv(total, span), ring=ring, tiers=tiers,
        spec=spec, windowed=windowed, key_offset=codes.key.has_offset, value_offset=codes.value.has_offset,
        rotary=ops.rotary_of(codes), interpret=interpret,
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


def _turns(codes: TransformCodes, tiers: Tiers, plan: ops.Plan) -> tuple[np.ndarray, ...]:
    """`turn_factors` of all buckets, times the factor on logits; none without buckets."""
    factors = turn_factors(codes, tiers, tiers.sink + plan.buckets * plan.bucket * plan.tile, plan.dim)
    return tuple(np.float32(plan.logit_scale) * x for x in factors)
