"""How 16-bit floats lie in the arrays of a cache.

XLA's CPU backend has no bfloat16 updates: it widens the whole operand to fp32 and back, so writing one token would
cost a pass over every layer (measured: 1360 ms instead of 0.1 ms a step, 30 layers, 97 MB). Pools therefore hold
bfloat16 as its bits, uint16, and only the rows that are read are reinterpreted. Every other dtype is stored as it is,
but for float16 in the TPU layouts of history: its bits, int16, because Mosaic takes no float16 and on v5p XLA copies a
pool that is reinterpreted whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def storage_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Dtype of a pool that holds `dtype`."""
    return jnp.dtype(jnp.uint16 if jnp.dtype(dtype) == jnp.bfloat16 else dtype)


def stored(x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """x as a pool holds it; `dtype` is the pool's where that may be int16."""
    if x.dtype == jnp.float16 and dtype == jnp.int16:
        return jax.lax.bitcast_convert_type(x, jnp.int16)
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def loaded(x: jax.Array) -> jax.Array:
    """Inverse of `stored`."""
    floats = {jnp.dtype(jnp.uint16): jnp.bfloat16, jnp.dtype(jnp.int16): jnp.float16}.get(x.dtype)
    return x if floats is None else jax.lax.bitcast_convert_type(x, floats)
