"""Sums of one layer's queries, keys and values, float64, that `moments` adds up: the first and the second pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from calib import histogram
from calib.attention import Rows, einsum, history_weights, output_second_moment
from calib.settings import Settings
from pallas_kernels.rope import unrotate

QUERY_STRIDE = 8  # rows between queries whose attention is measured: neighbours see nearly the same


def bucket_origin(positions: jax.Array, settings: Settings) -> jax.Array:
    """Start of the bucket of each position; sinks, which no history moment counts, fall into the first."""
    return settings.sink + settings.bucket * (jnp.maximum(positions - settings.sink, 0) // settings.bucket)


def covered(positions: jax.Array, valid: jax.Array, settings: Settings) -> jax.Array:
    """History tokens that some measured query sees, counted by position relative to their bucket, f64 `[bucket]`."""
    measured = valid[:, ::QUERY_STRIDE]
    last = jnp.where(measured, positions[::QUERY_STRIDE], -1).max(-1, keepdims=True)
    history = valid & (positions >= settings.sink) & (positions <= last - settings.recent)
    relative = positions - bucket_origin(positions, settings)
    counts = history.sum(0).astype(jnp.float64)
    return jnp.zeros(settings.bucket, jnp.float64).at[relative].add(counts, mode="drop")


def _clean(x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Float64 rows `[B, T, heads, D]` with padding zeroed, and the number of rows `[heads]` with NaN or Inf."""
    x = jnp.where(valid[..., None, None], x.astype(jnp.float64), 0)
    return x, (~jnp.isfinite(x).all(-1)).sum((0, 1)).astype(jnp.float64)


def _second_moment(rows: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """`sum w x x^T` of `[B, K, .., D]` with weights `[B, K, ..]`, `[K, D, D]`."""
    left = rows if weights is None else rows * weights[..., None]
    return einsum("bkrd,bkre->kde", _flat(left), _flat(rows))


def _flat(rows: jax.Array) -> jax.Array:
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])


def first_pass(settings: Settings, rope, positions, origin, valid, layer) -> dict[str, jax.Array]:
    """Sums of one layer: q `[B, T, N, D]`, k, v `[B, T, K, D]`, value metric `[K, D, D]` or None."""
    q, k, v, metric = layer
    needed, sums = settings.groups, {}
    q, sums["bad_query"] = _clean(q, valid)
    k, sums["bad_key"] = _clean(k, valid)
    v, sums["bad_value"] = _clean(v, valid)
    batch, rows, _, dim = k.shape
    queries = q.reshape(batch, rows, settings.kv_heads, -1, dim).transpose(0, 2, 1, 3, 4)
    causal = Rows(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), positions, valid, settings.window)
    if "query" in needed:
        sums["query"] = _second_moment(queries)
    for name, side in (("key", causal.key), ("value", causal.value)):
        if name in needed:
            sums |= {f"{name}_sum": side.sum((0, 2)), name: _second_moment(side)}
    if "output" in needed:
        sums["output"] = output_second_moment(queries * settings.softmax_scale, causal)
    if "weighted" in needed:
        sums |= _weighted(settings, rope, origin, queries[:, :, ::QUERY_STRIDE], causal, metric)
    return sums


def _weighted(settings: Settings, rope, origin, queries, causal: Rows, metric) -> dict[str, jax.Array]:
    weights = history_weights(
        queries * settings.softmax_scale,
        causal,
        metric,
        stride=QUERY_STRIDE,
        sink=settings.sink,
        recent=settings.recent,
    )
    keys = causal.key
    if rope is not None:
        angles = origin[:, None].astype(jnp.float64) * jnp.asarray(rope.inverse_frequencies, jnp.float64)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        keys = unrotate(keys, cos, sin, pairing=rope.pairing)
        strided = slice(None, None, QUERY_STRIDE), None
        queries = unrotate(queries, cos[strided], sin[strided], pairing=rope.pairing)
    return {
        "weighted_pair": weights.key.sum((0, 2)),
        "weighted_query": _second_moment(queries, weights.query),
        "weighted_key_sum": einsum("bkt,bktd->kd", weights.key, keys),
        "weighted_key": _second_moment(keys, weights.key),
        "weighted_value_weight": weights.value.sum((0, 2)),
        "weighted_value_sum": einsum("bkt,bktd->kd", weights.value, causal.value),
        "weighted_value": _second_moment(causal.value, weights.value),
    }


def second_pass(valid: jax.Array, layer) -> dict[str, jax.Array]:
    """Sums of one layer that need the first pass: logit-weighted values and histograms of rotated rows."""
    k, v, first = layer
    k, v = _clean(k, valid)[0], _clean(v, valid)[0]
    sums = {}
    if first.query is not None:
        weight = (einsum("btkd,kde->btke", k, first.query) * k).sum(-1)
        sums["logit"] = einsum("btkd,btke->kde", v * weight[..., None], v)
        sums["logit_weight"] = weight.sum((0, 1))
    for name, rotation in first.rotations.items():
        rows = einsum("btkd,kde->btke", k if name.endswith("/key") else v, rotation)
        sums[f"histogram/{name}"] = histogram.count(rows, valid)
    return sums
