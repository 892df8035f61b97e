"""Causal attention without a cache, as the decoder's `attend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oscar_jax.models.config import ModelConfig

Attend = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any, Any]]
"""`attend(state, layer, q [B, T, N, D], k [B, T, K, D], v [B, T, K, D]) -> (out [B, T, N, D], state, extra)`."""

Attends = Attend | Sequence[tuple[int, Attend]]
"""One for all layers, or `(count, attend)` for each run of layers, from the first one on."""


def runs(attends: Attends, layers: int) -> list[tuple[int, Attend]]:
    """The runs of layers of an `Attends`."""
    return [(layers, attends)] if callable(attends) else list(attends)


def plain_attention(config: ModelConfig, *, capture: bool = False, query_block: int = 256) -> Attend:
    """An `attend` over the tokens of the call alone: token i sees tokens 0..i, or those in its layer's window.

    Pad on the right: what follows a sequence's end never reaches it.

    Args:
        config: gives the softmax scale and the layers' windows.
        capture: return `(q, k, v)` as `extra`, so that the decoder's `extras` are q `[L, B, T, N, D]` and k, v
            `[L, B, T, K, D]`, after the rotary positions.
        query_block: see `causal_attention`.
    """
    unlimited = np.iinfo(np.int32).max
    windows = None
    if any(w is not None for w in config.windows):
        windows = np.asarray([unlimited if w is None else w for w in config.windows], np.int32)

    def attend(state: Any, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any, Any]:
        window = None if windows is None else jnp.asarray(windows)[layer]
        out = causal_attention(q, k, v, scale=config.softmax_scale, window=window, query_block=query_block)
        return out, state, (q, k, v) if capture else None

    return attend


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: jax.Array | int | None = None,
    query_block: int = 256,
) -> jax.Array:
    """Softmax attention of each token over itself and the tokens before it.

    Scores and softmax are at least float32. One block of scores, `[B, N, query_block, T]`, exists at a time, and keys
    after a block are never read.

    Args:
        q: `[B, T, N, D]`.
        k, v: `[B, T, K, D]`, K dividing N; query head n reads KV head `n // (N / K)`.
        scale: factor on `q . k`.
        window: token t sees only tokens `j > t - window`; None sees all. May be traced.
        query_block: queries a block.

    Returns:
        `[B, T, N, D]` in the dtype of q.
    """
    batch, length, _, head_dim = q.shape
    kv_heads = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # Heads first and the group's queries side by side: both products are plain batched matrix products.
    grouped = q.reshape(batch, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    outputs = []
    for start in range(0, length, query_block):
        stop = min(start + query_block, length)
        t, j = np.arange(start, stop)[:, None], np.arange(stop)[None]
        visible = jnp.asarray(j <= t) if window is None else (j <= t) & (j > t - window)
        block = grouped[:, :, :, start:stop]
        queries = block.reshape(batch, kv_heads, -1, head_dim)
        scores = jnp.einsum(
            "bkqd,bksd->bkqs", queries, k[:, :, :stop], precision="highest", preferred_element_type=wide
        ).reshape(*block.shape[:-1], stop)
        weights = jax.nn.softmax(jnp.where(visible, scores * scale, -jnp.inf), axis=-1).astype(v.dtype)
        weights = weights.reshape(batch, kv_heads, -1, stop)
        out = jnp.einsum("bkqs,bksd->bkqd", weights, v[:, :, :stop], precision="highest", preferred_element_type=wide)
        outputs.append(out.reshape(block.shape))
    out = jnp.concatenate(outputs, axis=3).transpose(0, 3, 1, 2, 4)
    return out.reshape(q.shape).astype(q.dtype)
