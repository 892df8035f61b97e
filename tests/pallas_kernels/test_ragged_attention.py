"""Attention with the arguments of ragged paged attention equals the definition on every sequence."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import api, attend_ragged, tpu
from pallas_kernels.tiers import Tiers
from tests.pallas_kernels.states import Case, build, codes_of, expected
from tests.pallas_kernels.test_tpu_attention import QUICK, kernel_state

CASE = Case((0, 37, 5, 150), tokens=4, counts=(0, 1, 4, 3), tiers=Tiers(4, 8, 4, 64), window=90, behind=True)
TOLERANCE = 5e-6  # of the largest output, at least 1
SPARE = 2  # rows that belong to no sequence


def ragged(case, state):
    """Arguments with the new tokens of all sequences one after another, then rows of NaN."""
    mask = np.arange(case.tokens) < np.asarray(case.new)[:, None]
    rows = [
        jnp.asarray(np.concatenate([np.asarray(x)[mask], np.full((SPARE, *x.shape[2:]), np.nan, x.dtype)]))
        for x in (state.q, state.k, state.v)
    ]
    options = {name: x for name, x in state.arguments.items() if name not in ("starts", "counts")}
    lengths = np.array(case.new)
    options["kv_lens"] = jnp.asarray(np.array(case.starts) + lengths, jnp.int32)
    options["cu_q_lens"] = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    return rows, options


def run(case, state, codes, **static):
    rows, options = ragged(case, state)
    function = functools.partial(attend_ragged, tiers=case.tiers, spec=case.spec, **static)
    arguments = (*rows, state.plain, state.history)
    compiled = jax.jit(function).lower(*arguments, codes=codes, **options).compile(compiler_options=QUICK)
    return np.asarray(compiled(*arguments, codes=codes, **options), np.float32)


@pytest.mark.parametrize("kernel", ["xla", "tpu"])
def test_every_row_is_the_definition_s(kernel, monkeypatch):
    if kernel == "tpu":
        codes, state = kernel_state(CASE)
        monkeypatch.setattr(api, "attend", functools.partial(tpu.attend, interpret=True))
        found = run(CASE, state, codes, max_q_len=4)
    else:
        codes = codes_of(CASE)
        state = build(CASE, codes)
        found = run(CASE, state, codes, max_q_len=4, implementation="xla")
    want = np.concatenate(expected(CASE, state))
    np.testing.assert_allclose(found[:-SPARE], want, atol=TOLERANCE * max(1, np.abs(want).max()))
    np.testing.assert_array_equal(found[-SPARE:], 0)


def test_rows_past_max_q_len_are_nan():
    codes = codes_of(CASE)
    state = build(CASE, codes)
    found = run(CASE, state, codes, max_q_len=3, implementation="xla")
    fourth = np.arange(len(found)) == 4  # token of the third sequence
    np.testing.assert_array_equal(np.isnan(found).any((1, 2)), fourth)
    want = np.concatenate(expected(CASE, state))
    np.testing.assert_allclose(found[:4], want[:4], atol=TOLERANCE * max(1, np.abs(want).max()))


def test_lengths_that_cannot_be_are_nan():
    """Lengths are not known when the call is traced, so nothing can be raised."""
    codes = codes_of(CASE)
    state = build(CASE, codes)
    (q, k, v), options = ragged(CASE, state)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def call(kv_lens, cu_q_lens):
        static: dict[str, Any] = dict(max_q_len=4, tiers=CASE.tiers, spec=CASE.spec, implementation="xla", codes=codes)
        arguments = options | dict(kv_lens=kv_lens, cu_q_lens=cu_q_lens)
        return attend_ragged(q, k, v, state.plain, state.history, **arguments, **static)

    found = call(options["kv_lens"].at[2].set(3), options["cu_q_lens"])  # four new tokens of three
    np.testing.assert_array_equal(np.isnan(found).any((1, 2))[:-SPARE], np.isin(np.arange(8), (1, 2, 3, 4)))
    for wrong in ([1, 1, 1, 5, 8], [0, 2, 1, 5, 8]):
        assert np.isnan(call(options["kv_lens"], jnp.asarray(wrong, jnp.int32))).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_q_len=0), "max_q_len=0: expected at least 1"),
        (dict(cu_q_lens=jnp.zeros(4, jnp.int32)), r"cu_q_lens \(4,\) with kv_lens \(4,\): expected one entry more"),
        (dict(q=jnp.zeros((3, 4, 64))), r"q \(3, 4, 64\), k \(10, 2, 64\)"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    codes = codes_of(CASE)
    state = build(CASE, codes)
    (q, k, v), options = ragged(CASE, state)
    options |= dict(max_q_len=4, codes=codes, tiers=CASE.tiers, spec=CASE.spec) | changes
    with pytest.raises(ValueError, match=message):
        attend_ragged(options.pop("q", q), k, v, state.plain, state.history, **options)
