"""Attention of many query tokens through Pallas' Triton lowering: interpreted and lowered here, run with `-m gpu`."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import dispatch, sm90
from pallas_kernels.attention import attend, gpu, triton, triton_prefill
from pallas_kernels.attention.triton_prefill import Block
from pallas_kernels.tiers import Tiers
from tests.pallas_kernels.states import Case, error, kernel_state

pytestmark = pytest.mark.usefixtures("unoptimized")

BASE = Case(
    (0, 5, 100, 300, 700), tokens=150, counts=(150, 150, 17, 0, 131), tiers=Tiers(4, 8, 4, 128), head_dim=128,
    bucket=256, dtype="bfloat16",
)  # fmt: skip


def case(**changes):
    return dataclasses.replace(BASE, **changes)


CASES = {
    "chunk": BASE,
    "one bucket": case(bucket=None),
    "float16": case(dtype="float16", scale_dtype="bfloat16"),
    "float32": case(dtype="float32"),
    "stored offsets": case(key="naive", value="rotation-rank", bucket=None),
    "stored value offsets": case(value="rotation-rank"),
    "stored key offsets": case(key="naive"),
    "multi-head": case(q_heads=2),
    **{f"{n} heads a group": case(q_heads=n, kv_heads=1) for n in (3, 5, 6, 7, 8, 12, 16)},
    "head size 64": case(head_dim=64, q_heads=14),
    "head size 80": case(head_dim=80),
    "head size 96": case(head_dim=96),
    "head size 192": case(head_dim=192),
    "head size 256": case(head_dim=256),
    "half as many slots": case(head_dim=64, value="levels", slots=32),
    "three quarters as many slots": case(value="levels", slots=96),
    "twice as many slots": case(value="levels", slots=256),
    "seventeen tokens": case(tokens=17, counts=(17, 1, 0, 16, 17)),
    "600 tokens": case(tokens=600, counts=(600, 599, 0, 300, 601 - 64)),
    "exact chunk": case(exact_chunk=True),
    "exact chunk longer than the ring": case(exact_chunk=True, tokens=600, counts=(600, 300, 0, 1, 17)),
    "window": case(window=200),
    "window inside the recents": case(window=4),
    "window over a long chunk": case(window=130, tokens=600, counts=(600, 300, 0, 1, 17), sinks=True),
    "soft-cap": case(softcap=2.0),
    "soft-cap, one bucket": case(softcap=2.0, bucket=None, sinks=True),
    "sink logits": case(sinks=True),
    "no sinks": case(tiers=Tiers(0, 8, 8, 128)),
    "one recent token": case(tiers=Tiers(2, 1, 1, 128)),
    "default tiers": case(
        tiers=Tiers(), starts=(0, 63, 320, 4000), bucket=2048, tokens=400, counts=(400, 400, 399, 321)
    ),
    "sinks inside the chunk": case(tiers=Tiers(100, 16, 8, 128), starts=(0, 50, 99, 100, 101)),
    "page 16": case(tiers=Tiers(4, 8, 8, 16)),
    "page 32": case(tiers=Tiers(4, 8, 8, 32), bucket=32),
    "page 64": case(tiers=Tiers(4, 8, 8, 64), bucket=64),
    "page 256": case(tiers=Tiers(4, 8, 8, 256)),
    "page 256, one bucket": case(tiers=Tiers(4, 8, 8, 256), bucket=None),
}
INTERPRETED = {
    "chunk": (
        Case((0, 37, 300), tokens=40, counts=(40, 33, 0), tiers=Tiers(4, 8, 4, 128), bucket=128, dtype="float16"),
        Block(64, 32, 4),
    ),
    "everything at once": (
        Case(
            (3, 70), tokens=70, counts=(70, 61), tiers=Tiers(4, 8, 4, 16), bucket=32, head_dim=96, q_heads=3,
            kv_heads=1, key="naive", value="rotation-rank", softcap=2.0, sinks=True, window=40,
        ),
        Block(64, 32, 4),
    ),
}  # fmt: skip
for n in (32, 128):
    INTERPRETED[f"{n} slots"] = (
        Case(
            (0, 37, 300), tokens=40, counts=(40, 33, 0), tiers=Tiers(4, 8, 4, 128), value="levels", slots=n, bucket=128,
        ),
        Block(64, 32, 4),
    )  # fmt: skip
BEHIND = "everything at once, NaN behind the window"
INTERPRETED[BEHIND] = (dataclasses.replace(INTERPRETED["everything at once"][0], behind=True), Block(64, 32, 4))
LOWERED = ("chunk", "half as many slots")
# Largest error relative to the largest output (at least 1): rounded keys, values and probabilities.
TOLERANCE = {"float32": 5e-4, "float16": 1.5e-3, "bfloat16": 6e-3}


@functools.partial(jax.jit, static_argnames=("tiers", "spec", "block", "interpret"))
def run(q, k, v, plain, history, codes, **arguments):
    return triton_prefill.attend(q, k, v, plain, history, codes=codes, **arguments)


def outputs(case, codes, state, **options):
    arguments = (state.q, state.k, state.v, state.plain, state.history, codes)
    return np.asarray(run(*arguments, tiers=case.tiers, spec=case.spec, **state.arguments, **options), np.float32)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_kernel_equals_the_definition(name):
    case, block = INTERPRETED[name]
    codes, state = kernel_state(case)
    state = dataclasses.replace(state, q=state.q.astype(case.dtype))
    wide = dataclasses.replace(state, q=state.q.astype(jnp.float32))
    out = outputs(case, codes, state, block=block, interpret=True)
    assert np.isfinite(out).all()
    assert error(case, out, wide) < TOLERANCE[case.dtype]


@pytest.mark.parametrize(
    "name", [name if name in LOWERED else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_kernel_lowers_for_a_gpu_that_is_not_there(name):
    case = CASES[name]
    codes, state = kernel_state(case)
    arguments = (state.q.astype(case.dtype), state.k, state.v, state.plain, state.history, codes)
    mesh = AbstractMesh(
        (1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    )
    with use_abstract_mesh(mesh):
        traced = run.trace(*arguments, tiers=case.tiers, spec=case.spec, **state.arguments)
        lowered = traced.lower(lowering_platforms=("cuda",))
    [kernel] = sm90.kernels(lowered)
    assert_joins_are_of_pairs(sm90.text(kernel))


def assert_joins_are_of_pairs(text: str) -> None:
    """XLA's Triton joins results of inline assembly with `pack=4` in a wrong order."""
    packs: dict[str, int] = {}  # of the latest value of a name: regions use names again
    joined = []
    for line in text.splitlines():
        if found := re.search(r"= tt.join (%\d+), (%\d+)", line):
            joined += [packs[name] for name in found.groups()]
        if found := re.match(r"\s*(%\d+) = (\S+)(?:.*packed_element = (\d+))?", line):
            packs[found[1]] = int(found[3] or 1)
    assert joined
    assert max(joined) <= 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(dtype="float64"), "plain tokens of float64"),
        (dict(tiers=Tiers(4, 8, 8, 8)), "page=8: 16, 32, 64, 128 and 256 are built"),
        (dict(head_dim=264), "head size 264: at most 256 is built"),
        (dict(head_dim=192), "float32 queries of head size 192: at most 128 is built"),
        (dict(bucket=16, tiers=Tiers(4, 8, 8, 16)), "bucket=16: multiples of 32 are built"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes, reason):
    small = case(starts=(40,), tokens=17, counts=None, q_heads=2, kv_heads=1, **changes)
    with jax.enable_x64(small.dtype == "float64"):
        codes, state = kernel_state(small)
        state = dataclasses.replace(state, q=state.q.astype("float32"))
        with pytest.raises(NotImplementedError, match=reason):
            outputs(small, codes, state)


def test_more_tokens_than_the_decode_kernel_takes_come_here(monkeypatch):
    for name, module in (("decode", triton), ("prefill", triton_prefill)):
        monkeypatch.setattr(module, "attend", lambda q, *_, name=name, **__: name)
    arrays = (jnp.zeros((1, tokens, 1, 32)) for tokens in (triton.MAX_TOKENS, triton.MAX_TOKENS + 1))
    assert [gpu.attend(q) for q in arrays] == ["decode", "prefill"]
    assert gpu.unavailable() == triton.unavailable()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_definition_on_the_device(name):
    """Pools are poisoned: NaN in every plain place, 0xFF slots, NaN scales, and garbage in the page table."""
    case = CASES[name]
    codes, state = kernel_state(case)
    state = dataclasses.replace(state, q=state.q.astype(case.dtype))
    wide = dataclasses.replace(state, q=state.q.astype(jnp.float32))
    assert error(case, outputs(case, codes, state), wide) < TOLERANCE[case.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("chunk", "stored offsets", "head size 80"))
def test_float32_queries_over_16_bit_tokens(name):
    case = CASES[name]
    codes, state = kernel_state(case)
    assert error(case, outputs(case, codes, state), state) < TOLERANCE["float32"]


@pytest.mark.gpu
@pytest.mark.parametrize("block", (Block(64, 32, 4), Block(64, 128, 4), Block(128, 64, 8), Block(128, 128, 8, 3)))
def test_the_result_does_not_depend_on_the_block(block):
    case = CASES["default tiers"]
    codes, state = kernel_state(case)
    state = dataclasses.replace(state, q=state.q.astype(case.dtype))
    wide = dataclasses.replace(state, q=state.q.astype(jnp.float32))
    assert error(case, outputs(case, codes, state, block=block), wide) < TOLERANCE[case.dtype]


@pytest.mark.gpu
def test_it_is_what_runs_on_a_gpu_and_agrees_with_xla():
    case = CASES["default tiers"]
    codes, state = kernel_state(case)
    assert dispatch.preferred(None) == "triton"
    arguments = (state.q.astype(case.dtype), state.k, state.v, state.plain, state.history)
    options: dict[str, Any] = dict(codes=codes, tiers=case.tiers, spec=case.spec, **state.arguments)
    got, xla = (np.asarray(attend(*arguments, implementation=name, **options), np.float32) for name in (None, "xla"))
    for b, count in enumerate(case.new):
        ulp = float(jnp.finfo(case.dtype).eps)  # both round their output
        np.testing.assert_allclose(got[b, :count], xla[b, :count], atol=2 * TOLERANCE[case.dtype], rtol=ulp)
    assert (got != xla).any()


@pytest.mark.gpu
def test_the_result_does_not_depend_on_neighbours():
    case = CASES["chunk"]
    codes, state = kernel_state(case)
    together = outputs(case, codes, state)
    counts = state.arguments["counts"].at[:4].set(0)
    alone = dataclasses.replace(state, arguments={**state.arguments, "counts": counts})
    np.testing.assert_array_equal(outputs(case, codes, alone)[4, : case.new[4]], together[4, : case.new[4]])


@pytest.mark.gpu
@pytest.mark.parametrize("side", ("key", "value"))
def test_a_row_that_had_nan_is_seen_in_its_own_sequence_only(side):
    case = CASES["chunk"]
    codes, state = kernel_state(case)
    state = dataclasses.replace(state, q=state.q.astype(case.dtype))
    page = int(state.arguments["page_indices"][4, 0])
    pages = getattr(state.history, side)
    nan = jnp.asarray(jnp.nan, codes.scale_dtype)
    pages = dataclasses.replace(pages, scale=pages.scale.at[1, page, :, 3].set(nan))
    out = outputs(case, codes, dataclasses.replace(state, history=dataclasses.replace(state.history, **{side: pages})))
    assert np.isnan(out[4, : case.new[4]]).all()
    assert np.isfinite(out[:4]).all()


@pytest.mark.gpu
def test_with_x64_enabled():
    with jax.enable_x64(True):
        codes, state = kernel_state(BASE)
        state = dataclasses.replace(state, q=state.q.astype(jnp.bfloat16))
        wide = dataclasses.replace(state, q=state.q.astype(jnp.float32))
        assert error(BASE, outputs(BASE, codes, state), wide) < TOLERANCE[BASE.dtype]
