"""Decode attention through Pallas' Triton lowering: interpreted and lowered here, run with `-m gpu` on the device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import dispatch
from pallas_kernels.attention import attend, triton, xla
from pallas_kernels.tiers import Tiers
from tests.pallas_kernels.states import Case, build, codes_of, error, kernel_state

pytestmark = pytest.mark.usefixtures("unoptimized")

BASE = Case((0, 5, 37, 300, 700), tiers=Tiers(4, 8, 4, 128), head_dim=128, bucket=256, dtype="bfloat16")


def case(**changes):
    return dataclasses.replace(BASE, **changes)


def around(*lengths):
    return tuple(sorted({length + d for length in lengths for d in (-1, 0, 1)}))


CASES = {
    "decode": BASE,
    "one bucket": case(bucket=None),
    "float16": case(dtype="float16", scale_dtype="bfloat16"),
    "float32": case(dtype="float32"),
    "stored offsets": case(key="naive", value="rotation-rank", bucket=None),
    "stored value offsets": case(value="rotation-rank"),
    "stored key offsets": case(key="naive"),
    "multi-head": case(q_heads=2),
    **{f"{n} heads a group": case(q_heads=n, kv_heads=1) for n in (3, 5, 6, 7, 8, 12, 16, 32)},
    "head size 64": case(head_dim=64, q_heads=14),
    "head size 80": case(head_dim=80),
    "head size 96": case(head_dim=96),
    "head size 192": case(head_dim=192),
    "head size 256": case(head_dim=256),
    "half as many slots": case(head_dim=64, value="levels", slots=32),
    "three quarters as many slots": case(value="levels", slots=96),
    "twice as many slots": case(value="levels", slots=256),
    "half as many slots, sixteen rows": case(value="levels", slots=64, tokens=4, counts=(4, 4, 0, 4, 3), q_heads=8),
    "twice as many slots, sixteen rows": case(
        head_dim=64, value="levels", slots=128, tokens=4, counts=(4, 4, 0, 4, 3), q_heads=8
    ),
    "two tokens": case(tokens=2, counts=(0, 1, 2, 2, 2)),
    "four tokens": case(tokens=4, counts=(4, 4, 0, 4, 3)),
    "sixteen tokens": case(tokens=16, starts=(0, 9, 250, 700, 390), q_heads=6),
    "exact chunk": case(tokens=16, exact_chunk=True),
    "window": case(window=200),
    "window inside the recents": case(window=4, tokens=2),
    "window inside the sinks": case(starts=(30, 37, 298), window=297),
    "window over several tokens": case(window=130, tokens=4, sinks=True),
    "soft-cap": case(softcap=2.0),
    "soft-cap, one bucket": case(softcap=2.0, bucket=None, sinks=True),
    "sink logits": case(sinks=True),
    "no sinks": case(tiers=Tiers(0, 8, 8, 128)),
    "one recent token": case(tiers=Tiers(2, 1, 1, 128)),
    "default tiers": case(tiers=Tiers(), starts=(63, 319, 320, 700, 4000), bucket=2048),
    "page 16": case(tiers=Tiers(4, 8, 8, 16)),
    "page 32": case(tiers=Tiers(4, 8, 8, 32), bucket=32),
    "page 64": case(tiers=Tiers(4, 8, 8, 64), bucket=64),
    "page 256": case(tiers=Tiers(4, 8, 8, 256)),
    "page 256, one bucket": case(tiers=Tiers(4, 8, 8, 256), bucket=None),
    "edges of the tiers": case(starts=around(4, 12, 16)),
    "edges of pages": case(starts=around(12 + 128, 12 + 256)),
    "many splits": case(starts=(9000, 30), bucket=None),
}
INTERPRETED = {
    "four rows, columns of products": Case((0, 5, 300), tiers=Tiers(4, 8, 4, 128), head_dim=128, bucket=128),
    "eight rows, two tokens a row of keys": Case(
        (0, 5, 300), tiers=Tiers(4, 8, 4, 128), q_heads=7, kv_heads=1, bucket=128,
    ),
    "twelve rows, fp16, NaN behind the window": Case(
        (0, 5, 300), tokens=4, counts=(3, 4, 4), tiers=Tiers(4, 8, 4, 128), bucket=128, head_dim=128, q_heads=3,
        kv_heads=1, dtype="bfloat16", window=150, behind=True,
    ),
    "twelve rows, fp16, everything at once": Case(
        (0, 5, 70), tokens=4, counts=(0, 1, 4), tiers=Tiers(4, 8, 4, 16), bucket=32, head_dim=96, q_heads=3, kv_heads=1,
        key="naive", value="rotation-rank", softcap=2.0, sinks=True, window=40, dtype="bfloat16",
    ),
    "eight rows, one token a row of keys, everything at once": Case(
        (0, 5, 70), tokens=2, counts=(0, 1, 2), tiers=Tiers(4, 8, 4, 16), bucket=32, head_dim=96, q_heads=3, kv_heads=1,
        key="naive", value="rotation-rank", softcap=2.0, sinks=True, window=40,
    ),
}  # fmt: skip
BEHIND = "eight rows, everything at once, NaN behind the window"
INTERPRETED[BEHIND] = dataclasses.replace(list(INTERPRETED.values())[-1], behind=True)
for n in (32, 48, 128):
    INTERPRETED[f"head size 64, {n} slots"] = Case(
        (0, 5, 300), tiers=Tiers(4, 8, 4, 128), value="levels", slots=n, bucket=128, q_heads=3, kv_heads=1
    )
LOWERED = (
    "decode", "stored offsets", "head size 96", "half as many slots", "four tokens", "window over several tokens",
    "page 16",
)  # fmt: skip
# Largest error relative to the largest output (at least 1): fixed point, and probabilities in the plain dtype.
TOLERANCE = {"float32": 5e-4, "float16": 1.5e-3, "bfloat16": 6e-3}


@functools.partial(jax.jit, static_argnames=("tiers", "spec", "span", "tile", "interpret"))
def run(q, k, v, plain, history, codes, **arguments):
    return triton.attend(q, k, v, plain, history, codes=codes, **arguments)


def outputs(case, codes, state, **options):
    arguments = (state.q, state.k, state.v, state.plain, state.history, codes)
    return np.asarray(run(*arguments, tiers=case.tiers, spec=case.spec, **state.arguments, **options), np.float32)


def assert_definition(case, **options):
    """With queries of the plain tokens' dtype."""
    codes, state = kernel_state(case)
    state = dataclasses.replace(state, q=state.q.astype(case.dtype))
    wide = dataclasses.replace(state, q=state.q.astype(jnp.float32))
    assert error(case, outputs(case, codes, state, **options), wide) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_kernels_equal_the_definition(name):
    assert_definition(INTERPRETED[name], interpret=True)


def test_sixteen_rows_that_see_no_history_keep_their_plain_tokens():
    """q' is zero where q . mu is not: in units of q', the number that masks a logit would be a small one."""
    small = case(starts=(13,), tokens=4, bucket=None, q_heads=3, kv_heads=1)
    codes, state = kernel_state(small)
    decode, mu = np.array(codes.key.decode), np.array(codes.key.mu)
    decode[..., 0], mu[..., 0] = 0, 80
    codes = dataclasses.replace(codes, key=dataclasses.replace(codes.key, decode=decode, mu=mu))
    query = jnp.zeros_like(state.q).at[..., 0].set(130).astype(small.dtype)
    plain = build(small, codes_of(small)).history
    got = outputs(small, codes, dataclasses.replace(state, q=query), interpret=True)
    arguments = (query, state.k, state.v, state.plain, plain)
    want = xla.attend(*arguments, codes=codes, tiers=small.tiers, spec=small.spec, **state.arguments)
    np.testing.assert_allclose(got, np.asarray(want, np.float32), rtol=2**-7, atol=TOLERANCE[small.dtype])


@pytest.mark.parametrize(
    "name", [name if name in LOWERED else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_kernels_lower_for_a_gpu_that_is_not_there(name):
    case = CASES[name]
    codes, state = kernel_state(case)
    arguments = (state.q.astype(case.dtype), state.k, state.v, state.plain, state.history, codes)
    mesh = AbstractMesh(
        (1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    )
    with use_abstract_mesh(mesh):
        traced = run.trace(*arguments, tiers=case.tiers, spec=case.spec, **state.arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") >= 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(dtype="float64"), "plain tokens of float64"),
        (dict(tokens=17), "17 query tokens a call: at most 16 are built"),
        (dict(tiers=Tiers(4, 8, 8, 8)), "page=8: 16, 32, 64, 128 and 256 are built"),
        (dict(tiers=Tiers(4, 8, 8, 48), bucket=96), "page=48: 16, 32, 64, 128 and 256 are built"),
        (dict(head_dim=264), "head size 264: at most 256 is built"),
        (dict(bucket=16, tiers=Tiers(4, 8, 8, 16)), "bucket=16: multiples of 32 are built"),
    ],
)
def test_fault_r13_what_is_not_built_is_refused_by_name(changes, reason):
    small = case(starts=(40,), q_heads=2, kv_heads=1, **changes)
    with jax.enable_x64(small.dtype == "float64"):
        codes, state = kernel_state(small)
        state = dataclasses.replace(state, q=state.q.astype("float32"))
        with pytest.raises(NotImplementedError, match=reason):
            outputs(small, codes, state)


def test_a_history_of_another_layout_is_refused():
    codes = codes_of(BASE)
    with pytest.raises(NotImplementedError, match="laid out for another implementation"):
        outputs(BASE, codes, build(BASE, codes))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_the_reason_is_named():
    assert "needs an NVIDIA GPU" in (dispatch.availability()["triton"] or "")
    assert dispatch.preferred(None) == "xla"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_definition_on_the_device(name):
    """Pools are poisoned: NaN in every plain place, 0xFF slots, NaN scales, and garbage in the page table."""
    assert_definition(CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("decode", "stored offsets", "head size 256"))
def test_float32_queries_over_16_bit_tokens(name):
    case = CASES[name]
    codes, state = kernel_state(case)
    assert error(case, outputs(case, codes, state), state) < TOLERANCE[case.dtype]


@pytest.mark.gpu
def test_it_is_what_runs_on_a_gpu_and_agrees_with_xla():
    case = CASES["default tiers"]
    codes, state = kernel_state(case)
    assert dispatch.preferred(None) == "triton"
    arguments = (state.q, state.k, state.v, state.plain, state.history)
    options: dict[str, Any] = dict(codes=codes, tiers=case.tiers, spec=case.spec, **state.arguments)
    got, xla = (np.asarray(attend(*arguments, implementation=name, **options)) for name in (None, "xla"))
    np.testing.assert_allclose(got, xla, atol=TOLERANCE[case.dtype])
    assert (got != xla).any()


@pytest.mark.gpu
def test_the_result_does_not_depend_on_the_split_or_on_neighbours():
    case = CASES["many splits"]
    codes, state = kernel_state(case)
    one = outputs(case, codes, state)
    for span in (1, 5, 64):
        np.testing.assert_allclose(outputs(case, codes, state, span=span), one, atol=2e-4)
    np.testing.assert_allclose(outputs(case, codes, state, tile=32), one, atol=2e-4)
    alone = dataclasses.replace(case, starts=case.starts[:1])
    table = {**state.arguments, "starts": state.arguments["starts"].at[1].set(3)}
    np.testing.assert_array_equal(outputs(alone, codes, dataclasses.replace(state, arguments=table))[0], one[0])


@pytest.mark.gpu
@pytest.mark.parametrize("side", ("key", "value"))
def test_a_row_that_had_nan_is_seen_in_its_own_sequence_only(side):
    case = CASES["decode"]
    codes, state = kernel_state(case)
    page = int(state.arguments["page_indices"][4, 0])
    pages = getattr(state.history, side)
    nan = jnp.asarray(jnp.nan, codes.scale_dtype)
    pages = dataclasses.replace(pages, scale=pages.scale.at[1, page, :, 3].set(nan))
    out = outputs(case, codes, dataclasses.replace(state, history=dataclasses.replace(state.history, **{side: pages})))
    assert np.isnan(out[4]).all()
    assert np.isfinite(out[:4]).all()


@pytest.mark.gpu
def test_with_x64_enabled():
    with jax.enable_x64(True):
        codes, state = kernel_state(BASE)
        state = dataclasses.replace(state, q=state.q.astype(jnp.float32))
        assert error(BASE, outputs(BASE, codes, state), state) < TOLERANCE[BASE.dtype]
