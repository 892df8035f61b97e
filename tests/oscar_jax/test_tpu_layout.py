"""Caches and codes laid out for TPUs, read and written by XLA here: the same tokens as in the shared layout."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from oscar_jax.engine import Engine, Request, Shapes
from oscar_jax.models import random_decoder, tiny_config
from oscar_jax.sharding import make_mesh
from oscar_jax.step import cache_config, make_step, prefill
from pallas_kernels import dispatch
from pallas_kernels.attention.api import lane_heads
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes
from tests.oscar_jax.tiny import tokens
from tests.pallas_kernels.codes import transform_codes

TIERS = Tiers(sink=4, recent=8, group=4, page=8)


@pytest.fixture
def for_tpu(monkeypatch):
    """Called once what follows shall be laid out for TPUs."""
    return lambda: monkeypatch.setattr(dispatch, "preferred", lambda implementation: "tpu")


def model_of(kv_heads: int, head_dim: int):
    config = tiny_config(q_heads=2 * kv_heads, kv_heads=kv_heads, head_dim=head_dim)
    codes = transform_codes(bucket=16, layers=config.layers, kv_heads=kv_heads, head_dim=head_dim)
    return random_decoder(config), codes


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "heads"),
    [(64, 8, 2), (64, 2, 2), (64, 3, 3), (64, 1, 1), (80, 8, 8), (96, 8, 4), (192, 4, 2), (128, 8, 1), (256, 3, 1)],
)
def test_heads_fill_the_lanes(head_dim, kv_heads, heads):
    assert lane_heads(head_dim, kv_heads) == heads


@pytest.mark.parametrize(("kv_heads", "row"), [(2, (1, 128)), pytest.param(3, (1, 192), marks=pytest.mark.slow)])
def test_steps_are_the_same(for_tpu, kv_heads, row):
    """Prompts of unequal length, in chunks and token by token."""
    decoder, codes = model_of(kv_heads, 64)
    config = cache_config(decoder.config, max_length=72, batch=3, tiers=TIERS, plain_dtype="float32")

    def run():
        step = make_step(decoder, config, codes)
        logits, cache = prefill(step, step.init(), tokens(40, 3, 25), chunks=(16,))
        found = [np.asarray(logits)]
        for token in range(9):
            logits, cache = step(cache, np.full((3, 1), token))
            found.append(np.asarray(logits))
        return found, cache, step

    want, shared, _ = run()
    for_tpu()
    got, cache, step = run()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert cache.plain.recent_k.shape[3:] == cache.plain.sink_v.shape[3:] == row
    assert cache.history is not None
    assert shared.history is not None
    assert cache.history.key.tokens_last
    assert isinstance(step.codes, TransformCodes)
    assert step.codes.key.encode.shape == (decoder.config.layers, kv_heads, 64 * 64)
    for one, other in zip(jax.tree.leaves(cache.plain), jax.tree.leaves(shared.plain), strict=True):
        np.testing.assert_allclose(one.reshape(other.shape), other, rtol=0, atol=1e-5)


def test_engines_on_a_mesh_are_the_same(for_tpu):
    """With rows copied to and from tails, and the heads of each device side by side."""
    decoder, codes = model_of(4, 32)
    shapes = Shapes(rows=2, decode_batches=(2,), prefill_batches=(1,), chunks=(16,))
    prompts = tokens(40, 3, 25, 50)

    def run():
        engine = Engine(
            decoder, codes, max_length=72, tiers=TIERS, plain_dtype="float32", shapes=shapes, pages=20, tails=8,
            mesh=make_mesh(data=2, tensor=2),
        )  # fmt: skip
        requests = [Request(prompt, max_tokens=8) for prompt in prompts]
        return [*engine.complete(requests), *engine.complete(requests)], engine

    want, _ = run()
    for_tpu()
    got, engine = run()
    assert got == want
    stats = engine.stats()
    assert stats.prefix_hits
    assert stats.device_bytes == stats.expected_bytes
    assert engine._executor.tails.recent_k.shape[3:] == (2, 2 * 32)


@pytest.mark.parametrize(
    ("head_dim", "page", "bucket", "reason"),
    [
        (96, 128, 128, "head size 96"),
        (64, 8, 128, "page=8"),
        (64, 16, 64, "buckets of 64 tokens"),
    ],
)
def test_what_tpu_kernels_do_not_take_is_refused_before_a_request(monkeypatch, head_dim, page, bucket, reason):
    from pallas_kernels.attention import tpu as attention
    from pallas_kernels.write import tpu as write

    for module in (attention, write):
        monkeypatch.setattr(module, "unavailable", lambda: None)
    config = tiny_config(q_heads=4, kv_heads=2, head_dim=head_dim)
    codes = transform_codes(bucket=bucket, layers=config.layers, kv_heads=2, head_dim=head_dim)
    cache = cache_config(config, max_length=512, tiers=Tiers(4, 8, 8, page), implementation="tpu")
    with pytest.raises(NotImplementedError, match=reason):
        make_step(random_decoder(config), cache, codes)
