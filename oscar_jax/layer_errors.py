"""How far each layer's attention output is off when it reads the 2-bit cache, on the inputs of the plain run.

Both caches are filled from the same run, and the plain output goes on to the next layer. So a layer's error is its own,
not what it inherited.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oscar_jax.cache import KVCache, advance, begin_step, init_cache, step_attention
from oscar_jax.cache_settings import CacheConfig
from oscar_jax.layer_codes import LayerCodes
from oscar_jax.models import Decoder, LoadedModel
from oscar_jax.models.attention import Attend, runs
from oscar_jax.step import cache_config
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

PLAIN_DTYPE = "bfloat16"
WORST = 3


@dataclasses.dataclass(frozen=True)
class LayerErrors:
    """Relative errors `|out - plain out| / |plain out|`, norms over the measured positions.

    Attributes:
        by_layer: float64 `[L]`.
        by_head: float64 `[L, N]`, by query head.
    """

    by_layer: np.ndarray
    by_head: np.ndarray

    def summary(self) -> dict[str, Any]:
        """`layer_errors [L]`, `worst_layers` (up to `WORST` of `{layer, error}`) and `worst_heads` (layer, head)."""
        heads = [np.unravel_index(i, self.by_head.shape) for i in np.argsort(-self.by_head, axis=None)[:WORST]]
        return {
            "layer_errors": self.by_layer.tolist(),
            "worst_layers": [
                {"layer": int(i), "error": float(self.by_layer[i])} for i in np.argsort(-self.by_layer)[:WORST]
            ],
            "worst_heads": [
                {"layer": int(layer), "head": int(head), "error": float(self.by_head[layer, head])}
                for layer, head in heads
            ],
        }


def measure(
    model: LoadedModel,
    codes: TransformCodes | LayerCodes,
    windows: np.ndarray,
    *,
    tiers: Tiers,
    first: int,
    chunk: int,
    implementation: str | None = None,
) -> LayerErrors:
    """Runs the model once over `windows` int `[B, T]`, chunk by chunk, with both caches.

    Args:
        first: first measured position; from there on every query should read some history.
        implementation: of the 2-bit cache's attention and writes; None is the best one here.
    """
    batch, length = windows.shape
    make = partial(cache_config, model.config, max_length=length, plain_dtype=PLAIN_DTYPE, batch=batch)
    plain = make(tiers=dataclasses.replace(tiers, recent=max(tiers.recent, length - tiers.sink)))
    config = make(tiers=tiers, implementation=implementation)
    caches = init_cache(plain), init_cache(config, codes)
    config_heads = (model.config.layers, model.config.q_heads)
    error, norm = np.zeros(config_heads), np.zeros(config_heads)
    for start in range(0, length, chunk):
        tokens = windows[:, start : start + chunk]
        positions = start + np.arange(chunk)
        measured = (positions >= first) & (positions < length)
        caches, sums = _step(
            model.decoder,
            codes,
            caches,
            jnp.asarray(np.pad(tokens, ((0, 0), (0, chunk - tokens.shape[1]))), jnp.int32),
            jnp.full(batch, tokens.shape[1], jnp.int32),
            jnp.asarray(measured),
            plain=plain,
            config=config,
        )
        error, norm = (total + np.asarray(part, np.float64) for total, part in zip((error, norm), sums, strict=True))
    return LayerErrors(np.sqrt(error.sum(1) / norm.sum(1)), np.sqrt(error / norm))


@partial(jax.jit, static_argnames=("plain", "config"), donate_argnames="caches")
def _step(
    decoder: Decoder,
    codes: TransformCodes | LayerCodes,
    caches: tuple[KVCache, KVCache],
    tokens: jax.Array,
    counts: jax.Array,
    measured: jax.Array,
    *,
    plain: CacheConfig,
    config: CacheConfig,
):
    """The caches after the chunk, and sums `[L, N]` of squared errors and of squared plain outputs."""
    attend_plain = step_attention(plain, None, counts)
    coded_cache, attend_coded = begin_step(caches[1], config, codes, counts, tokens=tokens.shape[1])

    def both(attend_run: Attend, state, layer, q, k, v):
        out, plain_cache, _ = attend_plain(state[0], layer, q, k, v)
        coded, coded_cache, _ = attend_run(state[1], layer, q, k, v)

        def total(x):
            return jnp.where(measured[:, None, None], jnp.square(x.astype(jnp.float32)), 0).sum((0, 1, 3))

        return out, (plain_cache, coded_cache), (total(coded - out), total(out))

    attend = [(count, partial(both, run)) for count, run in runs(attend_coded, config.layers)]
    positions = caches[0].lengths[:, None] + jnp.arange(tokens.shape[1])
    _, caches, sums = decoder(tokens, positions, attend, (caches[0], coded_cache))
    return tuple(advance(cache, counts) for cache in caches), sums
