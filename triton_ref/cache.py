"""One layer of the three-tier cache as tensors: its rows, the write that fills its pages, and attention over it.

Page i of a sequence covers positions `[sink + i page, sink + (i + 1) page)`; entries of a page table past a sequence's
history are never trusted. Position p of the recents lies at place p modulo R of the ring.
"""

from __future__ import annotations

import dataclasses

import torch

from triton_ref import attention, codec
from triton_ref.code import TransformCodes
from triton_ref.tiers import Tiers


@dataclasses.dataclass(frozen=True)
class Pages:
    """One side: slots uint8 `[P, K, page, N/4]`, scale `[P, K, page]`, offset likewise or None."""

    slots: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None

    def rows(self, pages: torch.Tensor, places: torch.Tensor) -> codec.Encoded:
        """Stored rows `[M, K, ...]` at page ids and places `[M]`."""
        parts = (None if x is None else x[pages, :, places] for x in (self.slots, self.scale, self.offset))
        return codec.Encoded(*parts)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Sinks `[B, S, K, D]` and recents `[B, R, K, D]` in the plain dtype, pages of both sides, page ids `[B, n]`."""

    sink_k: torch.Tensor
    sink_v: torch.Tensor
    recent_k: torch.Tensor
    recent_v: torch.Tensor
    key: Pages
    value: Pages
    page_indices: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Call:
    """What one attention call asks: tokens before it `[B]`, new ones `[B]`, factor on logits, and what a model adds."""

    starts: torch.Tensor
    counts: torch.Tensor
    scale: float
    softcap: float | None = None
    window: int | None = None
    sink_logits: torch.Tensor | None = None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    codes: TransformCodes,
    call: Call,
    *,
    tiers: Tiers,
    rounded_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention of new tokens q `[B, T, N, D]`, k, v `[B, T, K, D]`, `[B, T, N, D]` in q's dtype; zeros past counts."""
    out = torch.zeros_like(q)
    for b, (start, count) in enumerate(zip(call.starts.tolist(), call.counts.tolist(), strict=True)):
        if not count:
            continue
        sides = [
            _sequence(side, new[b, :count], start, cache, codes, b, tiers, q.dtype)
            for side, new in (("key", k), ("value", v))
        ]
        (keys, key_hats), (values, value_hats) = sides
        positions = torch.arange(start, start + count, device=q.device)
        out[b, :count] = attention.attend(
            q[b, :count], keys, values, key_hats, value_hats, positions=positions,
            history_end=tiers.history_end(positions), sink=tiers.sink, scale=call.scale, softcap=call.softcap,
            window=call.window, sink_logits=call.sink_logits, rounded_to=rounded_to,
        )  # fmt: skip
    return out


def write(
    cache: LayerCache,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sequence: int,
    first: int,
    codes: TransformCodes,
    tiers: Tiers,
) -> None:
    """Encodes rows `[M, K, D]` of positions `first ..` (at least `tiers.sink`) and stores them in place."""
    positions = torch.arange(first, first + len(k), device=k.device)
    place = positions - tiers.sink
    pages = cache.page_indices[sequence].long()[place // tiers.page]
    compute = torch.promote_types(k.dtype, torch.float32)
    relative = codes.turn(k.to(compute), -codes.origins(positions, tiers.sink))
    for side, code, rows in ((cache.key, codes.key, relative), (cache.value, codes.value, v.to(compute))):
        encoded = codec.encode(code, rows, scale_dtype=codes.scale_dtype)
        for pool, stored in zip((side.slots, side.scale, side.offset), encoded, strict=True):
            if pool is not None and stored is not None:
                pool[pages, :, place % tiers.page] = stored


def _sequence(side, new, start, cache: LayerCache, codes: TransformCodes, b: int, tiers: Tiers, dtype):
    """Plain and decoded rows `[n, K, D]` of one sequence; zeros where a tier does not hold a position."""
    sink, recent = (getattr(cache, f"{tier}_{side[0]}")[b] for tier in ("sink", "recent"))
    pages, code = getattr(cache, side), getattr(codes, side)
    total, ring = start + len(new), recent.shape[0]
    plain = torch.zeros(total, *new.shape[1:], dtype=dtype, device=new.device)
    held = min(start, tiers.sink)
    plain[:held] = sink[:held].to(dtype)
    recents = torch.arange(min(start, max(tiers.sink, start - ring)), start, device=new.device)
    plain[recents] = recent[recents % ring].to(dtype)
    plain[start:] = new.to(dtype)
    decoded = torch.zeros_like(plain)
    end = int(tiers.history_end(torch.tensor(total - 1)))
    place = torch.arange(end - tiers.sink, device=new.device)
    if end > tiers.sink:
        ids = cache.page_indices[b].long()[place // tiers.page]
        decoded[tiers.sink : end] = codec.decode(code, pages.rows(ids, place % tiers.page), dtype=dtype)
    if side == "key":
        positions = torch.arange(total, device=new.device)
        decoded = codes.turn(decoded, codes.origins(positions, tiers.sink))
    return plain, decoded
