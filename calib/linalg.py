"""Batched symmetric linear algebra of the fit, in float64.

Matrices lead with any batch axes and every function works on the last two, so a batch sharded over layers x heads
stays where it is: no function mixes batch entries. Call them inside `jax.enable_x64(True)`; results follow the
input's dtype.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

# Entries this close to the largest count as tied, so that rounding noise does not decide the sign.
SIGN_TIE = 1e-9
# Eigenvalues below this fraction of the largest are noise of the decomposition, raised before roots and inverses.
EIGENVALUE_FLOOR = 1e-12


def transpose(a: jax.Array | np.ndarray) -> jax.Array:
    """Swaps the last two axes."""
    return jnp.swapaxes(a, -1, -2)


def symmetrize(a: jax.Array | np.ndarray) -> jax.Array:
    """`(A + A^T) / 2`."""
    return (jnp.asarray(a) + transpose(a)) / 2


def scale_columns(a: jax.Array, factors: jax.Array) -> jax.Array:
    """`A diag(factors)`."""
    return a * factors[..., None, :]


def mean_diagonal(a: jax.Array) -> jax.Array:
    """Mean of the diagonal, without the last two axes."""
    return jnp.trace(a, axis1=-2, axis2=-1) / a.shape[-1]


def canonical_sign(vectors: jax.Array) -> jax.Array:
    """Flips columns so that the entry of largest magnitude is positive (the first one, of entries tied to 1e-9).

    Eigenvectors are defined up to a sign and libraries differ in it; a Hadamard mix of them would differ in more
    than sign.
    """
    size = jnp.abs(vectors)
    tied = size >= (1 - SIGN_TIE) * size.max(axis=-2, keepdims=True)
    first = tied & (jnp.cumsum(tied, axis=-2) == 1)
    leading = jnp.sum(jnp.where(first, vectors, 0), axis=-2, keepdims=True)
    return jnp.where(leading < 0, -vectors, vectors)


def eigh(a: jax.Array | np.ndarray, *, descending: bool = True) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues `[..., D]` and eigenvectors `[..., D, D]` (columns) of the symmetric part of `a`, canonical sign.

    Within an eigenspace of equal eigenvalues the basis is arbitrary: compare subspaces or products, never vectors.
    """
    values, vectors = jnp.linalg.eigh(symmetrize(a), symmetrize_input=False)
    if descending:
        values, vectors = values[..., ::-1], vectors[..., ::-1]
    return values, canonical_sign(vectors)


def powers(a: jax.Array, *exponents: float) -> tuple[jax.Array, ...]:
    """`A^e` for each exponent, of a symmetric positive semidefinite matrix; eigenvalues floored at 1e-12 of the
    largest."""
    values, vectors = eigh(a)
    values = jnp.maximum(values, EIGENVALUE_FLOOR * values[..., :1])
    return tuple(
        symmetrize(matmul(scale_columns(vectors, values**exponent), transpose(vectors))) for exponent in exponents
    )


def ridged(a: jax.Array, ridge: float) -> jax.Array:
    """`A + ridge x mean diagonal x I`."""
    return a + ridge * mean_diagonal(a)[..., None, None] * jnp.eye(a.shape[-1], dtype=a.dtype)


def balance(covariance: jax.Array, metric: jax.Array, ridge: float) -> tuple[jax.Array, jax.Array]:
    """`P^1/2` and `P^-1/2` of the P that solves `P S P = C`, with S and C ridged.

    `P = S^-1/2 (S^1/2 C S^1/2)^1/2 S^-1/2` is the geometric mean of `S^-1` and C. In coordinates `x P^1/2` the data
    covariance and the error metric are the same matrix, so one basis serves both.
    """
    root, inverse_root = powers(ridged(covariance, ridge), 0.5, -0.5)
    (middle,) = powers(matmul(matmul(root, ridged(metric, ridge)), root), 0.5)
    half, inverse_half = powers(matmul(matmul(inverse_root, middle), inverse_root), 0.5, -0.5)
    return half, inverse_half


def mixer(start: jax.Array, size: jax.Array) -> jax.Array:
    """Block-diagonal orthogonal mixer `[..., D, D]`: one block `Q_n` for each run of n coordinates.

    `Q_n` is the Hadamard matrix in natural order where n is a power of two, else the DCT-II
    `Q_n[j, k] = sqrt((2 - [k = 0]) / n) cos(pi (j + 1/2) k / n)`, j the coordinate and k the mixed column.
    Closed forms entry by entry, so that heads with different runs are one computation.

    Args:
        start: int `[..., D]`, first coordinate of the run that coordinate i belongs to.
        size: int `[..., D]`, its length n; 0 leaves row and column zero (a dropped coordinate).
    """
    index = jnp.arange(start.shape[-1])
    row, column = (index - start)[..., :, None], (index - start)[..., None, :]
    n = jnp.maximum(size, 1)[..., :, None]
    sign = 1 - 2 * (lax.population_count(row & column) & 1)
    dct = jnp.sqrt(2 - (column == 0).astype(float)) * jnp.cos(jnp.pi * (row + 0.5) * column / n)
    block = jnp.where((n & (n - 1)) == 0, sign, dct) / jnp.sqrt(n.astype(float))
    same = (start[..., :, None] == start[..., None, :]) & (size[..., :, None] > 0) & (size[..., None, :] > 0)
    return jnp.where(same, block, 0.0)


def hadamard(dim: int) -> np.ndarray:
    """`H_D = I (x) H_m`, float64 `[D, D]`, m the largest power of two that divides D (D itself for a power of two)."""
    block = dim & -dim
    index = np.arange(dim)
    parity = np.bitwise_count(index[:, None] & index[None, :] & (block - 1)) & 1
    same = index[:, None] // block == index[None, :] // block
    return np.where(same, 1.0 - 2.0 * parity, 0.0) / np.sqrt(block)


def bit_reversal(dim: int) -> np.ndarray:
    """The reference's `P_br` as the index `pi [D]` with `(x P)_j = x[pi(j)]`, for eigenvalues in ascending order.

    `pi(j) = D - 1 - rev(j)`, rev reversing the bits of j (OSCAR's fitter). For D that is not a power of two, which
    the reference refuses, the low bits are reversed within each block of `H_D`. It permutes finished columns, so
    with one min/max group a row it changes no reconstruction.
    """
    block = dim & -dim
    within = np.arange(block)
    reversed_ = np.zeros(block, np.int64)
    for _ in range(block.bit_length() - 1):
        reversed_, within = reversed_ << 1 | within & 1, within >> 1
    return dim - 1 - (np.arange(dim) // block * block + reversed_[np.arange(dim) % block])


@jax.jit
def reference_rotation(target: jax.Array) -> jax.Array:
    """`R = U H P_br` `[..., D, D]` with U the target's eigenvectors, ascending as in the reference, canonical sign."""
    _, vectors = eigh(target, descending=False)
    dim = target.shape[-1]
    return matmul(vectors, jnp.asarray(hadamard(dim)[:, bit_reversal(dim)], target.dtype))
