"""Random cache states, every unused byte poisoned: inputs of attention for tests, vectors and `oscar-jax parity`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from triton_ref import cache
from triton_ref.cache import Call, LayerCache, Pages
from triton_ref.code import TransformCode, TransformCodes
from triton_ref.tiers import Tiers

Sequence = Callable[[int, int], tuple[torch.Tensor, ...]]
GARBAGE = (-1, 2**30, -(2**30))


@dataclasses.dataclass(frozen=True)
class Shape:
    """A batch of sequences of `starts` stored tokens that get `counts` (all by default) of `tokens` new ones."""

    starts: tuple[int, ...]
    tokens: int = 1
    counts: tuple[int, ...] | None = None
    q_heads: int = 4
    tiers: Tiers = Tiers(4, 8, 4, 16)  # noqa: RUF009
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False
    room: int = 0  # the page table is that of sequences of at least so many tokens


@dataclasses.dataclass(frozen=True)
class State:
    """Arguments of `triton_ref.cache.attend`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: LayerCache
    call: Call


def build(shape: Shape, codes: TransformCodes, sequence: Sequence, *, seed: int) -> State:
    """A state whose history holds encoded rows on permuted pages.

    Args:
        codes: of one layer, `[K, ...]` leaves.
        sequence: `sequence(b, length)` gives q `[length, N, D]`, k and v `[length, K, D]` of a whole sequence.
    """
    random = torch.Generator().manual_seed(seed)
    kv_heads, dim = codes.key.mu.shape
    batch, tiers, dtype = len(shape.starts), shape.tiers, shape.dtype
    counts = shape.counts or (shape.tokens,) * batch
    lengths = [start + count for start, count in zip(shape.starts, counts, strict=True)]
    entries = max(1, -(-int(tiers.history_end(torch.tensor(max(shape.room, *lengths) - 1)) - tiers.sink) // tiers.page))
    ring = tiers.recent + tiers.group - 1 + shape.tokens - 1
    pool = batch * entries + 2
    ids = torch.randperm(pool, generator=random)[: batch * entries].reshape(batch, entries)

    def nan(*dims: int) -> torch.Tensor:
        return torch.full(dims, torch.nan, dtype=dtype)

    q = torch.zeros(batch, shape.tokens, shape.q_heads, dim, dtype=dtype)
    rows = [nan(batch, shape.tokens, kv_heads, dim) for _ in range(2)]
    store = LayerCache(
        nan(batch, tiers.sink, kv_heads, dim), nan(batch, tiers.sink, kv_heads, dim),
        nan(batch, ring, kv_heads, dim), nan(batch, ring, kv_heads, dim),
        empty_pages(codes.key, pool, tiers.page, codes.scale_dtype, torch.nan),
        empty_pages(codes.value, pool, tiers.page, codes.scale_dtype, torch.nan),
        ids.int(),
    )  # fmt: skip
    table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(entries)[:entries].repeat(batch, 1)
    for b, (start, count) in enumerate(zip(shape.starts, counts, strict=True)):
        length = start + count
        if not length:
            continue
        queries, k, v = (x.to(dtype) for x in sequence(b, length))
        q[b, :count] = queries[start:]
        for x, new, sink, recent in zip(
            (k, v), rows, (store.sink_k, store.sink_v), (store.recent_k, store.recent_v), strict=True
        ):
            new[b, :count] = x[start:]
            held = min(start, tiers.sink)
            sink[b, :held] = x[:held]
            places = torch.arange(min(start, max(tiers.sink, start - ring)), start)
            recent[b, places % ring] = x[places]
        end = int(tiers.history_end(torch.tensor(length - 1)))
        cache.write(
            store, k[tiers.sink : end], v[tiers.sink : end], sequence=b, first=tiers.sink, codes=codes, tiers=tiers
        )
        used = -(-(end - tiers.sink) // tiers.page)
        table[b, :used] = ids[b, :used]
    sink_logits = torch.randn(shape.q_heads, generator=random) if shape.sinks else None
    call = Call(
        torch.tensor(shape.starts, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), dim**-0.5,
        shape.softcap, shape.window, sink_logits,
    )  # fmt: skip
    return State(q, rows[0], rows[1], dataclasses.replace(store, page_indices=table), call)


def empty_pages(code: TransformCode, pool: int, page: int, scale_dtype: torch.dtype, fill: float) -> Pages:
    """Pages of `pool` ids with scales and offsets of `fill`: 0, with slots of 0, or NaN, with slots of 3."""
    rows = (pool, code.mu.shape[0], page)
    scale = torch.full(rows, fill, dtype=scale_dtype)
    slots = torch.full((*rows, code.slots // 4), 0 if fill == 0 else 0xFF, dtype=torch.uint8)
    return Pages(slots, scale, scale.clone() if code.kind == "minmax" else None)
