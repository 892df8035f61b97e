"""Rotary positions: rotation against its matrix, inverses, and precision at long positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope import Rotary, rotate, unrotate
from tests.pallas_kernels.attention_definition import rotation

ROTARIES = {
    "half": Rotary.standard(64),
    "interleaved": Rotary.standard(64, pairing="interleaved"),
    "partial": Rotary(tuple(0.3 / (i + 1) for i in range(12)), 24),
    "partial, interleaved": Rotary(tuple(0.3 / (i + 1) for i in range(12)), 24, "interleaved"),
}


@pytest.mark.parametrize("name", ROTARIES)
def test_rotation_equals_the_matrix_of_the_definition(name):
    rotary, positions = ROTARIES[name], np.array([0, 1, 77, 5000])
    x = np.random.default_rng(0).normal(size=(4, 3, 64)).astype(np.float32)
    cos, sin = (table[:, None] for table in rotary.tables(positions))
    turned = rotate(jnp.asarray(x), cos, sin, pairing=rotary.pairing)
    for i, position in enumerate(positions):
        matrix = rotary.matrix(int(position), 64)
        np.testing.assert_allclose(matrix, rotation(rotary, position, 64), atol=1e-12)
        np.testing.assert_allclose(turned[i], x[i] @ matrix, atol=2e-6)
    back = unrotate(turned, cos, sin, pairing=rotary.pairing)
    np.testing.assert_allclose(back, x, atol=1e-6)
    np.testing.assert_array_equal(turned[..., rotary.rotary_dim :], x[..., rotary.rotary_dim :])


@pytest.mark.parametrize("name", ROTARIES)
def test_scores_depend_on_the_distance_only(name):
    rotary, rng = ROTARIES[name], np.random.default_rng(1)
    q, k = rng.normal(size=(2, 64))
    scores = [q @ rotary.matrix(a, 64) @ (k @ rotary.matrix(b, 64)) for a, b in ((40, 7), (1040, 1007), (33, 0))]
    np.testing.assert_allclose(scores, scores[0], atol=1e-10)
    relative = k @ rotary.matrix(500, 64) @ rotary.matrix(-480, 64)
    np.testing.assert_allclose(relative, k @ rotary.matrix(20, 64), atol=1e-12)


def test_tables_are_rounded_once_from_float64_angles():
    """A float32 angle at position 131071 would be off by 4e-3; a table entry is off by half an ulp."""
    rotary, position = Rotary.standard(128, base=500000.0), 131071
    cos, sin = rotary.tables(position)
    angle = position * np.array(rotary.inverse_frequencies)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos, np.cos(angle), atol=6e-8)
    np.testing.assert_allclose(sin, np.sin(angle), atol=6e-8)
    np.testing.assert_array_equal(rotary.table(9)[0][8], rotary.tables(8)[0])


def test_the_result_keeps_the_dtype_and_is_computed_in_the_wider_one():
    rotary = ROTARIES["half"]
    cos, sin = rotary.tables(123)
    x = jnp.asarray(np.random.default_rng(2).normal(size=64), jnp.bfloat16)
    turned = rotate(x, cos, sin)
    assert turned.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64) @ rotary.matrix(123, 64)
    np.testing.assert_allclose(np.asarray(turned, np.float64), exact, atol=2**-8 * np.abs(exact).max())
    assert jax.jit(rotate)(x.astype(jnp.float32), cos, sin).dtype == jnp.float32


def test_inconsistent_sizes_and_unknown_pairings_are_refused():
    with pytest.raises(ValueError, match="rotary_dim=6 with 2 inverse frequencies"):
        Rotary((1.0, 0.1), 6)
    with pytest.raises(ValueError, match="expected an even rotary_dim"):
        Rotary((1.0,), 3)
    with pytest.raises(ValueError, match="pairing='neox': expected 'half' or 'interleaved'"):
        Rotary((1.0,), 2, "neox")  # type: ignore[arg-type]
    assert hash(Rotary.standard(64)) == hash(Rotary.standard(64))
