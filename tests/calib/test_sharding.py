"""Calibration over eight simulated devices: batch over a data axis for moments, layers x heads for the fit."""

from __future__ import annotations

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from calib import linalg, recipes
from calib import moments as calib_moments
from calib.fit import first_fit, fit
from calib.frame import balanced
from pallas_kernels import codec
from tests.calib import definition

GATHERING = (
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "reduce-scatter",
    " send",
    " recv",
)
NAMES = ("default", "oscar-reference", "oscar-paper")
pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices (simulated ones will do)"),
    pytest.mark.filterwarnings("ignore::calib.fit.CalibrationWarning"),
]


@pytest.fixture(scope="module")
def sharding() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:8]), ("data",)), P("data"))


def covariances(count: int = 16, dim: int = 32) -> np.ndarray:
    factor = np.random.default_rng(0).normal(size=(count, dim, dim))
    return factor @ np.swapaxes(factor, -1, -2)


def reduced(program: str | None) -> list[int]:
    """Elements of every array that devices sum; nothing else may go from one device to another."""
    assert program
    assert not [name for name in GATHERING if name in program]
    found = re.findall(r"= (.+?) all-reduce(?:-start)?\(", program)
    assert len(found) == len(re.findall(r" all-reduce(?:-start)?\(", program))
    shapes = [shape for each in found for shape in re.findall(r"\w+\[([\d,]*)\]", each)]
    return [math.prod(int(size) for size in shape.split(",") if size) for shape in shapes]


def assert_no_collectives(program: str | None) -> None:
    assert reduced(program) == []


def test_fault_r15_eigh_keeps_its_sharding_without_collectives(sharding):
    a = covariances()
    with jax.enable_x64(True):
        alone = jax.jit(linalg.eigh)(a)
        spread = jax.jit(linalg.eigh).lower(jax.device_put(a, sharding)).compile()
        assert_no_collectives(spread.as_text())
        values, vectors = spread(jax.device_put(a, sharding))
        for leaf in (values, vectors):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        np.testing.assert_allclose(values, alone[0], rtol=1e-10)
        # Compared as the matrix they decompose, never as vectors.
        rebuilt = np.asarray(vectors) * np.asarray(values)[:, None, :] @ np.swapaxes(np.asarray(vectors), -1, -2)
        np.testing.assert_allclose(rebuilt, a, atol=1e-11 * np.abs(a).max())


@pytest.mark.parametrize("side", ["key", "value"])
def test_the_whole_frame_has_no_collectives(sharding, side):
    a = covariances()
    recipe = recipes.get("default").sides[side]
    with jax.enable_x64(True):
        arrays = [jax.device_put(array, sharding) for array in (a[:, 0], a, a)]
        program = jax.jit(partial(balanced, side=recipe, slots=32)).lower(*arrays).compile().as_text()
    assert program
    assert "syev" in program
    assert_no_collectives(program)


def test_fault_r2_one_and_eight_devices_agree(sharding):
    data = definition.sample(layers=3, lengths=(90, 60, 80, 90, 40, 70, 85, 66), kv_heads=3, group=1, dim=16, seed=2)
    empty = partial(calib_moments.init, NAMES, bucket=32, sink=3, recent=5, value_metric=data.metric, **data.sizes)
    over_batch = NamedSharding(sharding.mesh, P(None, "data"))
    arrays = [jax.device_put(x, over_batch) for x in data.arrays]
    where = data.where | dict(lengths=jax.device_put(data.lengths, sharding))
    alone = calib_moments.accumulate(empty(), *data.arrays, **data.where)
    spread = calib_moments.accumulate(empty(), *arrays, **where)
    # Each group's second pass starts from the same first fit: eigenvectors of the two are not comparable.
    first = first_fit(alone)
    alone = calib_moments.accumulate(alone, *data.arrays, **data.where, first_fit=first)
    spread = calib_moments.accumulate(spread, *arrays, **where, first_fit=first)
    assert len(spread.sums["query"].sharding.device_set) == 8
    for name, array in alone.sums.items():
        got, expected = np.asarray(spread.sums[name]), np.asarray(array)
        if expected.ndim < 4:
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max(), err_msg=name)
        else:
            largest = np.abs(expected).max((-1, -2), keepdims=True)
            assert (np.abs(got - expected) <= 1e-12 * largest).all(), name

    rows = np.random.default_rng(3).normal(size=(200, 3, 16)).astype(np.float32)
    for name in NAMES:
        one = fit(alone, name, rope=data.rope, max_position=100)
        eight = fit(spread, name, rope=data.rope, max_position=100, sharding=sharding)  # nine heads on eight devices
        for side, metric in (("key", alone.sums["query"]), ("value", data.metric)):
            ours, theirs = getattr(one, side), getattr(eight, side)
            np.testing.assert_array_equal(ours.bits, theirs.bits)
            # Directions and signs too: their eigenvalues are well apart here.
            np.testing.assert_allclose(ours.encode, theirs.encode, atol=1e-6 * np.abs(np.asarray(ours.encode)).max())
            for layer in range(3):
                decoded = [
                    np.asarray(codec.decode(c, codec.encode(c, jnp.asarray(rows))), np.float64)
                    for c in (ours.layer(layer), theirs.layer(layer))
                ]
                errors = [np.einsum("tkd,kde,tke->k", x - rows, np.asarray(metric)[layer], x - rows) for x in decoded]
                np.testing.assert_allclose(errors[0], errors[1], rtol=1e-6)


def test_moments_of_a_sharded_batch_are_reduced_not_gathered(sharding):
    data = definition.sample(layers=1, lengths=(40,) * 8, kv_heads=1, group=1, dim=8)
    empty = calib_moments.init("default", bucket=32, sink=3, recent=5, **data.sizes)
    arrays = [jax.device_put(x, NamedSharding(sharding.mesh, P(None, "data"))) for x in data.arrays]
    lengths = jax.device_put(data.lengths, sharding)
    with jax.enable_x64(True):
        step = jax.jit(partial(calib_moments.update, positions=data.where["positions"], rope=data.rope))
        program = step.lower(empty, *arrays, lengths=lengths).compile().as_text()
    # Sums of all devices: an array of activations, padded with zeros, would be as good as gathered.
    assert 0 < max(reduced(program)) <= max(leaf.size for leaf in jax.tree.leaves(empty.sums)) < arrays[0].size / 8
