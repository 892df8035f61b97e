"""RotationZoo `.pt` files as the OSCAR reference loads them: `torch.load`, then one tensor a layer.

The loader of the reference looks up `layers[layer id]`, by int or str, takes `rotation`, branches on its rank (`[D, D]`
for the layer, `[K, D, D]` for each KV head) and applies it from the right, `x @ R`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

FORMAT_VERSIONS = (1, 2, "identity-v1")


def load(path: str | os.PathLike[str], *, layer_ids: Sequence[int], kv_heads: int) -> torch.Tensor:
    """Rotations f32 `[L, K, D, D]` of the layers of a model, in the order of their global ids.

    Raises:
        ValueError: another format, a missing layer, a dtype other than float32, or another number of heads.
    """
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or content.get("format_version") not in FORMAT_VERSIONS:
        raise ValueError(f"{path}: expected a dict with format_version {', '.join(map(str, FORMAT_VERSIONS))}.")
    layers, rotations = content["layers"], []
    for layer in layer_ids:
        entry = layers.get(layer, layers.get(str(layer)))
        if entry is None:
            raise ValueError(f"{path}: no rotation for layer {layer}; the file has {sorted(map(int, layers))}.")
        rotation = entry["rotation"]
        per_layer = rotation.ndim == 2
        if rotation.dtype != torch.float32 or rotation.ndim not in (2, 3) or entry["layer_id"] != layer:
            raise ValueError(f"{path}: layer {layer} has {rotation.dtype}{list(rotation.shape)}, expected float32.")
        if not per_layer and rotation.shape[0] != kv_heads:
            raise ValueError(f"{path}: layer {layer} has {rotation.shape[0]} heads, expected {kv_heads}.")
        rotations.append(rotation.expand(kv_heads, *rotation.shape) if per_layer else rotation)
    return torch.stack(rotations)


def save(
    path: str | os.PathLike[str],
    rotations: torch.Tensor,
    *,
    objective: str,
    layer_ids: Sequence[int],
    eigenvalues: torch.Tensor | None = None,
) -> None:
    """Writes `[L, D, D]` as version 1 (a matrix a layer) or `[L, K, D, D]` as version 2, as the reference's fitter.

    Args:
        eigenvalues: `[L, D]`, ascending.
    """
    per_layer = rotations.ndim == 3
    layers = {}
    for index, layer in enumerate(layer_ids):
        entry = {"layer_id": layer, "rotation": rotations[index].float().contiguous().clone()}
        if eigenvalues is not None:
            entry["eigenvalues"] = eigenvalues[index].float().clone()
        layers[layer] = entry
    grouping = "layer" if per_layer else "per_kv_head"
    version = 1 if per_layer else 2
    content = {"format_version": version, "objective": objective, "source_grouping": grouping, "layers": layers}
    torch.save(content, path)
