"""The decoder by itself: jit and donation, agreement between ways to run it, windows, value metric."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from oscar_jax import models
from oscar_jax.models.attention import causal_attention
from pallas_kernels.rope import Rotary


def _tokens(config: models.ModelConfig, batch: int, length: int, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length))
    return jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(length), (batch, length))


def _dense_cache(config: models.ModelConfig, length: int, dtype: DTypeLike) -> dict[str, jax.Array]:
    shape = (config.layers, 1, length, config.kv_heads, config.head_dim)
    return {"k": jnp.full(shape, jnp.nan, dtype), "v": jnp.full(shape, jnp.nan, dtype), "end": jnp.int32(0)}


def _attend_dense(state, layer, q, k, v):
    """One new token at position `end`, attending to a plain cache of all layers; written from the formula."""
    k_all = state["k"].at[layer, :, state["end"]].set(k[:, 0])
    v_all = state["v"].at[layer, :, state["end"]].set(v[:, 0])
    seen = jnp.arange(k_all.shape[2]) <= state["end"]
    group = q.shape[2] // k.shape[2]
    keys = jnp.repeat(jnp.where(seen[:, None, None], k_all[layer], 0), group, axis=2)
    values = jnp.repeat(jnp.where(seen[:, None, None], v_all[layer], 0), group, axis=2)
    scores = jnp.einsum("btnd,bsnd->bnts", q, keys, precision="highest") / np.sqrt(q.shape[-1])
    p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnd->btnd", p, values, precision="highest"), state | {"k": k_all, "v": v_all}, None


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_one_piece_equals_token_by_token_in_float64(architecture):
    with jax.enable_x64(True):
        rotary = Rotary(Rotary.standard(12).inverse_frequencies, 12)  # partial: 12 of 20 dimensions
        config = models.tiny_config(
            architecture=architecture, layers=3, q_heads=6, kv_heads=2, head_dim=20, rotary=rotary, attention_factor=1.1
        )
        decoder = models.random_decoder(config, dtype=jnp.float64)
        tokens, positions = _tokens(config, 1, 17)
        whole, _, _ = decoder(tokens, positions, models.plain_attention(config, query_block=5), None)

        @partial(jax.jit, donate_argnames="cache")
        def step(decoder, token, position, cache):
            hidden, cache, _ = decoder(token, position, _attend_dense, cache)
            return decoder.logits(hidden), cache | {"end": cache["end"] + 1}

        cache, logits = _dense_cache(config, 17, jnp.float64), []
        for i in range(17):
            one, cache = step(decoder, tokens[:, i : i + 1], positions[:, i : i + 1], cache)
            logits.append(one)
        np.testing.assert_allclose(jnp.concatenate(logits, 1), decoder.logits(whole), rtol=0, atol=1e-11)
        assert whole.dtype == jnp.float64


def test_state_is_updated_in_place_and_weights_are_untouched():
    config = models.tiny_config()
    decoder = models.random_decoder(config)
    before = jax.tree.map(np.array, jax.tree.leaves(decoder))
    cache = _dense_cache(config, 64, jnp.float32)
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    tokens, positions = _tokens(config, 1, 1)
    step = jax.jit(lambda decoder, cache: decoder(tokens, positions, _attend_dense, cache)[:2], donate_argnums=1)
    memory = step.lower(decoder, cache).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= cache_bytes
    held = cache["k"]
    step(decoder, cache)
    assert held.is_deleted()
    for old, new in zip(before, jax.tree.leaves(decoder), strict=True):
        np.testing.assert_array_equal(old, new)


def test_program_does_not_grow_with_depth():
    def size(layers: int) -> int:
        config = models.tiny_config(layers=layers)
        decoder, (tokens, positions) = models.random_decoder(config), _tokens(config, 1, 4)
        run = jax.jit(lambda decoder: decoder(tokens, positions, models.plain_attention(config), None)[0])
        return run.lower(decoder).as_text().count("\n")

    assert size(2) == size(12)


def test_capture_returns_every_layers_queries_keys_and_values():
    config = models.tiny_config(layers=3, head_dim=16)
    decoder, (tokens, positions) = models.random_decoder(config), _tokens(config, 2, 9)
    attend = models.plain_attention(config, capture=True)
    hidden, state, (q, k, v) = decoder(tokens, positions, attend, None)
    assert state is None
    assert q.shape == (3, 2, 9, config.q_heads, 16)
    assert k.shape == v.shape == (3, 2, 9, config.kv_heads, 16)
    plain, _, none = decoder(tokens, positions, models.plain_attention(config), None)
    assert none is None
    np.testing.assert_array_equal(hidden, plain)
    # Layer 0 by hand: the first key's value head, from the embedding.
    x = np.asarray(decoder.embedding[...], np.float64)[np.asarray(tokens)]
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.norm_eps) * np.asarray(decoder.layers.attention_norm[0])
    expected = x @ np.asarray(decoder.layers.value[0], np.float64)
    np.testing.assert_allclose(v[0].reshape(2, 9, -1), expected, atol=1e-5)


def test_right_padding_never_reaches_a_sequence():
    config = models.tiny_config()
    decoder, (tokens, positions) = models.random_decoder(config), _tokens(config, 1, 12)
    attend = models.plain_attention(config)
    whole, _, _ = decoder(tokens, positions, attend, None)
    other, _, _ = decoder(tokens.at[:, 7:].set(3), positions, attend, None)
    np.testing.assert_array_equal(whole[:, :7], other[:, :7])
    assert not np.array_equal(whole[:, 7:], other[:, 7:])


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("query_block", [3, 64])
def test_causal_attention_equals_the_formula(window, query_block):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 11, heads, 8)) for heads in (6, 2, 2))
    t, j = np.arange(11)[:, None], np.arange(11)
    mask = (j <= t) & (j > t - (window or 99))
    scores = np.einsum("btnd,bsnd->bnts", q, k.repeat(3, axis=2)) * 0.3
    p = np.exp(np.where(mask, scores, -np.inf))
    expected = np.einsum("bnts,bsnd->btnd", p / p.sum(-1, keepdims=True), v.repeat(3, axis=2))
    cast = partial(jnp.asarray, dtype=jnp.float32)
    out = causal_attention(cast(q), cast(k), cast(v), scale=0.3, window=window, query_block=query_block)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_windows_are_per_layer():
    config = models.tiny_config(layers=2, windows=(3, None))
    decoder, (tokens, positions) = models.random_decoder(config), _tokens(config, 1, 10)
    attend = models.plain_attention(config, capture=True)
    _, _, (_, k, _) = decoder(tokens, positions, attend, None)
    _, _, (_, k_other, _) = decoder(tokens.at[0, 0].set(5), positions, attend, None)
    # Layer 1 sees layer 0's output: token 3 no longer depends on token 0, tokens 1 and 2 still do.
    np.testing.assert_array_equal(k[1, 0, 3:], k_other[1, 0, 3:])
    assert not np.array_equal(k[1, 0, 2], k_other[1, 0, 2])


def test_value_metric_is_the_group_mean_of_the_output_gram():
    config = models.tiny_config(q_heads=6, kv_heads=2, head_dim=8)
    decoder = models.random_decoder(config)
    metric = decoder.value_metric()
    assert metric.shape == (2, 2, 8, 8)
    assert metric.dtype == np.float64
    heads = np.asarray(decoder.layers.output[...], np.float64).reshape(2, 6, 8, config.hidden_size)
    for layer, head in np.ndindex(2, 2):
        expected = sum(w @ w.T for w in heads[layer, 3 * head : 3 * head + 3]) / 3
        np.testing.assert_allclose(metric[layer, head], expected, rtol=1e-12)


def test_same_seed_is_the_same_model_in_every_dtype():
    config = models.tiny_config()
    with jax.enable_x64(True):
        wide = np.asarray(models.random_decoder(config, seed=3, dtype=jnp.float64).layers.query[...])
        narrow = models.random_decoder(config, seed=3, dtype=jnp.bfloat16)
        np.testing.assert_array_equal(wide.astype(jnp.bfloat16), narrow.layers.query[...])
        assert not np.array_equal(wide, np.asarray(models.random_decoder(config, seed=4).layers.query[...]))


def test_bfloat16_model_gives_float32_logits_close_to_its_float32_self():
    config = models.tiny_config(architecture="qwen3")
    tokens, positions = _tokens(config, 1, 20)
    logits = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        decoder = models.random_decoder(config, dtype=dtype)
        hidden, _, _ = decoder(tokens, positions, models.plain_attention(config), None)
        assert hidden.dtype == dtype
        logits[dtype] = decoder.logits(hidden)
    assert logits[jnp.bfloat16].dtype == jnp.float32
    np.testing.assert_allclose(logits[jnp.bfloat16], logits[jnp.float32], atol=0.15)


def test_float64_without_x64_is_refused():
    with pytest.raises(ValueError, match="dtype=float64: jax computes in float32 unless"):
        models.random_decoder(models.tiny_config(), dtype=jnp.float64)


def test_config_hash_covers_everything_but_max_position():
    config = models.tiny_config()
    assert dataclasses.replace(config, max_position=7).config_hash() == config.config_hash()
    for change in ({"norm_eps": 1e-6}, {"rotary": Rotary.standard(16, 5e5)}, {"windows": (4, None)}, {"qk_norm": True}):
        assert dataclasses.replace(config, **change).config_hash() != config.config_hash()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_heads": 5}, "q_heads=5: expected a multiple of kv_heads=2"),
        ({"layers": 0}, "layers=0: expected a whole number from 1 to 10000"),
        ({"windows": (None,)}, "windows has 1 entries: expected one for each of 2 layers"),
        ({"rotary": Rotary.standard(32)}, "rotary_dim=32: expected at most head_dim=16"),
        ({"architecture": "mixtral"}, "architecture 'mixtral' is not supported: expected one of llama, qwen2, qwen3"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        models.tiny_config(**change)
