"""Fitted codes against the dense definition, the probes, and what a fit refuses or warns about."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from calib import fit as calib_fit
from calib import linalg, rounding
from calib import moments as calib_moments
from calib.fit import BucketCoverageWarning, ThinStatisticsWarning, first_fit, fit, rounding_errors
from calib.recipes import get
from pallas_kernels import codec
from tests.calib import definition

PROBES = Path(__file__).resolve().parents[3] / "shared" / "probes" / "recipe"
WINDOWS = dict(bucket=32, sink=3, recent=5)
NAMES = (
    "default",
    "default-feedback",
    "default-averaged",
    "oscar-reference",
    "oscar-head",
    "oscar-paper",
    "oscar-paper-head",
)
MAX_POSITION = 99  # 3 sinks and exactly 3 buckets: counting sinks as history would add an offset
pytestmark = [
    pytest.mark.usefixtures("unoptimized"),
    pytest.mark.filterwarnings("ignore::calib.fit.CalibrationWarning"),
]


@pytest.fixture(scope="module")
def data() -> definition.Sample:
    return definition.sample(lengths=(120, 90), dim=16, seed=5)


@pytest.fixture(scope="module")
def moments(data) -> calib_moments.Moments:
    sources = rounding.sources(get("oscar-head")).values()
    empty = calib_moments.init(
        (*NAMES, "naive", "hadamard", "hadamard-clip", *sources), **WINDOWS, **data.sizes, value_metric=data.metric
    )
    once = calib_moments.accumulate(empty, *data.arrays, **data.where)
    return calib_moments.accumulate(once, *data.arrays, **data.where, first_fit=first_fit(once))


def fitted(moments, data, name, **options):
    defaults: dict[str, Any] = dict(rope=data.rope, max_position=MAX_POSITION)
    return fit(moments, name, **defaults | options)


def turned(matrix: np.ndarray, rope, offsets) -> np.ndarray:
    """Mean over offsets o of `R(o)^T C R(o)`."""
    dim = len(matrix)
    return np.mean([rope.matrix(o, dim).T @ matrix @ rope.matrix(o, dim) for o in offsets], axis=0)


def normalised(moments, side: str, at) -> tuple[np.ndarray, np.ndarray]:
    """Weighted mean and second moment of a side."""
    sums = {name: np.asarray(array) for name, array in moments.sums.items() if name.startswith("weighted_")}
    weight = sums["weighted_pair" if side == "key" else "weighted_value_weight"][at]
    return sums[f"weighted_{side}_sum"][at] / weight, sums[f"weighted_{side}"][at] / weight


def weighted_error(code, x: np.ndarray, metric: np.ndarray) -> np.ndarray:
    """Mean of `e^T C e` per head `[K]` of one layer's rows `[T, K, D]`."""
    error = np.asarray(codec.decode(code, codec.encode(code, jnp.asarray(x))), np.float64) - x
    return np.einsum("tkd,kde,tke->k", error, metric, error) / len(x)


def statistics(moments, data, name, side, at) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, covariance and metric that the rounding errors of a head are told with."""
    weighted = not name.startswith("oscar")
    if weighted:
        mean, second = normalised(moments, side, at)
    else:
        mean, second = (
            np.asarray(moments.sums[key])[at] / float(moments.sums["tokens"]) for key in (f"{side}_sum", side)
        )
    covariance = second - np.outer(mean, mean)
    metric = (
        data.metric[at] if side == "value" else np.asarray(moments.sums["weighted_query" if weighted else "query"])[at]
    )
    if (name, side) == ("default", "key"):
        metric = turned(metric, data.rope, (0, 32, 64))
    if (name, side) == ("default-averaged", "key"):
        turn = data.rope.matrix(3, len(mean))
        mean, covariance, metric = mean @ turn, turn.T @ covariance @ turn, turn.T @ metric @ turn
    return mean, covariance, metric


@pytest.mark.parametrize("name", ["default", "default-averaged", "oscar-head"])
def test_rounding_errors_are_those_of_rows_with_the_statistics_of_the_recipe(moments, data, name):
    codes = fitted(moments, data, name)
    found = rounding_errors(moments, name, codes, rope=data.rope, max_position=MAX_POSITION)
    rng = np.random.default_rng(1)
    for side, at in itertools.product(("key", "value"), np.ndindex(2, 2)):
        mean, covariance, metric = statistics(moments, data, name, side, at)
        spread = rng.normal(size=(4096, 16)) @ np.linalg.cholesky(covariance + 1e-9 * np.eye(16)).T
        rows = np.repeat((mean + spread)[:, None], 2, axis=1).astype(np.float32)
        lost = weighted_error(getattr(codes, side).layer(at[0]), rows, np.stack([metric] * 2))[at[1]]
        assert found[side][at] == pytest.approx(lost / np.trace(covariance @ metric), rel=0.15), (side, at)


def test_recipes_without_data_and_moments_without_statistics_have_no_rounding_errors(moments, data):
    assert rounding_errors(moments, "naive", fitted(moments, data, "naive"), rope=data.rope, max_position=99) == {}
    alone = calib_moments.init("oscar-head", **WINDOWS, **data.sizes)
    codes = fitted(moments, data, "oscar-head")
    assert rounding_errors(alone, "oscar-head", codes, rope=data.rope, max_position=99) == {}


@pytest.mark.parametrize("slots", [None, (24, 8)])
def test_default_equals_the_dense_definition(moments, data, slots):
    codes = fitted(moments, data, "default", slots=slots)
    n_k, n_v = slots or (16, 16)
    assert (codes.bucket, codes.rotary, codes.key.slots, codes.value.slots) == (32, data.rope, n_k, n_v)
    layers, kv_heads, dim = codes.key.mu.shape
    steps = {6: 0.104, 4: 0.335, 2: 0.996, 0: 1.0}
    for at in np.ndindex(layers, kv_heads):
        mean, second = normalised(moments, "key", at)
        query = np.asarray(moments.sums["weighted_query"][at]) / np.asarray(moments.sums["weighted_pair"][at])
        metric = turned(query, data.rope, range(0, MAX_POSITION - 3, 32))
        covariance = second - np.outer(mean, mean)
        _, encode, inverse, hessian = definition.balanced(covariance, metric, lambda s: definition.split(s, n_k))
        n6, n4, n2 = definition.split(definition.balanced(covariance, metric, lambda s: ())[0], n_k)
        bits = np.repeat([6, 4, 2, 0], [n6, n4, n2, dim - n6 - n4 - n2])
        np.testing.assert_allclose(codes.key.mu[at], mean, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(codes.key.bits[at], bits)
        np.testing.assert_allclose(codes.key.encode[at], encode, atol=1e-5 * np.abs(encode).max())
        np.testing.assert_allclose(codes.key.delta[at], [steps[b] for b in bits], rtol=1e-6)
        np.testing.assert_allclose(codes.key.weight[at], np.where(bits, np.diag(hessian), 0), rtol=1e-4)
        lowest = np.asarray(codes.key.slot_shift[at]) == 0
        rows = (
            np.asarray(codes.key.decode[at])[lowest]
            / np.asarray(codes.key.delta[at])[codes.key.slot_owner[at][lowest]][:, None]
        )
        np.testing.assert_allclose(rows, inverse[codes.key.slot_owner[at][lowest]], atol=1e-5 * np.abs(inverse).max())

        mean, second = normalised(moments, "value", at)
        covariance = second - np.outer(mean, mean)
        _, encode, _, _ = definition.balanced(covariance, data.metric[at], lambda s: (0, 0, n_v))
        np.testing.assert_allclose(codes.value.mu[at], mean, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(codes.value.encode[at], encode, atol=1e-5 * np.abs(encode).max())
        np.testing.assert_array_equal(codes.value.bits[at], np.repeat([2, 0], [n_v, dim - n_v]))
    kept = np.arange(dim) < n_v
    np.testing.assert_allclose(codes.value.delta[..., kept], 0.98, rtol=1e-6)
    np.testing.assert_array_equal(codes.value.weight[..., kept], 1)
    np.testing.assert_allclose(codes.value.gain, 1.06, rtol=1e-6)
    np.testing.assert_array_equal(codes.key.gain, 1)
    assert codes.key.metric is None
    assert codes.value.metric is None


def test_more_slots_than_coordinates_make_values_finer(moments, data):
    wide, narrow = (fitted(moments, data, "default", slots=(16, n)).value for n in (32, 16))
    assert (np.asarray(wide.bits) == 4).all()
    np.testing.assert_allclose(wide.delta, 0.335, rtol=1e-6)
    assert 1 < wide.gain[0, 0] < narrow.gain[0, 0] == np.float32(1.06)
    x, metric = data.arrays[2][0, 0, :120], data.metric[0]
    errors = [weighted_error(code.layer(0), x, metric) for code in (wide, narrow)]
    assert (errors[0] < 0.3 * errors[1]).all()


def test_keys_sort_slots_and_values_do_not(moments, data):
    codes = fitted(moments, data, "default")
    power = np.where(codes.key.slot_shift < 8, 2.0**codes.key.slot_shift, 0)
    heaviness = power * jnp.take_along_axis(codes.key.delta * np.sqrt(codes.key.weight), codes.key.slot_owner, -1)
    assert (np.diff(heaviness, axis=-1) >= -1e-6).all()
    np.testing.assert_array_equal(codes.value.slot_order, np.broadcast_to(np.arange(16), (2, 2, 16)))


def test_feedback_keeps_the_frame_and_damps_the_metric(moments, data):
    plain, feedback = (fitted(moments, data, name) for name in ("default", "default-feedback"))
    np.testing.assert_array_equal(plain.key.encode, feedback.key.encode)
    np.testing.assert_allclose(feedback.value.gain, 1.03, rtol=1e-6)
    np.testing.assert_array_equal(feedback.value.delta, 1)
    diagonal = np.diagonal(np.asarray(feedback.key.metric), axis1=-2, axis2=-1)
    kept = plain.key.bits > 0
    np.testing.assert_allclose(diagonal[kept], 1.01 * plain.key.weight[kept], rtol=1e-5)
    np.testing.assert_array_equal(diagonal[~kept], 1)
    inverse = np.zeros((2, 2, 16, 16))
    for at in np.ndindex(2, 2):
        lowest = feedback.value.slot_shift[at] == 0
        inverse[at][feedback.value.slot_owner[at][lowest]] = feedback.value.decode[at][lowest]
    hessian = inverse @ data.metric @ np.swapaxes(inverse, -1, -2)
    expected = hessian + 0.01 * np.eye(16) * hessian
    np.testing.assert_allclose(np.asarray(feedback.value.metric), expected, atol=1e-4 * np.abs(expected).max())


def test_feedback_lowers_the_weighted_error(moments, data):
    plain, feedback = (fitted(moments, data, name) for name in ("default", "default-feedback"))
    rows = data.v[0, 0, :120]
    errors = [weighted_error(codes.value.layer(0), rows, data.metric[0]).sum() for codes in (plain, feedback)]
    assert errors[1] < errors[0]


def test_averaged_positions_use_one_code_without_buckets(moments, data):
    codes = fitted(moments, data, "default-averaged", max_position=546)
    assert codes.bucket is None
    assert codes.rotary is None
    offsets = [3, 259]  # every 256 tokens from the first history position; 515 and a bucket would end past 546
    for at in np.ndindex(2, 2):
        mean, second = normalised(moments, "key", at)
        mean = np.mean([mean @ data.rope.matrix(o, 16) for o in offsets], axis=0)
        query = np.asarray(moments.sums["weighted_query"][at]) / np.asarray(moments.sums["weighted_pair"][at])
        second, metric = turned(second, data.rope, offsets), turned(query, data.rope, offsets)
        covariance = second - np.outer(mean, mean)
        _, encode, _, _ = definition.balanced(covariance, metric, lambda s: definition.split(s, 16))
        np.testing.assert_allclose(codes.key.mu[at], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(codes.key.encode[at], encode, atol=1e-5 * np.abs(encode).max())


def rotation_of(target: np.ndarray) -> np.ndarray:
    values, vectors = definition.eigh(target)
    assert (np.diff(values) < 0).all()
    return (vectors[:, ::-1] @ definition.mixing(len(target)))[:, linalg.bit_reversal(len(target))]


@pytest.mark.parametrize("name", ["oscar-reference", "oscar-head", "oscar-paper", "oscar-paper-head"])
def test_rotations_equal_the_dense_definition(moments, data, name):
    codes = fitted(moments, data, name)
    sums, tokens = moments.sums, data.lengths.sum()
    targets = {"key": np.asarray(sums["query"]) / (2 * tokens), "value": np.asarray(sums["output"]) / (2 * tokens)}
    if name in ("oscar-reference", "oscar-head"):
        targets["value"] = np.asarray(sums["logit"]) / np.asarray(sums["logit_weight"])[..., None, None]
    for side, code in (("key", codes.key), ("value", codes.value)):
        for layer, head in np.ndindex(2, 2):
            shared = name in ("oscar-reference", "oscar-paper")
            target = targets[side][layer].mean(0) if shared else targets[side][layer, head]
            np.testing.assert_allclose(code.encode[layer, head], rotation_of(target), atol=1e-6)
        np.testing.assert_allclose(code.decode, np.swapaxes(code.encode, -1, -2), atol=1e-7)
        assert (code.kind, code.clip, code.clip_ratio) == (
            "minmax",
            "static" if "paper" in name else "rank",
            0.96 if side == "key" else 0.92,
        )
    assert codes.bucket is None


@pytest.mark.parametrize(("name", "pooled"), [("oscar-paper", True), ("oscar-paper-head", False)])
def test_static_thresholds_are_quantiles_of_rotated_calibration_rows(moments, data, name, pooled):
    codes = fitted(moments, data, name)
    valid = np.arange(data.k.shape[2]) < data.lengths[:, None]
    for code, rows, ratio in ((codes.key, data.k, 0.96), (codes.value, data.v, 0.92)):
        for layer in range(2):
            size = np.abs(np.einsum("tkd,kde->tke", rows[layer][valid], code.encode[layer]))
            for head in range(2):
                of = size if pooled else size[:, head]
                exact = np.quantile(of, ratio, method="inverted_cdf")
                assert (
                    exact
                    <= np.asarray(code.clip_threshold)[layer, head] * (1 + 1e-6)
                    <= exact * 2 ** (1 / 128) * (1 + 1e-5)
                )


def test_data_free_recipes_need_no_text(data):
    empty = calib_moments.init(("naive", "hadamard", "hadamard-clip"), **WINDOWS, **data.sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes = {name: fitted(empty, data, name) for name in ("naive", "hadamard", "hadamard-clip")}
    np.testing.assert_array_equal(codes["naive"].key.encode[1, 1], np.eye(16))
    for name in ("hadamard", "hadamard-clip"):
        np.testing.assert_allclose(codes[name].value.encode[1, 0], definition.mixing(16), atol=1e-7)
    assert codes["hadamard"].key.clip == "none"
    assert codes["hadamard-clip"].value.clip_ratio == 0.92


def test_fault_r6_two_heads_orthogonal_outliers():
    """The first head's queries rule the shared frame, where H maps the second head's outliers to one coordinate."""
    rng = np.random.default_rng(0)
    dim, rows = 32, 400
    basis = np.asarray(linalg.canonical_sign(jnp.asarray(np.linalg.qr(rng.normal(size=(dim, dim)))[0])))
    outliers = np.stack([basis[:, -1], basis[:, :-1] @ definition.mixing(dim)[:-1, 7]])
    outliers /= np.linalg.norm(outliers, axis=-1, keepdims=True)
    q = rng.normal(size=(rows, 2, dim))
    # Orthonormal columns: the sample's eigenvectors are exactly the basis.
    q[:, 0] = np.linalg.qr(q[:, 0])[0] * np.sqrt(rows * 1e4 * 1.3 ** np.arange(dim)) @ basis.T
    q[:, 1] += 10 * rng.normal(size=(rows, 1)) * outliers[1]
    k = rng.normal(size=(rows, 2, dim)) + 12 * rng.choice([-1, 1], size=(rows, 2, 1)) * outliers
    v = rng.normal(size=(rows, 2, dim))
    q_, k_, v_ = (x[None, None].astype(np.float32) for x in (q, k, v))
    where: dict[str, Any] = dict(positions=np.arange(rows), lengths=[rows], rope=None)
    names = ("oscar-reference", "oscar-head", "default")
    moments = calib_moments.init(names, layers=1, kv_heads=2, q_heads=2, head_dim=dim, bucket=512, softmax_scale=1e-4)
    moments = calib_moments.accumulate(moments, q_, k_, v_, **where)
    moments = calib_moments.accumulate(moments, q_, k_, v_, **where, first_fit=first_fit(moments))
    metric = np.einsum("tkd,tke->kde", q, q) / rows

    def error(name: str, of: calib_moments.Moments) -> np.ndarray:
        code = fit(of, name, rope=None, max_position=512).key.layer(0)
        return weighted_error(code, k.astype(np.float32), metric)

    shared, own = error("oscar-reference", moments), error("oscar-head", moments)
    assert own[1] < shared[1] / 20
    assert own[0] < shared[0] * 1.1
    pooled = {
        name: np.broadcast_to(np.asarray(array).mean(1, keepdims=True), array.shape)
        for name, array in moments.sums.items()
        if array.ndim > 1
    }
    shared = error("default", dataclasses.replace(moments, sums=moments.sums | pooled))
    assert error("default", moments)[1] < shared[1] / 5


@pytest.mark.parametrize("dim", [80, 96])
def test_fault_r8_hadamard_by_blocks_codes_heads_that_are_no_power_of_two(dim):
    empty = calib_moments.init(("naive", "hadamard"), layers=1, kv_heads=1, q_heads=1, head_dim=dim)
    code = fit(empty, "hadamard", rope=None, max_position=4096).key
    np.testing.assert_allclose(code.encode[0, 0], linalg.hadamard(dim), atol=1e-7)
    rows = np.random.default_rng(0).normal(size=(50, 1, dim)).astype(np.float32)
    rows[:, 0, 3] = 30
    error = {
        name: weighted_error(fit(empty, name, rope=None, max_position=4096).key.layer(0), rows, np.eye(dim)[None]).sum()
        for name in ("naive", "hadamard")
    }
    assert error["hadamard"] < 0.8 * error["naive"]


def test_second_pass_must_see_the_same_tokens(moments, data):
    half = dataclasses.replace(moments, sums=moments.sums | {"tokens2": np.float64(90)})
    with pytest.raises(ValueError, match="the second pass saw 90 tokens, the first 210"):
        fitted(half, data, "oscar-head")


def test_recipe_must_be_among_the_moments(data):
    empty = calib_moments.init("default", **WINDOWS, **data.sizes)
    with pytest.raises(ValueError, match="the moments were made for default"):
        fitted(empty, data, "hadamard")


@pytest.mark.parametrize(
    ("name", "slots", "message"),
    [
        ("default", 12, "slots=12 on the key side .* the nearest is 16"),
        ("default", (16, 56), "slots=56 on the value side .* the nearest is 48"),
        ("default", (16, 24), "slots=24 on the value side .* expected at most 16, or 32 or 48"),
        ("hadamard", 8, "slots=8 on the key side .* expected 16, the head size"),
    ],
)
def test_slots_that_do_not_fit(moments, data, name, slots, message):
    with pytest.raises(ValueError, match=message):
        fitted(moments, data, name, slots=slots)


def test_max_position_must_exceed_the_sinks(moments, data):
    with pytest.raises(ValueError, match="max_position=3"):
        fitted(moments, data, "default", max_position=3)


def test_warns_of_thin_statistics_and_poor_coverage(moments, data, monkeypatch):
    with pytest.warns(ThinStatisticsWarning, match="210 calibration tokens"):
        fitted(moments, data, "default")
    monkeypatch.setattr(calib_fit, "THIN_TOKENS", 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(moments, data, "default")  # all 32 positions of a bucket were seen
        sums = moments.sums | {"weighted_covered": (np.arange(32) < 28).astype(float)}
        poor = dataclasses.replace(moments, sums=sums)
        fitted(poor, data, "oscar-head")  # does not care for buckets
        with pytest.warns(BucketCoverageWarning, match="28 of the 32 positions"):
            fitted(poor, data, "default")


@pytest.fixture
def quant(monkeypatch):
    """The recipe probes' quantizers (PyTorch)."""
    pytest.importorskip("torch", reason="the probes need PyTorch")
    if not (PROBES / "quant.py").exists():
        pytest.skip("development probes are absent (../shared/probes/recipe)")
    monkeypatch.syspath_prepend(str(PROBES))
    sys.modules.pop("quant", None)
    import quant  # type: ignore[import-not-found]

    yield quant
    sys.modules.pop("quant", None)


def test_frames_and_bits_equal_the_probes(moments, data, quant):
    import torch

    sums = {name: np.array(array) for name, array in moments.sums.items()}
    pair, weight = sums["weighted_pair"][..., None], sums["weighted_value_weight"][..., None]
    query = sums["weighted_query"] / pair[..., None]
    offsets = range(0, MAX_POSITION - 3, 32)
    query = np.stack([[turned(c, data.rope, offsets) for c in layer] for layer in query])
    plain = np.zeros_like(query)
    statistics = dict(
        k1=plain[..., 0], kk=plain, v1=plain[..., 0], vv=plain, qqw=query, G=data.metric,
        k1w=sums["weighted_key_sum"] / pair, kkw=sums["weighted_key"] / pair[..., None],
        v1w=sums["weighted_value_sum"] / weight, vvw=sums["weighted_value"] / weight[..., None],
        qq=sums["query"] / (2 * data.lengths.sum()),
    )  # fmt: skip
    statistics = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in statistics.items()}
    codes, head = fitted(moments, data, "default"), fitted(moments, data, "oscar-head")
    key = quant.DEF | dict(R="bal", mu="w", codec="mix", cov="kkw", cw="qqw")
    value = quant.DEF | dict(R="bal", mu="w", codec="lm", cov="vvw")
    for layer in range(2):
        mu, m, _, hessian, extra = quant.frame(statistics, layer, "k", key)
        for k, split in enumerate(extra["al"]):
            ours = codes.key.bits[layer, k]
            assert tuple((ours == b).sum() for b in (6, 4, 2)) == tuple(split)
            np.testing.assert_allclose(codes.key.mu[layer, k], mu[k], rtol=1e-5, atol=1e-6)
            # Signs of eigenvectors and mixers differ; each class spans the same space with the same scale.
            for b in (6, 4, 2):
                mine, theirs = codes.key.encode[layer, k][:, ours == b], m[k].numpy()[:, ours == b]
                np.testing.assert_allclose(
                    mine @ mine.T, theirs @ theirs.T, atol=1e-4 * np.abs(m[k].numpy()).max() ** 2
                )
                total = hessian[k].numpy().diagonal()[ours == b].sum()
                np.testing.assert_allclose(codes.key.weight[layer, k][ours == b].sum(), total, rtol=1e-3)
        mu, m, _, _, _ = quant.frame(statistics, layer, "v", value)
        sigma = m.numpy() @ np.swapaxes(m.numpy(), -1, -2)  # not divided by the rms in the probe
        mine = codes.value.encode[layer] @ np.swapaxes(codes.value.encode[layer], -1, -2)
        ratio = mine / sigma
        np.testing.assert_allclose(
            ratio, np.broadcast_to(np.median(ratio, (-1, -2))[:, None, None], ratio.shape), rtol=2e-3
        )
        np.testing.assert_allclose(codes.value.mu[layer], mu, rtol=1e-5, atol=1e-6)
        _, m, _, _, _ = quant.frame(statistics, layer, "k", quant.DEF | dict(R="UH", tgt="qq"))
        unmixed = head.key.encode[layer][..., np.argsort(linalg.bit_reversal(16))] @ definition.mixing(16)
        overlap = np.swapaxes(unmixed, -1, -2) @ (m.numpy() @ definition.mixing(16))
        np.testing.assert_allclose(np.abs(overlap), np.broadcast_to(np.eye(16), overlap.shape), atol=1e-4)


def test_fit_leaves_x64_as_it_was(moments, data):
    before = jnp.arange(2).dtype
    codes = fitted(moments, data, "default")
    assert jnp.arange(2).dtype == before
    assert codes.key.encode.dtype == np.float32
