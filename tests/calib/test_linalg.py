"""Eigenvectors, the balanced frame's algebra, mixers and bit allocation."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calib import bits, linalg
from tests.calib import definition

DIMS = (8, 64, 80, 96, 128, 192, 256)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def spd(rng: np.random.Generator, *shape: int, rank: int | None = None) -> np.ndarray:
    """Random `[..., D, D]` of that rank with a wide spectrum."""
    *lead, dim = shape
    factor = rng.normal(size=(*lead, dim, rank or dim)) * np.exp(rng.normal(size=(*lead, dim, 1)))
    return factor @ np.swapaxes(factor, -1, -2)


def test_eigh_is_descending_symmetrized_and_signed():
    rng = np.random.default_rng(0)
    a = spd(rng, 3, 2, 16)
    skew = rng.normal(size=a.shape)
    values, vectors = jax.jit(linalg.eigh)(a + skew - np.swapaxes(skew, -1, -2))
    assert (np.diff(values, axis=-1) < 0).all()
    np.testing.assert_allclose((vectors * values[..., None, :]) @ np.swapaxes(vectors, -1, -2), a, atol=1e-10)
    for index in np.ndindex(3, 2):
        expected_values, expected_vectors = definition.eigh(a[index])
        # An eigenvalue is known up to rounding of the largest, which differs between processors' LAPACKs.
        np.testing.assert_allclose(values[index], expected_values, rtol=1e-10, atol=1e-15 * expected_values[0])
        np.testing.assert_allclose(vectors[index], expected_vectors, atol=1e-8)
    ascending, reversed_ = linalg.eigh(a, descending=False)
    np.testing.assert_allclose(ascending[..., ::-1], values, rtol=1e-10, atol=1e-15 * float(values.max()))
    np.testing.assert_allclose(reversed_[..., ::-1], vectors, atol=1e-8)


def test_fault_r1_null_space_is_orthogonal_and_compared_as_a_subspace():
    a = spd(np.random.default_rng(1), 4, 64, rank=32)
    rotation = np.asarray(linalg.reference_rotation(jnp.asarray(a)))
    np.testing.assert_allclose(
        rotation @ np.swapaxes(rotation, -1, -2), np.broadcast_to(np.eye(64), a.shape), atol=1e-12
    )
    assert (
        np.abs(rotation.astype(np.float32) @ np.swapaxes(rotation.astype(np.float32), -1, -2) - np.eye(64)).max() < 1e-5
    )
    _, ours = linalg.eigh(jnp.asarray(a))
    for index in range(4):
        _, theirs = definition.eigh(a[index])
        mine = np.asarray(ours[index][:, 32:])
        np.testing.assert_allclose(mine @ mine.T, theirs[:, 32:] @ theirs[:, 32:].T, atol=1e-9)


def test_fault_r2_sign_does_not_depend_on_the_library():
    rng = np.random.default_rng(2)
    _, vectors = np.linalg.eigh(spd(rng, 5, 24))
    flips = rng.choice([-1.0, 1.0], size=(5, 1, 24))
    ours = linalg.canonical_sign(jnp.asarray(vectors))
    np.testing.assert_array_equal(linalg.canonical_sign(jnp.asarray(vectors * flips)), ours)
    largest = np.abs(ours).argmax(-2)[:, None]
    assert (np.take_along_axis(np.asarray(ours), largest, -2) > 0).all()


def test_fault_r2_tied_entries_do_not_let_noise_decide():
    tied = np.array([[-1.0, 1 + 1e-14], [1 + 1e-14, 1.0]]) / np.sqrt(2)
    noisy = np.array([[-1.0, 1.0], [1.0, 1 + 1e-14]]) / np.sqrt(2)
    for matrix in (tied, noisy, -tied, -noisy):
        signed = np.asarray(linalg.canonical_sign(jnp.asarray(matrix)))
        np.testing.assert_array_equal(np.sign(signed), [[1, 1], [-1, 1]])


def test_balance_makes_covariance_and_metric_one_matrix():
    rng = np.random.default_rng(3)
    covariance, metric = spd(rng, 3, 16), spd(rng, 3, 16)
    half, inverse_half = (np.asarray(x) for x in linalg.balance(jnp.asarray(covariance), jnp.asarray(metric), 0.0))
    p = half @ half
    scale = np.abs(metric).max((-1, -2), keepdims=True)
    np.testing.assert_allclose(p @ covariance @ p / scale, metric / scale, atol=1e-8)
    np.testing.assert_allclose(half @ inverse_half, np.broadcast_to(np.eye(16), p.shape), atol=1e-8)
    both = half @ covariance @ half, inverse_half @ metric @ inverse_half
    np.testing.assert_allclose(both[0] / scale, both[1] / scale, atol=1e-8)


def test_mixer_is_hadamard_or_dct_for_each_run():
    sizes = (8, 5, 1, 12, 6)
    dim = sum(sizes) + 3
    start, size, expected, at = np.zeros(dim, int), np.zeros(dim, int), np.zeros((dim, dim)), 0
    for n in sizes:
        start[at : at + n], size[at : at + n] = at, n
        expected[at : at + n, at : at + n] = definition.mixing(n)
        at += n
    start[at:] = at
    got = jax.jit(linalg.mixer)(start, size)
    np.testing.assert_allclose(got, expected, atol=1e-14)
    np.testing.assert_allclose(got.T @ got, np.diag(size > 0), atol=1e-14)


@pytest.mark.parametrize("dim", DIMS)
def test_hadamard_is_orthogonal_with_equal_magnitudes(dim):
    matrix, block = linalg.hadamard(dim), dim & -dim
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-14)
    np.testing.assert_array_equal(matrix, np.kron(np.eye(dim // block), definition.mixing(block)))


@pytest.mark.parametrize(("dim", "block"), [(80, 16), (96, 32)])
def test_fault_r8_hadamard_by_blocks(dim, block):
    matrix = linalg.hadamard(dim)
    assert np.count_nonzero(matrix) == dim * block
    np.testing.assert_allclose(np.abs(matrix[matrix != 0]), block**-0.5, rtol=1e-15)
    # The rotation is not silently off: an outlier spreads over its whole block.
    outlier = np.eye(dim)[5] * 100
    assert np.abs(outlier @ matrix).max() == pytest.approx(100 / np.sqrt(block))


def test_bit_reversal_is_the_reference_permutation():
    np.testing.assert_array_equal(linalg.bit_reversal(128)[:8], [127, 63, 95, 31, 111, 47, 79, 15])
    for dim in DIMS:
        np.testing.assert_array_equal(np.sort(linalg.bit_reversal(dim)), np.arange(dim))


def test_reference_rotation_flattens_its_target():
    """`diag(R^T C R)` is constant for `R = U H P_br`, as in the reference's published files."""
    target = spd(np.random.default_rng(4), 2, 32)
    rotation = np.asarray(linalg.reference_rotation(jnp.asarray(target)))
    diagonal = np.einsum("lij,lik,lkj->lj", rotation, target, rotation)
    expected = np.trace(target, axis1=1, axis2=2) / 32
    np.testing.assert_allclose(diagonal, np.broadcast_to(expected[:, None], (2, 32)), rtol=1e-12)
    # U comes back out of it with ascending eigenvalues: U = R P^T H.
    inverse = np.argsort(linalg.bit_reversal(32))
    vectors = rotation[..., inverse] @ linalg.hadamard(32)
    values = np.einsum("lij,lik,lkj->lj", vectors, target, vectors)
    assert (np.diff(values) > 0).all()


@pytest.mark.parametrize(
    ("dim", "slots"), [(8, 8), (16, 16), (16, 24), (16, 8), (64, 64), (64, 56), (64, 72), (16, 48)]
)
def test_bits_are_the_first_minimum_of_the_predicted_error(dim, slots):
    rng = np.random.default_rng(dim + slots)
    decay = np.array([0.01, 0.1, 0.3, 1.0])[:, None]
    spectrum = -np.sort(-np.exp(-decay * np.arange(dim) + 0.1 * rng.normal(size=(4, dim))), axis=-1)
    got = np.asarray(jax.jit(partial(bits.allocate, slots=slots))(spectrum))
    for row, values in zip(got, spectrum, strict=True):
        n6, n4, n2 = definition.split(values, slots)
        np.testing.assert_array_equal(row, np.repeat([6, 4, 2, 0], [n6, n4, n2, dim - n6 - n4 - n2]))
        assert row.sum() <= 2 * slots


def test_equal_errors_take_the_first_split():
    got = bits.allocate(jnp.zeros((1, 16)), 16)
    assert (np.asarray(got) == 2).all()  # every split costs nothing; n6 = n4 = 0 comes first


def test_class_runs():
    start, size = bits.class_runs(jnp.asarray([[6, 4, 4, 2, 2, 2, 0, 0]]))
    np.testing.assert_array_equal(start, [[0, 1, 1, 3, 3, 3, 6, 6]])
    np.testing.assert_array_equal(size, [[1, 2, 2, 3, 3, 3, 0, 0]])
