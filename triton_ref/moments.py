"""Calibration moments in float64 PyTorch: the sums of `calib.moments`, from dense attention, one head at a time.

Meant to be read and compared with, not to be fast: the whole causal softmax of a head is formed.
"""

from __future__ import annotations

import dataclasses

import torch

from triton_ref.rope import Rotary

QUERY_STRIDE = 8  # rows between queries whose attention over history is measured
BINS = 4096
BINS_PER_OCTAVE = 128
LOWEST_OCTAVE = -16


@dataclasses.dataclass(frozen=True)
class Settings:
    """Bucket, and S and W of the statistics: history pairs have `S <= j <= t - W`."""

    bucket: int = 2048
    sink: int = 16
    recent: int = 64
    softmax_scale: float | None = None


def first_pass(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lengths: list[int],
    rotary: Rotary | None,
    settings: Settings,
    value_metric: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Sums over sequences, by the names of `calib.moments.Moments.sums`.

    Args:
        q: `[L, B, T, N, D]`, k, v: `[L, B, T, K, D]`, after rotary positions 0 .. T - 1; rows past a length are
            ignored.
        value_metric: `[L, K, D, D]`, norm of value errors; None is the identity.
    """
    layers, _, _, kv_heads, dim = k.shape
    vector, square = (layers, kv_heads, dim), (layers, kv_heads, dim, dim)
    zeros = {name: torch.zeros(square, dtype=torch.float64) for name in ("query", "key", "value", "output")}
    zeros |= {f"weighted_{name}": torch.zeros(square, dtype=torch.float64) for name in ("query", "key", "value")}
    for name in ("key_sum", "value_sum", "weighted_key_sum", "weighted_value_sum"):
        zeros[name] = torch.zeros(vector, dtype=torch.float64)
    for name in ("weighted_pair", "weighted_value_weight"):
        zeros[name] = torch.zeros(vector[:-1], dtype=torch.float64)
    sums = zeros | {
        "tokens": torch.tensor(float(sum(lengths)), dtype=torch.float64),
        "weighted_covered": _covered(lengths, settings),
    }
    groups = q.shape[3] // kv_heads
    for b, length in enumerate(lengths):
        for layer in range(layers):
            for head in range(kv_heads):
                queries = q[layer, b, :length, head * groups : (head + 1) * groups].double()
                keys, values = (x[layer, b, :length, head].double() for x in (k, v))
                metric = torch.eye(dim, dtype=torch.float64) if value_metric is None else value_metric[layer, head]
                for name, value in _head(queries, keys, values, metric.double(), rotary, settings).items():
                    sums[name][layer, head] += value
    return sums


def second_pass(
    k: torch.Tensor, v: torch.Tensor, query: torch.Tensor, *, lengths: list[int]
) -> dict[str, torch.Tensor]:
    """The reference's value target: `sum w v v^T` and `sum w` with `w = k^T C_Q k`, C_Q `[L, K, D, D]` of each head."""
    valid = torch.arange(k.shape[2]) < torch.tensor(lengths)[:, None]
    k, v = (torch.where(valid[..., None, None], x.double(), 0) for x in (k, v))
    weights = torch.einsum("lbtkd,lkde,lbtke->lbtk", k, query, k)
    return {
        "logit": torch.einsum("lbtk,lbtkd,lbtke->lkde", weights, v, v),
        "logit_weight": weights.sum((1, 2)),
        "tokens2": torch.tensor(float(sum(lengths)), dtype=torch.float64),
    }


def histogram(rows: torch.Tensor, *, lengths: list[int]) -> torch.Tensor:
    """Counts of |x| of rotated rows `[B, T, K, D]` in logarithmic bins, `[K, BINS]`."""
    valid = torch.arange(rows.shape[1]) < torch.tensor(lengths)[:, None]
    bins = torch.floor((torch.log2(rows.double().abs()) - LOWEST_OCTAVE) * BINS_PER_OCTAVE)
    bins = bins.nan_to_num(0, posinf=BINS, neginf=0).clamp(0, BINS - 1).to(torch.int64)
    return torch.stack(
        [torch.bincount(bins[:, :, head][valid].reshape(-1), minlength=BINS) for head in range(rows.shape[2])]
    ).double()


def quantile(counts: torch.Tensor, ratio: float) -> torch.Tensor:
    """Upper edge of the first bin at which the share of counts `[..., BINS]` reaches `ratio`."""
    cumulative = counts.cumsum(-1)
    first = (cumulative >= ratio * cumulative[..., -1:]).to(torch.int64).argmax(-1)
    return 2.0 ** (LOWEST_OCTAVE + (first + 1).double() / BINS_PER_OCTAVE)


def _head(queries, keys, values, metric, rotary: Rotary | None, settings: Settings) -> dict[str, torch.Tensor]:
    """Sums of one sequence and KV head: queries `[T, G, D]`, keys, values `[T, D]`."""
    length, _, dim = queries.shape
    scale = dim**-0.5 if settings.softmax_scale is None else settings.softmax_scale
    scores = torch.einsum("tgd,jd->gtj", queries * scale, keys)
    index = torch.arange(length)
    scores = torch.where(index <= index[:, None], scores, -torch.inf)
    probabilities = torch.softmax(scores, -1)
    outputs = probabilities @ values  # [G, T, D]
    sums = {
        "query": torch.einsum("tgd,tge->de", queries, queries),
        "key_sum": keys.sum(0),
        "key": keys.T @ keys,
        "value_sum": values.sum(0),
        "value": values.T @ values,
        "output": torch.einsum("gtd,gte->de", outputs, outputs),
    }
    measured = index[::QUERY_STRIDE]
    squared = probabilities[:, measured].square()
    squared = torch.where((index >= settings.sink) & (index <= measured[:, None] - settings.recent), squared, 0)
    difference = values - outputs[:, measured, None]  # [G, Q, T, D]
    weights = squared * torch.einsum("gqtd,de,gqte->gqt", difference, metric, difference)
    origins = settings.sink + settings.bucket * ((index - settings.sink).clamp(min=0) // settings.bucket)
    turned_keys, turned_queries = keys, queries[measured]
    if rotary is not None:
        turned_keys = rotary.rotate(keys, -origins)
        turned_queries = rotary.rotate(turned_queries, -origins[measured, None])
    per_query, per_key, per_value = weights.sum(-1), weights.sum((0, 1)), squared.sum((0, 1))
    return sums | {
        "weighted_pair": weights.sum(),
        "weighted_query": torch.einsum("gq,qgd,qge->de", per_query, turned_queries, turned_queries),
        "weighted_key_sum": per_key @ turned_keys,
        "weighted_key": torch.einsum("t,td,te->de", per_key, turned_keys, turned_keys),
        "weighted_value_weight": per_value.sum(),
        "weighted_value_sum": per_value @ values,
        "weighted_value": torch.einsum("t,td,te->de", per_value, values, values),
    }


def _covered(lengths: list[int], settings: Settings) -> torch.Tensor:
    """History tokens that some measured query sees, counted by position relative to their bucket, `[bucket]`."""
    counts = torch.zeros(settings.bucket, dtype=torch.float64)
    for length in lengths:
        last = (length - 1) // QUERY_STRIDE * QUERY_STRIDE
        positions = torch.arange(settings.sink, max(settings.sink, last - settings.recent + 1))
        relative = (positions - settings.sink) % settings.bucket
        counts += torch.bincount(relative, minlength=settings.bucket)
    return counts
