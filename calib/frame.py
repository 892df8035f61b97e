"""The balanced frame of a batch of heads, and moments averaged over position offsets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from calib import linalg
from calib.bits import allocate, class_runs, uniform
from calib.recipes import SideRecipe
from pallas_kernels.rope import Rotary, rotate

# Of the largest eigenvalue: a class without calibration data must not blow its noise up to the size of the others.
VARIANCE_FLOOR = 1e-8


class Frame(NamedTuple):
    """Fitted heads, float64.

    mu: `[M, D]`. encode: `[M, D, D]`, zero columns where dropped. inverse: `[M, D, D]`, A, zero rows where dropped.
    bits: int `[M, D]`. weight: `[M, D]`, g, 0 where dropped. metric: `[M, D, D]`, damped `A C A^T`.
    """

    mu: jax.Array
    encode: jax.Array
    inverse: jax.Array
    bits: jax.Array
    weight: jax.Array
    metric: jax.Array


@partial(jax.jit, static_argnames=("side", "slots"))
def balanced(mean: jax.Array, covariance: jax.Array, metric: jax.Array, *, side: SideRecipe, slots: int) -> Frame:
    """The frame in which a head is coded: `M = P^1/2 U Q / rms`, `A = rms Q^T U^T P^-1/2`.

    P balances the covariance S against the metric C (`linalg.balance`), U holds the eigenvectors of `P^1/2 S P^1/2`, Q
    mixes each class of equal bits, and rms is that of a class's coordinates after mixing.

    Args:
        mean: `[M, D]`. covariance, metric: `[M, D, D]`.
        side: ridge, bits, weights and damping.
        slots: N.
    """
    half, inverse_half = linalg.balance(covariance, metric, side.ridge)
    spectrum, vectors = linalg.eigh(linalg.matmul(linalg.matmul(half, covariance), half))
    spectrum = jnp.maximum(spectrum, 0)
    bits = allocate(spectrum, slots) if side.search_bits else uniform(spectrum, slots)
    start, size = class_runs(bits)
    mixer = linalg.mixer(start, size)
    same_class = (start[..., :, None] == start[..., None, :]) & (size[..., None, :] > 0)
    variance = jnp.where(same_class, spectrum[..., :, None], 0).sum(-2) / jnp.maximum(size, 1)
    floor = jnp.maximum(VARIANCE_FLOOR * spectrum[..., :1], jnp.finfo(spectrum.dtype).tiny)
    rms = jnp.sqrt(jnp.maximum(variance, floor))
    kept = bits > 0
    encode = linalg.scale_columns(linalg.matmul(linalg.matmul(half, vectors), mixer), 1 / rms)
    inverse = linalg.transpose(linalg.scale_columns(linalg.matmul(linalg.matmul(inverse_half, vectors), mixer), rms))
    hessian = linalg.symmetrize(linalg.matmul(linalg.matmul(inverse, metric), linalg.transpose(inverse)))
    diagonal = jnp.diagonal(hessian, axis1=-2, axis2=-1)
    weight = jnp.where(kept, diagonal if side.metric_weights else 1.0, 0.0)
    # A dropped coordinate gets the identity's row: the matrix stays invertible and couples it to nothing.
    extra = jnp.where(kept, (side.damping or 0.0) * diagonal, 1.0)
    damped = hessian + extra[..., None] * jnp.eye(bits.shape[-1], dtype=hessian.dtype)
    return Frame(mean, encode, inverse, bits, weight, damped)


def over_heads(function: Callable, *arrays: jax.Array, sharding: NamedSharding | None = None):
    """`function` on arrays `[L, K, ...]` with L and K as one axis; results `[L, K, ...]` on the host.

    Args:
        function: jitted, of arrays `[M, ...]`, treating every entry of the first axis alone.
        sharding: spreads the first axis, which is padded with copies of its last entry up to a multiple of the devices;
            None uses the default device.
    """
    lead = arrays[0].shape[:2]
    heads = lead[0] * lead[1]
    with jax.enable_x64(True):
        flat = [np.asarray(array).reshape(heads, *array.shape[2:]) for array in arrays]
        if sharding is not None:
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
            parts = sharding.mesh.size // sharding.shard_shape((sharding.mesh.size,))[0]
            flat = [np.concatenate([array, np.repeat(array[-1:], -heads % parts, axis=0)]) for array in flat]
            flat = [jax.device_put(array, sharding) for array in flat]
        result = function(*flat)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:heads].reshape(*lead, *leaf.shape[1:]), result)


def average_vectors(x: jax.Array, offsets: np.ndarray, rope: Rotary) -> jax.Array:
    """Mean over offsets o of `x R(o)`, x f64 `[L, K, D]`."""
    return _average(x, *rope.tables(offsets, np.float64), rope=rope, both_axes=False)


def average_matrices(x: jax.Array, offsets: np.ndarray, rope: Rotary) -> jax.Array:
    """Mean over offsets o of `R(o)^T x R(o)`, x f64 `[L, K, D, D]`."""
    return _average(x, *rope.tables(offsets, np.float64), rope=rope, both_axes=True)


@partial(jax.jit, static_argnames=("rope", "both_axes"))
def _average(x: jax.Array, cos: jax.Array, sin: jax.Array, *, rope: Rotary, both_axes: bool) -> jax.Array:
    def add(total, tables):
        turned = rotate(x, *tables, pairing=rope.pairing)
        if both_axes:
            turned = linalg.transpose(rotate(linalg.transpose(turned), *tables, pairing=rope.pairing))
        return total + turned, None

    return lax.scan(add, jnp.zeros_like(x), (cos, sin))[0] / len(cos)
