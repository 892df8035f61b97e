"""Demotion of all layers before the first one runs: interpreted here, with `-m gpu` on the device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from oscar_jax.cache import init_cache
from oscar_jax.cache_check import check_cache
from pallas_kernels import dispatch
from pallas_kernels.tiers import Tiers
from pallas_kernels.write import triton
from tests.oscar_jax.cache_runs import LAYERS, Tokens, base_codes, config, feed, live_rows, pages

SMALL = config(head_dim=32, q_heads=2, kv_heads=1, max_length=40)
DEVICE = config(tiers=Tiers(4, 8, 4, 16), plain_dtype="bfloat16", step_tokens=4)
SIDES = ("key", "value")


def decoded(cfg, codes, tokens, steps):
    """The cache after steps of `(width, counts)`, and the last outputs."""
    cache, begins, out = init_cache(cfg, codes), [0, 0], None
    for width, counts in steps:
        out, cache = feed(cache, codes, tokens, begins, counts, width=width, config=cfg)
        begins = [a + b for a, b in zip(begins, counts, strict=True)]
    return cache, out


def test_a_decode_loop_stores_the_same_as_demotion_layer_by_layer(monkeypatch):
    load, calls = dispatch._load, []

    def interpreted(operation, name):
        if (operation, name) != ("demote_ahead", "triton"):
            return load(operation, name)
        calls.append(operation)
        return functools.partial(triton.demote_ahead, interpret=True)

    monkeypatch.setattr(dispatch, "_load", interpreted)
    codes, tokens = base_codes(head_dim=32, kv_heads=1), Tokens.random(20, length=40, heads=2, kv_heads=1, dim=32)
    steps = [(24, [24, 17]), *[(1, [1, 1])] * 7, (1, [1, 0]), (1, [0, 1])]  # 24 tokens push out some of their own
    layered = dataclasses.replace(SMALL, implementation="xla")
    want, _ = decoded(layered, codes, tokens, steps)
    assert not calls
    got, _ = decoded(SMALL, codes, tokens, steps)
    assert calls == ["demote_ahead"]  # traced once, for the steps of one token
    for layer, b, side in ((layer, b, side) for layer in range(LAYERS) for b in range(2) for side in SIDES):
        rows = zip(live_rows(got, SMALL, layer, b, side), live_rows(want, SMALL, layer, b, side), strict=True)
        for ours, expected in rows:
            if expected is not None:
                np.testing.assert_array_equal(ours, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens_a_step", (1, 4))
@pytest.mark.parametrize("kinds", ("levels levels-uniform", "naive rotation-rank"))
def test_caches_of_both_implementations_agree_after_a_decode_loop(kinds, tokens_a_step):
    """Rule E2: the same inputs, so slots differ in near-ties only; and the ring still holds what was not demoted."""
    key, value = kinds.split()
    codes, tokens = base_codes(key=key, value=value, bucket=32), Tokens.random(21)
    steps = [(24, [24, 9]), *[(tokens_a_step, [tokens_a_step, tokens_a_step - 1 or 1])] * (40 // tokens_a_step)]
    caches, outputs = [], []
    for implementation in (("triton", "xla"), "xla"):
        cfg = dataclasses.replace(DEVICE, implementation=implementation)
        cache, out = decoded(cfg, codes, tokens, steps)
        check_cache(cache, cfg)
        caches.append(cache)
        outputs.append([np.asarray(out, np.float32)[:, b, :count] for b, count in enumerate(steps[-1][1])])
    for a, b in zip(*outputs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2)
    assert [pages(cache).value.tokens_last for cache in caches] == [True, False]  # each has run
    for a, b in zip(jax.tree.leaves(caches[0].plain), jax.tree.leaves(caches[1].plain), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    unequal = total = 0
    for layer, b, side in ((layer, b, side) for layer in range(LAYERS) for b in range(2) for side in SIDES):
        (slots, scale, _), (want, want_scale, _) = (live_rows(cache, DEVICE, layer, b, side) for cache in caches)
        unequal, total = unequal + int((slots != want).sum()), total + slots.size
        np.testing.assert_allclose(scale.astype(np.float32), want_scale.astype(np.float32), rtol=2e-3)
    assert total > 0
    assert unequal <= 1e-4 * total
