"""Decode attention for TPUs in Pallas' interpreter. No TPU has run it; test_tpu_compile.py compiles it for them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import codec, dispatch, tpu_pages
from pallas_kernels.attention import AttentionSpec, PlainTiers, tpu, xla
from pallas_kernels.history import History, short_page
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import flat
from tests.pallas_kernels.gpu_spec import covering
from tests.pallas_kernels.states import Case, build, codes_of, expected, in_lanes

QUICK: Any = {"xla_backend_optimization_level": 0}  # compiling is nearly all the time of an interpreted kernel
BASE = Case(
    (0, 5, 37, 300), tiers=Tiers(4, 8, 4, 128), head_dim=128, kv_heads=1, q_heads=4, bucket=128, dtype="bfloat16",
    behind=True,
)  # fmt: skip


def case(**changes):
    return dataclasses.replace(BASE, **changes)


CASES = {
    "decode": case(kv_heads=2, q_heads=2),
    "everything at once": case(
        starts=(0, 9, 250, 420), tokens=2, counts=(0, 1, 2, 2), head_dim=64, q_heads=12, key="naive",
        value="rotation-rank", softcap=2.0, sinks=True, window=130, dtype="float16", scale_dtype="bfloat16",
    ),
    "pages of 64": case(tiers=Tiers(4, 8, 4, 64), starts=(5, 75, 76, 700), bucket=256, q_heads=5),
    "pages of 16, float32": case(tiers=Tiers(4, 8, 4, 16), starts=(27, 28, 330), q_heads=7, dtype="float32"),
    "pages of 16, two heads a unit": case(
        tiers=Tiers(4, 8, 4, 16), starts=(27, 28, 330), head_dim=64, kv_heads=4, key="naive", value="rotation-rank",
    ),
}  # fmt: skip
SLOW = {
    "three heads of 64 in a row": case(head_dim=64, kv_heads=3, q_heads=3),
    "one bucket": case(bucket=None),
    "head size 256": case(head_dim=256),
    "float32, everything": case(
        starts=(0, 9, 250, 420), tokens=2, counts=(0, 1, 2, 2), key="naive", value="rotation-rank", softcap=2.0,
        sinks=True, window=130, dtype="float32",
    ),
    "pages of 16, a window": case(tiers=Tiers(4, 8, 4, 16), starts=(90, 330), window=70),
    "stored offsets": case(key="naive", value="rotation-rank", bucket=None),
    "exact chunk": case(tokens=16, exact_chunk=True, q_heads=6, kv_heads=2),
    "16 heads a group, 16 tokens": case(tokens=16, q_heads=16, starts=(0, 9, 250, 390)),
    "several steps and buckets": case(starts=(3000, 30), bucket=1024),
    "edges of pages": case(starts=(139, 140, 141, 267, 268, 269)),
    "pages of 16": case(tiers=Tiers(4, 8, 4, 16), starts=(27, 28, 3000), bucket=1024, window=700, kv_heads=2),
    "pages of 16, head size 256": case(tiers=Tiers(4, 8, 4, 16), head_dim=256),
    "pages of 32": case(tiers=Tiers(4, 8, 4, 32), starts=(43, 44, 1000), bucket=None),
    "pages of 64, exact chunk": case(tiers=Tiers(4, 8, 4, 64), tokens=16, exact_chunk=True, head_dim=64),
}  # fmt: skip
# Query heads a KV head that no row of sublanes fits, with every other size.
GROUPS = covering(
    {
        "q_heads": [5, 6, 7, 8, 9, 10, 11, 12],
        "head_dim": [64, 128, 256],
        "page": [16, 32, 64, 128],
        "dtype": ["bfloat16", "float16", "float32"],
        "tokens": [1, 2],
        "key": ["levels", "naive"],
    }
)


def of_group(*, page, q_heads, head_dim, **changes):
    heads = 2 if (page, head_dim) == (16, 64) else 1  # as many as fill a row of lanes
    return case(
        starts=(5, 160), tiers=Tiers(4, 8, 4, page), kv_heads=heads, q_heads=heads * q_heads, head_dim=head_dim,
        **changes,
    )  # fmt: skip


def kernel_state(case):
    codes = codes_of(case)
    state = build(case, codes)
    sides = (state.history.key, state.history.value)
    words = short_page(case.head_dim, case.tiers.page, case.kv_heads)
    key, value = (side.as_words() if words else side.laid_out(tokens_last=True) for side in sides)
    if case.scale_dtype == "float16":  # keys as `init_history` holds them for TPUs; values as others may hand them over
        key = dataclasses.replace(key, scale=jax.lax.bitcast_convert_type(key.scale, jnp.int16))
        if key.offset is not None:
            key = dataclasses.replace(key, offset=jax.lax.bitcast_convert_type(key.offset, jnp.int16))
    # As a model has them, queries have the dtype of the plain tokens: of fp32 ones the kernel is as exact as fp32.
    q = state.q.astype(case.dtype)
    return codes, dataclasses.replace(state, q=q, plain=in_lanes(state.plain), history=History(key, value))


@functools.partial(jax.jit, static_argnames=("tiers", "spec"))
def run(q, k, v, plain, history, codes, *, tiers, spec, **arguments):
    return tpu.attend(q, k, v, plain, history, codes=codes, tiers=tiers, spec=spec, interpret=True, **arguments)


def outputs(case, codes, state):
    arguments = (state.q, state.k, state.v, state.plain, state.history, flat(codes))
    options = dict(tiers=case.tiers, spec=case.spec)
    program = run.lower(*arguments, **options, **state.arguments).compile(compiler_options=QUICK)
    return np.asarray(program(*arguments, **state.arguments), np.float64)


def assert_by_the_attention_rule(case, out, state):
    """Error of a call at most twice that of plain attention in the same dtype, and two ulp of the largest output."""

    def rows(sequences):
        return np.concatenate([rows[:count].ravel() for rows, count in zip(sequences, case.new, strict=True)])

    got, want, plain = rows(out), rows(expected(case, state)), rows(expected(case, state, dtype=case.dtype))
    error, of_plain = np.abs(got - want).max(), np.abs(plain - want).max()
    ulp = float(jnp.finfo(case.dtype).eps) * np.abs(want).max()
    assert error <= 2 * of_plain + 2 * ulp, f"error {error}, of plain attention {of_plain}, ulp {ulp}"


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_attention_equals_the_definition(name):
    """Pools are poisoned: NaN tokens, 0xFF slots and NaN scales where no query sees, garbage in the page table."""
    case = (CASES | SLOW)[name]
    codes, state = kernel_state(case)
    assert_by_the_attention_rule(case, outputs(case, codes, state), state)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", GROUPS, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_every_group_size_equals_the_definition(sizes):
    case = of_group(**sizes)
    codes, state = kernel_state(case)
    assert_by_the_attention_rule(case, outputs(case, codes, state), state)


def test_fp32_queries_read_16_bit_plain_tokens_as_exactly():
    """The error is that of fp32, though windows and the definition's plain attention are of 16 bits."""
    mixed = CASES["decode"]
    codes, state = kernel_state(mixed)
    state = dataclasses.replace(state, q=state.q.astype(jnp.float32))
    assert_by_the_attention_rule(dataclasses.replace(mixed, dtype="float32"), outputs(mixed, codes, state), state)


@pytest.mark.parametrize(("parts", "bits"), [(2, 16), (3, 24)])
def test_parts_hold_so_many_bits(parts, bits):
    """In bfloat16 numbers, of which the sum is at most half a unit off."""
    x = np.random.default_rng(0).normal(size=(8, 128)).astype(np.float32)
    plan = dataclasses.make_dataclass("Plan", ["parts"])(parts)
    operand, rounded = jax.jit(functools.partial(tpu._parts, plan))(x)
    assert operand.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(operand, np.float32).reshape(parts, 8, 128).sum(0), rounded)
    assert (np.abs(rounded - x) <= 2.0**-bits * np.abs(x)).all()
    if bits == 24:
        np.testing.assert_array_equal(rounded, x)


@pytest.mark.parametrize("tokens", [1, 17])
def test_xla_reads_the_same_short_pages(tokens):
    """Slots at one token, rows at seventeen, which the kernel refuses."""
    short = case(tiers=Tiers(4, 8, 4, 16), starts=(27, 90), head_dim=64, kv_heads=2, tokens=tokens)
    codes, words = kernel_state(short)
    bytes_ = dataclasses.replace(build(short, codes), q=words.q)
    arguments = dict(codes=codes, tiers=short.tiers, spec=short.spec)

    def outputs(state):
        function = functools.partial(xla.attend, state.q, state.k, state.v, state.plain, state.history, **arguments)
        return np.asarray(jax.jit(function).lower(**state.arguments).compile(QUICK)(**state.arguments))

    assert words.history.key.words
    np.testing.assert_array_equal(outputs(words), outputs(bytes_))


def test_fields_are_the_slots_in_their_order():
    """Every byte in every place: 128 and the slot times its power of four, exactly."""
    rng = np.random.default_rng(0)
    packed = rng.permutation(np.arange(32 * 128) % 256).astype(np.uint8).reshape(32, 128)
    fields = jax.jit(lambda packed: tpu._fields(pltpu.bitcast(packed, jnp.int32)))(jnp.asarray(packed))
    slots = np.asarray(codec.unpack(jnp.asarray(packed.T))).T[tpu.field_order(128)]
    powers = np.repeat(4.0 ** np.array(tpu.POWERS), 16)
    np.testing.assert_array_equal(np.asarray(fields, np.float32), tpu.BIAS + powers[:, None] * slots)
    np.testing.assert_array_equal(np.asarray(tpu._powers(128))[0], powers)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_every_16_bit_number_is_read_exactly(dtype):
    words = np.arange(-(2**15), 2**15, dtype=np.int16).reshape(512, 128)
    plan = dataclasses.make_dataclass("Plan", ["scale_dtype"])(dtype)
    got = np.asarray(jax.jit(functools.partial(tpu._number, plan))(jnp.asarray(words)))
    want = np.asarray(jax.lax.bitcast_convert_type(jnp.asarray(words), dtype).astype(jnp.float32))
    if dtype == "float16":
        want = np.where(np.isfinite(want), want, np.nan)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(dtype="float64"), "plain tokens of float64"),
        (dict(tokens=17), "17 query tokens a call: at most 16 are built"),
        (dict(tokens=16, q_heads=32), "512 query rows a KV head: at most 256 are built"),
        (dict(tiers=Tiers(4, 8, 8, 8)), "page=8: 16, 32, 64, 128 are built"),
        (dict(tiers=Tiers(4, 8, 8, 16), head_dim=64), "page=16 with 1 KV heads of 64 slots: .* at least 32"),
        (dict(tiers=Tiers(4, 8, 8, 16), bucket=64), "buckets of 64 tokens: multiples of 128 are built"),
        (dict(head_dim=96), "head size 96: 64, 128, 256 are built"),
        (
            dict(tiers=Tiers(4, 14000, 8, 128), starts=(0,), counts=(0,)),
            r"14080 plain tokens and 8 query rows of size 128 .* take 16\.\d MiB of VMEM: at most 16 are built",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes, reason):
    small = case(**{"starts": (40,)} | changes)
    with jax.enable_x64(small.dtype == "float64"):
        codes, state = kernel_state(small)
        state = dataclasses.replace(state, q=state.q.astype("float32"))
        with pytest.raises(NotImplementedError, match=reason):
            outputs(small, codes, state)


def test_the_rotations_of_many_buckets_count():
    array: Any = jax.ShapeDtypeStruct
    tiers = Tiers(4, 8, 8, 128)
    rows = array((1, 1, 1, 256), jnp.bfloat16)
    plain = PlainTiers(*(array((1, 1, n, 1, 256), jnp.uint16) for n in (4, 4, 8, 8)))
    codes = codes_of(case(starts=(0,), head_dim=256, tiers=tiers, bucket=128))
    arguments: Any = (codes, tiers, AttentionSpec(1.0), False, False)
    tpu._plan(rows, rows, plain, array((1, 1024), jnp.int32), *arguments)
    with pytest.raises(NotImplementedError, match=r"MiB of VMEM: .* larger buckets take less"):
        tpu._plan(rows, rows, plain, array((1, 8192), jnp.int32), *arguments)


def test_a_page_table_larger_than_scalar_memory_is_refused():
    tpu_pages.check_table(248, 1024)
    with pytest.raises(NotImplementedError, match="256 sequences of 1024 pages: at most 253952 entries fit"):
        tpu_pages.check_table(256, 1024)


def test_a_history_of_another_layout_is_refused():
    codes = codes_of(BASE)
    with pytest.raises(NotImplementedError, match="laid out for another implementation"):
        outputs(BASE, codes, build(BASE, codes))


@pytest.mark.skipif(jax.default_backend() == "tpu", reason="there is a TPU")
def test_without_a_tpu_the_reason_is_named():
    assert "needs a TPU" in (dispatch.availability()["tpu"] or "")
