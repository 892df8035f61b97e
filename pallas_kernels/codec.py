"""The codec, defined once: transform, clip, scale, round, split into slots, pack, and back.

Prefill, demotion, every kernel and the PyTorch reference agree with this file: bit for bit from the same y, and up to
near-ties of the rounding where the product `(x - mu) M` is summed in another order.

Numerics: y in fp32 (float64 for float64 rows) with `precision="highest"`. Sums over coordinates are pairwise (pad with
zeros to a power of two, add the upper half to the lower, repeat), their products are rounded before they are added, and
quotients are rounded once, so the result does not depend on the compiler. Levels round down to a half-step grid;
min/max rounds half up from the unrounded fp32 scale. Scale and offset are rounded once, when stored.

Degenerate rows: a row with NaN or Inf, or whose mean of y^2 overflows, stores slots 0 and scale NaN, so it is seen in
its own sequence only. `levels`: y = 0 decodes to mu. `minmax`: a row constant after clipping stores scale 0, slots 0
and the value as offset. |scale| and |offset| saturate at 65504, the largest fp16, in either dtype; a scale
that underflows stores 0. Every other finite row decodes finite.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.transform_code import SLOT_BITS, TransformCode

PLANES = 8 // SLOT_BITS
IMPLIED_OFFSET = -1.5  # of the scale, for `kind == "levels"`: the middle of a two-bit slot
SIGMA_EPSILON = 1e-12
SCALE_LIMIT = 65504.0  # of |scale| and |offset|, in either dtype


class Encoded(NamedTuple):
    """Stored rows: slots uint8 `[..., K, N/4]`, scale 16-bit `[..., K]`, offset likewise or None."""

    slots: jax.Array
    scale: jax.Array
    offset: jax.Array | None


def encode(code: TransformCode, x: jax.Array, *, scale_dtype: str = "float16") -> Encoded:
    """Encodes rows of one layer.

    Args:
        code: one layer's code, leaves `[K, ...]`.
        x: `[..., K, D]`, already rounded to the cache's plain dtype.
        scale_dtype: "float16" or "bfloat16".
    """
    return quantize(code, transform(code, x), scale_dtype=scale_dtype)


def transform(code: TransformCode, x: jax.Array) -> jax.Array:
    """`y = (x - mu) M`, `[..., K, D]` in fp32 (float64 for float64 x)."""
    compute = jnp.promote_types(x.dtype, jnp.float32)
    centred = x.astype(compute) - jnp.asarray(code.mu, compute)
    return jnp.einsum("...kd,kde->...ke", centred, jnp.asarray(code.encode, compute), precision="highest")


def quantize(code: TransformCode, y: jax.Array, *, scale_dtype: str = "float16") -> Encoded:
    """Slots, scale and offset of transformed rows y `[..., K, D]`."""
    storage = jnp.dtype(scale_dtype)
    finite = jnp.isfinite(y).all(-1)
    if code.kind == "minmax":
        stored, scale, offset = _quantize_minmax(code, y)
    else:
        stored, scale, finite = _quantize_levels(code, y, finite)
        offset = None
    owner = jnp.broadcast_to(code.slot_owner, (*y.shape[:-1], code.slots))
    slots = jnp.take_along_axis(stored, owner, axis=-1) >> code.slot_shift & 3
    slots = jnp.where(finite[..., None], slots, 0)

    def store(value: jax.Array) -> jax.Array:
        return jnp.where(finite, jnp.clip(value, -SCALE_LIMIT, SCALE_LIMIT), jnp.nan).astype(storage)

    return Encoded(pack(slots), store(scale), None if offset is None else store(offset))


def decode(code: TransformCode, encoded: Encoded, *, dtype: jnp.dtype | type = jnp.float32) -> jax.Array:
    """`x_hat = (scale c + offset 1) E + mu`, `[..., K, D]` in `dtype`."""
    scale = encoded.scale.astype(dtype)[..., None]
    offset = IMPLIED_OFFSET * scale if encoded.offset is None else encoded.offset.astype(dtype)[..., None]
    rows = scale * unpack(encoded.slots).astype(dtype) + offset
    return jnp.einsum("...kn,knd->...kd", rows, jnp.asarray(code.decode, dtype), precision="highest") + jnp.asarray(
        code.mu, dtype
    )


def pack(slots: jax.Array) -> jax.Array:
    """Slots `[..., N]` to bytes `[..., N/4]`; byte j holds slots j, j + N/4, j + N/2, j + 3N/4, lowest first."""
    planes = slots.astype(jnp.uint8).reshape(*slots.shape[:-1], PLANES, slots.shape[-1] // PLANES)
    shifts = jnp.arange(0, 8, SLOT_BITS, dtype=jnp.uint8)[:, None]
    return (planes << shifts).sum(-2, dtype=jnp.uint8)


def unpack(packed: jax.Array) -> jax.Array:
    """Inverse of `pack`: bytes `[..., N/4]` to slots `[..., N]`, uint8 0 .. 3."""
    shifts = jnp.arange(0, 8, SLOT_BITS, dtype=jnp.uint8)[:, None]
    planes = (packed[..., None, :] >> shifts) & jnp.uint8(3)
    return planes.reshape(*packed.shape[:-1], packed.shape[-1] * PLANES)


def pairwise_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis in a fixed order, whatever the compiler."""
    size = x.shape[-1]
    width = 1 << (size - 1).bit_length()
    if width > size:
        x = jnp.concatenate([x, jnp.zeros((*x.shape[:-1], width - size), x.dtype)], axis=-1)
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def clip_rank(ratio: float, size: int) -> int:
    """0-based rank, ascending in magnitude, of the element that rank clipping clips to."""
    return min(int(np.floor(ratio * size)), size - 1)


def quotient(a: jax.Array, b: jax.Array | float) -> jax.Array:
    """`a / b`, rounded once, whatever the compiler."""
    # Compilers multiply by `1 / b`, rounded twice, where b is a constant or the same for many elements; so it must look
    # like neither.
    return a / jnp.where(jnp.isnan(a), 1, b).astype(a.dtype)


def rounded(product: jax.Array) -> jax.Array:
    # An identity on every finite number that compilers cannot see through: without it the product may be fused into the
    # addition that follows (one rounding instead of two), and implementations would differ.
    limit = float(jnp.finfo(product.dtype).max)
    return jnp.clip(product, -limit, limit)


def _quantize_minmax(code: TransformCode, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    if code.clip == "rank":
        rank = clip_rank(code.clip_ratio, y.shape[-1])
        threshold = jnp.sort(jnp.abs(y), axis=-1)[..., rank : rank + 1]
        y = jnp.clip(y, -threshold, threshold)
    elif code.clip == "static":
        threshold = jnp.asarray(code.clip_threshold, y.dtype)[..., None]
        y = jnp.clip(y, -threshold, threshold)
    low, high = y.min(-1, keepdims=True), y.max(-1, keepdims=True)
    scale = jnp.minimum(quotient(high - low, 3), jnp.finfo(y.dtype).max)
    constant = scale < jnp.finfo(y.dtype).tiny
    level = jnp.floor(quotient(y - low, jnp.where(constant, 1, scale)) + 0.5)
    stored = jnp.clip(jnp.nan_to_num(level), 0, 3).astype(jnp.int32)
    return (
        jnp.where(constant, 0, stored),
        jnp.where(constant, 0, scale)[..., 0],
        low[..., 0],
    )


def _quantize_levels(code: TransformCode, y: jax.Array, finite: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    delta = jnp.asarray(code.delta, y.dtype)
    half = (1 << jnp.asarray(code.bits, jnp.int32)) // 2  # levels on each side of zero; 0 where dropped
    kept = half > 0
    count = kept.sum(-1).astype(y.dtype)
    # maximum(), not clip(): an overflow must stay visible here.
    mean_square = quotient(pairwise_sum(jnp.where(kept, jnp.maximum(y * y, 0), 0)), count)
    finite &= jnp.isfinite(mean_square)
    # The lower bound never binds; it keeps compilers from replacing 1 / sqrt by an approximate reciprocal root.
    sigma = jnp.maximum(jnp.sqrt(mean_square + SIGMA_EPSILON), 1e-7)
    y = jnp.where(finite[..., None] & kept, y, 0)
    sigma = jnp.where(finite, sigma, 1)[..., None]

    def nearest(z: jax.Array, half: jax.Array) -> jax.Array:
        """Index k of the level `delta (k + 1/2)`; 0 for a dropped coordinate."""
        return jnp.clip(jnp.floor(z), -half, jnp.maximum(half - 1, 0))

    inverse_delta = 1 / delta
    if code.metric is None:
        index = nearest(y * (1 / sigma) * inverse_delta, half)
        level = jnp.where(kept, delta * (index + 0.5), 0)
        weighted = rounded(jnp.asarray(code.weight, y.dtype) * level)
        dot, norm = pairwise_sum(rounded(weighted * y)), pairwise_sum(rounded(weighted * level))
    else:
        index = _feedback_levels(code, y, sigma[..., 0], nearest, half, kept)
        level = jnp.where(kept, delta * (index + 0.5), 0)
        weighted = _metric_product(code, level)
        dot, norm = pairwise_sum(rounded(weighted * y)), pairwise_sum(rounded(weighted * level))
    scale = jnp.asarray(code.gain, y.dtype) * dot / jnp.where(norm > 0, norm, 1)
    return (index + half).astype(jnp.int32), scale, finite


def _metric_product(code: TransformCode, rows: jax.Array) -> jax.Array:
    return jnp.einsum("...kd,kde->...ke", rows, jnp.asarray(code.metric, rows.dtype), precision="highest")


def _feedback_levels(code: TransformCode, y: jax.Array, sigma: jax.Array, nearest, half, kept) -> jax.Array:
    """Rounds coordinates one after another, pushing each error into the later ones, then one sweep of descent.

    Sequential rounding under `metric^-1 = U^T U` (Frantar et al., arXiv 2210.17323, applied to a row), then coordinate
    descent on the same quadratic error with the least-squares scale held.
    """
    delta, size = jnp.asarray(code.delta, y.dtype), y.shape[-1]
    factor, metric = jnp.asarray(code.feedback, y.dtype), jnp.asarray(code.metric, y.dtype)
    later = jnp.arange(size)

    def pick(values: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(values, i, axis=-1, keepdims=False)

    def level_of(i, z):
        index = nearest(z, pick(half, i))
        return index, jnp.where(pick(kept, i), pick(delta, i) * (index + 0.5), 0)

    def round_one(i, carry):
        target, index = carry
        here = pick(target, i)
        k, level = level_of(i, here / sigma / pick(delta, i))
        row = jax.lax.dynamic_index_in_dim(factor, i, axis=-2, keepdims=False)
        error = (here - level * sigma) / pick(row, i)
        target = target - jnp.where(later > i, row * error[..., None], 0)
        return target, jax.lax.dynamic_update_index_in_dim(index, k, i, -1)

    _, index = jax.lax.fori_loop(0, size, round_one, (y, jnp.zeros_like(y)))
    level = jnp.where(kept, delta * (index + 0.5), 0)
    product = _metric_product(code, level)
    norm = pairwise_sum(product * level)
    scale = pairwise_sum(product * y) / jnp.where(norm > 0, norm, 1)
    scale = jnp.where(scale == 0, 1, scale)  # y = 0: any scale leaves the levels as they are
    residual = _metric_product(code, y - level * scale[..., None])

    def descend_one(i, carry):
        level, index, residual = carry
        row = jax.lax.dynamic_index_in_dim(metric, i, axis=-2, keepdims=False)
        old = pick(level, i)
        k, new = level_of(i, (old + pick(residual, i) / pick(row, i) / scale) / pick(delta, i))
        residual = residual + row * ((old - new) * scale)[..., None]
        update = jax.lax.dynamic_update_index_in_dim
        return update(level, new, i, -1), update(index, k, i, -1), residual

    return jax.lax.fori_loop(0, size, descend_one, (level, index, residual))[1]
