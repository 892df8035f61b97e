"""What an artifact says about itself: recipe, model, text, and shapes, dtypes and hashes of its arrays."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from typing import Any

from calib.identity import ModelIdentity, TextIdentity
from calib.rounding import RoundingErrors
from pallas_kernels.rope import Rotary

FORMAT_VERSION = 1
PACKAGES = ("oscar-jax", "jax", "jaxlib", "numpy", "orbax-checkpoint", "flax", "transformers")
SIDES = ("key", "value")


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """What one stored array must be: shape, dtype name, and hex sha256 of its C-order little-endian bytes.

    `heads` are those of each KV head `[:, k]`, for processes that read some heads only; older artifacts have none.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    heads: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class SideRecord:
    """The static part of a `TransformCode`, N, and its arrays by leaf name."""

    kind: str
    clip: str
    clip_ratio: float
    slots: int
    arrays: dict[str, ArrayRecord]


@dataclasses.dataclass(frozen=True)
class CodesRecord:
    """The static part of `TransformCodes`; `rotary` keeps its frequencies exactly, as hexadecimal floats."""

    rotary: Rotary | None
    bucket: int | None
    scale_dtype: str
    key: SideRecord
    value: SideRecord


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What an artifact says about itself.

    The first fields are the caller's; those from `codes` on are recorded by `artifact.save`.

    Attributes:
        recipe: name of the recipe.
        model, text: None where unknown (imported rotations).
        value_metric: metric of V's error, "output-projection" (group mean of W_o W_o^T), "identity", or "none".
        statistics_sink, statistics_recent: S and W, tokens, of the history pairs in the statistics; None without any.
        max_position: positions that the query statistics cover, tokens; None if they do not depend on it.
        covered_positions: distinct bucket-relative positions seen in calibration; None if not counted.
        rotary: of the model, for recipes whose statistics depend on positions (the codes keep it only with buckets).
        sequence: tokens of a calibration sequence; None without statistics, or from before it was recorded.
        rounding: what rounding costs each head; None for data-free recipes, layer plans and imported rotations, or from
            before it was recorded.
        layer_ids: the model's layer of each layer of the codes; `()` means 0 .. L-1.
        codes: static parts, shapes, dtypes and hashes of what is stored.
        created: UTC time, ISO 8601.
        packages: versions that wrote it.
        format_version: of this layout.
    """

    recipe: str
    model: ModelIdentity | None = None
    text: TextIdentity | None = None
    value_metric: str = "none"
    statistics_sink: int | None = None
    statistics_recent: int | None = None
    max_position: int | None = None
    covered_positions: int | None = None
    rotary: Rotary | None = None
    sequence: int | None = None
    rounding: RoundingErrors | None = None
    layer_ids: tuple[int, ...] = ()
    codes: CodesRecord | None = None
    created: str = ""
    packages: dict[str, str] = dataclasses.field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """A tree of dicts, lists, strings and numbers from which `from_json` makes an equal manifest."""
        tree = dataclasses.asdict(self)
        for record in (tree, tree["codes"] or {}):
            if rotary := record.get("rotary"):
                rotary["inverse_frequencies"] = [float(f).hex() for f in rotary["inverse_frequencies"]]
        return json.loads(json.dumps(tree))

    @classmethod
    def from_json(cls, tree: Any) -> Manifest:
        """Inverse of `to_json`.

        Raises:
            ValueError: another format version, or fields missing, unknown or malformed.
        """
        version = tree.get("format_version") if isinstance(tree, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(
                f"format_version {version!r:.20} is unknown, this oscar-jax reads {FORMAT_VERSION}; "
                "update oscar-jax or calibrate again."
            )
        try:
            tree = dict(tree)
            tree["model"] = tree["model"] and ModelIdentity(**tree["model"])
            tree["text"] = tree["text"] and TextIdentity(**tree["text"])
            tree["rotary"] = _rotary(tree["rotary"])
            tree["rounding"] = RoundingErrors.from_json(tree.get("rounding"))
            tree["layer_ids"] = tuple(tree["layer_ids"])
            tree["codes"] = tree["codes"] and _codes_record(tree["codes"])
            if tree["rounding"] and tree["codes"]:
                tree["rounding"].check(*tree["codes"].key.arrays["mu"].shape[:2])
            return cls(**tree)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(f"the manifest is malformed ({error}); delete the folder, then calibrate again.") from None


def _codes_record(tree: dict[str, Any]) -> CodesRecord:
    sides = {}
    for side in SIDES:
        arrays = {name: ArrayRecord(**record) for name, record in tree[side]["arrays"].items()}
        arrays = {
            name: dataclasses.replace(record, shape=tuple(record.shape), heads=tuple(record.heads))
            for name, record in arrays.items()
        }
        sides[side] = SideRecord(**(tree[side] | {"arrays": arrays}))
    rest = {name: value for name, value in tree.items() if name not in (*SIDES, "rotary")}
    return CodesRecord(rotary=_rotary(tree["rotary"]), **sides, **rest)


def _rotary(tree: dict[str, Any] | None) -> Rotary | None:
    if tree is None:
        return None
    fields: dict[str, Any] = tree | {"inverse_frequencies": tuple(map(float.fromhex, tree["inverse_frequencies"]))}
    return Rotary(**fields)


def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
