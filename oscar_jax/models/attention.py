"""Causal attention without a cache, as the decoder's `attend`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oscar_jax.models.config import ModelConfig

Attend = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any, Any]]
"""`attend(state, layer, q [B, T, N, D], k [B, T, K, D], v [B, T, K, D]) -> (out [B, T, N, D], state, extra)`."""


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
    batch, length, q_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(batch, length, kv_heads, q_heads // kv_heads, head_dim)
    outputs = []
    for start in range(0, length, query_block):
        stop = min(start + query_block, length)
        t, j = np.arange(start, stop)[:, None], np.arange(stop)[None]
        visible = jnp.asarray(j <= t) if window is None else (j <= t) & (j > t - window)
        scores = jnp.einsum(
            "btkgd,bskd->bkgts",
            grouped[:, start:stop],
            k[:, :stop],
            precision="highest",
            preferred_element_type=wide,
        )
        weights = jax.nn.softmax(jnp.where(visible, scores * scale, -jnp.inf), axis=-1).astype(v.dtype)
        outputs.append(
            jnp.einsum("bkgts,bskd->btkgd", weights, v[:, :stop], precision="highest", preferred_element_type=wide)
        )
    return jnp.concatenate(outputs, axis=1).reshape(q.shape).astype(q.dtype)
