"""Decode attention on every configuration of `gpu_spec.json`: lowered here, checked with `-m gpu` on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sm90
from pallas_kernels.storage import loaded, stored
from pallas_kernels.tiers import Tiers
from tests.pallas_kernels import gpu_spec
from tests.pallas_kernels.states import Case, expected, kernel_state
from tests.pallas_kernels.test_triton_attention import outputs, run

CONFIGURATIONS = gpu_spec.configurations()
SMALL = gpu_spec.axes() | {"head_dim": [64, 96], "heads_per_group": [2, 3], "q_len": [1, 2], "page": [16, 64]}
INTERPRETED = [gpu_spec.Configuration(**row) for row in gpu_spec.covering(SMALL)]


def rms(x):
    return np.sqrt(np.mean(np.square(x))) if x.size else 0.0


def assert_as_exact_as_16_bits(case, out, state):
    """Error at most twice that of plain attention in 16 bits on the same pages, plus two units in the last place.

    Rounding of the outputs hides much from the largest error: its mean square may be four times as large, no more.
    """
    precision = float(jnp.finfo(case.dtype).eps)
    for rows, count, want, plain in zip(
        out, case.new, expected(case, state), expected(case, state, dtype=case.dtype), strict=True
    ):
        _, exponent = np.frexp(want)
        error, unit = rows[:count] - want, np.ldexp(precision, exponent - 1)
        largest = np.abs(plain - want).max(initial=0)
        assert (np.abs(error) <= 2 * largest + 2 * unit).all(), f"error {np.abs(error).max()}, plain {largest}"
        assert rms(error) <= 2 * max(rms(plain - want), precision / 4 * rms(want)) + 1e-30


def checked(case, *, flatness=1.0, **options):
    codes, state = kernel_state(case)
    state = dataclasses.replace(state, q=(state.q * flatness).astype(case.dtype))
    out = outputs(case, codes, state, **options)
    assert_as_exact_as_16_bits(case, out, dataclasses.replace(state, q=state.q.astype(jnp.float32)))
    return out


def test_every_pair_of_values_is_in_some_row():
    axes = gpu_spec.axes()
    rows = [dict(zip(axes, dataclasses.astuple(each), strict=True)) for each in CONFIGURATIONS]
    assert set().union(*map(gpu_spec.pairs, rows)) == gpu_spec.all_pairs(axes)


def lowered(case, sharding=None):
    none = (0,) * len(case.starts)
    case = dataclasses.replace(case, starts=none, counts=none, room=max(case.starts))  # shapes are all that counts
    codes, state = kernel_state(case)

    def call(*arguments):
        return run(*arguments, tiers=case.tiers, spec=case.spec, **state.arguments)

    arguments = (state.q.astype(case.dtype), state.k, state.v, state.plain, state.history, codes)
    return sm90.lower(call, *arguments, sharding=sharding)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_fault_r11_and_r13_attention_lowers_for_a_gpu_that_is_not_there(configuration):
    assert len(sm90.kernels(lowered(configuration.case))) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("configuration", gpu_spec.product(), ids=str)
def test_every_combination_lowers(configuration):
    assert len(sm90.kernels(lowered(configuration.case))) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_fault_r11_xla_compiles_it_for_a_gpu_that_is_not_there(configuration):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA plugin of jax, extra cuda13")
    assert len(sm90.compiled_by_xla(lowered(configuration.case, sm90.absent_gpu()))) >= 3


@pytest.mark.parametrize(
    "configuration",
    [*INTERPRETED[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in INTERPRETED[2:])],
    ids=str,
)
def test_interpreted_error_is_that_of_16_bit_attention(configuration):
    few = configuration.q_len
    checked(dataclasses.replace(configuration.case, starts=(0, 3, 12, 70), counts=(0, 1, few, few)), interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_error_is_that_of_16_bit_attention(configuration):
    checked(configuration.case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_nearly_flat_attention_over_128k_tokens_keeps_its_error(dtype):
    case = Case((2**17 - 1,), head_dim=64, kv_heads=1, tiers=Tiers(), dtype=dtype)
    checked(case, flatness=2.0**-8)


def with_sequences(state, order):
    """The same sequences in another order."""
    names = ("starts", "counts", "page_indices")
    return dataclasses.replace(
        state, q=state.q[order], k=state.k[order], v=state.v[order],
        plain=jax.tree.map(lambda x: x[:, order], state.plain),
        arguments=state.arguments | {name: state.arguments[name][order] for name in names},
    )  # fmt: skip


def with_pages(state, order):
    """The same pages elsewhere in the pool: place i holds what was at `order[i]`."""
    table, place = state.arguments["page_indices"], jnp.asarray(np.argsort(order), jnp.int32)
    inside = (table >= 0) & (table < len(order))
    table = jnp.where(inside, place[jnp.where(inside, table, 0)], table)
    history = jax.tree.map(lambda x: x[:, order], state.history)
    return dataclasses.replace(state, history=history, arguments=state.arguments | {"page_indices": table})


def with_reused_pages(state):
    """Unused places hold what earlier sequences left: finite scales and slots instead of poison."""

    def side(pages):
        unused = jnp.isnan(loaded(pages.scale))
        old = jnp.broadcast_to(jnp.expand_dims(unused, 3 if pages.tokens_last else 4), pages.slots.shape)

        def filled(numbers, x):
            return (
                None if numbers is None else jnp.where(unused, stored(jnp.asarray(x, loaded(numbers).dtype)), numbers)
            )

        return dataclasses.replace(
            pages, slots=jnp.where(old, 0x1B, pages.slots), scale=filled(pages.scale, 0.5),
            offset=filled(pages.offset, -0.75),
        )  # fmt: skip

    history = state.history
    return dataclasses.replace(
        state, history=dataclasses.replace(history, key=side(history.key), value=side(history.value))
    )


def places(case, **options):
    """Outputs as built, and with everything elsewhere, sequences in their first order."""
    codes, state = kernel_state(case)
    state = dataclasses.replace(state, q=state.q.astype(case.dtype))
    rng = np.random.default_rng(0)
    sequences, pages = rng.permutation(len(case.starts)), rng.permutation(state.history.key.slots.shape[1])
    yield outputs(case, codes, state, **options)
    yield outputs(case, codes, with_sequences(state, sequences), **options)[np.argsort(sequences)]
    yield outputs(case, codes, with_pages(state, pages), **options)
    yield outputs(case, codes, with_reused_pages(state), **options)


@pytest.mark.slow
def test_interpreted_outputs_do_not_depend_on_places():
    case = Case((0, 12, 70), head_dim=64, tiers=Tiers(4, 8, 8, 16), bucket=64, value="rotation-rank", dtype="bfloat16")
    first, *others = places(case, interpret=True)
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.gpu
@pytest.mark.parametrize("configuration", CONFIGURATIONS[::7], ids=str)
def test_outputs_do_not_depend_on_places(configuration):
    first, *others = places(configuration.case)
    for other in others:
        np.testing.assert_array_equal(other, first)
