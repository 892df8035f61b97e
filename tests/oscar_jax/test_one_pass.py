"""Quantization without a cache: it agrees with the cache, and its baselines are what they say."""

import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax import calibrate as calibration
from oscar_jax import corpus, evaluate, layer_errors, one_pass
from oscar_jax.step import cache_config, make_step
from pallas_kernels.tiers import Tiers

TIERS = Tiers(sink=8, recent=32, group=8, page=16)
RECIPES = ["oscar-head", "default"]
pytestmark = [
    pytest.mark.usefixtures("unoptimized"),
    pytest.mark.filterwarnings("ignore::calib.fit.ThinStatisticsWarning"),
    pytest.mark.filterwarnings("ignore::calib.fit.BucketCoverageWarning"),
]


@pytest.fixture(scope="module")
def arms(tiny, tiny_text):
    text = corpus.calibration_text(calibration.encoder(tiny), 800, files=[tiny_text / "calibration.txt"])
    fitted = calibration.calibrate(tiny, text, RECIPES, sequence=400, bucket=128, progress=False)
    return {name: codes for name, (codes, _) in fitted.items()}


@pytest.fixture(scope="module")
def heldout(tiny, tiny_text):
    return corpus.heldout_text(calibration.encoder(tiny), 800, file=tiny_text / "heldout.txt")


@pytest.fixture(scope="module")
def reports(tiny, arms, heldout):
    """By mode, on the same windows of three buckets."""
    single = {name: one_pass.from_codes(codes) for name, codes in arms.items()}
    single |= one_pass.baselines(tiny.config.head_dim)
    run = {"sequence": 400, "tiers": TIERS, "progress": False}
    cached = evaluate.evaluate(tiny, arms, heldout, errors_by_layer=True, **run)
    return cached["arms"], evaluate.evaluate(tiny, single, heldout, **run)["arms"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_pass_agrees_with_the_cache_within_two_percent(reports, recipe):
    cached, single = (report[recipe] for report in reports)
    assert single["kl_mean"] == pytest.approx(cached["kl_mean"], rel=0.02)
    assert single["ppl"] == pytest.approx(cached["ppl"], rel=0.002)
    assert single["bits_per_element"] == pytest.approx(cached["bits_per_element"])
    assert single["history_bits_per_element"] == cached["history_bits_per_element"]


def test_one_pass_arms_are_marked_and_have_no_bytes(reports):
    cached, single = reports
    assert not any(arm["one_pass"] for arm in cached.values())
    assert all(arm["one_pass"] and arm["cache_bytes"] is None for arm in single.values())
    assert "kivi (one pass)" in evaluate.table(single)


def test_baselines_cost_what_their_bits_suggest(reports):
    single = reports[1]
    assert 0 < single["fp8"]["kl_mean"] < single["kivi"]["kl_mean"]
    assert single["fp8"]["history_bits_per_element"] == 8
    assert single["kivi"]["history_bits_per_element"] == (2 + 32 / 64 + 2 + 32 / 16) / 2


def test_kivi_has_four_levels_a_channel_and_group_and_keeps_sinks():
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(1, 8 + 64 + 30, 2, 16)), jnp.float32) for _ in range(2))
    k_hat, v_hat = (np.asarray(x) for x in one_pass._kivi(None, jnp.int32(0), k, v, TIERS))
    assert (k_hat[:, :8] == np.asarray(k)[:, :8]).all()
    for begin, end in ((8, 72), (72, 102)):
        part, exact = k_hat[0, begin:end], np.asarray(k)[0, begin:end]
        assert all(len(np.unique(part[:, head, d])) == 4 for head in range(2) for d in range(16))
        step = (exact.max(0) - exact.min(0)) / 3
        assert (np.abs(part - exact) <= 0.502 * step).all()
    assert all(len(np.unique(row)) <= 4 for row in v_hat.reshape(-1, 16))


def test_fp8_saturates_instead_of_overflowing():
    x = jnp.asarray([[[[1e4, -1e4, 1.0, 0.3]]]], jnp.float32)
    k_hat, _ = one_pass._fp8(None, jnp.int32(0), x, x, TIERS)
    assert np.asarray(k_hat).ravel().tolist() == [448, -448, 1, 0.3125]


def test_layer_errors_order_recipes_and_name_the_worst(reports):
    cached = reports[0]
    for arm in (cached[recipe] for recipe in RECIPES):
        assert len(arm["layer_errors"]) == 2
        assert min(arm["layer_errors"]) > 0
        assert arm["worst_layers"][0]["error"] == max(arm["layer_errors"])
        assert arm["worst_heads"][0]["error"] >= arm["worst_layers"][0]["error"]
    assert np.mean(cached["default"]["layer_errors"]) < np.mean(cached["oscar-head"]["layer_errors"])
    assert "layer_errors" not in cached["bf16"]
    assert "oscar-head: relative error of attention outputs, worst layers" in evaluate.table(cached)


def test_layer_errors_are_those_of_attention_on_the_plain_runs_inputs(tiny, arms, heldout):
    """The first layer's inputs are the same in both runs, so its error is that of a whole step's outputs."""
    window = heldout.tokens[:200].reshape(1, 200)
    found = layer_errors.measure(tiny, arms["oscar-head"], window, tiers=TIERS, first=104, chunk=64)
    outputs = []
    for tiers, codes in ((Tiers(8, 192, 8, 16), None), (TIERS, arms["oscar-head"])):
        config = cache_config(tiny.config, max_length=200, tiers=tiers, plain_dtype="bfloat16")
        step = make_step(tiny.decoder, config, codes)
        outputs.append(_first_layer(step, window))
    plain, coded = (output[:, 104:] for output in outputs)
    expected = np.linalg.norm(coded - plain) / np.linalg.norm(plain)
    assert found.by_layer[0] == pytest.approx(expected, rel=0.01)


def _first_layer(step, window):
    """Attention outputs of layer 0, `[1, T, N, D]`, with the whole window in one call."""
    from oscar_jax.cache import step_attention

    counts = jnp.full(1, window.shape[1], jnp.int32)
    attend = step_attention(step.config, step.codes, counts)

    def watch(state, layer, q, k, v):
        out, state, _ = attend(state, layer, q, k, v)
        return out, state, out

    positions = jnp.arange(window.shape[1])[None]
    seen = step.decoder(jnp.asarray(window), positions, watch, step.init())[2]
    return np.asarray(seen[0], np.float64)
