"""Transform codes: slot tables, E, checks, arrays in and out, and bits per element."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike

from pallas_kernels.rope import Rotary
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCode, TransformCodes, bits_per_element
from tests.pallas_kernels.codes import KINDS, transform_code, transform_codes


def frame(bits, *, slots=None, delta: ArrayLike = 1.0, weight: ArrayLike = 1.0, sort_slots=False, **kwargs):
    """A code of one layer and head with the identity as frame."""
    bits = np.asarray(bits, np.int8)[None, None]
    eye = np.eye(bits.shape[-1])[None, None]
    return TransformCode.build(
        mu=np.zeros(bits.shape), encode=eye, inverse=eye, bits=bits, delta=np.broadcast_to(delta, bits.shape),
        weight=np.broadcast_to(weight, bits.shape), slots=slots, sort_slots=sort_slots, **kwargs,
    )  # fmt: skip


def test_logical_slots_are_adjacent_and_most_significant_first():
    code = frame([6, 4, 2, 0, 0, 0, 0, 0], delta=np.array([0.1, 0.3, 1, 1, 1, 1, 1, 1]))
    np.testing.assert_array_equal(code.slot_owner[0, 0], [0, 0, 0, 1, 1, 2, 0, 0])
    np.testing.assert_array_equal(code.slot_shift[0, 0], [4, 2, 0, 2, 0, 0, 8, 8])
    # A slot with shift 2 r is worth 4^r steps; the two slots without an owner have zero rows.
    expected = np.zeros((8, 8))
    for slot, (owner, worth) in enumerate([(0, 1.6), (0, 0.4), (0, 0.1), (1, 1.2), (1, 0.3), (2, 1.0)]):
        expected[slot, owner] = worth
    np.testing.assert_allclose(code.decode[0, 0], expected, rtol=1e-6)


def test_keys_keep_their_heaviest_slots_last():
    delta, weight = np.array([0.1, 0.3, 1, 1, 1, 1, 1, 1]), np.array([1, 1, 9, 1, 1, 1, 1, 1])
    code = frame([6, 4, 2, 0, 0, 0, 0, 0], delta=delta, weight=weight, sort_slots=True)
    # 4^r delta sqrt(g) of the logical slots: 1.6, .4, .1, 1.2, .3, 3, and 0 for the two without an owner.
    np.testing.assert_array_equal(code.slot_order[0, 0], [6, 7, 2, 4, 1, 3, 0, 5])
    heaviness = np.abs(np.asarray(code.decode)[0, 0]).sum(-1) * np.where(np.asarray(code.slot_owner)[0, 0] == 2, 3, 1)
    assert (np.diff(heaviness) >= -1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_in_and_out_give_the_same_code(kind):
    code = transform_code(kind, layers=2)
    again = TransformCode.from_arrays(code.arrays(), kind=code.kind, clip=code.clip, clip_ratio=code.clip_ratio)
    assert jax.tree.structure(again) == jax.tree.structure(code)
    for a, b in zip(jax.tree.leaves(code), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    again.check("key")


def test_arrays_that_do_not_fit_are_refused_by_name():
    code = transform_code("levels")
    arrays = code.arrays()

    def build(arrays):
        return TransformCode.from_arrays(arrays, kind="levels")

    with pytest.raises(ValueError, match=r"missing arrays \['mu'\]"):
        build({name: array for name, array in arrays.items() if name != "mu"} | {"mu_": arrays["mu"]})
    with pytest.raises(ValueError, match="transform code array mu: came as float64"):
        build(arrays | {"mu": arrays["mu"].astype(np.float64)})
    with pytest.raises(ValueError, match=r"transform code array decode: came as float32\[1, 2, 64, 63\]"):
        build(arrays | {"decode": arrays["decode"][..., :63]})
    with pytest.raises(ValueError, match="slot_order: expected a permutation"):
        build(arrays | {"slot_order": np.zeros_like(arrays["slot_order"])})
    with pytest.raises(ValueError, match="in descending order"):
        build(arrays | {"bits": arrays["bits"][..., ::-1].copy()})
    with pytest.raises(ValueError, match=r"bits: need .* slots"):
        build(arrays | {"bits": np.full_like(arrays["bits"], 6)})


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("encode", np.nan, "layer 1, head 0: encode has NaN or Inf"),
        ("delta", 0.0, "layer 1, head 0: delta is not positive"),
        ("gain", -1.0, "layer 1, head 0: gain is not positive"),
        ("encode", 0.5, "layer 1, head 0: A M differs from the identity"),
        ("decode", 7.0, "layer 1, head 0: A M differs from the identity"),
    ],
)
def test_loading_checks_name_side_layer_and_head(leaf, value, message):
    code = transform_code("levels", layers=2)
    array = np.array(getattr(code, leaf))
    first = (1, 0) if leaf == "gain" else (1, 0, ..., slice(1))
    array[first] = value
    with pytest.raises(ValueError, match=f"value transform code, {message}"):
        dataclasses.replace(code, **{leaf: array}).check("value")


@pytest.mark.parametrize(("leaf", "at"), [("encode", (0, 0, 0, 1)), ("encode", (0, 0, 2, 2)), ("decode", (0, 0, 1, 3))])
def test_a_frame_and_its_inverse_may_differ_by_a_ten_thousandth(leaf, at):
    code = frame([2] * 8)
    for error in (0.9e-4, -0.9e-4, 1.1e-4, -1.1e-4):
        array = np.array(getattr(code, leaf), np.float32)
        array[at] += error
        changed = dataclasses.replace(code, **{leaf: array})
        if abs(error) < 1e-4:
            changed.check("key")
        else:
            with pytest.raises(ValueError, match=r"A M differs from the identity by 1\.1e-04, more than 1e-4"):
                changed.check("key")


def test_a_code_that_keeps_nothing_is_refused():
    with pytest.raises(ValueError, match="key transform code, layer 0, head 0: no coordinate is kept"):
        frame([0] * 8).check("key")


@pytest.mark.parametrize("head_dim", (64, 80, 96, 128, 192, 256))
@pytest.mark.parametrize("kind", ("naive", "levels", "levels-uniform"))
def test_codes_of_every_head_size_pass_their_checks(kind, head_dim):
    code = transform_code(kind, head_dim=head_dim)
    code.check("key")
    assert (code.head_dim, code.slots, code.layers, code.kv_heads) == (head_dim, head_dim, 1, 2)
    assert code.row_bits == 2 * head_dim + (32 if kind == "naive" else 16)


def test_slots_that_are_not_whole_bytes_of_planes_are_refused():
    with pytest.raises(ValueError, match="slots=20: expected a multiple of 8; the nearest is 16"):
        frame([2] * 8, slots=20)


def test_a_traced_layer_is_a_slice():
    codes = transform_codes(layers=3)
    one = jax.jit(lambda code, layer: code.layer(layer))(codes.key, jnp.int32(2))
    for a, b in zip(jax.tree.leaves(codes.key), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[2], b)


def test_codes_say_what_their_positions_need():
    key, value = transform_code("levels"), transform_code("levels-uniform")
    with pytest.raises(ValueError, match="bucket=256 without rotary"):
        TransformCodes(key, value, bucket=256)
    with pytest.raises(ValueError, match="scale_dtype='float32': expected one of float16, bfloat16"):
        TransformCodes(key, value, scale_dtype="float32")
    codes = TransformCodes(key, value, Rotary.standard(64), 256)
    codes.check()
    broken = dataclasses.replace(codes, value=dataclasses.replace(value, gain=-np.asarray(value.gain)))
    with pytest.raises(ValueError, match="value transform code, layer 0, head 0: gain"):
        broken.check()


def test_bits_per_element_count_scales_offsets_and_windows():
    tiers, codes = Tiers(64, 256, 8, 128), transform_codes()
    minmax = transform_codes("naive", "naive")
    assert bits_per_element(codes, tiers, 320) == 16  # all plain
    history = (4096 - 320) // 8 * 8
    assert bits_per_element(codes, tiers, 4096) == pytest.approx(((4096 - history) * 16 + history * 2.25) / 4096)
    assert bits_per_element(minmax, tiers, 4096) == pytest.approx(((4096 - history) * 16 + history * 2.5) / 4096)
    assert bits_per_element(codes, tiers, 10**9) == pytest.approx(2.25, abs=1e-4)
    assert bits_per_element(None, tiers, 5, plain_bits=32) == 32
    with pytest.raises(ValueError, match="context=0: expected at least one stored token"):
        bits_per_element(codes, tiers, 0)
