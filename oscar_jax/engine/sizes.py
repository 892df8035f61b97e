"""Bytes of an engine's arrays, by formula, and the number of pages that fits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from oscar_jax.cache_settings import CacheConfig
from oscar_jax.layer_codes import LayerCodes, groups_of
from pallas_kernels.codec import PLANES
from pallas_kernels.transform_code import TransformCode, TransformCodes

BFLOAT16_BYTES = 2


def page_bytes(config: CacheConfig, codes: TransformCodes | LayerCodes | None) -> int:
    """Of one page of history in all layers: slots, scales and offsets of both sides; 0 for a plain cache."""

    def row(code: TransformCode, parameter: int) -> int:
        return code.slots // PLANES + parameter * (2 if code.has_offset else 1)

    total = 0
    for own, code in groups_of(config, codes):
        if code is not None:
            sides = sum(row(side, jnp.dtype(code.scale_dtype).itemsize) for side in (code.key, code.value))
            total += own.layers * own.stored_heads * own.tiers.page * sides
    return total


def row_bytes(config: CacheConfig, codes: TransformCodes | LayerCodes | None) -> int:
    """Of the plain tiers of one sequence, or of one tail."""
    tokens = sum(own.layers * (own.tiers.sink + own.ring) for own, _ in groups_of(config, codes))
    return 2 * tokens * config.stored_heads * config.head_dim * jnp.dtype(config.plain_dtype).itemsize


def bfloat16_token_bytes(config: CacheConfig) -> int:
    """Of K and V of one token in an ordinary bfloat16 cache, copies of heads on a mesh counted."""
    return 2 * config.layers * config.stored_heads * config.head_dim * BFLOAT16_BYTES


def total_bytes(config: CacheConfig, codes: TransformCodes | LayerCodes | None, *, pages: int, tails: int) -> int:
    """Of all arrays of an engine on all devices, the model's weights aside; pages and tails of all parts."""
    return pages * page_bytes(config, codes) + (config.batch + tails) * row_bytes(config, codes)


def pages_within(config: CacheConfig, codes: TransformCodes | LayerCodes, *, cache_bytes: int, tails: int) -> int:
    """Pages that fit into `cache_bytes` beside the plain tiers and tails, as many in each part of the mesh.

    Raises:
        ValueError: not even one sequence of `max_length` and a page to copy fit.
    """
    fixed = (config.batch + tails) * row_bytes(config, codes)
    parts = config.data_parts
    pages = (cache_bytes - fixed) // (parts * page_bytes(config, codes))
    if pages < config.sequence_pages + 1:
        least = fixed + parts * (config.sequence_pages + 1) * page_bytes(config, codes)
        sequences = "one sequence" if parts == 1 else f"{parts} sequences"
        raise ValueError(
            f"cache_bytes={cache_bytes}: {config.batch} rows, {tails} tails and {sequences} of max_length="
            f"{config.max_length} take {least}; give more, or fewer rows and tails."
        )
    return parts * pages


def bytes_of_fraction(fraction: float, mesh: jax.sharding.Mesh | None = None) -> int:
    """Bytes that an engine may take on all its devices if this process's first shall be used up to this fraction.

    Args:
        mesh: that it runs on, whose devices are taken to be alike; None for one device.

    Raises:
        ValueError: a fraction out of range, or a device that does not say how much memory it has.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction={fraction}: expected above 0 and at most 1.")
    device = jax.local_devices()[0] if mesh is None else mesh.local_devices[0]
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ValueError(f"memory_fraction={fraction}: {device} does not tell its memory; give cache_bytes instead.")
    return (int(fraction * stats["bytes_limit"]) - stats["bytes_in_use"]) * (1 if mesh is None else mesh.size)
