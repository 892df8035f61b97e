"""Layers of different sizes: more slots, or no rounding at all, for the layers whose rounding costs most.

`sensitivity` measures what a layer costs; `choose` picks a size for each layer at an average of bits. A plan is a
folder: `plan.json`, and one artifact for each size with the layers that have it; `load` makes `LayerCodes` of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calib import artifact, artifact_folder
from calib.allocation import allocate
from calib.identity import ModelIdentity
from oscar_jax.layer_codes import LayerCodes, history_bits
from pallas_kernels.transform_code import TransformCodes

FILE = artifact_folder.PLAN_FILE
TEMPORARY = f".{FILE}.tmp"
PLAIN_BITS = history_bits(None)


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """A size for each layer.

    Attributes:
        codes: by N, of all layers.
        slots: N of each layer; None stays plain.
        costs: by N ("plain" costs nothing), mean KL in nats `[L]` with that layer alone rounded.
    """

    codes: Mapping[int, TransformCodes]
    slots: tuple[int | None, ...]
    costs: Mapping[int, Sequence[float]]

    def layer_codes(self) -> LayerCodes:
        """What caches and the one-pass mode take."""
        sizes = list(dict.fromkeys(self.slots))
        codes = [None if size is None else _of_layers(self.codes[size], self.layers(size)) for size in sizes]
        return LayerCodes(tuple(codes), tuple(sizes.index(size) for size in self.slots))

    def layers(self, slots: int | None) -> list[int]:
        """The layers of size N."""
        return [layer for layer, size in enumerate(self.slots) if size == slots]


def _of_layers(codes: TransformCodes, layers: list[int]) -> TransformCodes:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[layers], codes)


def check_average(average_bits: float, least: float) -> None:
    """Raises ValueError unless it is at least `least`, the bits of history in the smallest size, and below plain."""
    if not least <= average_bits < PLAIN_BITS:
        raise ValueError(
            f"average_bits={average_bits:g}: expected {least:g} (the smallest size) to {PLAIN_BITS:g} (plain), which "
            "itself needs no plan."
        )


def choose(codes: Mapping[int, TransformCodes], costs: Mapping[int, Sequence[float]], average_bits: float) -> LayerPlan:
    """The plan of least summed cost at an average of bits.

    Args:
        codes: by N, of all layers.
        costs: as `measure` gives them.
        average_bits: most bits of a history element, mean over layers, scales counted.

    Raises:
        ValueError: an average below that of the smallest size in all layers, or above the plain one.
    """
    head_dim = next(iter(codes.values())).head_dim
    rows = [each.key.row_bits + each.value.row_bits for each in codes.values()]
    check_average(average_bits, min(rows) / (2 * head_dim))
    bits = [round(2 * PLAIN_BITS * head_dim), *rows]
    layers = len(next(iter(costs.values())))
    errors = np.asarray([[0.0] * layers, *(costs[size] for size in codes)])
    chosen = allocate(errors, np.asarray(bits), int(average_bits * 2 * head_dim * layers))
    sizes = [None, *codes]
    return LayerPlan(codes, tuple(sizes[option] for option in chosen), costs)


def save(path: Path, plan: LayerPlan, manifest: artifact.Manifest) -> dict[str, Any]:
    """Writes the folder and returns what `plan.json` holds.

    Args:
        path: made if missing, else one that `require_replaceable` takes.

    Raises:
        ValueError: a directory of something else.
        OSError: it cannot be written.
    """
    require_replaceable(path)
    for size in {size for size in plan.slots if size is not None}:
        layers = plan.layers(size)
        codes = _of_layers(plan.codes[size], layers)
        own = dataclasses.replace(manifest, layer_ids=tuple(layers), rounding=None)  # those would be of all layers
        artifact.save(path / _folder(size), codes, own)
    content = {
        "recipe": manifest.recipe,
        "slots": plan.slots,
        "bits_per_element": history_bits(plan.layer_codes()),
        "costs": {str(size): [float(f"{cost:.4g}") for cost in each] for size, each in plan.costs.items()},
    }
    temporary = path / TEMPORARY
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    temporary.replace(path / FILE)
    return content


def require_replaceable(path: str | os.PathLike[str]) -> None:
    """Raises ValueError unless `path` is no directory, an empty one, a plan, or what an interrupted `save` left."""
    path = Path(path).absolute()
    if not path.is_dir():
        return
    if artifact_folder.is_artifact(path):
        raise ValueError(
            f"plan {path}: the folder holds an artifact, which a plan of layers would hide; choose a new or "
            "empty folder."
        )
    children = sorted(path.iterdir())
    sizes = [child for child in children if child.is_dir() and re.fullmatch(r"slots-\d+", child.name)]
    foreign = [child for child in children if child not in sizes and child.name != TEMPORARY]
    if foreign and not _is_plan(path / FILE):
        name = FILE if path / FILE in foreign else foreign[0].name
        raise ValueError(
            f"plan {path}: the folder holds {name!r}, which is not a plan's; choose a new or empty folder, or a plan "
            "to replace."
        )
    for size in sizes:
        artifact_folder.require_replaceable(size)


def _is_plan(file: Path) -> bool:
    """Whether `save` wrote it."""
    try:
        return {"recipe", "slots", "bits_per_element", "costs"} <= json.loads(file.read_bytes()).keys()
    except (OSError, ValueError, AttributeError):
        return False


def load(
    path: str | os.PathLike[str], *, model: ModelIdentity | None = None, sharding: artifact.Placement | None = None
) -> tuple[TransformCodes | LayerCodes, artifact.Manifest]:
    """`artifact.load`, of a plan too; the manifest is then that of one size, with the recipe's name and "-plan".

    Raises:
        ValueError: as `artifact.load`; a file that is not a plan, or artifacts that do not hold its layers.
    """
    path = Path(path)
    file = path / FILE
    if not file.is_file():
        return artifact.load(path, model=model, sharding=sharding)
    try:
        slots = tuple(json.loads(file.read_text(encoding="utf-8"))["slots"])
        plan = LayerPlan({}, slots, {})
        sizes = list(dict.fromkeys(slots))
        if not {size for size in slots if size is not None}:
            raise ValueError("no layer has codes")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file}: not a plan of layers ({error}); delete the folder, then calibrate again.") from None
    codes: list[TransformCodes | None] = []
    manifest = None
    for size in sizes:
        if size is None:
            codes.append(None)
            continue
        of_size, manifest = artifact.load(path / _folder(size), model=model, sharding=sharding)
        if list(manifest.layer_ids) != plan.layers(size) or of_size.key.slots != size:
            raise ValueError(f"{path / _folder(size)}: does not hold the layers of {FILE}; calibrate again.")
        codes.append(of_size)
    assert manifest is not None
    manifest = dataclasses.replace(manifest, recipe=f"{manifest.recipe}-plan", layer_ids=())
    return LayerCodes(tuple(codes), tuple(sizes.index(size) for size in slots)), manifest


def _folder(slots: int) -> str:
    return f"slots-{slots}"
