"""What moments measure: sizes, windows, and the sums that the requested recipes need."""

from __future__ import annotations

import dataclasses

from calib import histogram
from calib.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Settings:
    """What moments measure; equal settings may be merged.

    Attributes:
        recipes: recipes the moments can be fitted to.
        layers, kv_heads, q_heads, head_dim: L, K, N, D.
        bucket: tokens in a bucket of history.
        sink, recent: S and W of the statistics: history pairs have `S <= j <= t - W`.
        softmax_scale: factor on `q . k`.
        window: latest tokens that a query sees; None sees all.
    """

    recipes: tuple[Recipe, ...]
    layers: int
    kv_heads: int
    q_heads: int
    head_dim: int
    bucket: int
    sink: int
    recent: int
    softmax_scale: float
    window: int | None = None

    @property
    def groups(self) -> frozenset[str]:
        """Groups of sums that some recipe needs."""
        return frozenset().union(*(groups(recipe) for recipe in self.recipes))


def groups(recipe: Recipe) -> frozenset[str]:
    """Groups of sums that a recipe is fitted from; empty for the data-free ones."""
    needed: set[str] = set()
    by_target = {
        "query": {"query"},
        "key": {"key"},
        "value": {"value"},
        "logit-value": {"query", "logit"},
        "attention-output": {"output"},
    }
    for name, side in recipe.sides.items():
        needed |= by_target[side.target] if side.target else set()
        needed |= {name} if side.statistics == "plain" else set()
        needed |= {"query"} if side.metric == "query" else set()
        needed |= {"weighted"} if side.statistics == "weighted" or side.metric == "weighted-query" else set()
        needed |= {"histogram"} if side.clip == "static" else set()
    return frozenset(needed)


def shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Shapes of all sums by name; `moments.Moments` says what they are."""
    heads = (settings.layers, settings.kv_heads)
    vector, square = (*heads, settings.head_dim), (*heads, settings.head_dim, settings.head_dim)
    result: dict[str, tuple[int, ...]] = {"tokens": (), "bad_query": (settings.layers, settings.q_heads)}
    result |= {"bad_key": heads, "bad_value": heads}
    of_group = {
        "query": {"query": square},
        "key": {"key_sum": vector, "key": square},
        "value": {"value_sum": vector, "value": square},
        "output": {"output": square},
        "weighted": {
            "weighted_pair": heads,
            "weighted_query": square,
            "weighted_key_sum": vector,
            "weighted_key": square,
            "weighted_value_weight": heads,
            "weighted_value_sum": vector,
            "weighted_value": square,
            "weighted_covered": (settings.bucket,),
        },
        "logit": {"tokens2": (), "logit": square, "logit_weight": heads},
        "histogram": {"tokens2": ()}
        | {
            f"histogram/{recipe.name}/{name}": (*heads, histogram.BINS)
            for recipe in settings.recipes
            for name, side in recipe.sides.items()
            if side.clip == "static"
        },
    }
    for group in sorted(settings.groups):
        result |= of_group[group]
    return result
