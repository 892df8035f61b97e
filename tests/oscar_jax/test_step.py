"""One step over the cache: equal results however a sequence is cut, neighbours, outputs, donation, errors.

Most tests share compiled programs, see `tiny`.
"""

from __future__ import annotations

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.cache import cache_bytes
from oscar_jax.models import plain_attention, random_decoder, tiny_config
from oscar_jax.step import Step, _run, cache_config, make_step, prefill
from pallas_kernels.tiers import Tiers
from tests.oscar_jax.tiny import BATCH, CHUNK, CONFIG, LENGTH, TIERS, codes, tiny_step, tokens

pytestmark = pytest.mark.usefixtures("unoptimized")


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(CONFIG)


@pytest.fixture(scope="module")
def step(decoder) -> Step:
    return tiny_step(decoder)


def filled(step: Step, *prompts: list[int]):
    """Logits and cache after prompts."""
    return prefill(step, step.init(), prompts, chunks=(CHUNK,))


def run_in_pieces(step: Step, prompt: list[int], pieces: list[int], shapes: tuple[int, ...]):
    """Logits of every token, and the cache, for a batch of one; each piece padded to the next of some shapes."""
    cache, logits, start = step.init(), [], 0
    for piece in pieces:
        padded = np.zeros((1, min(shape for shape in shapes if shape >= piece)), np.int32)
        padded[0, :piece] = prompt[start : start + piece]
        out, cache = step(cache, padded, [piece], output="all")
        logits.append(np.asarray(out[0, :piece]))
        start += piece
    return np.concatenate(logits), cache


def test_one_piece_chunks_single_tokens_and_several_a_step_agree_in_float64():
    """Rule E3; fault Q9."""
    with jax.enable_x64(True):
        config = cache_config(CONFIG, max_length=40, tiers=TIERS, plain_dtype="float64", step_tokens=4)
        step = make_step(random_decoder(CONFIG, dtype=jnp.float64), config, codes())
        (prompt,) = tokens(40)
        whole, reference = run_in_pieces(step, prompt, [40], (40,))
        assert reference.history is not None
        assert np.asarray(reference.history.key.slots).any()
        for pieces in ([1] * 40, [4] * 10, [3, 2] * 8, [20, 17, 3], [17, *[1] * 23], [8] * 5):
            logits, cache = run_in_pieces(step, prompt, pieces, (1, 4, 40))
            np.testing.assert_allclose(logits, whole, rtol=0, atol=1e-9)
            for side in ("key", "value"):
                got, expected = getattr(cache.history, side), getattr(reference.history, side)
                np.testing.assert_array_equal(got.slots, expected.slots)
                np.testing.assert_array_equal(got.scale, expected.scale)


def test_chunk_exact_prefill_reads_a_prompt_in_one_piece_without_loss(decoder):
    """The reference's prefill: what decoding would read in two bits is read plain within one call, and only there."""
    (prompt,) = tokens(40)
    logits = {}
    for mode in ("by-position", "chunk-exact"):
        config = cache_config(CONFIG, max_length=LENGTH, tiers=TIERS, plain_dtype="float32", prefill=mode)
        step = make_step(decoder, config, codes())
        logits[mode], cache = run_in_pieces(step, prompt, [39], (40,))
        assert cache.history is not None
        assert np.asarray(cache.history.key.slots).any()
        following, _ = step(cache, [[prompt[39], *[0] * 39]], [1], output="all")
        logits[mode, "next"] = np.asarray(following[0, 0])
    positions = jnp.arange(40)[None]
    hidden = decoder(jnp.asarray([prompt]), positions, plain_attention(CONFIG), None)[0]
    plain = np.asarray(decoder.logits(hidden))[0]
    np.testing.assert_allclose(logits["chunk-exact"], plain[:39], rtol=0, atol=1e-4)
    assert np.abs(logits["by-position"] - plain[:39]).max() > 1e-2
    assert np.abs(logits["chunk-exact", "next"] - plain[39]).max() > 1e-2
    with pytest.raises(ValueError, match="prefill='lossless': expected 'by-position' or 'chunk-exact'"):
        cache_config(CONFIG, max_length=LENGTH, prefill="lossless")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_plain_cache_gives_the_logits_of_a_forward_pass_without_one(decoder, dtype, tolerance):
    (prompt,) = tokens(40)
    config = cache_config(CONFIG, max_length=40, tiers=Tiers(sink=0, recent=40), plain_dtype=dtype)
    logits, _ = run_in_pieces(make_step(decoder, config), prompt, [16, 5, 1, 2, 16], (CHUNK,))
    hidden, _, _ = decoder(jnp.asarray([prompt]), jnp.arange(40)[None], plain_attention(CONFIG), None)
    expected = np.asarray(decoder.logits(hidden)[0])
    error = np.abs(logits - expected).max() / np.abs(expected).max()
    assert error < tolerance
    assert dtype == "float32" or error > 1e-4  # the tiers really hold 16 bits


def test_sliding_layers_reach_the_cache():
    config = dataclasses.replace(CONFIG, windows=(6, None))
    decoder, (prompt,) = random_decoder(config), tokens(30)
    step = make_step(
        decoder, cache_config(config, max_length=30, tiers=Tiers(sink=0, recent=30), plain_dtype="float32")
    )
    assert step.config.windows == (6, None)
    logits, _ = filled(step, prompt)
    hidden, _, _ = decoder(jnp.asarray([prompt]), jnp.arange(30)[None], plain_attention(config), None)
    np.testing.assert_allclose(logits[0], decoder.logits(hidden)[0, -1], rtol=1e-4, atol=1e-4)


def test_ragged_batch_is_bit_equal_to_each_sequence_alone_in_the_same_program(step):
    # Fault C11: prompts of 2 and 9 tokens, sinks beyond the shorter one; and one that reaches the history.
    prompts = tokens(2, 9, 50)
    together, cache = filled(step, *prompts)
    following, _ = step(cache, [[5], [6], [7]])
    for row, prompt in enumerate(prompts):
        alone: list[list[int]] = [[] for _ in prompts]
        alone[row] = prompt
        logits, cache = filled(step, *alone)
        np.testing.assert_array_equal(cache.lengths, [len(other) for other in alone])
        assert not np.delete(np.asarray(logits), row, axis=0).any()
        after, _ = step(cache, [[5], [6], [7]], [int(other == row) for other in range(BATCH)])
        np.testing.assert_array_equal(logits[row], together[row])
        np.testing.assert_array_equal(after[row], following[row])


def test_row_with_count_zero_keeps_its_part_of_the_cache(step):
    _, cache = filled(step, *tokens(40, 40, 40))
    before = jax.tree.map(np.asarray, cache)
    _, after = step(cache, tokens(CHUNK, CHUNK, CHUNK), [0, CHUNK, 1])
    after = jax.tree.map(np.asarray, after)
    pages = before.page_indices[0]
    for new, old in zip(jax.tree.leaves(after.plain), jax.tree.leaves(before.plain), strict=True):
        np.testing.assert_array_equal(new[:, 0], old[:, 0])
    for new, old in zip(jax.tree.leaves(after.history), jax.tree.leaves(before.history), strict=True):
        np.testing.assert_array_equal(new[:, pages], old[:, pages])
        assert (new != old).any()
    np.testing.assert_array_equal(after.lengths, [40, 40 + CHUNK, 41])


def test_last_and_hidden_are_parts_of_all(decoder, step):
    rows, counts = tokens(CHUNK, CHUNK, CHUNK), [CHUNK, 5, 1]
    every, _ = step(step.init(), rows, counts, output="all")
    last, _ = step(step.init(), rows, counts)
    hidden, _ = step(step.init(), rows, counts, output="hidden")
    assert every.shape == (BATCH, CHUNK, CONFIG.vocab_size)
    assert hidden.shape == (BATCH, CHUNK, CONFIG.hidden_size)
    for row, count in enumerate(counts):
        np.testing.assert_allclose(last[row], every[row, count - 1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(decoder.logits(hidden)[row, :count], every[row, :count], rtol=1e-5, atol=1e-5)


def test_unrolled_layers_give_the_logits_of_the_loop(step):
    unrolled = dataclasses.replace(step, config=dataclasses.replace(step.config, unroll_layers=True))
    (loop, _), (each, _) = (
        one(filled(step, *tokens(30, 3, 50))[1], [[5], [6], [7]]) for one in (step, unrolled)
    )  # fmt: skip
    np.testing.assert_allclose(each, loop, rtol=1e-5, atol=1e-5)


def test_what_stands_in_padding_is_never_seen(step):
    (prompt,) = tokens(17)
    outputs = []
    for filler in (0, 95, 10**6, -1):
        padded = [[*prompt[:13], filler, filler, filler]] * BATCH
        _, cache = step(step.init(), padded, [13] * BATCH)
        outputs.append(np.asarray(step(cache, [[prompt[13]]] * BATCH)[0]))
    for other in outputs[1:]:
        np.testing.assert_array_equal(other, outputs[0])


def test_pool_of_nan_is_never_seen(step):
    """Fault C14: what was never written may hold anything."""
    prompts = tokens(30, 3, 50)
    clean, _ = filled(step, *prompts)
    cache = step.init()

    def poisoned(leaf):
        return jnp.full_like(leaf, jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo(leaf.dtype).max)

    cache = dataclasses.replace(
        cache, plain=jax.tree.map(poisoned, cache.plain), history=jax.tree.map(poisoned, cache.history)
    )
    logits, _ = prefill(step, cache, prompts, chunks=(CHUNK,))
    np.testing.assert_array_equal(logits, clean)


def test_cache_is_donated_and_weights_are_not(decoder, step):
    def digest():
        return [
            hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for leaf in jax.tree.leaves((decoder, step.codes))
        ]

    before, cache = digest(), step.init()
    old = jax.tree.leaves(cache)
    for _ in range(3):
        _, cache = step(cache, [[1], [2], [3]])
    assert all(leaf.is_deleted() for leaf in old)
    assert digest() == before


def test_decode_step_aliases_the_cache_and_copies_none_of_it(decoder):
    config = cache_config(CONFIG, max_length=LENGTH, tiers=TIERS, plain_dtype="bfloat16", pages=20_000)
    step = make_step(decoder, config, codes())
    cache, count = step.init(), jnp.ones(1, jnp.int32)
    size = cache_bytes(cache)["total"]
    compiled = _run.lower(decoder, step.codes, cache, count[None], count, config=config, output="last").compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert size <= memory.alias_size_in_bytes <= size + 4096  # each array is aligned
    assert memory.temp_size_in_bytes < size / 8


def test_checked_mode_names_layer_head_and_position(step):
    checked = dataclasses.replace(step, checked=True)
    _, cache = filled(checked, *tokens(40, 3, 20))
    assert cache.history is not None
    scale = cache.history.key.scale.at[1, int(cache.page_indices[0, 1]), 1, 3].set(jnp.nan)
    history = dataclasses.replace(cache.history, key=dataclasses.replace(cache.history.key, scale=scale))
    with pytest.raises(ValueError, match=r"sequence 0, layer 1, head 1, position 15: key scale is nan"):
        checked(dataclasses.replace(cache, history=history), [[1], [1], [1]])


def test_wrong_requests_are_named(decoder, step):
    with pytest.raises(ValueError, match=r"tokens of shape \(1, 3\): expected \[3, T\]"):
        step(step.init(), [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"counts of shape \(1,\): expected \[3\]"):
        step(step.init(), [[1], [2], [3]], [1])
    with pytest.raises(ValueError, match=r"prompts of \[0, 0, 0\] tokens: expected 3 prompts, not all empty"):
        prefill(step, step.init(), [[], [], []])
    with pytest.raises(ValueError, match=r"prompts: number 1 has 73 tokens and the cache has room for 72"):
        prefill(step, step.init(), tokens(3, 73, 2))
    with pytest.raises(ValueError, match=r"prompts of \[1\] tokens: expected 3 prompts"):
        prefill(step, step.init(), [[1]])
    other = cache_config(tiny_config(kv_heads=4), max_length=16, tiers=TIERS)
    with pytest.raises(ValueError, match=r"config has kv_heads=4: this model has layers=2, q_heads=4, kv_heads=2"):
        make_step(decoder, other)
    uncoded = make_step(decoder, cache_config(CONFIG, max_length=64, tiers=TIERS))
    with pytest.raises(ValueError, match=r"codes=None with max_length=64: a plain cache needs recent >= 60, got 8"):
        uncoded.init()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_tiers_have_the_model_dtype_unless_told_otherwise(dtype):
    step = make_step(random_decoder(CONFIG, dtype=jnp.dtype(dtype)), cache_config(CONFIG, max_length=LENGTH), codes())
    assert step.config.plain_dtype == dtype
    told = cache_config(CONFIG, max_length=LENGTH, plain_dtype="float16")
    assert make_step(random_decoder(CONFIG), told, codes()).config.plain_dtype == "float16"
