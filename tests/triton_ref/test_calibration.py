"""Moments within 1e-12 and rotations within 1e-9 of JAX, given the same float64 queries, keys and values."""

import functools
import warnings

import jax
import numpy as np
import pytest

from calib import fit as jax_fit
from calib import linalg as jax_linalg
from calib import moments as jax_moments
from tests.calib.definition import sample

torch = pytest.importorskip("torch", reason="the reference is PyTorch")

from triton_ref import fit, linalg, moments  # noqa: E402
from triton_ref.rope import Rotary  # noqa: E402

LENGTHS = (120, 97)
SIZES = {"bucket": 32, "sink": 4, "recent": 8}
SETTINGS = moments.Settings(**SIZES)
RECIPES = ("oscar-reference", "oscar-head", "oscar-paper", "default", "default-feedback")


@functools.cache
def data():
    return sample(lengths=LENGTHS, dim=16)


def rows():
    return [np.nan_to_num(x.astype(np.float64)) for x in data().arrays]


@functools.cache
def from_jax():
    """Moments after the first pass, and after both."""
    given = data()
    found = jax_moments.init(RECIPES, **given.sizes, **SIZES, value_metric=given.metric)
    with jax.enable_x64(True):
        found = jax_moments.accumulate(found, *rows(), **given.where)
        copy = jax.tree.map(lambda x: x + 0, found)  # `accumulate` donates what it is given
        return found, jax_moments.accumulate(copy, *rows(), **given.where, first_fit=jax_fit.first_fit(found))


@functools.cache
def from_torch():
    q, k, v = (torch.from_numpy(x) for x in rows())
    rope = data().rope
    rotary = Rotary(rope.inverse_frequencies, rope.rotary_dim, rope.pairing)
    metric = torch.from_numpy(data().metric)
    first = moments.first_pass(q, k, v, lengths=list(LENGTHS), rotary=rotary, settings=SETTINGS, value_metric=metric)
    second = moments.second_pass(k, v, first["query"] / (first["tokens"] * 2), lengths=list(LENGTHS))
    return first, second, rotary, metric


def test_moments_agree():
    _, both_passes = from_jax()
    first, second, *_ = from_torch()
    compared = 0
    for name, got in (first | second).items():
        if name in both_passes.sums:
            wanted = np.asarray(both_passes.sums[name])
            assert np.abs(got.numpy() - wanted).max() <= 1e-12 * np.abs(wanted).max(), name
            compared += 1
    assert compared >= 14


@pytest.mark.parametrize(("recipe", "per_layer"), [("oscar-reference", True), ("oscar-head", False)])
def test_rotations_agree(recipe, per_layer):
    first, second, *_ = from_torch()
    targets = fit.reference_targets(first, second, groups=2, per_layer=per_layer)
    codes = fit.reference(targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jax_fit.ThinStatisticsWarning)
        wanted = jax_fit.fit(from_jax()[1], recipe, rope=data().rope, max_position=512)
    for target, got, theirs in zip(targets, (codes.key, codes.value), (wanted.key, wanted.value), strict=True):
        wide = linalg.reference_rotation(target)
        with jax.enable_x64(True):
            other = torch.from_numpy(np.array(jax_linalg.reference_rotation(target.numpy())))
        ours, other = (r.mT @ target @ r for r in (wide, other))
        assert (ours - other).abs().max() <= 1e-9 * target.abs().max()
        np.testing.assert_allclose(got.encode, theirs.encode, atol=1e-6)
        np.testing.assert_allclose(got.decode, theirs.decode, atol=1e-6)
        assert (got.clip, got.clip_ratio) == (theirs.clip, theirs.clip_ratio)


@pytest.mark.parametrize("recipe", ["default", "default-feedback"])
def test_balanced_codes_agree(recipe):
    first, _, rotary, metric = from_torch()
    both = fit.default_statistics(first, rotary=rotary, max_position=512, settings=SETTINGS, value_metric=metric)
    codes = fit.default(*both, rotary=rotary, bucket=32, feedback=recipe == "default-feedback")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jax_fit.CalibrationWarning)
        wanted = jax_fit.fit(from_jax()[0], recipe, rope=data().rope, max_position=512)
    for got, theirs in ((codes.key, wanted.key), (codes.value, wanted.value)):
        for name, leaf in theirs.arrays().items():
            if leaf.dtype.kind == "i":
                np.testing.assert_array_equal(getattr(got, name), leaf)
            else:
                np.testing.assert_allclose(getattr(got, name), leaf, rtol=2e-5, atol=2e-5)


def test_static_thresholds_agree():
    found, both_passes = from_jax()
    rotations = jax_fit.first_fit(found).rotations
    for side, x in (("key", rows()[1]), ("value", rows()[2])):
        rotation = torch.from_numpy(np.array(rotations[f"oscar-paper/{side}"]))
        for layer in range(2):
            rotated = torch.einsum("btkd,kde->btke", torch.from_numpy(x[layer]), rotation[layer])
            counts = moments.histogram(rotated, lengths=list(LENGTHS))
            wanted = np.array(both_passes.sums[f"histogram/oscar-paper/{side}"])[layer]
            # A magnitude on the edge between two bins may fall into either.
            assert np.abs(counts.numpy() - wanted).sum() <= 4
            np.testing.assert_allclose(
                moments.quantile(counts, 0.96), moments.quantile(torch.from_numpy(wanted), 0.96), rtol=6e-3
            )


@pytest.mark.parametrize("dim", [64, 96, 80])
def test_closed_forms_agree(dim):
    np.testing.assert_array_equal(linalg.hadamard(dim), jax_linalg.hadamard(dim))
    assert linalg.bit_reversal(dim) == jax_linalg.bit_reversal(dim).tolist()
    size = dim // 2 - 3
    with jax.enable_x64(True):
        wanted = jax_linalg.mixer(jax.numpy.zeros(size, int), jax.numpy.full(size, size))
    np.testing.assert_allclose(linalg.mixer(size), wanted, atol=1e-14)


def test_eigenvectors_have_a_canonical_sign():
    random = torch.Generator().manual_seed(0)
    a = torch.randn(3, 12, 12, generator=random, dtype=torch.float64)
    values, vectors = linalg.eigh(a @ a.mT)
    assert (values.diff(dim=-1) <= 0).all()
    largest = torch.gather(vectors, -2, vectors.abs().argmax(-2, keepdim=True))
    assert (largest > 0).all()
    torch.testing.assert_close((vectors * values[:, None]) @ vectors.mT, a @ a.mT, rtol=1e-12, atol=1e-12)
