"""The checked mode of a cache: `check_cache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from oscar_jax.cache import KVCache
from oscar_jax.cache_settings import CacheConfig
from oscar_jax.layer_codes import LayerCodes
from oscar_jax.sharding import on_host
from pallas_kernels.codec import SCALE_LIMIT
from pallas_kernels.history import History
from pallas_kernels.storage import loaded
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes


def check_cache(cache: KVCache, config: CacheConfig, codes: TransformCodes | LayerCodes | None = None) -> None:
    """Checked mode: every live page id is in range and owned once, every live scale finite and not saturated.

    Args:
        codes: those of the cache, needed to name layers where they have different sizes.

    Raises:
        ValueError: names the sequence, or the layer, head and position.
    """
    lengths = on_host(cache.lengths)
    for sequence, length in enumerate(lengths):
        if not 0 <= length <= config.max_length:
            raise ValueError(
                f"sequence {sequence}: {length} stored tokens, expected 0 to max_length={config.max_length}."
            )
    groups: Any = enumerate(cache.history) if isinstance(codes, LayerCodes) else [(0, cache.history)]  # type: ignore[arg-type]
    histories = {number: history for number, history in groups if history is not None}
    if not histories:
        return
    pool, tiers = next(iter(histories.values())).key.scale.shape[1] // config.data_parts, config.tiers
    table = on_host(cache.page_indices)
    for sequence, length in enumerate(lengths):
        live = table[sequence, : tiers.history_pages(int(length))]
        bad = np.flatnonzero((live < 0) | (live >= pool))
        if bad.size:
            raise ValueError(
                f"sequence {sequence}: page table entry {bad[0]} is {live[bad[0]]}, expected a page of the pool, "
                f"0 to {pool - 1}."
            )
        if len(np.unique(live)) != len(live):
            raise ValueError(f"sequence {sequence}: its page table names a page twice, expected every page once.")
        first = pool * (sequence * config.data_parts // config.batch)  # page of the sequence's part
        for number, history in histories.items():
            layers = codes.layers_of(number) if isinstance(codes, LayerCodes) else range(config.layers)
            _check_scales(history, first + live, tiers, int(length), sequence, layers)


def _check_scales(
    history: History, live: np.ndarray, tiers: Tiers, length: int, sequence: int, layers: Sequence[int]
) -> None:
    tokens = tiers.history_tokens(length)
    for name, side in (("key", history.key), ("value", history.value)):
        for parameter in ("scale", "offset"):
            leaf = getattr(side, parameter)
            if leaf is None:
                continue
            rows = loaded(leaf[:, live])
            rows = np.asarray(on_host(rows), np.float32).transpose(0, 2, 1, 3)  # [L, K, pages, page]
            rows = rows.reshape(*rows.shape[:2], -1)[:, :, :tokens]
            bad = np.argwhere(~np.isfinite(rows) | (np.abs(rows) >= SCALE_LIMIT))
            if bad.size:
                layer, head, token = bad[0]
                raise ValueError(
                    f"sequence {sequence}, layer {layers[layer]}, head {head}, position {tiers.sink + token}: {name} "
                    f"{parameter} is {rows[layer, head, token]}, expected a finite number below {SCALE_LIMIT:.0f}; the "
                    "row had NaN, Inf or values too large."
                )
