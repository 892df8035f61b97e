"""Three-tier attention against its dense float64 definition, and what it must never read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import AttentionSpec, PlainTiers, attend
from pallas_kernels.tiers import Tiers
from tests.pallas_kernels import attention_definition as definition
from tests.pallas_kernels.states import Case, build, codes_of, expected

BASE = Case((0, 5, 37), tiers=Tiers(4, 8, 4, 8), behind=True)


def case(**changes):
    return dataclasses.replace(BASE, **changes)


def around(*lengths):
    return tuple(sorted({length + d for length in lengths for d in (-1, 0, 1)}))


# Between them every head size, group size, page size, code kind and dtype; from 17 tokens on rows are read, not slots.
CASES = {
    "decode": BASE,
    "minmax": case(head_dim=80, q_heads=2, key="naive", value="rotation-rank", tiers=Tiers(4, 8, 1, 1)),
    "two tokens": case(head_dim=96, q_heads=8, tokens=2, bucket=8),
    "static clip": case(head_dim=128, q_heads=14, key="rotation-static", value="rotation-static", dtype="bfloat16"),
    "five tokens": case(
        head_dim=192,
        q_heads=3,
        kv_heads=1,
        tokens=5,
        counts=(0, 3, 5),
        bucket=16,
        dtype="float16",
        tiers=Tiers(4, 8, 8, 16),
    ),
    "bfloat16 scales": case(head_dim=256, q_heads=5, kv_heads=1, scale_dtype="bfloat16"),
    "sixteen tokens": case(q_heads=6, kv_heads=1, tokens=16, counts=(16, 2, 16), bucket=16),
    "no sinks": case(q_heads=16, kv_heads=1, tiers=Tiers(0, 8, 8, 8), value="feedback"),
    "sink longer than a prompt": case(starts=(3, 40, 12), tiers=Tiers(16, 5, 1, 8), tokens=2),
    "one recent token": case(tiers=Tiers(2, 1, 1, 8), starts=(40, 3, 2), dtype="bfloat16"),
    "recents larger than everything": case(tiers=Tiers(4, 512, 8, 64), tokens=2),
    "soft-cap and sink logits": case(softcap=2.0, sinks=True, bucket=8, tokens=2),
    "window inside the recents": case(window=4, tokens=2),
    "window inside the history": case(window=17, sinks=True, bucket=8, starts=(20, 36, 61)),
    "window inside the sinks": case(window=36, starts=(30, 37, 3)),
    "several tiles": case(
        starts=(1700, 1100), tiers=Tiers(4, 8, 8, 128), bucket=256, kv_heads=1, q_heads=7, window=500, tokens=2
    ),
    "edges of the tiers": Case(around(4, 12, 16), tiers=Tiers(4, 8, 4, 8), bucket=8),
    "edges of pages and tiles": Case(around(12 + 64, 12 + 512), tiers=Tiers(4, 8, 1, 64), q_heads=2, kv_heads=1),
    "rows: twelve heads a group": case(q_heads=12, kv_heads=1, tokens=17, counts=(17, 0, 9), head_dim=256),
    "rows: buckets and soft-cap": case(
        head_dim=80, q_heads=8, tokens=24, bucket=16, softcap=3.0, key="rotation-rank", dtype="float16"
    ),
    "rows: exact chunk": case(tokens=32, exact_chunk=True, bucket=8, scale_dtype="bfloat16", head_dim=192, q_heads=2),
    "rows: no sinks": case(
        head_dim=128, tokens=40, tiers=Tiers(0, 1, 1, 64), starts=(0, 70, 130), dtype="bfloat16", value="feedback"
    ),
    "rows: sink logits": case(head_dim=96, q_heads=32, kv_heads=1, tokens=20, sinks=True, counts=(0, 20, 11)),
    "rows: window inside the history": case(window=9, tokens=24, starts=(61, 5, 90), bucket=8, key="naive"),
    "rows: several tiles": case(
        starts=(2400, 30), tiers=Tiers(4, 1100, 8, 256), bucket=256, kv_heads=1, q_heads=2, tokens=17
    ),
    "rows: edges of the tiers": Case(around(4, 12, 16), tokens=17, tiers=Tiers(4, 8, 4, 8), bucket=8),
    "rows: edges of pages and tiles": Case(
        around(12 + 64, 12 + 512), tokens=17, tiers=Tiers(4, 8, 1, 64), q_heads=2, kv_heads=1
    ),
}


# Compiling is nearly all the time of this file, and LLVM's optimiser is not under test.
@functools.partial(jax.jit, static_argnames=("tiers", "spec"), compiler_options={"xla_backend_optimization_level": 0})
def run(q, k, v, plain, history, codes, *, tiers, spec, **arguments):
    return attend(q, k, v, plain, history, codes=codes, tiers=tiers, spec=spec, **arguments)


def all_outputs(case, state, codes):
    arguments = (state.q, state.k, state.v, state.plain, state.history, codes)
    return np.asarray(run(*arguments, tiers=case.tiers, spec=case.spec, **state.arguments))


def outputs(case, state, codes):
    """Outputs of the real tokens, a sequence each."""
    return [out[:count] for out, count in zip(all_outputs(case, state, codes), case.new, strict=True)]


def error(case):
    """Largest difference from the definition, relative to the largest output (at least 1)."""
    codes = codes_of(case)
    state = build(case, codes)
    pairs = list(zip(outputs(case, state, codes), expected(case, state), strict=True))
    largest = max(1.0, *(np.abs(want).max(initial=0) for _, want in pairs))
    return max(np.abs(got - want).max(initial=0) for got, want in pairs) / largest


@functools.cache
def error_of(name):
    return error(CASES[name])


def check_cases(wanted):
    names = [name for name, case in CASES.items() if wanted(case)]
    assert names
    for name in names:
        assert error_of(name) < 2e-5, name


def test_fault_q10_large_keys_in_bfloat16_read_as_the_dequantized_oracle():
    assert error(dataclasses.replace(CASES["one recent token"], bias=400.0)) < 2e-5


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_definition(name):
    """Pools are poisoned: NaN plain tokens, 0xFF slots and NaN scales wherever there is no token that a query sees."""
    assert error_of(name) < 2e-5


@pytest.mark.parametrize("tokens", (2, 17))
def test_float64_attention_is_computed_in_float64(tokens):
    with jax.enable_x64(True):
        assert error(case(dtype="float64", tokens=tokens, bucket=8)) < 1e-12


@settings(max_examples=25, deadline=None)
@given(
    starts=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    counts=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    window=st.integers(1, 70),
    seed=st.integers(0, 2**16),
)
def test_a_query_reads_exactly_what_the_rule_says(starts, counts, window, seed):
    """Zero queries weigh all keys alike: the output is the mean of the rows read, plain or history, and names them."""
    case = Case(
        starts,
        tokens=3,
        counts=counts,
        tiers=Tiers(3, 6, 2, 4),
        window=window,
        behind=True,
        seed=seed,
        room=63,
        q_heads=2,
        kv_heads=1,
    )
    codes = codes_of(case)
    state = build(case, codes)
    state = dataclasses.replace(state, q=jnp.zeros_like(state.q))
    for got, sequence, start, count in zip(outputs(case, state, codes), state.rows, starts, counts, strict=True):
        for i in range(count):
            plain, history = definition.visible(start + i, start + count, case.tiers, window=window)
            read = np.concatenate([sequence["v"][plain], sequence["v_hat"][history]])
            np.testing.assert_allclose(got[i, 0], read.mean(0)[0], atol=1e-5)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_page_order_does_not_matter(seed):
    codes = codes_of(BASE)
    pool = 3 * BASE.tiers.history_pages(38) + 3
    order = np.random.default_rng(seed).permutation(pool)
    first, second = (outputs(BASE, build(BASE, codes, page_order=ids), codes) for ids in (np.arange(pool), order))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_batch_order_does_not_matter():
    codes, order = codes_of(BASE), np.array([2, 0, 1])
    state = build(BASE, codes)

    def moved(x):
        return x[order]

    plain = PlainTiers(*(x[:, order] for x in dataclasses.astuple(state.plain)))
    arguments = state.arguments | {name: moved(state.arguments[name]) for name in ("starts", "counts", "page_indices")}
    shuffled = dataclasses.replace(
        state, q=moved(state.q), k=moved(state.k), v=moved(state.v), plain=plain, arguments=arguments
    )
    alike = outputs(BASE, shuffled, codes)
    for place, b in enumerate(order):
        np.testing.assert_array_equal(alike[place], outputs(BASE, state, codes)[b])


def test_fault_k1_unused_places_do_not_reach_the_output():
    """NaN and 0xFF in every unused place, against zeros there: bit-equal."""
    codes = codes_of(BASE)
    state = build(BASE, codes)
    clean = jax.tree.map(lambda x: jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, state.plain)
    history = jax.tree.map(lambda x: jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, state.history)
    fresh = dataclasses.replace(state, plain=clean, history=history)
    poisoned = outputs(BASE, state, codes)
    for a, b in zip(poisoned, outputs(BASE, fresh, codes), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


def test_fault_k3_a_sequence_that_sees_nothing_gives_zeros():
    for name in ("rows: sink logits", "decode"):
        empty = dataclasses.replace(CASES[name], counts=(0, 1, CASES[name].tokens), sinks=CASES[name].sinks)
        codes = codes_of(empty)
        state = build(empty, codes)
        np.testing.assert_array_equal(all_outputs(empty, state, codes)[0], 0)
        assert error(empty) < 2e-5


def test_fault_k4_empty_and_full_histories():
    check_cases(lambda case: case.starts == around(4, 12, 16))


def test_fault_k6_lengths_around_the_page_and_the_tile():
    check_cases(lambda case: case.starts == around(12 + 64, 12 + 512))


def test_fault_k7_repeated_calls_are_bit_equal():
    codes = codes_of(BASE)
    state = build(BASE, codes)
    first = outputs(BASE, state, codes)
    for _ in range(9):
        for a, b in zip(first, outputs(BASE, state, codes), strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("group", (1, 3, 5, 6, 7, 12, 16))
def test_fault_k9_every_group_size(group):
    check_cases(lambda case: case.q_heads == group * case.kv_heads)


@pytest.mark.parametrize("head_dim", (64, 80, 96, 128, 192, 256))
def test_fault_k10_every_head_size(head_dim):
    check_cases(lambda case: case.head_dim == head_dim and case.tokens <= 16)
    check_cases(lambda case: case.head_dim == head_dim and case.tokens > 16)


@pytest.mark.parametrize(("head_dim", "group"), ((96, 4), (80, 4), (96, 32)))
def test_fault_k11_odd_head_sizes_with_groups(head_dim, group):
    check_cases(lambda case: case.head_dim == head_dim and case.q_heads == group * case.kv_heads)


@pytest.mark.parametrize("page", (1, 8, 16, 64, 128, 256))
def test_fault_k14_every_page_size(page):
    check_cases(lambda case: case.tiers.page == page)


@pytest.mark.parametrize(("dtype", "tokens"), (("bfloat16", 2), ("bfloat16", 17), ("float16", 2)))
def test_low_precision_loses_no_more_than_the_same_computation_plainly(dtype, tokens):
    """Error against the oracle at most twice that of one dense computation in the same dtype, plus 2 ulp."""
    low = case(dtype=dtype, tokens=tokens, head_dim=128)
    codes = codes_of(low)
    state = build(low, codes)
    state = dataclasses.replace(state, q=state.q.astype(dtype))
    for b, (got, want) in enumerate(zip(outputs(low, state, codes), expected(low, state), strict=True)):
        dense = _dense(low, state, b, ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
        ulp = float(jnp.finfo(dtype).eps) * np.abs(want).max()
        assert np.abs(got.astype(np.float64) - want).max() <= 2 * np.abs(dense - want).max() + 2 * ulp


def _dense(case, state, b, dtype):
    """One dense attention per query and head, every intermediate rounded to `dtype`."""
    rows, start = state.rows[b], case.starts[b]
    out = np.zeros((case.new[b], case.q_heads, case.head_dim))
    for i, head in np.ndindex(*out.shape[:2]):
        plain, history = definition.visible(start + i, start + case.new[b], case.tiers)
        kv = head // (case.q_heads // case.kv_heads)
        keys, values = (
            np.concatenate([rows[side][plain, kv], rows[side + "_hat"][history, kv]]).astype(dtype) for side in "kv"
        )
        logits = keys @ np.asarray(state.q)[b, i, head] * dtype(case.spec.scale)
        weights = np.exp((logits - logits.max()).astype(np.float32)).astype(dtype)
        out[i, head] = (weights / weights.sum(dtype=dtype)).astype(dtype) @ values
    return out


def test_wrong_shapes_are_refused_by_name():
    codes = codes_of(BASE)
    state = build(BASE, codes)
    call = functools.partial(run, tiers=BASE.tiers, spec=BASE.spec, **state.arguments)
    with pytest.raises(ValueError, match=r"expected q \[B, T, N, D\]"):
        call(state.q[..., :32], state.k, state.v, state.plain, state.history, codes)
    with pytest.raises(ValueError, match="whole number of query heads"):
        call(state.q[:, :, :3], state.k, state.v, state.plain, state.history, codes)
    with pytest.raises(ValueError, match="expected both, or neither"):
        call(state.q, state.k, state.v, state.plain, state.history, None)
    with pytest.raises(ValueError, match="calibrated on this model"):
        call(state.q, state.k, state.v, state.plain, state.history, codes_of(dataclasses.replace(BASE, kv_heads=1)))
    for name, value, message in [
        ("starts", jnp.zeros(1, jnp.int32), r"starts \(1,\), counts \(3,\): expected \[3\]"),
        ("page_indices", state.arguments["page_indices"][:1], r"page_indices \(1, \d+\): expected \[3, pages"),
        ("page_indices", jnp.zeros((3, 0), jnp.int32), "at least one page"),
        ("sink_logits", jnp.zeros(3), r"sink_logits \(3,\): expected \[4\]"),
        ("page_indices", state.arguments["page_indices"] + 0.5, "page_indices of float32: expected integers"),
        ("window", jnp.float32(3), "window of float32: expected integers"),
        ("tiers", dataclasses.replace(BASE.tiers, page=2 * BASE.tiers.page), r"history\.key has pages of \d+ tokens"),
        ("tiers", dataclasses.replace(BASE.tiers, sink=BASE.tiers.sink + 1), r"expected sink=5 places a sequence"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(state.q, state.k, state.v, state.plain, state.history, codes, **{name: value})
    ring = {name: getattr(state.plain, name)[:, :, :4] for name in ("recent_k", "recent_v")}
    with pytest.raises(ValueError, match="expected a ring of at least recent=8 places"):
        call(state.q, state.k, state.v, dataclasses.replace(state.plain, **ring), state.history, codes)
    offsets = codes_of(dataclasses.replace(BASE, key="naive"))
    with pytest.raises(ValueError, match=r"history\.key has no offsets: its code expects some"):
        call(state.q, state.k, state.v, state.plain, state.history, offsets)
    with pytest.raises(ValueError, match=r"softcap=0\.0"):
        AttentionSpec(1.0, softcap=0.0)


def test_a_window_of_any_size_is_one_that_sees_everything():
    codes = codes_of(BASE)
    state = build(BASE, codes)
    call = functools.partial(run, tiers=BASE.tiers, spec=BASE.spec, **state.arguments)
    far, wide = (
        call(state.q, state.k, state.v, state.plain, state.history, codes, window=jnp.int32(window))
        for window in (2**31 - 1, 2**20)
    )
    np.testing.assert_array_equal(far, wide)


def test_no_tokens_give_no_rows():
    codes = codes_of(BASE)
    state = build(BASE, codes)
    call = functools.partial(attend, codes=codes, tiers=BASE.tiers, spec=BASE.spec, **state.arguments)
    assert call(state.q[:, :0], state.k[:, :0], state.v[:, :0], state.plain, state.history).shape == (3, 0, 4, 64)
