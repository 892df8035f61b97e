"""The three-tier cache: against its definition, across call sizes, and between neighbours."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_jax.cache import advance, cache_bytes, init_cache
from oscar_jax.cache_check import check_cache
from pallas_kernels.attention import PlainTiers
from pallas_kernels.tiers import Tiers
from tests.oscar_jax.cache_runs import (
    BASE,
    BATCH,
    HEADS,
    LAYERS,
    LENGTH,
    Tokens,
    base_codes,
    config,
    defined_outputs,
    encoded_rows,
    feed,
    live_rows,
    pages,
    run,
    schedule,
    slots_of,
)  # fmt: skip

LENGTHS = (70, 41)
WIDE = config(plain_dtype="float64")
PATHS = {
    "chunks": (24, schedule(LENGTHS, 16, 16, 8)),
    "odd chunks": (24, schedule(LENGTHS, 17, 1, 23, 2, 9, 24)),
    "token by token": (1, schedule(LENGTHS, 1)),
    "several tokens a step": (5, schedule(LENGTHS, 5, 3, 1, 4)),
    "ragged steps": (24, [[24, 3], [5, 20], [0, 1], [24, 0], [17, 17]]),
}


@pytest.fixture(scope="module")
def piece():
    """Whole sequences prefilled in one piece, in float64."""
    with jax.enable_x64(True):
        tokens = Tokens.random(dtype=np.float64)
        return tokens, *run([list(LENGTHS)], width=LENGTH, tokens=tokens, codes=base_codes(), config=WIDE)


def assert_trees_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_pages_hold_what_the_definition_encodes(piece):
    tokens, _, cache = piece
    with jax.enable_x64(True):
        for layer, b in np.ndindex(LAYERS, BATCH):
            wanted = encoded_rows(base_codes(), WIDE, tokens, layer, b, LENGTHS[b])
            for side in ("key", "value"):
                slots, scale, _ = live_rows(cache, WIDE, layer, b, side)
                np.testing.assert_array_equal(slots, wanted[side][0])
                np.testing.assert_allclose(scale.astype(np.float32), wanted[side][1], rtol=2e-3)
                assert (scale.astype(np.float32) == wanted[side][1]).mean() > 0.99


def test_outputs_equal_the_definition(piece):
    tokens, outputs, cache = piece
    with jax.enable_x64(True):
        for layer, b in np.ndindex(LAYERS, BATCH):
            wanted = defined_outputs(base_codes(), WIDE, tokens, cache, layer, b)
            np.testing.assert_allclose(outputs[layer, b, : LENGTHS[b]], wanted, atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_stores_the_same_slots_in_float64(piece, path):
    """Rule E3: identical slots, outputs to 1e-9."""
    tokens, outputs, cache = piece
    width, steps = PATHS[path]
    with jax.enable_x64(True):
        got, other = run(steps, width=width, tokens=tokens, codes=base_codes(), config=WIDE)
        np.testing.assert_allclose(got, outputs, atol=1e-9)
        assert_trees_equal(other.history, cache.history)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_stores_the_same_slots_in_float32(path):
    """Rule E3: at least 99.99 % of the slots, outputs to 1e-4."""
    tokens, codes = Tokens.random(seed=1), base_codes()
    width, steps = PATHS[path]
    reference, cache = run(schedule(LENGTHS, 24), width=24, tokens=tokens, codes=codes)
    got, other = run(steps, width=width, tokens=tokens, codes=codes)
    np.testing.assert_allclose(got, reference, atol=1e-4)
    for a, b in zip(slots_of(cache), slots_of(other), strict=True):
        assert (a != b).mean() <= 1e-4
    check_cache(other, BASE)


def test_rejected_drafts_leave_no_trace(piece):
    """Four tokens a step, of which three are junk and taken back, across window edge, groups and pages."""
    tokens, outputs, cache = piece
    codes = base_codes()
    with jax.enable_x64(True):
        drafted = init_cache(WIDE, codes)
        for position in range(60):
            counts = [4 if position < n - 4 else 0 for n in LENGTHS]
            out, drafted = feed(drafted, codes, tokens, [position] * BATCH, counts, width=5, config=WIDE, junk_from=1)
            drafted = advance(drafted, -jnp.asarray([max(0, c - 1) for c in counts]))
            for b, count in enumerate(counts):
                if count:
                    np.testing.assert_allclose(out[:, b, 0], outputs[:, b, position], atol=1e-9)
        for b, length in enumerate((60, 37)):
            kept = WIDE.tiers.history_tokens(length)
            assert int(drafted.lengths[b]) == length
            for side in ("key", "value"):
                for got, want in zip(
                    live_rows(drafted, WIDE, 1, b, side), live_rows(cache, WIDE, 1, b, side), strict=True
                ):
                    if got is not None and want is not None:
                        np.testing.assert_array_equal(got, want[:kept])


def test_fault_q9_and_c7_one_shot_and_streamed_pages_are_the_same(piece):
    """40 tokens at once, 17 + 1 x 23, 8 x 5 and 16 + 16 + 8: bit-identical pages."""
    tokens = piece[0]
    with jax.enable_x64(True):
        caches = [
            run(schedule((40, 40), *sizes), width=width, tokens=tokens, codes=base_codes(), config=WIDE)[1]
            for width, sizes in ((LENGTH, (40,)), (24, (17, 1)), (24, (8,)), (24, (16, 16, 8)))
        ]
    for other in caches[1:]:
        assert_trees_equal(other.history, caches[0].history)


def poisoned(cache):
    """The same empty cache with NaN in every float, 0xFF in every byte, and page table entries that exist nowhere."""

    def fill(x):
        if x.dtype in (jnp.uint8, jnp.uint16):
            return jnp.full_like(x, jnp.iinfo(x.dtype).max)  # as bfloat16 bits: NaN
        return jnp.full_like(x, jnp.nan)

    return dataclasses.replace(cache, plain=jax.tree.map(fill, cache.plain), history=jax.tree.map(fill, cache.history))


@pytest.mark.parametrize("width", (1, 24))
def test_fault_c14_pools_may_start_as_nan(width):
    tokens, codes = Tokens.random(seed=2), base_codes()
    steps = schedule(LENGTHS, width)
    clean, _ = run(steps, width=width, tokens=tokens, codes=codes)
    empty = init_cache(BASE, codes)
    garbage = np.resize(np.array([-1, 10**6, 2**30, -(2**30)], np.int32), empty.page_indices.shape)
    table = np.asarray(empty.page_indices).copy()
    for b, length in enumerate(LENGTHS):
        used = BASE.tiers.history_pages(length)
        table[b, used:] = garbage[b, used:]
    dirty = dataclasses.replace(poisoned(empty), page_indices=jnp.asarray(table))
    got, cache = run(steps, width=width, tokens=tokens, codes=codes, cache=dirty)
    assert np.isfinite(got[:, 0, :70]).all()
    np.testing.assert_array_equal(got, clean)
    check_cache(cache, BASE)


def test_fault_k2_reused_pages_hold_no_past():
    tokens, codes = Tokens.random(seed=3), base_codes()
    _, used = run(schedule((64, 64), 24), width=24, tokens=tokens, codes=codes)
    other = Tokens.random(seed=4)
    again = dataclasses.replace(used, lengths=jnp.zeros_like(used.lengths))
    reused, _ = run(schedule((17, 30), 24), width=24, tokens=other, codes=codes, cache=again)
    fresh, _ = run(schedule((17, 30), 24), width=24, tokens=other, codes=codes)
    np.testing.assert_array_equal(reused, fresh)


@pytest.mark.parametrize("width", (1, 24))
def test_fault_c10_a_sequence_does_not_see_its_neighbour(width):
    """A token of sequence 0 changes: sequence 1 stays bit-equal, in outputs and in pages."""
    tokens, codes, steps = Tokens.random(seed=5), base_codes(), schedule(LENGTHS, width)
    flipped = Tokens(*(x.copy() for x in (tokens.q, tokens.k, tokens.v)))
    flipped.k[:, 0, 7] += 100
    flipped.v[:, 0, 7] = np.inf
    before, first = run(steps, width=width, tokens=tokens, codes=codes)
    after, second = run(steps, width=width, tokens=flipped, codes=codes)
    np.testing.assert_array_equal(before[:, 1], after[:, 1])
    assert not np.array_equal(before[:, 0, 30:70], after[:, 0, 30:70])
    for side in ("key", "value"):
        for a, b in zip(live_rows(first, BASE, 1, 1, side), live_rows(second, BASE, 1, 1, side), strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="sequence 0, layer 0, head 0, position 7: value scale is nan"):
        check_cache(second, BASE)


@pytest.mark.parametrize("width", (1, 24))
def test_the_place_in_the_batch_does_not_matter(width):
    """Rule E1: one compiled program, whatever the row."""
    tokens, codes = Tokens.random(seed=6), base_codes()
    a, _ = run(schedule((50, 50), width), width=width, tokens=tokens, codes=codes)
    b, _ = run(schedule((50, 50), width), width=width, tokens=tokens.take([1, 0]), codes=codes)
    np.testing.assert_array_equal(a, b[:, [1, 0]])


def test_fault_c4_the_same_prompt_twice():
    tokens, codes = Tokens.random(seed=7).take([0, 0]), base_codes()
    outputs, _ = run(schedule((45, 45), 24), width=24, tokens=tokens, codes=codes)
    np.testing.assert_array_equal(outputs[:, 0, :45], outputs[:, 1, :45])


def test_fault_k18_layers_do_not_disturb_each_other():
    tokens, codes = Tokens.random(seed=8), base_codes()
    changed = Tokens(*(x.copy() for x in (tokens.q, tokens.k, tokens.v)))
    changed.k[0], changed.v[0] = changed.k[0] * 3, -changed.v[0]
    before, first = run(schedule(LENGTHS, 24), width=24, tokens=tokens, codes=codes)
    after, second = run(schedule(LENGTHS, 24), width=24, tokens=changed, codes=codes)
    np.testing.assert_array_equal(before[1], after[1])
    one, two = (jax.tree.map(lambda x: x[1], (cache.plain, cache.history)) for cache in (first, second))
    assert_trees_equal(one, two)
    assert (np.asarray(pages(first).key.scale)[0] != np.asarray(pages(second).key.scale)[0]).any()


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_page_ids_do_not_matter(seed):
    tokens, codes = Tokens.random(seed=9), base_codes()
    steps = schedule(LENGTHS, 24)
    plain, _ = run(steps, width=24, tokens=tokens, codes=codes)
    empty = init_cache(BASE, codes)
    shape = empty.page_indices.shape
    ids = np.random.default_rng(seed).permutation(shape[0] * shape[1]).reshape(shape)
    moved = dataclasses.replace(empty, page_indices=jnp.asarray(ids, jnp.int32))
    permuted, cache = run(steps, width=24, tokens=tokens, codes=codes, cache=moved)
    np.testing.assert_array_equal(plain, permuted)
    check_cache(cache, BASE)


def test_fault_c5_a_negative_page_id_writes_nowhere():
    """Python's -1 is the last page, here a page of sequence 1: rows for a page that is not there are dropped."""
    tokens, codes = Tokens.random(seed=17), base_codes()
    empty = init_cache(BASE, codes)
    damaged = dataclasses.replace(empty, page_indices=empty.page_indices.at[0].set(-1))
    assert int(damaged.page_indices[1, -1]) == pages(damaged).key.scale.shape[1] - 1
    _, cache = run(schedule((70, 5), 24), width=24, tokens=tokens, codes=codes, cache=damaged)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(cache.history))


def test_fault_c11_prompts_shorter_than_their_padding_and_the_sinks():
    tokens, codes = Tokens.random(seed=10), base_codes()
    outputs, cache = run([[2, 9], [24, 24], [5, 1]], width=24, tokens=tokens, codes=codes)
    for layer, b in np.ndindex(LAYERS, BATCH):
        wanted = defined_outputs(codes, BASE, tokens, cache, layer, b)
        np.testing.assert_allclose(outputs[layer, b, : len(wanted)], wanted, atol=2e-5)


def history_rows(cache, b):
    """History tokens of sequence b, counted in its pages: a written row has a scale."""
    ids = np.asarray(cache.page_indices)[b]
    return int((np.asarray(pages(cache).key.scale, np.float32)[0, ids, 0] != 0).sum())


def test_fault_q7_and_q8_streamed_tokens_are_quantized_and_recents_stay_bounded():
    """One token at a time: W .. W + g - 1 recents, the rest truly quantized, and not a byte more than at the start."""
    tokens, codes, tiers = Tokens.random(seed=11), base_codes(), BASE.tiers
    cache = init_cache(BASE, codes)
    size = cache_bytes(cache)
    for position in range(60):
        _, cache = feed(cache, codes, tokens, [position] * BATCH, [1] * BATCH, width=1)
        held, history = position + 1, history_rows(cache, 0)
        recents = held - min(held, tiers.sink) - history
        if held < tiers.sink + tiers.recent:
            assert history == 0
        else:
            assert tiers.recent <= recents <= tiers.recent + tiers.group - 1
    assert cache_bytes(cache) == size
    assert size["total"] == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    slots, scale, _ = live_rows(cache, BASE, 0, 0, "value")
    mu, matrix = np.asarray(codes.value.mu)[0], np.asarray(codes.value.decode)[0]
    rows = scale.astype(np.float32)[..., None] * (slots - 1.5)
    decoded = np.einsum("tkn,knd->tkd", rows, matrix) + mu
    exact = tokens.v[0, 0, tiers.sink : tiers.sink + len(slots)]
    error = ((decoded - exact) ** 2).mean() / (exact**2).mean()
    assert 0.02 < error < 1


def test_fault_q11_a_prompt_within_the_windows_is_never_quantized():
    """At most S + W tokens: no page is written, and the outputs are those of a plain cache, bit for bit."""
    tokens, codes, limit = Tokens.random(seed=12), base_codes(), BASE.tiers.sink + BASE.tiers.recent
    for width in (1, 24):
        outputs, cache = run(schedule((limit, limit - 3), width), width=width, tokens=tokens, codes=codes)
        assert not np.asarray(pages(cache).key.scale).any()
        assert not np.asarray(pages(cache).key.slots).any()
        # All plain, with a ring of the same size, so that sums are taken in the same order.
        everything = config(tiers=dataclasses.replace(BASE.tiers, recent=BASE.ring), max_length=4 + BASE.ring)
        assert everything.ring == BASE.ring
        plain, _ = run(schedule((limit, limit - 3), width), width=width, tokens=tokens, codes=None, config=everything)
        np.testing.assert_array_equal(outputs, plain)
    _, cache = run(schedule((limit + 3, limit + 4), 24), width=24, tokens=tokens, codes=codes)
    assert (history_rows(cache, 0), history_rows(cache, 1)) == (0, 4)


def test_fault_c2_a_needle_is_found_before_and_after_demotion():
    """Slots, scale and position move together: a query made for one key keeps reading that token's value."""
    tokens, codes, needle = Tokens.random(seed=13), base_codes(key="levels-uniform"), 9
    group = HEADS // BASE.kv_heads
    tokens.q[:] = 30 * np.repeat(tokens.k[:, :, needle : needle + 1], group, axis=3)
    outputs, cache = run(schedule((60, 60), 1), width=1, tokens=tokens, codes=codes)
    demoted = next(t for t in range(60) if BASE.tiers.history_end(t) > needle)
    for layer, b, head in np.ndindex(LAYERS, BATCH, HEADS):
        value = tokens.v[layer, b, needle, head // group]
        np.testing.assert_allclose(
            outputs[layer, b, needle:demoted, head], np.tile(value, (demoted - needle, 1)), atol=1e-3
        )
        wanted = defined_outputs(codes, BASE, tokens, cache, layer, b)[demoted:, head]
        np.testing.assert_allclose(outputs[layer, b, demoted:60, head], wanted, atol=1e-3)
        similar = wanted @ value / np.linalg.norm(wanted, axis=-1) / np.linalg.norm(value)
        assert (similar > 0.7).all()


def test_fault_k16_ones_in_ones_out():
    """A canary for compilers: constant rows are exact under min/max, so every output is one."""
    codes = base_codes(key="naive", value="naive", bucket=None)
    ones = Tokens(*(np.ones_like(x) for x in dataclasses.astuple(Tokens.random())))
    for width in (1, 24):
        outputs, _ = run(schedule((60, 60), width), width=width, tokens=ones, codes=codes)
        np.testing.assert_allclose(outputs[:, :, :60], 1, atol=1e-6)


def test_sliding_layers_read_their_window_only():
    sliding, codes = config(windows=(None, 13)), base_codes()
    tokens = Tokens.random(seed=14)
    outputs, cache = run(schedule(LENGTHS, 24, 24, 9), width=24, tokens=tokens, codes=codes, config=sliding)
    for layer, window in ((0, None), (1, 13)):
        wanted = defined_outputs(codes, sliding, tokens, cache, layer, 0, window=window)
        np.testing.assert_allclose(outputs[layer, 0, :70], wanted, atol=2e-5)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_narrow_tiers_encode_and_attend_to_rounded_rows(dtype):
    """Every encoder takes x as rounded to the plain dtype: outputs equal the definition on the rounded rows."""
    narrow, codes = config(plain_dtype=dtype), dataclasses.replace(base_codes(), scale_dtype=dtype)
    tokens = Tokens.random(seed=15)
    rounded = Tokens(tokens.q, *(np.asarray(jnp.asarray(x, dtype), np.float32) for x in (tokens.k, tokens.v)))
    for width in (1, 24):
        outputs, cache = run(schedule(LENGTHS, width), width=width, tokens=tokens, codes=codes, config=narrow)
        wanted = defined_outputs(codes, narrow, rounded, cache, 1, 0)
        np.testing.assert_allclose(outputs[1, 0, :70], wanted, atol=3e-5)
        for side, rows in encoded_rows(codes, narrow, rounded, 1, 0, LENGTHS[0]).items():
            assert (live_rows(cache, narrow, 1, 0, side)[0] != rows[0]).mean() < 1e-3
        for stored in jax.tree.leaves(PlainTiers(*dataclasses.astuple(cache.plain))):
            assert stored.dtype.itemsize == 2


def test_no_sinks_and_single_recent_token():
    for tiers in (Tiers(0, 8, 8, 16), Tiers(0, 1, 1, 8)):
        other, codes = config(tiers=tiers, step_tokens=1), base_codes()
        tokens = Tokens.random(seed=16)
        outputs, cache = run(schedule(LENGTHS, 24, 7), width=24, tokens=tokens, codes=codes, config=other)
        for b in range(BATCH):
            wanted = defined_outputs(codes, other, tokens, cache, 0, b)
            np.testing.assert_allclose(outputs[0, b, : LENGTHS[b]], wanted, atol=2e-5)
