"""Histograms of magnitudes in logarithmic bins: quantiles of a stream without keeping it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

BINS = 4096
BINS_PER_OCTAVE = 128
# Bin 0 starts here and takes what is smaller; the last bin ends at 2 ** 16 and takes what is larger.
LOWEST_OCTAVE = -16


def count(rows: jax.Array, valid: jax.Array) -> jax.Array:
    """Counts of |x| by bin, f64 `[K, BINS]`.

    Args:
        rows: `[B, T, K, D]`.
        valid: bool `[B, T]`; other rows are not counted.
    """
    kv_heads = rows.shape[2]
    bins = jnp.floor((jnp.log2(jnp.abs(rows)) - LOWEST_OCTAVE) * BINS_PER_OCTAVE)
    bins = jnp.clip(jnp.nan_to_num(bins), 0, BINS - 1).astype(jnp.int32)
    bins = bins + BINS * jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
    counted = jnp.broadcast_to(valid[..., None, None], rows.shape).astype(jnp.float64)
    total = jnp.zeros(kv_heads * BINS, jnp.float64).at[bins.reshape(-1)].add(counted.reshape(-1))
    return total.reshape(kv_heads, BINS)


def quantile(counts: np.ndarray, ratio: float) -> np.ndarray:
    """Upper edge of the first bin at which the share of counts `[..., BINS]` reaches `ratio`, `[...]`."""
    cumulative = np.cumsum(counts, axis=-1)
    first = (cumulative >= ratio * cumulative[..., -1:]).argmax(-1)
    return 2.0 ** (LOWEST_OCTAVE + (first + 1) / BINS_PER_OCTAVE)
