"""How many bits each coordinate of a balanced frame gets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from calib.recipes import ERRORS

SIX_BIT_COUNTS = (0, 1, 2, 3, 4, 6, 8)
CLASSES = (6, 4, 2)


def candidates(dim: int, slots: int) -> np.ndarray:
    """All (n6, n4, n2) searched, int `[candidates, 3]`, n6 then n4 ascending.

    Slots are used up (`n2 = N - 3 n6 - 2 n4`) unless that exceeds the D coordinates (`n2 = D - n6 - n4`).
    """
    splits = [
        (n6, n4, min(slots - 3 * n6 - 2 * n4, dim - n6 - n4))
        for n6 in SIX_BIT_COUNTS
        for n4 in range((slots - 3 * n6) // 2 + 1)
    ]
    return np.array([split for split in splits if split[2] >= 0])


def predicted_error(spectrum: jax.Array, splits: np.ndarray) -> jax.Array:
    """Weighted squared error of each split, `[..., candidates]`.

    `sum over classes d_b (sum of lambda in the class)^2 / n_b + sum of lambda^2 dropped`: after mixing, each coordinate
    of a class has its mean variance and its mean error weight.
    """
    ends = np.concatenate([np.zeros((len(splits), 1), int), np.cumsum(splits, axis=-1)], axis=-1)
    zero = jnp.zeros_like(spectrum[..., :1])
    sums = jnp.concatenate([zero, jnp.cumsum(spectrum, axis=-1)], axis=-1)
    squares = jnp.concatenate([zero, jnp.cumsum(spectrum**2, axis=-1)], axis=-1)
    error = squares[..., -1:] - squares[..., ends[:, -1]]
    for index, bits in enumerate(CLASSES):
        total = sums[..., ends[:, index + 1]] - sums[..., ends[:, index]]
        error += ERRORS[bits] * total**2 / np.maximum(splits[:, index], 1)
    return error


def allocate(spectrum: jax.Array, slots: int) -> jax.Array:
    """Bits of each coordinate, int32 `[..., D]` in descending order: the first split of least predicted error.

    Args:
        spectrum: lambda `[..., D]`, descending.
        slots: N.
    """
    dim = spectrum.shape[-1]
    splits = candidates(dim, slots)
    table = np.zeros((len(splits), dim), np.int32)
    for row, split in zip(table, splits, strict=True):
        row[: split.sum()] = np.repeat(CLASSES, split)
    return jnp.asarray(table)[jnp.argmin(predicted_error(spectrum, splits), axis=-1)]


def uniform(spectrum: jax.Array, slots: int) -> jax.Array:
    """Bits int32 `[..., D]`: two for the leading `slots` coordinates, or as many for all as a multiple of D gives."""
    dim = spectrum.shape[-1]
    bits = np.where(np.arange(dim) < slots, 2 * max(1, slots // dim), 0)
    # Behind the barrier XLA sees no constant: folding `class_runs` of one for all heads takes it seconds.
    return jax.lax.optimization_barrier(jnp.broadcast_to(jnp.asarray(bits, jnp.int32), spectrum.shape))


def class_runs(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First coordinate and length of the class of each coordinate, int `[..., D]` twice; length 0 where dropped."""
    same = bits[..., :, None] == bits[..., None, :]
    start = jnp.argmax(same, axis=-1)
    return start, jnp.where(bits > 0, same.sum(-1), 0)
