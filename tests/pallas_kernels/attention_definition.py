"""Three-tier attention from its written definition: numpy, float64, one query at a time, no code of the package."""

import numpy as np


def history_end(position, tiers):
    """h(t) = S + g floor(max(0, t + 1 - S - W) / g)."""
    return tiers.sink + tiers.group * (max(0, position + 1 - tiers.sink - tiers.recent) // tiers.group)


def visible(position, count, tiers, *, window=None, chunk_start=None):
    """Which of `count` positions a query reads plain and which from history, two bool `[count]`."""
    j = np.arange(count)
    end = history_end(position, tiers)
    if chunk_start is not None:
        end = min(end, max(chunk_start, tiers.sink))
    seen = j <= position
    if window is not None:
        seen &= j > position - window
    history = (j >= tiers.sink) & (j < end)
    return seen & ~history, seen & history


def rotation(rotary, position, head_dim):
    """R with `x R` the row x rotated to `position`; the identity without a rotary embedding."""
    matrix = np.eye(head_dim)
    if rotary is None:
        return matrix
    half = rotary.rotary_dim // 2
    for i, frequency in enumerate(rotary.inverse_frequencies):
        a, b = (i, i + half) if rotary.pairing == "half" else (2 * i, 2 * i + 1)
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        matrix[a, a] = matrix[b, b] = cos
        matrix[a, b], matrix[b, a] = sin, -sin
    return matrix


def bucket_rotations(codes, tiers, count, head_dim):
    """`R(B)` of the bucket of every position, `[count, D, D]`; the identity for sinks and without buckets."""
    if codes.bucket is None:
        return np.broadcast_to(np.eye(head_dim), (count, head_dim, head_dim))
    buckets = np.maximum(np.arange(count) - tiers.sink, 0) // codes.bucket
    origins = [
        rotation(codes.rotary, tiers.sink + codes.bucket * i, head_dim) for i in range(buckets.max(initial=0) + 1)
    ]
    return np.stack(origins)[buckets]


def decode(code, layer, slots, scale, offset):
    """Stored rows `[n, K, N]`, `[n, K]` to `x_hat [n, K, D]`."""
    scale = np.asarray(scale, np.float64)
    offset = -1.5 * scale if offset is None else np.asarray(offset, np.float64)
    rows = scale[..., None] * slots + offset[..., None]
    mu, matrix = (np.asarray(leaf, np.float64)[layer] for leaf in (code.mu, code.decode))
    return np.einsum("tkn,knd->tkd", rows, matrix) + mu


def attention(
    q, k, v, k_hat, v_hat, *, tiers, scale, softcap=None, window=None, sink_logits=None, chunk_starts=None, dtype=None
):
    """Outputs `[T, N, D]` of queries at the last T of n positions.

    Args:
        q: `[T, N, D]`. k, v: plain rows `[n, K, D]`. k_hat, v_hat: the same from history, read where due.
        chunk_starts: `[T]`, first position of each query's call, for the chunk-exact rule.
        dtype: None for float64, or what keys, values, probabilities and outputs are rounded to, as by plain attention
            in it, with sums and logits in fp32.
    """
    wide = np.float64 if dtype is None else np.float32

    def rounded(x):
        return np.asarray(x, dtype or np.float64).astype(wide)

    q, k, v, k_hat, v_hat = map(rounded, (q, k, v, k_hat, v_hat))
    tokens, heads, dim = q.shape
    count, kv_heads = k.shape[:2]
    out = np.zeros((tokens, heads, dim), wide)
    for i in range(tokens):
        start = None if chunk_starts is None else chunk_starts[i]
        plain, history = visible(count - tokens + i, count, tiers, window=window, chunk_start=start)
        if not (plain | history).any() or count - tokens + i < 0:
            continue
        keys = np.concatenate([k[plain], k_hat[history]])
        values = np.concatenate([v[plain], v_hat[history]])
        grouped = q[i].reshape(kv_heads, heads // kv_heads, dim)
        logits = wide(scale) * np.einsum("kgd,skd->kgs", grouped, keys)
        if softcap is not None:
            logits = wide(softcap) * np.tanh(logits / wide(softcap))
        top = logits.max(-1, keepdims=True)
        extra = 0.0
        if sink_logits is not None:
            learnt = np.asarray(sink_logits, wide).reshape(kv_heads, -1, 1)
            top = np.maximum(top, learnt)
            extra = np.exp(learnt - top)
        weights = np.exp(logits - top)
        total = weights.sum(-1, keepdims=True) + extra
        out[i] = (np.einsum("kgs,skd->kgd", rounded(weights), values) / total).reshape(heads, dim)
    return rounded(out)
