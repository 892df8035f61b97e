"""Layers of different sizes: more slots, or no rounding at all, for the layers whose rounding costs most.

`sensitivity` measures what a layer costs; `choose` picks a size for each layer at an average of bits. A plan is a
folder: `plan.json`, and one artifact for each size with the layers that have it. The cache's pools are stacked over
layers of one size, so no cache takes a plan yet; `evaluate --one-pass` does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calib import artifact
from calib.allocation import allocate
from oscar_jax import one_pass
from oscar_jax.models import LoadedModel
from pallas_kernels.transform_code import TransformCodes

FILE = artifact.PLAN_FILE


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """A size for each layer.

    Attributes:
        codes: by N, of all layers, or only of those that have this size.
        slots: N of each layer; None stays plain.
        costs: by N ("plain" costs nothing), mean KL in nats `[L]` with that layer alone rounded.
    """

    codes: Mapping[int, TransformCodes]
    slots: tuple[int | None, ...]
    costs: Mapping[int, Sequence[float]]

    @property
    def bits_per_element(self) -> float:
        """Mean over layers of the bits of a history element, scales counted."""
        return self.arm().history_bits_per_element

    def layers(self, slots: int) -> list[int]:
        """The layers of size N."""
        return [layer for layer, size in enumerate(self.slots) if size == slots]

    def arm(self) -> one_pass.OnePassArm:
        """The plan in the one-pass mode."""
        sizes = [None, *self.codes]
        index = np.arange(len(self.slots))
        for size, codes in self.codes.items():
            if codes.layers < len(self.slots):
                index[self.layers(size)] = np.arange(codes.layers)
        arms = [one_pass.PLAIN, *(one_pass.from_codes(codes) for codes in self.codes.values())]
        return one_pass.mixed(arms, np.asarray([sizes.index(size) for size in self.slots]), index)


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
    plain = one_pass.PLAIN.history_bits_per_element
    bits = [round(2 * plain * head_dim), *(each.key.row_bits + each.value.row_bits for each in codes.values())]
    least = min(bits) / (2 * head_dim)
    if not least <= average_bits <= plain:
        raise ValueError(f"average_bits={average_bits}: expected {least:g} (the smallest size) to {plain:g} (plain).")
    layers = len(next(iter(costs.values())))
    errors = np.asarray([[0.0] * layers, *(costs[size] for size in codes)])
    chosen = allocate(errors, np.asarray(bits), int(average_bits * 2 * head_dim * layers))
    sizes = [None, *codes]
    return LayerPlan(codes, tuple(sizes[option] for option in chosen), costs)


def save(path: Path, plan: LayerPlan, manifest: artifact.Manifest) -> dict[str, Any]:
    """Writes the folder and returns what `plan.json` holds.

    Raises:
        OSError: it cannot be written.
    """
    used = {size: codes for size, codes in plan.codes.items() if size in plan.slots}
    for size, codes in used.items():
        ids = plan.layers(size)
        of_layers = jax.tree.map(lambda leaf, ids=ids: np.asarray(leaf)[ids], codes)
        artifact.save(path / _folder(size), of_layers, dataclasses.replace(manifest, layer_ids=tuple(ids)))
    content = {
        "recipe": manifest.recipe,
        "slots": plan.slots,
        "bits_per_element": plan.bits_per_element,
        "costs": {str(size): [float(f"{cost:.4g}") for cost in each] for size, each in plan.costs.items()},
    }
    temporary = path / f".{FILE}.tmp"
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    temporary.replace(path / FILE)
    return content


def is_plan(path: str | Path) -> bool:
    """Whether a folder holds a plan."""
    return (Path(path) / FILE).is_file()


def load(path: Path, model: LoadedModel) -> tuple[LayerPlan, str]:
    """A plan and its recipe.

    Raises:
        ValueError: a file that is not a plan, one of another model, or artifacts that do not hold its layers.
    """
    file = path / FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        slots, recipe = tuple(content["slots"]), str(content["recipe"])
        costs = {int(size): each for size, each in content["costs"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file}: not a plan of layers ({error}); calibrate again.") from None
    if len(slots) != model.config.layers:
        raise ValueError(f"{file}: of {len(slots)} layers, the model has {model.config.layers}; calibrate this model.")
    plan = LayerPlan({}, slots, costs)
    codes = {}
    for size in dict.fromkeys(size for size in slots if size is not None):
        codes[size], manifest = artifact.load(path / _folder(size), model=model.identity)
        if list(manifest.layer_ids) != plan.layers(size) or codes[size].key.slots != size:
            raise ValueError(f"{path / _folder(size)}: does not hold the layers of {FILE}; calibrate again.")
    return dataclasses.replace(plan, codes=codes), recipe


def _folder(slots: int) -> str:
    return f"slots-{slots}"
