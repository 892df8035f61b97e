"""`LayerCodes`: transform codes of a model whose layers do not all have the same size."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import jax
import numpy as np

from oscar_jax.cache_settings import CacheConfig
from pallas_kernels import dispatch, history
from pallas_kernels.codec import PLANES
from pallas_kernels.transform_code import TransformCodes, flat


@partial(jax.tree_util.register_dataclass, data_fields=["codes"], meta_fields=["group"])
@dataclasses.dataclass(frozen=True)
class LayerCodes:
    """Layers in groups: those of a group have the same number of slots, or stay plain.

    Attributes:
        codes: of each group, for its layers in ascending order; None for layers that stay plain.
        group: of each layer of the model, the number of its group.
    """

    codes: tuple[TransformCodes | None, ...]
    group: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.group)

    @property
    def kv_heads(self) -> int:
        return next((code.kv_heads for code in self.codes if code is not None), 1)

    @property
    def places(self) -> tuple[int, ...]:
        """Each layer's number within its group."""
        return tuple(self.group[:layer].count(number) for layer, number in enumerate(self.group))

    @property
    def runs(self) -> list[tuple[int, int]]:
        """How many layers in a row are of which group: `(count, group)`, from the first layer on."""
        return [(len(list(run)), number) for number, run in itertools.groupby(self.group)]

    def layers_of(self, number: int) -> list[int]:
        """The model's layers of a group."""
        return [layer for layer, each in enumerate(self.group) if each == number]


def history_bits(codes: TransformCodes | LayerCodes | None) -> float:
    """Bits per K or V element of history rows, scales and offsets counted, the mean over layers; 16 without codes."""
    if codes is None:
        return 16.0
    if isinstance(codes, LayerCodes):
        return sum(history_bits(codes.codes[number]) for number in codes.group) / codes.layers
    return codes.history_bits


def groups_of(
    config: CacheConfig, codes: TransformCodes | LayerCodes | None
) -> list[tuple[CacheConfig, TransformCodes | None]]:
    """Of each group, the configuration of a cache of its layers alone, and its codes.

    Raises:
        ValueError: codes of another number of layers.
    """
    if not isinstance(codes, LayerCodes):
        return [(config, codes)]
    if codes.layers != config.layers:
        raise ValueError(f"codes for {codes.layers} layers: expected {config.layers}; calibrate this model.")
    groups = []
    for number, code in enumerate(codes.codes):
        layers = codes.layers_of(number)
        windows = None if config.windows is None else tuple(config.windows[layer] for layer in layers)
        own = dataclasses.replace(config, layers=len(layers), windows=windows)
        if code is None:  # recents for all of the longest sequence, which not every implementation reads
            tiers = dataclasses.replace(config.tiers, recent=max(config.tiers.recent, config.max_length))
            own = dataclasses.replace(own, tiers=tiers, implementation=None)
        groups.append((own, code))
    return groups


def for_kernels(config: CacheConfig, codes: TransformCodes | LayerCodes | None) -> TransformCodes | LayerCodes | None:
    """The codes as the kernels of this device take them.

    For GPUs layers are in more groups where that keeps the pools at sizes that the kernels can address: of a pool of 2
    to 4 GiB of slots a side (`pallas_kernels.history.UNADDRESSED`) they would leave all to XLA. For TPUs matrices that
    would leave lanes empty are flat.
    """
    preferred = dispatch.preferred(config.implementation)
    if preferred == "tpu" and config.head_dim % history.LANES:
        return flat(codes)
    if codes is None or preferred != "triton":
        return codes
    whole = codes if isinstance(codes, LayerCodes) else LayerCodes((codes,), (0,) * config.layers)
    # Of a layer, on one device.
    tokens = config.pool_pages // config.data_parts * config.device_heads * config.tiers.page
    parts: list[TransformCodes | None] = []
    group = [0] * config.layers
    for number, code in enumerate(whole.codes):
        layers = whole.layers_of(number)
        for places in _split(len(layers), code, tokens):
            for place in places:
                group[layers[place]] = len(parts)
            parts.append(code if len(places) == len(layers) else jax.tree.map(lambda leaf, at=places: leaf[at], code))
    return codes if len(parts) == len(whole.codes) else LayerCodes(tuple(parts), tuple(group))


def _split(layers: int, code: TransformCodes | None, tokens: int) -> list[np.ndarray]:
    """Layers of a group in as few parts as have pools that can be addressed; in one where no number of parts has."""
    sides = [] if code is None else [code.key, code.value]
    for count in range(1, layers + 1):
        parts = np.array_split(np.arange(layers), count)
        sizes = [len(part) * tokens * side.slots // PLANES for part in parts for side in sides]
        if not any(size in history.UNADDRESSED for size in sizes):
            return parts
    return [np.arange(layers)]
