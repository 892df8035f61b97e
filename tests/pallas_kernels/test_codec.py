"""Codec against its written definition (rule E1), its round trip, and its degenerate rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.typing import DTypeLike

from pallas_kernels import codec
from tests.pallas_kernels import codec_definition as definition
from tests.pallas_kernels.codes import KINDS, transform_code

HEAD_DIMS = (64, 80, 96, 128, 192, 256)

encode = jax.jit(codec.encode, static_argnames="scale_dtype")
transform, decode, unpack = (
    jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})
    for f in (codec.transform, codec.decode, codec.unpack)
)
quantize = jax.jit(codec.quantize)

# Compiling is the cost here: every head size for the default code, one each for the other kinds.
KINDS_AND_HEADS = [("levels", head_dim) for head_dim in HEAD_DIMS] + [
    ("naive", 256), ("rotation-rank", 128), ("rotation-static", 192), ("levels-uniform", 80), ("feedback", 96),
]  # fmt: skip


def arrays(encoded):
    return jax.tree.map(np.asarray, encoded)


def round_trip(code, x):
    """Decoded rows of x, 24 at a time: one compiled program serves most tests."""
    return np.concatenate([decode(code, encode(code, x[i : i + 24])) for i in range(0, len(x), 24)])


def rows(head_dim, *, count=24, kv_heads=2, seed=3, dtype: DTypeLike = np.float32):
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, size=(count, kv_heads, head_dim)) * 1.5).astype(dtype)


@pytest.mark.parametrize(("kind", "head_dim"), [pair for pair in KINDS_AND_HEADS if pair[0] != "feedback"])
def test_slots_and_scale_equal_the_definition_bit_for_bit(kind, head_dim):
    code = transform_code(kind, head_dim=head_dim).layer(0)
    y = np.array(transform(code, rows(head_dim)))
    y[-4:] *= np.float32(1e-6)  # spreads near the root of SIGMA_EPSILON
    encoded = arrays(quantize(code, y))
    for token, head in np.ndindex(*y.shape[:2]):
        slots, scale, offset = definition.quantize_row(code, head, y[token, head])
        np.testing.assert_array_equal(encoded.slots[token, head], definition.pack_row(slots))
        assert encoded.scale[token, head] == scale
        if offset is not None:
            assert encoded.offset[token, head] == offset


@pytest.mark.parametrize(("kind", "head_dim"), KINDS_AND_HEADS)
def test_decoding_equals_the_definition(kind, head_dim):
    code = transform_code(kind, head_dim=head_dim).layer(0)
    encoded = arrays(quantize(code, transform(code, rows(head_dim))))
    decoded = np.asarray(decode(code, encoded))
    slots = np.asarray(unpack(encoded.slots))
    for token, head in np.ndindex(*decoded.shape[:2]):
        offset = None if encoded.offset is None else encoded.offset[token, head]
        expected = definition.decode_row(code, head, slots[token, head], encoded.scale[token, head], offset)
        np.testing.assert_allclose(decoded[token, head], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_loses_what_two_bits_lose(kind):
    code = transform_code(kind).layer(0)
    x = np.random.default_rng(0).normal(size=(240, 2, 64)).astype(np.float32)
    kept = np.asarray(code.bits) > 0
    y, y_hat = (np.einsum("tkd,kde->tke", rows - code.mu, code.encode) for rows in (x, round_trip(code, x)))
    relative = (((y_hat - y) ** 2) * kept).sum() / ((y**2) * kept).sum()
    # On Gaussian rows: min/max without clipping .25, at rank .96 .16; frames that do not fit the data lose more.
    assert 0.01 < relative < (0.3 if code.kind == "minmax" else 0.5)


def test_feedback_lowers_the_metric_error_of_the_same_code():
    plain, feedback = (transform_code(kind).layer(0) for kind in ("levels-uniform", "feedback"))
    x = rows(64, count=240)
    inverse = np.linalg.inv(np.asarray(plain.encode, np.float64))

    def metric_error(code):
        y_error = np.einsum("tkd,kde->tke", round_trip(code, x) - x, code.encode)
        return (np.einsum("tkd,kde->tke", y_error, inverse) ** 2).sum()

    assert metric_error(feedback) < 0.95 * metric_error(plain)


@pytest.mark.parametrize("slots", (56, 72, 128))
def test_slot_counts_other_than_the_head_size(slots):
    code = transform_code("levels", head_dim=64, slots=slots).layer(0)
    encoded = encode(code, rows(64))
    assert encoded.slots.shape[-1] * 4 == slots
    unowned = np.asarray(code.slot_shift) == 8
    unpacked = np.asarray(unpack(encoded.slots))
    for head in range(2):
        assert (unpacked[:, head, unowned[head]] == 0).all()
        assert (np.asarray(code.decode)[head, unowned[head]] == 0).all()
    y = np.asarray(transform(code, rows(64)))
    for token, head in np.ndindex(*y.shape[:2]):
        expected, _, _ = definition.quantize_row(code, head, y[token, head])
        np.testing.assert_array_equal(unpacked[token, head], expected)


@pytest.mark.parametrize(("ratio", "size", "rank"), [(0.96, 128, 122), (0.92, 128, 117), (0.96, 8, 7), (1.0, 64, 63)])
def test_the_rank_of_clipping_is_rounded_down(ratio, size, rank):
    assert codec.clip_rank(ratio, size) == rank


@settings(max_examples=60, deadline=None)
@given(st.sampled_from((1, 2, 16, 20, 24, 32)), st.integers(0, 2**32 - 1))
def test_pack_and_unpack_are_inverse(quarter, seed):
    slots = np.random.default_rng(seed).integers(0, 4, size=(3, 4 * quarter)).astype(np.uint8)
    packed = codec.pack(jnp.asarray(slots))
    np.testing.assert_array_equal(unpack(packed), slots)
    np.testing.assert_array_equal(packed, np.stack([definition.pack_row(row) for row in slots]))


def test_fault_q12_every_byte_value_unpacks():
    every = np.arange(256, dtype=np.uint8)
    expected = np.stack([(every >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    np.testing.assert_array_equal(unpack(every[:, None]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_q1_all_zero_rows(kind):
    """Zero rows come back as zeros (min/max) or as mu's nearest stored row, never as NaN."""
    code = transform_code(kind).layer(0)
    x = np.zeros((24, 2, 64), np.float32)
    decoded = np.asarray(decode(code, encode(code, x)))
    assert np.isfinite(decoded).all()
    if code.kind == "minmax":
        np.testing.assert_array_equal(decoded, 0)


@pytest.mark.parametrize("kind", ("levels", "levels-uniform", "feedback"))
def test_rows_equal_to_the_mean_store_scale_zero_and_decode_to_it(kind):
    code = transform_code(kind).layer(0)
    encoded = encode(code, np.broadcast_to(np.asarray(code.mu), (24, 2, 64)))
    np.testing.assert_array_equal(encoded.scale, 0)
    np.testing.assert_array_equal(decode(code, encoded), np.broadcast_to(code.mu, (24, 2, 64)))


@pytest.mark.parametrize("scale_dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("constant", (3.7, 1e-4, -2.5, 6e4))
def test_fault_q2_constant_rows(constant, scale_dtype):
    """A constant row has no range: it comes back within the rounding of the stored offset."""
    code = transform_code("naive").layer(0)
    x = np.full((24, 2, 64), constant, np.float32)
    encoded = encode(code, x, scale_dtype=scale_dtype)
    np.testing.assert_array_equal(np.asarray(encoded.scale, np.float32), 0)
    step = float(jnp.finfo(scale_dtype).eps) * abs(constant)
    np.testing.assert_allclose(np.asarray(decode(code, encoded)), x, atol=step)


def test_fault_q2_constant_rows_under_hadamard():
    from scipy.linalg import hadamard

    from pallas_kernels.transform_code import TransformCode

    rotation = np.broadcast_to(hadamard(64) / 8.0, (1, 1, 64, 64))
    ones = np.ones((1, 1, 64))
    code = TransformCode.build(
        mu=0 * ones, encode=rotation, inverse=rotation, bits=(2 * ones).astype(np.int8), delta=ones, weight=ones,
        kind="minmax",
    ).layer(0)  # fmt: skip
    for constant in (3.7, 1e-4):
        encoded = encode(code, np.full((2, 1, 64), constant, np.float32))
        decoded = np.asarray(decode(code, encoded))
        # One quantization step in y is range / 3 = 8 |x| / 3, spread over 64 coordinates by the rotation.
        np.testing.assert_allclose(decoded, constant, atol=8 * constant / 3 / 8 * 1.01 + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_q4_a_channel_of_zeros(kind):
    code = transform_code(kind).layer(0)
    x = rows(64)
    x[..., 5] = 0
    assert np.isfinite(np.asarray(decode(code, encode(code, x)))).all()


def test_fault_q5_bit_widths_are_right_or_refused():
    from pallas_kernels.transform_code import TransformCode

    ones = np.ones((1, 1, 8))
    frame: dict[str, Any] = dict(mu=0 * ones, encode=np.eye(8)[None, None], inverse=np.eye(8)[None, None], weight=ones)
    for bits in (3, 5, 8, 1):
        with pytest.raises(ValueError, match="6, 4, 2 or 0"):
            TransformCode.build(**frame, bits=(bits * ones).astype(np.int8), delta=ones)
    with pytest.raises(ValueError, match="slots"):
        TransformCode.build(**frame, bits=(4 * ones).astype(np.int8), delta=ones)
    four = TransformCode.build(**frame, bits=(4 * ones).astype(np.int8), delta=0.335 * ones, slots=16).layer(0)
    x = np.random.default_rng(0).normal(size=(500, 1, 8)).astype(np.float32)
    error = np.asarray(decode(four, encode(four, x))) - x
    assert (error**2).mean() < 0.02  # 4-bit uniform on a Gaussian: .0115


def test_fault_q10_large_keys_in_bfloat16_stay_accurate():
    """A bias of 400 in one channel: coded as defined, and no worse than without it where the mean has it."""
    code, x = transform_code("levels", head_dim=128).layer(0), rows(128)
    bias = 400 * (np.arange(128) == 7).astype(np.float32)
    biased = jnp.asarray(x + bias, jnp.bfloat16)
    encoded = arrays(encode(code, biased))
    assert np.isfinite(encoded.scale.astype(np.float32)).all()
    y = np.asarray(transform(code, biased))
    for token, head in np.ndindex(*y.shape[:2]):
        slots, scale, _ = definition.quantize_row(code, head, y[token, head])
        np.testing.assert_array_equal(encoded.slots[token, head], definition.pack_row(slots))
        assert encoded.scale[token, head] == scale
    aware = dataclasses.replace(code, mu=np.asarray(code.mu) + bias)
    errors = [
        decode(each, encode(each, row)) - row for each, row in ((code, jnp.asarray(x, jnp.bfloat16)), (aware, biased))
    ]
    plain, large = (float((np.asarray(error, np.float64) ** 2).mean()) for error in errors)
    assert large < 1.1 * plain


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_rows_store_nan_and_leave_their_neighbours(kind, bad):
    code = transform_code(kind).layer(0)
    clean = rows(64)
    dirty = clean.copy()
    dirty[2, 1, 9] = bad
    before, after = encode(code, clean), encode(code, dirty)
    assert np.isnan(np.asarray(after.scale, np.float32)[2, 1])
    assert (np.asarray(after.slots)[2, 1] == 0).all()
    keep = np.ones((24, 2), bool)
    keep[2, 1] = False
    np.testing.assert_array_equal(np.asarray(after.slots)[keep], np.asarray(before.slots)[keep])
    np.testing.assert_array_equal(np.asarray(after.scale)[keep], np.asarray(before.scale)[keep])


@pytest.mark.parametrize("scale_dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("magnitude", (1e-30, 1e-6, 1e7, 1e15))
def test_scales_underflow_to_zero_and_saturate(kind, magnitude, scale_dtype):
    code = transform_code(kind).layer(0)
    encoded = encode(code, rows(64) * np.float32(magnitude), scale_dtype=scale_dtype)
    assert np.isfinite(np.asarray(encoded.scale, np.float32)).all()
    assert np.isfinite(np.asarray(decode(code, encoded))).all()
    if magnitude >= 1e7 and scale_dtype == "float16":
        assert (np.abs(np.asarray(encoded.scale, np.float32)) <= 65504).all()


def test_an_overflowing_mean_square_counts_as_non_finite():
    code = transform_code("levels").layer(0)
    encoded = encode(code, np.full((24, 2, 64), 1e25, np.float32))
    assert np.isnan(np.asarray(encoded.scale, np.float32)).all()
    assert (np.asarray(encoded.slots) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_encodes_alike_at_every_place_of_one_program(kind):
    """Rule E1: one compiled program, whatever the neighbours and the row's position."""
    code = transform_code(kind).layer(0)
    x = rows(64)
    reference = encode(code, x)
    order = np.random.default_rng(1).permutation(24)
    moved = encode(code, x[order])
    for a, b in zip(jax.tree.leaves(reference), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[order], np.asarray(b))
    lonely = x * 0 + 1e3
    lonely[5] = x[5]
    alone = encode(code, lonely)
    np.testing.assert_array_equal(np.asarray(alone.slots)[5], np.asarray(reference.slots)[5])


def test_float64_rows_are_encoded_in_float64():
    with jax.enable_x64(True):
        code, x = transform_code("levels").layer(0), jnp.asarray(rows(64, dtype=np.float64))
        y = transform(code, x)
        assert y.dtype == jnp.float64
        exact = np.einsum("tkd,kde->tke", np.asarray(x) - code.mu.astype(np.float64), code.encode.astype(np.float64))
        np.testing.assert_allclose(y, exact, rtol=1e-12, atol=1e-12)
        assert (
            jax.eval_shape(lambda x: codec.decode(code, codec.encode(code, x), dtype=jnp.float64), x).dtype == y.dtype
        )


def test_minmax_rounds_halves_up():
    code = transform_code("naive", head_dim=8, kv_heads=1).layer(0)
    y = jnp.asarray([[[0, 0.5, 1, 1.5, 2, 2.5, 3, 0.49]]], jnp.float32)
    assert np.asarray(codec.unpack(codec.quantize(code, y).slots)).ravel().tolist() == [0, 1, 1, 2, 2, 3, 3, 0]


@pytest.mark.parametrize("kind", ("naive", "rotation-rank", "rotation-static"))
def test_levels_of_short_numbers_equal_the_definition(kind):
    """Eleven bits or fewer make ties frequent; a product with a reciprocal in place of a quotient breaks some."""
    code = transform_code(kind, kv_heads=1).layer(0)
    y = np.round(rows(64, count=400, kv_heads=1) * 8).astype(np.float32) / 8
    got = np.asarray(quantize(code, y).slots)
    for token, row in enumerate(y[:, 0]):
        np.testing.assert_array_equal(got[token, 0], definition.pack_row(definition.quantize_row(code, 0, row)[0]))


def test_quotients_are_rounded_once():
    rng = np.random.default_rng(0)
    a, columns, rows = (rng.uniform(1, 9, size=shape).astype(np.float32) for shape in ((40, 8), 8, (40, 1)))
    a[0] = 0, np.inf, np.nan, -1e-30, 1e30, 3e38, 1, -2
    divided = jax.jit(lambda a, *divisors: [codec.quotient(a, divisor) for divisor in (3, *divisors)])
    for got, divisor in zip(divided(a, columns, rows), (np.float32(3), columns, rows), strict=True):
        np.testing.assert_array_equal(got, a / divisor)


@pytest.mark.parametrize("scale_dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("kind", ("naive", "rotation-rank"))
def test_the_largest_rows_saturate_and_decode_finite(kind, scale_dtype):
    code = transform_code(kind, head_dim=80).layer(0)
    encoded = codec.encode(code, jnp.asarray(np.sign(rows(80)) * np.float32(1e37)), scale_dtype=scale_dtype)
    assert np.abs(np.asarray(encoded.scale, np.float32)).max() <= 65536  # 65504 in the nearest bfloat16
    assert np.isfinite(np.asarray(codec.decode(code, encoded))).all()


def test_codes_fresh_from_a_fit_may_be_closed_over_under_jit():
    codes = transform_code("levels", layers=2)
    x = jnp.asarray(rows(64))
    traced = jax.jit(lambda layer: codec.encode(codes.layer(layer), x))(1)
    np.testing.assert_array_equal(traced.slots, jax.jit(codec.encode)(codes.layer(1), x).slots)
