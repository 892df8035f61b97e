"""Rotary positions: the pure rotation, its tables, and its matrix.

Bucket-relative keys (`design.md`) need the rotation by any whole position, forwards and backwards, so angles are made
in float64 on the host and only the finished cosines and sines are rounded.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

Pairing = Literal["half", "interleaved"]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """A rotary embedding without its attention factor.

    Attributes:
        inverse_frequencies: radians a token, one for each rotated pair; length `rotary_dim / 2`.
        rotary_dim: leading dimensions of a head that are rotated; the rest pass through.
        pairing: "half" pairs dimension i with i + rotary_dim/2, "interleaved" pairs 2i with 2i + 1.
    """

    inverse_frequencies: tuple[float, ...]
    rotary_dim: int
    pairing: Pairing = "half"

    def __post_init__(self):
        if self.rotary_dim % 2 or self.rotary_dim != 2 * len(self.inverse_frequencies):
            raise ValueError(
                f"rotary_dim={self.rotary_dim} with {len(self.inverse_frequencies)} inverse frequencies: expected an "
                "even rotary_dim and one frequency for each pair of dimensions."
            )
        if self.pairing not in ("half", "interleaved"):
            raise ValueError(f"pairing={self.pairing!r}: expected 'half' or 'interleaved'.")

    @classmethod
    def standard(cls, head_dim: int, base: float = 10000.0, pairing: Pairing = "half") -> Rotary:
        """Rotary embedding of the whole head with frequencies `base ** (-2i / head_dim)`."""
        return cls(tuple(float(base ** (-2 * i / head_dim)) for i in range(head_dim // 2)), head_dim, pairing)

    def tables(self, positions: ArrayLike, dtype: DTypeLike = np.float32) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines `[..., rotary_dim / 2]` for integer positions `[...]`, from float64 angles."""
        angles = np.asarray(positions, np.float64)[..., None] * np.asarray(self.inverse_frequencies, np.float64)
        return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)

    def table(self, length: int, dtype: DTypeLike = np.float32) -> tuple[np.ndarray, np.ndarray]:
        """`tables` of positions 0 .. length - 1."""
        return self.tables(np.arange(length), dtype)

    def matrix(self, position: int, head_dim: int) -> np.ndarray:
        """Float64 `[head_dim, head_dim]` with `x @ matrix` equal to `rotate(x)` at `position`."""
        cos, sin = self.tables(position, np.float64)
        first, second = self._pairs()
        matrix = np.eye(head_dim)
        matrix[first, first] = matrix[second, second] = cos
        matrix[first, second], matrix[second, first] = sin, -sin
        return matrix

    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        pair = np.arange(self.rotary_dim // 2)
        return (2 * pair, 2 * pair + 1) if self.pairing == "interleaved" else (pair, pair + self.rotary_dim // 2)


def rotate(x: jax.Array, cos: ArrayLike, sin: ArrayLike, *, pairing: Pairing = "half") -> jax.Array:
    """Rotates the last axis of x by the angles whose cosines and sines are given.

    Args:
        x: `[..., D]`, any float dtype; the result has the same dtype.
        cos, sin: broadcast against `x[..., : rotary_dim / 2]`.
        pairing: see `Rotary`.
    """
    cos, sin = jnp.asarray(cos), jnp.asarray(sin)
    half = cos.shape[-1]
    wide = jnp.promote_types(x.dtype, cos.dtype)
    if pairing == "half":
        first, second = x[..., :half].astype(wide), x[..., half : 2 * half].astype(wide)
    else:
        first, second = x[..., 0 : 2 * half : 2].astype(wide), x[..., 1 : 2 * half : 2].astype(wide)
    turned = first * cos - second * sin, second * cos + first * sin
    if pairing == "half":
        head = jnp.concatenate(turned, axis=-1)
    else:
        head = jnp.stack(turned, axis=-1).reshape(*turned[0].shape[:-1], 2 * half)
    tail = jnp.broadcast_to(x[..., 2 * half :], (*head.shape[:-1], x.shape[-1] - 2 * half))
    return jnp.concatenate([head.astype(x.dtype), tail], axis=-1)


def unrotate(x: jax.Array, cos: ArrayLike, sin: ArrayLike, *, pairing: Pairing = "half") -> jax.Array:
    """Inverse of `rotate`."""
    return rotate(x, cos, -jnp.asarray(sin), pairing=pairing)
