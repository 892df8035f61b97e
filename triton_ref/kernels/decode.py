"""Decode attention over the three tiers as Triton kernels: INT2 pages, plain tokens, and a merge by log-sum-exp.

Grouped heads: the R = G T query rows of a KV head (G heads, T tokens) share a program, so every stored byte is read
once. Split-KV: a program reads `span` tokens and leaves an unnormalised output with its maximum and sum. Slots are
never scaled one by one: `q . x_hat = scale (q' . (c - 1.5)) + (offset + 1.5 scale) sum(q') + q . mu` with `q' = E q_B`,
one q' a bucket, and scales of values are folded into the probabilities; plane i of a byte is quarter i of the row, so a
tile needs four products and no shuffle. `E` maps the merged accumulator back once.

Bytes read per token and KV head: `(N_k + N_v) / 4`, and 2 for each scale and offset.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ref import codec
from triton_ref.cache import Call, LayerCache
from triton_ref.code import TransformCodes
from triton_ref.kernels.launch import MIN_DOT, block, interpreted, run
from triton_ref.tiers import Tiers

MASKED = tl.constexpr(-1e30)  # finite, so that differences of two masked logits are zero and not NaN
IMPLIED_OFFSET = tl.constexpr(codec.IMPLIED_OFFSET)
TILE, PLAIN_TILE = 64, 32  # tokens; more plain ones spill
SPAN, PLAIN_SPAN = 512, 128  # tokens that a program reads
UNLIMITED = 2**30


@triton.jit
def _history_end(position, SINK: tl.constexpr, RECENT: tl.constexpr, GROUP: tl.constexpr):
    return SINK + tl.maximum(position + 1 - SINK - RECENT, 0) // GROUP * GROUP


@triton.jit
def _cap(logits, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0:
        return SOFTCAP * (2 * tl.sigmoid(2 * logits / SOFTCAP) - 1)
    return logits


@triton.jit
def _plane(byte, i: tl.constexpr, dtype: tl.constexpr):
    """Slots of plane i less 1.5, exact in every float dtype: centred, the products cancel nothing."""
    # By way of int32: uint8 to a 16-bit float has no instruction of its own.
    return (((byte.to(tl.int32) >> (2 * i)) & 3).to(tl.float32) + IMPLIED_OFFSET).to(dtype)


@triton.jit
def history_kernel(
    query_ptr, sums_ptr, constant_ptr, key_ptr, key_scale_ptr, key_offset_ptr, value_ptr, value_scale_ptr,
    value_offset_ptr, table_ptr, starts_ptr, counts_ptr,
    output_ptr, stats_ptr,
    KV_HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEY_QUARTER: tl.constexpr,
    VALUE_QUARTER: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, PAGE: tl.constexpr,
    POOL: tl.constexpr, ENTRIES: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, SPAN: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KEY_OFFSET: tl.constexpr, VALUE_OFFSET: tl.constexpr,
):  # fmt: skip
    """One span of history of one sequence and KV head; grid (B, K, splits).

    Inputs: query `[B, K, U, ROWS, N_k]` (q' of each bucket, in the products' dtype), sums, constant f32
    `[B, K, U, ROWS]` (sum of q', `q . mu`); slots uint8 `[P, K, page, N/4]`, scales and offsets `[P, K, page]`; table
    int32 `[B, entries]`; starts, counts int32 `[B]`. Row r is head `r // TOKENS`, token `r % TOKENS`. Outputs f32:
    `[B, K, splits, ROWS, N_v]`, and maxima and sums `[B, K, splits, 2, ROWS]`.
    """
    b, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = tl.load(starts_ptr + b), tl.load(counts_ptr + b)
    row = tl.arange(0, ROWS)
    position = start + row % TOKENS
    row_end = _history_end(position, SINK, RECENT, GROUP) - SINK
    last = tl.where(count > 0, _history_end(start + count - 1, SINK, RECENT, GROUP) - SINK, 0)
    first = start - WINDOW + 1 - SINK  # what no query of the call sees lies below

    jk, jv = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    at = b * KV_HEADS + head
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    maximum = tl.full((ROWS,), MASKED, tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    offsets = tl.full((ROWS,), 0.0, tl.float32)
    output0 = tl.full((ROWS, BLOCK_VALUE), 0.0, tl.float32)
    output1 = output0
    output2 = output0
    output3 = output0

    # A span that no query sees leaves its partial empty.
    if (split * SPAN < last) & ((split + 1) * SPAN > first):
        for step in range(0, SPAN, TILE):  # of constant length: Triton's interpreter takes no other with numpy 2.4
            tile = split * SPAN + step
            index = tile + tl.arange(0, TILE)
            inside = (index < last) & (index >= first)
            page = tl.load(table_ptr + b * ENTRIES + index // PAGE, mask=inside, other=0)
            page = tl.minimum(tl.maximum(page, 0), POOL - 1).to(tl.int64)
            stored = (page * KV_HEADS + head) * PAGE + index % PAGE
            bucket = at * BUCKETS + tl.minimum(tile // BUCKET, BUCKETS - 1)

            key_mask = inside[None, :] & (jk < KEY_QUARTER)[:, None]
            byte = tl.load(key_ptr + stored[None, :] * KEY_QUARTER + jk[:, None], mask=key_mask, other=0)
            product = tl.full((ROWS, TILE), 0.0, tl.float32)
            for i in tl.static_range(4):
                place = (bucket * ROWS + row[:, None]) * (4 * KEY_QUARTER) + i * KEY_QUARTER + jk[None, :]
                query = tl.load(query_ptr + place, mask=(jk < KEY_QUARTER)[None, :], other=0.0)
                product += tl.dot(query, _plane(byte, i, dtype), input_precision="ieee")
            key_scale = tl.load(key_scale_ptr + stored, mask=inside, other=0.0).to(tl.float32)
            constant = tl.load(constant_ptr + bucket * ROWS + row)
            logits = key_scale[None, :] * product + constant[:, None]
            if KEY_OFFSET:
                key_offset = tl.load(key_offset_ptr + stored, mask=inside, other=0.0).to(tl.float32)
                sums = tl.load(sums_ptr + bucket * ROWS + row)
                logits += (key_offset - IMPLIED_OFFSET * key_scale)[None, :] * sums[:, None]
            logits = _cap(logits, SOFTCAP)

            seen = inside[None, :] & (index[None, :] < row_end[:, None])
            seen = seen & (index[None, :] + SINK > position[:, None] - WINDOW)
            logits = tl.where(seen, logits, MASKED)
            higher = tl.maximum(maximum, tl.max(logits, axis=1))
            probability = tl.where(seen, tl.exp(logits - higher[:, None]), 0.0)
            rescale = tl.exp(maximum - higher)
            maximum = higher
            total = total * rescale + tl.sum(probability, axis=1)

            value_scale = tl.load(value_scale_ptr + stored, mask=inside, other=0.0).to(tl.float32)
            weight = (probability * value_scale[None, :]).to(dtype)
            if VALUE_OFFSET:
                value_offset = tl.load(value_offset_ptr + stored, mask=inside, other=0.0).to(tl.float32)
                centre = value_offset - IMPLIED_OFFSET * value_scale
                offsets = offsets * rescale + tl.sum(probability * centre[None, :], axis=1)
            value_mask = inside[:, None] & (jv < VALUE_QUARTER)[None, :]
            byte = tl.load(value_ptr + stored[:, None] * VALUE_QUARTER + jv[None, :], mask=value_mask, other=0)
            output0 = output0 * rescale[:, None] + tl.dot(weight, _plane(byte, 0, dtype), input_precision="ieee")
            output1 = output1 * rescale[:, None] + tl.dot(weight, _plane(byte, 1, dtype), input_precision="ieee")
            output2 = output2 * rescale[:, None] + tl.dot(weight, _plane(byte, 2, dtype), input_precision="ieee")
            output3 = output3 * rescale[:, None] + tl.dot(weight, _plane(byte, 3, dtype), input_precision="ieee")

    partial = at * SPLITS + split
    target = output_ptr + (partial * ROWS + row[:, None]) * (4 * VALUE_QUARTER) + jv[None, :]
    kept = (jv < VALUE_QUARTER)[None, :] & (row >= 0)[:, None]
    tl.store(target, output0 + offsets[:, None], mask=kept)
    tl.store(target + VALUE_QUARTER, output1 + offsets[:, None], mask=kept)
    tl.store(target + 2 * VALUE_QUARTER, output2 + offsets[:, None], mask=kept)
    tl.store(target + 3 * VALUE_QUARTER, output3 + offsets[:, None], mask=kept)
    tl.store(stats_ptr + partial * 2 * ROWS + row, maximum)
    tl.store(stats_ptr + (partial * 2 + 1) * ROWS + row, total)


@triton.jit
def plain_kernel(
    query_ptr, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, new_k_ptr, new_v_ptr, starts_ptr, counts_ptr,
    output_ptr, stats_ptr,
    KV_HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    RING: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, SINK: tl.constexpr,
    RECENT: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One span of the plain tokens of one sequence and KV head: sinks, then the ring, then the call's own tokens.

    Inputs: query `[B, K, ROWS, D]`, scaled; sinks `[B, S, K, D]`, recents `[B, RING, K, D]`, new `[B, T, K, D]`.
    Outputs as of `history_kernel`, D wide. Grid (B, K, splits).
    """
    b, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = tl.load(starts_ptr + b), tl.load(counts_ptr + b)
    row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    position = start + row % TOKENS
    row_end = _history_end(position, SINK, RECENT, GROUP)
    at = b * KV_HEADS + head
    known = d < D
    query = tl.load(query_ptr + (at * ROWS + row[:, None]) * D + d[None, :], mask=known[None, :], other=0.0)
    maximum = tl.full((ROWS,), MASKED, tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    output = tl.full((ROWS, BLOCK_D), 0.0, tl.float32)

    for step in range(0, SPAN, TILE):
        index = split * SPAN + step + tl.arange(0, TILE)
        place, new = index - SINK, index - SINK - RING
        in_sink = (index < SINK) & (index < start)
        # Twice, since the remainder of a negative number is negative.
        held = start - 1 - ((start - 1 - place) % RING + RING) % RING
        in_ring = (place >= 0) & (place < RING) & (held >= SINK)
        is_new = (new >= 0) & (new < count) & (new < TOKENS)
        j = tl.where(in_sink, index, tl.where(in_ring, held, start + new))
        sink_at = ((b * SINK + index) * KV_HEADS + head) * D
        ring_at = ((b * RING + place) * KV_HEADS + head) * D
        new_at = ((b * TOKENS + new) * KV_HEADS + head) * D
        sink_mask = in_sink[:, None] & known[None, :]
        ring_mask = in_ring[:, None] & known[None, :]
        new_mask = is_new[:, None] & known[None, :]
        # Each token has one source; the others are masked to zero.
        keys = tl.load(sink_k_ptr + sink_at[:, None] + d[None, :], mask=sink_mask, other=0.0).to(tl.float32)
        keys += tl.load(recent_k_ptr + ring_at[:, None] + d[None, :], mask=ring_mask, other=0.0).to(tl.float32)
        keys += tl.load(new_k_ptr + new_at[:, None] + d[None, :], mask=new_mask, other=0.0).to(tl.float32)
        logits = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
        logits = _cap(logits, SOFTCAP)
        seen = (in_sink | in_ring | is_new)[None, :] & (j[None, :] <= position[:, None])
        seen = seen & ((j < SINK)[None, :] | (j[None, :] >= row_end[:, None]))
        seen = seen & (j[None, :] > position[:, None] - WINDOW)
        logits = tl.where(seen, logits, MASKED)
        higher = tl.maximum(maximum, tl.max(logits, axis=1))
        probability = tl.where(seen, tl.exp(logits - higher[:, None]), 0.0)
        rescale = tl.exp(maximum - higher)
        maximum = higher
        total = total * rescale + tl.sum(probability, axis=1)
        values = tl.load(sink_v_ptr + sink_at[:, None] + d[None, :], mask=sink_mask, other=0.0).to(tl.float32)
        values += tl.load(recent_v_ptr + ring_at[:, None] + d[None, :], mask=ring_mask, other=0.0).to(tl.float32)
        values += tl.load(new_v_ptr + new_at[:, None] + d[None, :], mask=new_mask, other=0.0).to(tl.float32)
        mixed = tl.dot(probability.to(query.dtype), values.to(query.dtype), input_precision="ieee")
        output = output * rescale[:, None] + mixed

    partial = at * SPLITS + split
    target = output_ptr + (partial * ROWS + row[:, None]) * D + d[None, :]
    tl.store(target, output, mask=known[None, :] & (row >= 0)[:, None])
    tl.store(stats_ptr + partial * 2 * ROWS + row, maximum)
    tl.store(stats_ptr + (partial * 2 + 1) * ROWS + row, total)


@triton.jit
def merge_kernel(
    partial_ptr, stats_ptr, output_ptr, merged_ptr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """Merges partials `[H, splits, ROWS, WIDTH]` and maxima and sums `[H, splits, 2, ROWS]` to `[H, ROWS, WIDTH]` and
    `[H, 2, ROWS]`; grid (H,). An empty split has sum 0 and weighs nothing; without any token the output is zero."""
    at = tl.program_id(0)
    row, x = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    maximum = tl.full((ROWS,), MASKED, tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    output = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    mask = (x < WIDTH)[None, :] & (row >= 0)[:, None]
    for split in range(SPLITS):
        partial = at * SPLITS + split
        part_maximum = tl.load(stats_ptr + partial * 2 * ROWS + row)
        part_total = tl.load(stats_ptr + (partial * 2 + 1) * ROWS + row)
        part = tl.load(partial_ptr + (partial * ROWS + row[:, None]) * WIDTH + x[None, :], mask=mask, other=0.0)
        higher = tl.maximum(maximum, part_maximum)
        old, new = tl.exp(maximum - higher), tl.exp(part_maximum - higher)
        total = total * old + part_total * new
        output = output * old[:, None] + part * new[:, None]
        maximum = higher
    if NORMALISE:
        output = output / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(output_ptr + (at * ROWS + row[:, None]) * WIDTH + x[None, :], output, mask=mask)
    tl.store(merged_ptr + at * 2 * ROWS + row, maximum)
    tl.store(merged_ptr + (at * 2 + 1) * ROWS + row, total)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    codes: TransformCodes,
    call: Call,
    *,
    tiers: Tiers,
    span: int | None = None,
) -> torch.Tensor:
    """`triton_ref.cache.attend` on kernels: q `[B, T, N, D]`, k, v `[B, T, K, D]` to `[B, T, N, D]` in q's dtype.

    Products are taken in q's dtype (fp32 exactly, never TF32), sums in fp32.

    Args:
        span: tokens of history that one program reads, a multiple of 64; None for a good number here.

    Raises:
        NotImplementedError: a bucket that is no multiple of 16, or bf16 in Triton's interpreter, which gets it wrong.
    """
    if interpreted(history_kernel) and torch.bfloat16 in (q.dtype, cache.recent_k.dtype, codes.scale_dtype):
        raise NotImplementedError("bf16 in Triton's CPU interpreter: it computes with the raw bits; use fp32 or fp16")
    prepared = prepare(q, codes, call, tiers=tiers, capacity=tiers.page * cache.page_indices.shape[1])
    history = attend_history(prepared, cache, codes, call, tiers=tiers, tokens=q.shape[1], span=span)
    plain = attend_plain(prepared, k, v, cache, call, tiers=tiers)
    return finish(q, history, plain, codes, call)


class Prepared:
    """Queries by KV head: `rows [B, K, R, D]` scaled, `queries [B, K, U, R, N]` transformed, `sums`, `constants`."""

    def __init__(self, rows, queries, sums, constants):
        self.rows, self.queries, self.sums, self.constants = rows, queries, sums, constants


def prepare(q: torch.Tensor, codes: TransformCodes, call: Call, *, tiers: Tiers, capacity: int) -> Prepared:
    """Scales, groups and transforms queries, once for each bucket of `capacity` tokens; padded to powers of two."""
    batch, tokens, heads, dim = q.shape
    kv_heads = codes.key.mu.shape[0]
    rows = (q.float() * call.scale).reshape(batch, tokens, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, heads // kv_heads * tokens, dim)
    padding = block(rows.shape[2], MIN_DOT) - rows.shape[2]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
    buckets = 1 if codes.bucket is None else -(-capacity // codes.bucket)
    origins = tiers.sink + (codes.bucket or 0) * torch.arange(buckets, device=q.device)
    relative = rows[:, :, None].expand(-1, -1, buckets, -1, -1)
    relative = codes.turn(relative, -origins)
    with codec.full_precision():
        queries = torch.einsum("bkurd,knd->bkurn", relative, codes.key.decode.float()).to(q.dtype)
        constants = torch.einsum("bkurd,kd->bkur", relative, codes.key.mu.float())
    return Prepared(
        rows.to(q.dtype).contiguous(), queries.contiguous(), queries.float().sum(-1), constants.contiguous()
    )


def stages(operand: torch.Tensor) -> int:
    """Of the pipeline: several of fp32 operands do not fit into shared memory."""
    return 1 if operand.dtype == torch.float32 else 3


def attend_history(
    prepared: Prepared,
    cache: LayerCache,
    codes: TransformCodes,
    call: Call,
    *,
    tiers: Tiers,
    tokens: int,
    span: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs in slots, f32 `[B, K, splits, R, N_v]`, and maxima and sums `[B, K, splits, 2, R]`."""
    arrays, splits, constants = history_arguments(prepared, cache, codes, call, tiers=tiers, tokens=tokens, span=span)
    batch, kv_heads, _, rows, _ = prepared.queries.shape
    output = torch.empty(batch, kv_heads, splits, rows, codes.value.slots, device=prepared.rows.device)
    stats = torch.empty(batch, kv_heads, splits, 2, rows, device=prepared.rows.device)
    run(
        history_kernel, (batch, kv_heads, splits), *arrays, output, stats, **constants, num_warps=4,
        num_stages=stages(prepared.queries),
    )  # fmt: skip
    return output, stats


def history_arguments(
    prepared: Prepared,
    cache: LayerCache,
    codes: TransformCodes,
    call: Call,
    *,
    tiers: Tiers,
    tokens: int,
    span: int | None,
):
    """Input arrays of `history_kernel` in order, the number of splits, and its constants."""
    bucket = codes.bucket or 1 << 30
    tile = min(TILE, bucket & -bucket)
    span = span or (TILE if interpreted(history_kernel) else SPAN)
    if tile < MIN_DOT or span % TILE:
        raise NotImplementedError(f"bucket={codes.bucket}, span={span}: multiples of {MIN_DOT} and {TILE} are built")
    _, kv_heads, buckets, rows, slots = prepared.queries.shape
    entries = cache.page_indices.shape[1]
    splits = max(1, -(-entries * tiers.page // span))
    key, value = cache.key, cache.value
    arrays = [
        prepared.queries, prepared.sums, prepared.constants,
        key.slots, key.scale, key.scale if key.offset is None else key.offset,
        value.slots, value.scale, value.scale if value.offset is None else value.offset,
        cache.page_indices.int(), call.starts.int(), call.counts.int(),
    ]  # fmt: skip
    constants = dict(
        KV_HEADS=kv_heads, TOKENS=tokens, ROWS=rows, KEY_QUARTER=slots // 4, VALUE_QUARTER=codes.value.slots // 4,
        BLOCK_KEY=block(slots // 4, MIN_DOT), BLOCK_VALUE=block(codes.value.slots // 4, MIN_DOT), PAGE=tiers.page,
        POOL=key.scale.shape[0], ENTRIES=entries, BUCKET=bucket, BUCKETS=buckets, SPAN=span, TILE=tile, SPLITS=splits,
        SINK=tiers.sink, RECENT=tiers.recent, GROUP=tiers.group, WINDOW=call.window or UNLIMITED,
        SOFTCAP=call.softcap or 0.0, KEY_OFFSET=key.offset is not None, VALUE_OFFSET=value.offset is not None,
    )  # fmt: skip
    return [x.contiguous() for x in arrays], splits, constants


def attend_plain(
    prepared: Prepared, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, call: Call, *, tiers: Tiers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs over plain tokens, f32 `[B, K, splits, R, D]`, and maxima and sums."""
    batch, kv_heads, rows, dim = prepared.rows.shape
    tokens, ring = k.shape[1], cache.recent_k.shape[1]
    splits = -(-(tiers.sink + ring + tokens) // PLAIN_SPAN)
    output = torch.empty(batch, kv_heads, splits, rows, dim, device=k.device)
    stats = torch.empty(batch, kv_heads, splits, 2, rows, device=k.device)
    sources = (cache.sink_k, cache.sink_v, cache.recent_k, cache.recent_v, k, v)
    run(
        plain_kernel, (batch, kv_heads, splits), prepared.rows, *(x.contiguous() for x in sources),
        call.starts.int(), call.counts.int(), output, stats,
        KV_HEADS=kv_heads, TOKENS=tokens, ROWS=rows, D=dim, BLOCK_D=block(dim, MIN_DOT), RING=ring, SPAN=PLAIN_SPAN,
        TILE=PLAIN_TILE, SPLITS=splits, SINK=tiers.sink, RECENT=tiers.recent, GROUP=tiers.group,
        WINDOW=call.window or UNLIMITED, SOFTCAP=call.softcap or 0.0, num_warps=4, num_stages=stages(k),
    )  # fmt: skip
    return output, stats


def merge(partial: torch.Tensor, stats: torch.Tensor, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B, K, splits, R, X]` and `[B, K, splits, 2, R]` to `[B, K, R, X]` and `[B, K, 2, R]`."""
    batch, kv_heads, splits, rows, width = partial.shape
    output = torch.empty(batch, kv_heads, rows, width, device=partial.device)
    merged = torch.empty(batch, kv_heads, 2, rows, device=partial.device)
    run(
        merge_kernel, (batch * kv_heads,), partial.contiguous(), stats.contiguous(), output, merged, ROWS=rows,
        WIDTH=width, BLOCK=block(width), SPLITS=splits, NORMALISE=normalise, num_warps=4,
    )  # fmt: skip
    return output, merged


def finish(q: torch.Tensor, history, plain, codes: TransformCodes, call: Call) -> torch.Tensor:
    """Maps the merged slots back with E, merges them with the plain tokens and learnt sinks, and normalises."""
    batch, tokens, heads, dim = q.shape
    output, stats = merge(*history, normalise=False)
    with codec.full_precision():
        mapped = torch.einsum("bkrn,knd->bkrd", output, codes.value.decode.float())
    mapped = mapped + stats[:, :, 1, :, None] * codes.value.mu.float()[:, None]
    parts = [(plain[0], plain[1]), (mapped[:, :, None], stats[:, :, None])]
    if call.sink_logits is not None:
        logits = torch.full_like(stats[:, :, 0], float(MASKED.value))
        kv_heads, groups = stats.shape[1], heads // stats.shape[1]
        learnt = call.sink_logits.float().reshape(kv_heads, groups, 1).expand(-1, -1, tokens).reshape(kv_heads, -1)
        logits[:, :, : groups * tokens] = learnt
        parts.append(
            (torch.zeros_like(mapped)[:, :, None], torch.stack([logits, torch.ones_like(logits)], 2)[:, :, None])
        )
    merged, _ = merge(*(torch.cat(x, 2) for x in zip(*parts, strict=True)), normalise=True)
    out = merged[:, :, : heads // merged.shape[1] * tokens].reshape(batch, -1, heads // merged.shape[1], tokens, dim)
    out = out.permute(0, 3, 1, 2, 4).reshape(batch, tokens, heads, dim)
    real = torch.arange(tokens, device=q.device) < call.counts[:, None]
    return torch.where(real[..., None, None], out, 0).to(q.dtype)
