"""What rounding costs each head: rows with the calibration's mean and covariance, through the real codec."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import numpy as np

from calib.recipes import Recipe, Side, SideRecipe
from calib.settings import groups
from pallas_kernels import codec
from pallas_kernels.transform_code import TransformCode

ROWS = 256
VERSION = 1
Heads = tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class RoundingErrors:
    """Relative weighted squared error of each layer's KV heads, `[L][K]` a side.

    `sum(e C e^T) / sum((x - mean) C (x - mean)^T)` over `ROWS` rows x, e what decoding leaves of them and C the metric.
    Rows are Gaussian, which those of a model are only roughly: good for comparing heads.

    Attributes:
        version: of this definition; other versions are left unread.
    """

    key: Heads
    value: Heads
    version: int = VERSION

    @classmethod
    def of(cls, key: np.ndarray, value: np.ndarray) -> RoundingErrors:
        """From arrays `[L, K]`, to four digits."""
        key_heads, value_heads = (
            tuple(tuple(float(f"{error:.4g}") for error in layer) for layer in side) for side in (key, value)
        )
        return cls(key_heads, value_heads)

    @classmethod
    def from_json(cls, tree: dict[str, Any] | None) -> RoundingErrors | None:
        """None where there are none, or those of another version."""
        if tree is None or tree["version"] != VERSION:
            return None
        sides: dict[str, Any] = {side: tuple(tuple(layer) for layer in tree[side]) for side in ("key", "value")}
        return cls(**tree | sides)

    def check(self, layers: int, kv_heads: int) -> None:
        """Raises ValueError unless both sides are `[layers][kv_heads]`, finite and not negative."""
        for name, side in (("key", self.key), ("value", self.value)):
            if len(side) != layers or any(len(layer) != kv_heads for layer in side):
                raise ValueError(f"rounding errors of {name}s: expected {layers} layers of {kv_heads} heads.")
            if not all(isinstance(each, float) and 0 <= each < math.inf for layer in side for each in layer):
                raise ValueError(f"rounding errors of {name}s: expected finite numbers of at least 0.")


def sources(recipe: Recipe) -> dict[Side, Recipe]:
    """Whose statistics and metric a side is measured with; nothing for data-free recipes.

    A side that the recipe gives no statistics (min/max) has those of all tokens alike, at the positions it is coded
    at, with the query's second moment or the value metric: what rotations are made for.
    """
    if not groups(recipe):
        return {}
    return {
        name: _statistics_at(recipe) if side.statistics == "none" else recipe for name, side in recipe.sides.items()
    }


def _statistics_at(recipe: Recipe) -> Recipe:
    absolute = recipe.positions == "absolute"  # only these positions have plain statistics of keys
    side = SideRecipe("balanced", kind="levels", statistics="plain" if absolute else "weighted")
    return Recipe(
        f"statistics-{recipe.positions}",
        "statistics for recipes without",
        dataclasses.replace(side, metric="query" if absolute else "weighted-query"),
        dataclasses.replace(side, metric="value-metric"),
        recipe.positions,
    )


def measure(
    code: TransformCode, mean: np.ndarray, covariance: np.ndarray, metric: np.ndarray, *, scale_dtype: str
) -> np.ndarray:
    """`RoundingErrors` of one side, float64 `[L, K]`; 0 where no error weighs anything.

    Args:
        mean: `[L, K, D]` float64. covariance, metric: `[L, K, D, D]`, at the positions that the code takes rows at.
    """
    spectrum, vectors = np.linalg.eigh(covariance)
    # The symmetric root, so that rows depend on no choice of eigenvectors.
    root = (vectors * np.sqrt(np.maximum(spectrum, 0))[..., None, :]) @ np.swapaxes(vectors, -1, -2)
    normal = np.random.default_rng(0).standard_normal((ROWS, code.head_dim))
    errors = []
    for layer in range(code.layers):
        spread = normal @ root[layer]
        rows = np.swapaxes(spread + mean[layer][:, None], 0, 1).astype(np.float32)
        left = np.asarray(_read_back(code.layer(layer), rows, scale_dtype=scale_dtype), np.float64) - rows
        error, whole = (((each @ metric[layer]) * each).sum((-1, -2)) for each in (np.swapaxes(left, 0, 1), spread))
        errors.append(np.divide(error, whole, out=np.zeros_like(error), where=whole > 0))
    return np.stack(errors)


@partial(jax.jit, static_argnames="scale_dtype")
def _read_back(code: TransformCode, rows: jax.Array, *, scale_dtype: str) -> jax.Array:
    return codec.decode(code, codec.encode(code, rows, scale_dtype=scale_dtype))
