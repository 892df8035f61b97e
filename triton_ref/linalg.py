"""Symmetric linear algebra of the fit, float64: canonical eigenvectors, Hadamard and DCT mixers, the balanced frame."""

from __future__ import annotations

import math

import torch

SIGN_TIE = 1e-9
EIGENVALUE_FLOOR = 1e-12


def eigh(a: torch.Tensor, *, descending: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues `[..., D]` and eigenvectors (columns), each with its entry of largest magnitude positive.

    Of entries tied to 1e-9 the first one decides.
    """
    values, vectors = torch.linalg.eigh((a + a.mT) / 2)
    if descending:
        values, vectors = values.flip(-1), vectors.flip(-1)
    size = vectors.abs()
    first = (size >= (1 - SIGN_TIE) * size.amax(-2, keepdim=True)).to(torch.int64).argmax(-2, keepdim=True)
    return values, vectors * torch.where(torch.gather(vectors, -2, first) < 0, -1.0, 1.0)


def hadamard(dim: int) -> torch.Tensor:
    """`H_D = I (x) H_m` in natural order, m the largest power of two that divides D."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < dim & -dim:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.kron(torch.eye(dim // len(block), dtype=torch.float64), block) / math.sqrt(len(block))


def bit_reversal(dim: int) -> list[int]:
    """The reference's `P_br`: `(x P)_j = x[pi(j)]`, `pi(j) = D - 1 - rev(j)`, bits reversed within blocks of `H_D`."""
    block = dim & -dim
    width = block.bit_length() - 1

    def reverse(j: int) -> int:
        within = int(format(j % block, f"0{width}b")[::-1], 2) if width else 0
        return j // block * block + within

    return [dim - 1 - reverse(j) for j in range(dim)]


def mixer(size: int) -> torch.Tensor:
    """Orthogonal `Q_n`: Hadamard for powers of two, else the DCT-II, j the coordinate and k the mixed column."""
    if size & (size - 1) == 0:
        return hadamard(size)
    j, k = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    return torch.sqrt((2 - (k == 0).double()) / size) * torch.cos(math.pi * (j + 0.5) * k / size)


def reference_rotation(target: torch.Tensor) -> torch.Tensor:
    """`R = U H P_br` `[..., D, D]`, U the eigenvectors of `target` in ascending order."""
    dim = target.shape[-1]
    return eigh(target, descending=False)[1] @ hadamard(dim)[:, bit_reversal(dim)]


def balance(covariance: torch.Tensor, metric: torch.Tensor, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`P^1/2` and `P^-1/2` of the P with `P S P = C`, S and C ridged by a fraction of their mean diagonal."""
    covariance, metric = (_ridged(a, ridge) for a in (covariance, metric))
    root, inverse_root = _power(covariance, 0.5), _power(covariance, -0.5)
    middle = inverse_root @ _power(root @ metric @ root, 0.5) @ inverse_root
    return _power(middle, 0.5), _power(middle, -0.5)


def _ridged(a: torch.Tensor, ridge: float) -> torch.Tensor:
    dim = a.shape[-1]
    return a + ridge * a.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(dim, dtype=a.dtype)


def _power(a: torch.Tensor, exponent: float) -> torch.Tensor:
    values, vectors = eigh(a)
    values = torch.maximum(values, EIGENVALUE_FLOOR * values[..., :1])
    result = (vectors * values[..., None, :] ** exponent) @ vectors.mT
    return (result + result.mT) / 2
