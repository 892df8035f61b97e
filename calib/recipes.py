"""Recipes: what to measure and how to turn it into a transform code, as data.

The named recipes are those of the OSCAR paper (arXiv 2605.17757), of its reference implementation, data-free
baselines, and `default`: transform coding in the frame where data covariance and error metric coincide, with more
bits for the coordinates that matter.
"""

from __future__ import annotations

import dataclasses
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

Side = Literal["key", "value"]
Frame = Literal["identity", "hadamard", "rotation", "balanced"]
Target = Literal["query", "key", "value", "logit-value", "attention-output"]
Metric = Literal["identity", "query", "weighted-query", "value-metric"]
Statistics = Literal["none", "plain", "weighted"]
Positions = Literal["absolute", "bucket", "averaged"]

# Steps in units of a row's rms, and expected squared error of a coordinate of unit variance, by bits.
STEPS = {6: 0.104, 4: 0.335, 2: 0.996}
ERRORS = {6: 0.00112, 4: 0.0118, 2: 0.119}


@dataclasses.dataclass(frozen=True)
class SideRecipe:
    """How one side (keys or values) is coded.

    Attributes:
        frame: "identity"; "hadamard" (`H_D`); "rotation" (`U H P_br`, U the eigenvectors of `target`); "balanced"
            (the frame of `linalg.balance`, its eigenvectors, then one mixer for each class of equal bits).
        kind: "minmax" (one offset and scale a row, all coordinates two bits) or "levels" (least-squares scale).
        target: matrix whose eigenvectors rotate: query second moment, key or value second moment, the value moment
            weighted by squared logits (reference implementation), or the attention output's (paper).
        per_layer: average the target over KV heads and use one rotation for all of them.
        clip, clip_ratio: "none", "rank" (order statistic of |y| of each row) or "static" (that quantile of
            calibration data).
        statistics: mean and covariance that the balanced frame centres and whitens with: "plain" (all tokens alike) or
            "weighted" (by attention). "none" elsewhere.
        metric: C of the balanced frame.
        ridge: of S and C, as a fraction of their mean diagonal, in P only.
        search_bits: choose 6, 4, 2 or 0 bits a coordinate by predicted error; else all coordinates get two.
        step: step of two-bit coordinates where bits are not searched.
        metric_weights: weight the least-squares scale by `diag(A C A^T)`; else by one.
        gain: factor on the fitted scale.
        damping: fraction of its own diagonal added to `A C A^T` for error feedback; None means plain rounding.
        sort_slots: heaviest slots last.
    """

    frame: Frame
    kind: Literal["levels", "minmax"] = "minmax"
    target: Target | None = None
    per_layer: bool = False
    clip: Literal["none", "rank", "static"] = "none"
    clip_ratio: float = 1.0
    statistics: Statistics = "none"
    metric: Metric = "identity"
    ridge: float = 1e-3
    search_bits: bool = False
    step: float = STEPS[2]
    metric_weights: bool = False
    gain: float = 1.0
    damping: float | None = None
    sort_slots: bool = False

    def __post_init__(self):
        rotates, balances = self.frame == "rotation", self.frame == "balanced"
        if rotates != (self.target is not None):
            raise ValueError(
                f"target={self.target!r} with frame={self.frame!r}: a rotation needs a target, others take none."
            )
        if balances != (self.statistics != "none"):
            raise ValueError(
                f"statistics={self.statistics!r} with frame={self.frame!r}: the balanced frame needs 'plain' or "
                "'weighted' statistics, others take 'none'."
            )
        if balances != (self.kind == "levels"):
            raise ValueError(
                f"kind={self.kind!r} with frame={self.frame!r}: expected 'levels' with 'balanced', else 'minmax'."
            )
        if self.kind == "levels" and self.clip != "none":
            raise ValueError(f"clip={self.clip!r} with kind='levels': expected 'none'; levels saturate on their own.")
        if not 0 < self.clip_ratio <= 1:
            raise ValueError(f"clip_ratio={self.clip_ratio}: expected a quantile above 0, at most 1.")
        for name in ("step", "gain"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: expected a number above 0.")
        for name in ("ridge", "damping"):
            if not 0 <= (getattr(self, name) or 0) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: expected a number of at least 0.")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Both sides, and how positions enter.

    Attributes:
        name: what `get` finds it by.
        summary: one line for people.
        key, value: the sides.
        positions: "absolute": moments and keys at the model's own positions. "bucket": keys are coded relative to
            their bucket's start. "averaged": one code for all positions, from moments averaged over common offsets;
            for serving loops that can give only one transformed query.
    """

    name: str
    summary: str
    key: SideRecipe
    value: SideRecipe
    positions: Positions = "absolute"

    def __post_init__(self):
        for side, allowed in ((self.key, ("query", "key")), (self.value, ("value", "logit-value", "attention-output"))):
            if side.target is not None and side.target not in allowed:
                raise ValueError(
                    f"recipe {self.name!r}: target={side.target!r} is on the wrong side; expected one of {allowed}."
                )
        key_metrics, value_metrics = ("identity", "query", "weighted-query"), ("identity", "value-metric")
        if self.key.metric not in key_metrics or self.value.metric not in value_metrics:
            raise ValueError(
                f"recipe {self.name!r}: metrics {self.key.metric!r} and {self.value.metric!r}; "
                f"expected one of {key_metrics} for keys and of {value_metrics} for values."
            )
        plain_key = self.key.statistics == "plain" or self.key.metric == "query"
        if self.positions != "absolute" and plain_key:
            raise ValueError(
                f"recipe {self.name!r}: plain key statistics are kept at absolute positions, not "
                f"positions={self.positions!r}; use 'weighted' and 'weighted-query', or positions='absolute'."
            )
        if self.positions == "absolute" and "weighted" in (self.key.statistics, self.key.metric.split("-")[0]):
            raise ValueError(
                f"recipe {self.name!r}: weighted key statistics are kept relative to buckets, positions='absolute'; "
                "use positions='bucket' or 'averaged'."
            )

    @property
    def sides(self) -> dict[Side, SideRecipe]:
        """`{"key": ..., "value": ...}`."""
        return {"key": self.key, "value": self.value}

    @property
    def passes(self) -> int:
        """How often calibration text must stream by: 2 where a statistic depends on the first pass's result."""
        return 2 if any(side.target == "logit-value" or side.clip == "static" for side in self.sides.values()) else 1


_registry: dict[str, Recipe] = {}
_reading: ContextVar[tuple[str, ...]] = ContextVar("_reading", default=())  # files, each the base of the one before it


def register(recipe: Recipe) -> Recipe:
    """Adds a recipe under its name and returns it.

    Raises:
        ValueError: another recipe has that name.
    """
    if _registry.get(recipe.name, recipe) != recipe:
        raise ValueError(f"recipe {recipe.name!r} exists already and differs; choose another name.")
    _registry[recipe.name] = recipe
    return recipe


def get(name: str | Recipe) -> Recipe:
    """The recipe of that name, or of that file if it ends in `.toml`; a `Recipe` is returned as it is.

    Raises:
        FileNotFoundError: no such file.
        ValueError: unknown name, the message lists the known ones; a file that is not a recipe, whose bases lead back
            to it, or whose name is that of a registered recipe that differs. A wrong base is told with its file.
    """
    if isinstance(name, Recipe):
        return name
    files = _reading.get()
    where = f"recipe {files[-1]!r}: base={name!r}" if files else f"recipe {name!r}"
    if not isinstance(name, str):
        raise ValueError(f"{where}: expected a recipe's name or a .toml file.")
    if name.endswith(".toml"):
        from calib import recipe_files  # builds on this module

        if Path(name).resolve() in [Path(file).resolve() for file in files]:
            raise ValueError(f"{where} would be its own base; expected another recipe.")
        if files and not Path(name).is_file():
            raise FileNotFoundError(f"{where}: no such file; expected a recipe's name or a .toml file.")
        token = _reading.set((*files, name))
        try:
            recipe = recipe_files.read(name)
        finally:
            _reading.reset(token)
        if _registry.get(recipe.name, recipe) != recipe:
            raise ValueError(f"recipe {name!r}: name={recipe.name!r} is another recipe's; choose another name.")
        return recipe
    if name not in _registry:
        raise ValueError(f"{where} is unknown; expected one of {', '.join(_registry)}, or a .toml file.")
    return _registry[name]


def names() -> tuple[str, ...]:
    """All registered names, in order of registration."""
    return tuple(_registry)


def _oscar(
    name: str, summary: str, value_target: Target, *, per_layer: bool, clip: Literal["rank", "static"]
) -> Recipe:
    key = SideRecipe("rotation", target="query", per_layer=per_layer, clip=clip, clip_ratio=0.96)
    value = SideRecipe("rotation", target=value_target, per_layer=per_layer, clip=clip, clip_ratio=0.92)
    return Recipe(name, summary, key, value)


_KEY = SideRecipe(
    "balanced",
    kind="levels",
    statistics="weighted",
    metric="weighted-query",
    search_bits=True,
    metric_weights=True,
    sort_slots=True,
)
_VALUE = SideRecipe("balanced", kind="levels", statistics="weighted", metric="value-metric", step=0.98, gain=1.06)

for _recipe in (
    Recipe("naive", "min/max of the row as it is", SideRecipe("identity"), SideRecipe("identity")),
    Recipe("hadamard", "Hadamard rotation, min/max", SideRecipe("hadamard"), SideRecipe("hadamard")),
    Recipe(
        "hadamard-clip",
        "Hadamard rotation, clip .96/.92, min/max",
        SideRecipe("hadamard", clip="rank", clip_ratio=0.96),
        SideRecipe("hadamard", clip="rank", clip_ratio=0.92),
    ),
    _oscar("oscar-reference", "the reference implementation, per layer", "logit-value", per_layer=True, clip="rank"),
    _oscar(
        "oscar-head", "the reference implementation's targets, per KV head", "logit-value", per_layer=False, clip="rank"
    ),
    _oscar(
        "oscar-paper",
        "the paper's targets and static clipping, per layer",
        "attention-output",
        per_layer=True,
        clip="static",
    ),
    _oscar("oscar-paper-head", "the paper's targets, per KV head", "attention-output", per_layer=False, clip="static"),
    Recipe("default", "balanced bit planes, bucket-relative keys", _KEY, _VALUE, "bucket"),
    Recipe(
        "default-feedback",
        "balanced bit planes with error feedback",
        dataclasses.replace(_KEY, damping=0.01),
        dataclasses.replace(_VALUE, step=1.0, gain=1.03, damping=0.01),
        "bucket",
    ),
    Recipe("default-averaged", "balanced bit planes, one code for all positions", _KEY, _VALUE, "averaged"),
):
    register(_recipe)
