"""Moments against the dense definition, streaming, padding, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calib import attention, recipes
from calib import moments as calib_moments
from calib.fit import covered_positions, first_fit, fit
from calib.recipes import Recipe, SideRecipe
from tests.calib import definition

WINDOWS: dict[str, Any] = dict(bucket=16, sink=3, recent=5)
# Every group of sums at once.
PLAIN = Recipe(
    "plain",
    "plain statistics",
    SideRecipe("balanced", kind="levels", statistics="plain", metric="query"),
    SideRecipe("balanced", kind="levels", statistics="plain"),
)
RECIPES = ("default", "oscar-reference", "oscar-paper", PLAIN)


def empty(data: definition.Sample, names=RECIPES, **changes) -> calib_moments.Moments:
    options: dict[str, Any] = WINDOWS | data.sizes | dict(value_metric=data.metric) | changes
    return calib_moments.init(names, **options)


def assert_close(got: calib_moments.Moments, expected: dict[str, np.ndarray], tolerance: float = 1e-12) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(got.sums[name], array, rtol=0, atol=tolerance * np.abs(array).max(), err_msg=name)


@pytest.fixture(scope="module")
def data() -> definition.Sample:
    return definition.sample()


@pytest.fixture(scope="module")
def expected(data) -> dict[str, np.ndarray]:
    return definition.moments(data, **WINDOWS)


@pytest.fixture
def accumulated(data) -> calib_moments.Moments:
    return calib_moments.accumulate(empty(data), *data.arrays, **data.where)


def test_first_pass_equals_the_dense_definition(accumulated, expected):
    assert_close(accumulated, expected)
    assert all(array.dtype == np.float64 for array in accumulated.sums.values())


def test_a_query_in_a_window_sees_no_further(data):
    got = calib_moments.accumulate(empty(data, window=9), *data.arrays, **data.where)
    assert_close(got, definition.moments(data, **WINDOWS, window=9))
    with pytest.raises(ValueError, match="window=0: expected at least 1, or None"):
        empty(data, window=0)


def test_blocks_of_queries_do_not_change_the_sums(data, expected, monkeypatch):
    monkeypatch.setattr(attention, "SCORES_PER_BLOCK", 1)  # one query a block
    got = calib_moments.update(empty(data), *data.arrays, **data.where)
    assert_close(got, expected)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_partial_rotary_dimensions_and_pairings(data, pairing):
    rope = dataclasses.replace(data.rope, inverse_frequencies=(0.7, 0.03), rotary_dim=4, pairing=pairing)
    turned = dataclasses.replace(data, rope=rope)
    got = calib_moments.accumulate(empty(turned, "default"), *turned.arrays, **turned.where)
    dense = definition.moments(turned, **WINDOWS)
    assert_close(got, {name: array for name, array in dense.items() if name in got.sums})


def test_second_pass_equals_the_dense_definition(data, accumulated):
    first = first_fit(accumulated)
    done = calib_moments.accumulate(accumulated, *data.arrays, **data.where, first_fit=first)
    layers, _, _, kv_heads, dim = data.k.shape
    group = data.q.shape[3] // kv_heads
    tokens = data.lengths.sum()
    valid = np.arange(data.k.shape[2]) < data.lengths[:, None]
    for layer, head in np.ndindex(layers, kv_heads):
        queries = data.q[layer][valid][:, head * group : (head + 1) * group].reshape(-1, dim).astype(np.float64)
        k, v = (x[layer][valid][:, head].astype(np.float64) for x in (data.k, data.v))
        c_q = queries.T @ queries / (tokens * group)
        np.testing.assert_allclose(np.asarray(first.query)[layer, head], c_q, rtol=1e-12)
        weight = np.einsum("td,de,te->t", k, c_q, k)
        np.testing.assert_allclose(done.sums["logit"][layer, head], (v.T * weight) @ v, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(done.sums["logit_weight"][layer, head], weight.sum(), rtol=1e-12)
        for side, rows in (("key", k), ("value", v)):
            size = np.abs(rows @ np.asarray(first.rotations[f"oscar-paper/{side}"][layer, head])).ravel()
            counts = np.asarray(done.sums[f"histogram/oscar-paper/{side}"][layer, head])
            assert counts.sum() == size.size
            edges = 2.0 ** (-16 + np.arange(1, 4097) / 128)
            for edge in (1000, 2047, 2300):
                assert counts[: edge + 1].sum() == (size < edges[edge]).sum()
    assert float(done.sums["tokens2"]) == float(done.sums["tokens"]) == tokens


def test_batches_may_be_split_and_merged(data, expected):
    parts, streamed = [], empty(data, "default")
    for index in range(len(data.lengths)):
        arrays = [x[:, index : index + 1] for x in data.arrays]
        where = data.where | dict(lengths=data.lengths[index : index + 1])
        parts.append(calib_moments.accumulate(empty(data, "default"), *arrays, **where))
        streamed = calib_moments.accumulate(streamed, *arrays, **where)
    expected = {name: array for name, array in expected.items() if name in streamed.sums}
    assert_close(calib_moments.merge(*parts), expected)
    assert_close(streamed, expected)


def test_merge_refuses_other_settings(data):
    with pytest.raises(ValueError, match="different settings"):
        calib_moments.merge(empty(data), empty(data, recent=6))


@pytest.mark.parametrize("x64", [False, True])
def test_caller_may_jit_with_x64_on_or_off(data, expected, x64):
    with jax.enable_x64(x64):
        step = jax.jit(calib_moments.update, static_argnames="rope")
        got = step(empty(data, "default"), *data.arrays, **data.where)
    assert_close(got, {name: array for name, array in expected.items() if name in got.sums})


def test_bfloat16_rows_are_widened_before_anything_else(data):
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in data.arrays]
    wide = [np.asarray(x, np.float32) for x in narrow]
    got = calib_moments.accumulate(empty(data, "default"), *narrow, **data.where)
    same = calib_moments.accumulate(empty(data, "default"), *wide, **data.where)
    assert_close(got, {name: np.asarray(array) for name, array in same.sums.items()}, 0)


def test_no_value_metric_is_the_identity(data):
    identity = np.broadcast_to(np.eye(data.k.shape[-1]), data.metric.shape)
    none = calib_moments.accumulate(empty(data, "default", value_metric=None), *data.arrays, **data.where)
    given = calib_moments.accumulate(empty(data, "default", value_metric=identity), *data.arrays, **data.where)
    assert_close(none, {name: np.asarray(array) for name, array in given.sums.items()})


def test_model_without_rotary_positions(data):
    got = calib_moments.accumulate(empty(data, "default"), *data.arrays, **data.where | dict(rope=None))
    still = dataclasses.replace(data, rope=dataclasses.replace(data.rope, inverse_frequencies=(0.0,) * 4))
    dense = definition.moments(still, **WINDOWS)
    assert_close(got, {name: array for name, array in dense.items() if name in got.sums})


def test_only_the_sums_a_recipe_needs_are_allocated(data):
    always = {"tokens", "bad_query", "bad_key", "bad_value"}
    assert set(empty(data, "hadamard").sums) == always
    assert set(empty(data, "oscar-head").sums) == always | {"query", "tokens2", "logit", "logit_weight"}
    assert all(name in always or name.startswith("weighted_") for name in empty(data, "default").sums)
    assert set(empty(data, "oscar-paper").sums) == always | {
        "query",
        "output",
        "tokens2",
        "histogram/oscar-paper/key",
        "histogram/oscar-paper/value",
    }


def test_passes():
    two = {"oscar-reference", "oscar-head", "oscar-paper", "oscar-paper-head"}
    assert {name for name in recipes.names() if calib_moments.passes(name) == 2} == two


def test_covered_positions(data, accumulated, expected):
    assert covered_positions(accumulated) == np.count_nonzero(expected["weighted_covered"]) == 16


@pytest.mark.parametrize("lengths", [(0, 0), ()])
def test_fault_q14_a_batch_without_tokens_raises(data, lengths):
    with pytest.raises(ValueError, match="no token"):
        calib_moments.accumulate(empty(data), *data.arrays, **data.where | dict(lengths=np.array(lengths, int)))


def test_fault_q14_an_empty_array_raises(data):
    q, k, v = (x[:, :, :0] for x in data.arrays)
    with pytest.raises(ValueError, match="no token"):
        calib_moments.update(empty(data), q, k, v, positions=np.arange(0), lengths=data.lengths, rope=data.rope)


def test_fault_q14_zero_batches_and_no_history_pair_raise(data):
    with pytest.raises(ValueError, match="saw no token"):
        fit(empty(data), "default", rope=data.rope, max_position=64)
    with pytest.raises(ValueError, match="saw no token"):
        first_fit(empty(data))
    short = calib_moments.accumulate(empty(data), *data.arrays, **data.where | dict(lengths=np.array([8, 8])))
    with pytest.raises(ValueError, match=r"no history pair.*longer than sink \+ recent = 8"):
        fit(short, "default", rope=data.rope, max_position=64)


def test_fault_q14_a_layer_that_was_never_captured_raises(data):
    arrays = [x.copy() for x in data.arrays]
    for x in arrays:
        x[1] = 0
    got = calib_moments.accumulate(empty(data), *arrays, **data.where)
    with pytest.raises(ValueError, match="layer 1, head 0: the sum 'weighted_pair' is zero"):
        fit(got, "default", rope=data.rope, max_position=64)


@pytest.mark.parametrize(("side", "index"), [("query", 0), ("key", 1), ("value", 2)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_a_number_is_reported_with_side_layer_and_head(data, side, index, bad):
    arrays = [x.copy() for x in data.arrays]
    arrays[index][1, 0, 20, 1, 3] = bad
    got = calib_moments.accumulate(empty(data), *arrays, **data.where)
    message = f"{side} side, layer 1, head 1: 1 calibration rows hold NaN or Inf"
    with pytest.raises(ValueError, match=message):
        calib_moments.check(got)
    with pytest.raises(ValueError, match=message):
        fit(got, "default", rope=data.rope, max_position=64)


def test_not_a_number_in_the_value_metric_is_reported(data):
    metric = data.metric.copy()
    metric[1, 0, 2, 2] = np.nan
    with pytest.raises(ValueError, match="value_metric, layer 1, head 0"):
        calib_moments.check(empty(data, value_metric=metric))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(positions=np.arange(4)), "positions: shape"),
        (dict(lengths=np.array([1000, 3])), "lengths=\\[1000, 3\\]: expected 0"),
        (dict(lengths=np.array([3])), "lengths: shape"),
        (dict(positions=np.arange(51)[::-1]), "expected increasing positions"),
    ],
)
def test_positions_and_lengths_are_checked(data, change, message):
    with pytest.raises(ValueError, match=message):
        calib_moments.accumulate(empty(data), *data.arrays, **data.where | change)


def test_shapes_are_checked(data):
    q, k, v = data.arrays
    with pytest.raises(ValueError, match="k: shape"):
        calib_moments.update(empty(data), q, k[..., :4], v, **data.where)
    with pytest.raises(ValueError, match="value_metric: shape"):
        empty(data, value_metric=data.metric[0])
    with pytest.raises(ValueError, match="q_heads=3 with kv_heads=2"):
        empty(data, q_heads=3)
    with pytest.raises(ValueError, match="bucket=0"):
        empty(data, bucket=0)
    with pytest.raises(ValueError, match="at least one recipe"):
        empty(data, [])
    with pytest.raises(ValueError, match="share a name"):
        empty(data, ["default", dataclasses.replace(recipes.get("default"), summary="other")])
