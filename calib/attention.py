"""Causal softmax of calibration queries, in blocks: the weights and outputs that the moments are made of.

One layer at a time, float64, batch axis kept in front so that a batch sharded over devices stays sharded. Memory is
that of one block of queries against the keys it can see.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)

# Scores held at once, of all heads and sequences (8 bytes each): a few temporaries of this size live in cache.
SCORES_PER_BLOCK = 1 << 20
# Blocks are unrolled into at most this many groups, each against only the keys its last query can see.
GROUPS = 6
MASKED = -1e30


class Rows(NamedTuple):
    """Keys and values of one layer, and where they stand.

    key, value: f64 `[B, K, T, D]`, padded rows zero. positions: int `[T]`, increasing. valid: bool `[B, T]`. window:
    latest tokens that a query sees; None sees all.
    """

    key: jax.Array
    value: jax.Array
    positions: jax.Array
    valid: jax.Array
    window: int | None = None


class HistoryWeights(NamedTuple):
    """Weights summed over one side of each pair of query t and history token j.

    query: f64 `[B, K, Q, G]`, `sum_j w_tj`. key: f64 `[B, K, T]`, `sum_t w_tj`. value: f64 `[B, K, T]`, `sum_t p_tj^2`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array


def history_weights(
    queries: jax.Array, rows: Rows, metric: jax.Array | None, *, stride: int, sink: int, recent: int
) -> HistoryWeights:
    """`w_tj = p_tj^2 |v_j - o_t|_G^2` over pairs with `sink <= j <= t - recent`: how strongly an error in a logit
    reaches the output.

    Args:
        queries: f64 `[B, K, Q, G, D]`, rows 0, stride, 2 stride, .. of the sequence, softmax scale included.
        rows: all T rows; o_t is the output over every visible one.
        metric: f64 `[K, D, D]`, norm of value errors; None is the identity.
    """
    values_metric = rows.value if metric is None else einsum("bktd,kde->bkte", rows.value, metric)
    norms = (values_metric * rows.value).sum(-1)

    def block(carry: tuple[jax.Array, jax.Array], query: jax.Array, index: jax.Array, present: jax.Array, extent: int):
        weights, sums, outputs = _softmax(query, rows, index, extent)
        values = rows.value[:, :, :extent]
        inverse = 1 / sums
        outputs = outputs * inverse
        measured = outputs if metric is None else einsum("bkqgd,kde->bkqge", outputs, metric)
        cross = einsum("bkqgd,bktd->bkqgt", measured, values)
        distance = norms[:, :, None, None, :extent] - 2 * cross + (measured * outputs).sum(-1, keepdims=True)
        position = rows.positions[index]
        history = (rows.positions[:extent] >= sink) & (rows.positions[:extent] <= position[:, None] - recent)
        history = history & rows.valid[:, None, :extent] & present[..., None]
        squared = jnp.where(history[:, None, :, None], jnp.square(weights * inverse), 0)
        weighted = squared * jnp.maximum(distance, 0)
        key, value = carry
        carry = key.at[..., :extent].add(weighted.sum((2, 3))), value.at[..., :extent].add(squared.sum((2, 3)))
        return carry, weighted.sum(-1)

    zeros = jnp.zeros(rows.key.shape[:3], rows.key.dtype)
    (key, value), by_block = _scan(block, (zeros, zeros), queries, rows, stride)
    per_query = jnp.moveaxis(jnp.concatenate(by_block), 0, 2)  # [B, K, blocks, q, G]
    per_query = per_query.reshape(*queries.shape[:2], -1, queries.shape[3])[:, :, : queries.shape[2]]
    return HistoryWeights(per_query, key, value)


def output_second_moment(queries: jax.Array, rows: Rows) -> jax.Array:
    """`sum_t o_t o_t^T` over every row and head of the group, f64 `[K, D, D]`: `V^T S^T S V` of the causal softmax S.

    Args:
        queries: f64 `[B, K, T, G, D]`, every row, softmax scale included.
    """

    def block(total: jax.Array, query: jax.Array, index: jax.Array, present: jax.Array, extent: int):
        _, sums, outputs = _softmax(query, rows, index, extent)
        outputs = jnp.where(present[:, None, :, None, None], outputs / sums, 0)
        return total + einsum("bkqgd,bkqge->kde", outputs, outputs), None

    _, kv_heads, _, dim = rows.key.shape
    total, _ = _scan(block, jnp.zeros((kv_heads, dim, dim), rows.key.dtype), queries, rows, 1)
    return total


def _softmax(query: jax.Array, rows: Rows, index: jax.Array, extent: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Unnormalised weights `[B, K, q, G, extent]`, their sums `[.., 1]` and unnormalised outputs `[B, K, q, G, D]`."""
    visible = rows.positions[:extent] <= rows.positions[index][:, None]
    if rows.window is not None:
        visible = visible & (rows.positions[:extent] > rows.positions[index][:, None] - rows.window)
    visible = visible & rows.valid[:, None, :extent]
    scores = einsum("bkqgd,bktd->bkqgt", query, rows.key[:, :, :extent])
    scores = jnp.where(visible[:, None, :, None], scores, MASKED)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return weights, weights.sum(-1, keepdims=True), einsum("bkqgt,bktd->bkqgd", weights, rows.value[:, :, :extent])


def _scan(block: Callable, carry, queries: jax.Array, rows: Rows, stride: int):
    """Runs `block(carry, query [B, K, q, G, D], row [q], present [B, q], extent) -> (carry, y)` over blocks of queries.

    `extent` is a static bound on the rows a block can see; queries that fill up the last block are not present. Returns
    the carry and, for each group of blocks, its y's stacked in front.
    """
    batch, kv_heads, count, group, _ = queries.shape
    length = rows.positions.shape[0]
    size = max(1, min(count, SCORES_PER_BLOCK // (batch * kv_heads * group * length)))
    blocks = -(-count // size)
    row = jnp.arange(blocks * size) * stride
    index = jnp.minimum(row, length - 1)
    present = jnp.moveaxis((rows.valid[:, index] & (row < length)).reshape(batch, blocks, size), 1, 0)
    index = index.reshape(blocks, size)
    queries = jnp.pad(queries, [(0, 0), (0, 0), (0, blocks * size - count), (0, 0), (0, 0)])
    queries = jnp.moveaxis(queries.reshape(batch, kv_heads, blocks, size, group, -1), 2, 0)
    results = []
    per_group = -(-blocks // GROUPS)
    for first in range(0, blocks, per_group):
        last = min(first + per_group, blocks)
        extent = min(length, (last * size - 1) * stride + 1)
        carry, result = lax.scan(
            lambda carry, inputs, extent=extent: block(carry, *inputs, extent),
            carry,
            (queries[first:last], index[first:last], present[first:last]),
        )
        results.append(result)
    return carry, results
