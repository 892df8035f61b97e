"""Random cache states, every unused byte poisoned: inputs of attention for tests, vectors and `oscar-jax parity`."""

from __future__ import annotations

import dataclasses

import torch

from triton_ref import cache
from triton_ref.cache import Call, LayerCache, Pages
from triton_ref.code import TransformCode, TransformCodes
from triton_ref.tiers import Tiers

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


def build(shape: Shape, codes: TransformCodes, *, seed: int) -> State:
    """A state whose history holds encoded random rows on permuted pages.

    Args:
        codes: of one layer, `[K, ...]` leaves.
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

    rows = [nan(batch, shape.tokens, kv_heads, dim) for _ in range(2)]
    store = LayerCache(
        *(nan(batch, tokens, kv_heads, dim) for tokens in (tiers.sink, tiers.sink, ring, ring)),
        *(_empty(code, pool, tiers.page, codes.scale_dtype) for code in (codes.key, codes.value)),
        ids.int(),
    )
    table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(entries)[:entries].repeat(batch, 1)
    for b, (start, count) in enumerate(zip(shape.starts, counts, strict=True)):
        length = start + count
        if not length:
            continue
        # Heavy tails, and keys with a mean, as activations have.
        k, v = (torch.randn(length, kv_heads, dim, generator=random) for _ in range(2))
        k, v = (x.pow(3) / 3 + x for x in (k + 0.5, v))
        k, v = k.to(dtype), v.to(dtype)
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
    q = torch.randn(batch, shape.tokens, shape.q_heads, dim, generator=random) * 1.5
    sink_logits = torch.randn(shape.q_heads, generator=random) if shape.sinks else None
    call = Call(
        torch.tensor(shape.starts, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), dim**-0.5,
        shape.softcap, shape.window, sink_logits,
    )  # fmt: skip
    return State(q.to(dtype), *rows, dataclasses.replace(store, page_indices=table), call)


def _empty(code: TransformCode, pool: int, page: int, scale_dtype: torch.dtype) -> Pages:
    rows = (pool, code.mu.shape[0], page)
    scale = torch.full(rows, torch.nan, dtype=scale_dtype)
    slots = torch.full((*rows, code.slots // 4), 0xFF, dtype=torch.uint8)
    return Pages(slots, scale, scale.clone() if code.kind == "minmax" else None)
