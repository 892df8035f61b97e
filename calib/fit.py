"""From moments to transform codes: frames, bits, steps and thresholds of every layer and KV head at once.

What grows with layers x heads is one batched float64 computation under `jit`, whose leading axis (layers and heads) may
be sharded over a mesh: heads never talk to each other, so the compiled program holds no collective.
"""

from __future__ import annotations

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from calib import histogram, linalg, rounding
from calib.frame import Frame, average_matrices, average_vectors, balanced, over_heads
from calib.moments import FirstFit, Moments, check
from calib.recipes import ERRORS, STEPS, Recipe, Side, SideRecipe
from calib.recipes import get as get_recipe
from calib.settings import groups
from pallas_kernels.rope import Rotary
from pallas_kernels.transform_code import TransformCode, TransformCodes

THIN_TOKENS = 16_000
COVERAGE = 0.9
AVERAGING_STEP = 256  # tokens between the offsets of `positions="averaged"`


class CalibrationWarning(UserWarning):
    """The statistics are usable but weaker than they should be."""


class ThinStatisticsWarning(CalibrationWarning):
    """Fewer calibration tokens than the statistics of a head need to settle."""


class BucketCoverageWarning(CalibrationWarning):
    """Calibration sequences too short to show keys at most positions of a bucket."""


def first_fit(moments: Moments) -> FirstFit:
    """What the second pass needs of the first: C_Q of each head, and the rotations to clip after.

    Raises:
        ValueError: moments without a token, or with NaN or Inf.
    """
    check(moments)
    query, rotations = None, {}
    for recipe in moments.settings.recipes:
        if recipe.passes == 2:
            _require(moments, recipe, first_pass_only=True)
        if "logit" in groups(recipe):
            query = _per_row(moments, "query")
        for name, side in recipe.sides.items():
            if side.clip == "static":
                rotations[f"{recipe.name}/{name}"] = _rotation(moments, side)
    return FirstFit(query, rotations)


def fit(
    moments: Moments,
    recipe: str | Recipe,
    *,
    rope: Rotary | None,
    max_position: int,
    slots: int | tuple[int, int] | None = None,
    scale_dtype: str = "float16",
    sharding: NamedSharding | None = None,
) -> TransformCodes:
    """Transform codes of all layers and heads.

    Args:
        moments: of all passes that the recipe asks for. Data-free recipes (`naive`, `hadamard`, `hadamard-clip`) take
            empty ones.
        recipe: one that the moments were made for.
        rope: the model's rotary positions, as given to `update`; None for a model without, which needs no buckets.
        max_position: context that the query metric is averaged over: the model's, unless it will be used shorter.
        slots: N of both sides or (N_k, N_v), multiples of 8; D by default, up to 3D for recipes of kind "levels". Where
            bits are not searched, more than D must be 2D or 3D: four or six bits in every coordinate.
        scale_dtype: of stored scales and offsets, "float16" or "bfloat16".
        sharding: spreads layers x heads, for instance `NamedSharding(mesh, PartitionSpec("data"))`.

    Raises:
        ValueError: recipe not among the moments', a pass missing, no token or no history pair seen, NaN or Inf, a head
            without weight (side, layer and head are named), slots that do not fit.

    Warns:
        ThinStatisticsWarning: fewer than 16 000 tokens. BucketCoverageWarning: bucket-relative or averaged recipe, and
            keys seen at fewer than nine tenths of a bucket's positions.
    """
    recipe, settings = get_recipe(recipe), moments.settings
    if recipe not in settings.recipes:
        known = ", ".join(known.name for known in settings.recipes)
        raise ValueError(f"recipe={recipe.name!r}: the moments were made for {known}; pass it to moments.init.")
    if max_position <= settings.sink:
        raise ValueError(
            f"max_position={max_position}: expected more than the {settings.sink} sinks of the statistics."
        )
    counts = slot_counts(recipe, settings.head_dim, slots)
    if groups(recipe):
        check(moments)
        _require(moments, recipe)
        _warn(moments, recipe)
    codes = {
        name: _levels(moments, recipe, name, counts[name], rope, max_position, sharding)
        if side.kind == "levels"
        else _minmax(moments, recipe, name, sharding)
        for name, side in recipe.sides.items()
    }
    bucketed = recipe.positions == "bucket" and rope is not None
    result = TransformCodes(
        key=codes["key"],
        value=codes["value"],
        rotary=rope if bucketed else None,
        bucket=settings.bucket if bucketed else None,
        scale_dtype=scale_dtype,
    )
    result.check()
    return result


def rounding_errors(
    moments: Moments, recipe: str | Recipe, codes: TransformCodes, *, rope: Rotary | None, max_position: int
) -> dict[Side, np.ndarray]:
    """What rounding costs each head, float64 `[L, K]` a side (`rounding.RoundingErrors`).

    Args:
        codes: what `fit` made of these moments; the other arguments as given to it.

    Returns:
        Nothing for data-free recipes, nor where the moments were not made for the recipe's `rounding.sources` too.
    """
    recipe, found = get_recipe(recipe), {}
    for name, source in rounding.sources(recipe).items():
        if not groups(source) <= moments.settings.groups:
            return {}
        statistics = map(np.asarray, _statistics(moments, source, name, rope, max_position))
        found[name] = rounding.measure(getattr(codes, name), *statistics, scale_dtype=codes.scale_dtype)
    return found


def covered_positions(moments: Moments) -> int:
    """Positions relative to a bucket's start at which some history key was seen, 0 .. bucket."""
    return int(np.count_nonzero(np.asarray(moments.sums.get("weighted_covered", 0))))


def _require(moments: Moments, recipe: Recipe, *, first_pass_only: bool = False) -> None:
    """Refuses moments that lack what the recipe is fitted from, naming it."""
    sums, needed = moments.sums, groups(recipe)
    tokens = float(sums["tokens"])
    if tokens == 0:
        raise ValueError(f"recipe {recipe.name!r}: the moments saw no token; run update over calibration text first.")
    if recipe.passes == 2 and not first_pass_only and float(sums["tokens2"]) != tokens:
        raise ValueError(
            f"recipe {recipe.name!r}: the second pass saw {float(sums['tokens2']):.0f} tokens, the first {tokens:.0f}; "
            "run update with first_fit=first_fit(moments) over the same text."
        )
    if "weighted" in needed and not np.asarray(sums["weighted_covered"]).any():
        shortest = moments.settings.sink + moments.settings.recent
        raise ValueError(
            f"recipe {recipe.name!r}: the moments saw {tokens:.0f} tokens but no history pair; "
            f"use sequences longer than sink + recent = {shortest} tokens."
        )
    weights = {
        "query": ("query", "query"),
        "key": ("key", "key"),
        "value": ("value", "value"),
        "output": ("value", "output"),
        "weighted_pair": ("key", "weighted"),
        "weighted_value_weight": ("value", "weighted"),
    }
    if not first_pass_only:
        weights["logit_weight"] = ("value", "logit")
    for name, (side, group) in weights.items():
        if group not in needed:
            continue
        total = np.asarray(sums[name])
        total = np.trace(total, axis1=-2, axis2=-1) if total.ndim == 4 else total
        if (total <= 0).any():
            layer, head = np.argwhere(total <= 0)[0]
            raise ValueError(
                f"recipe {recipe.name!r}, {side} side, layer {layer}, head {head}: the sum {name!r} is zero; "
                "expected every layer and head to be captured."
            )


def _warn(moments: Moments, recipe: Recipe) -> None:
    tokens, settings = float(moments.sums["tokens"]), moments.settings
    if tokens < THIN_TOKENS:
        warnings.warn(
            f"thin statistics: {tokens:.0f} calibration tokens; expected {THIN_TOKENS}, better 64k of mixed text.",
            ThinStatisticsWarning,
            stacklevel=3,
        )
    covered = covered_positions(moments)
    if recipe.positions != "absolute" and covered < COVERAGE * settings.bucket:
        warnings.warn(
            f"calibration showed keys at {covered} of the {settings.bucket} positions of a bucket; use sequences of "
            f"{settings.bucket + settings.sink + settings.recent} tokens or a smaller bucket.",
            BucketCoverageWarning,
            stacklevel=3,
        )


def slot_counts(recipe: Recipe, dim: int, slots: int | tuple[int, int] | None) -> dict[Side, int]:
    """N of each side.

    Args:
        dim: the head size. slots: as for `fit`.

    Raises:
        ValueError: slots that the recipe does not take.
    """
    pair = (slots, slots) if slots is None or isinstance(slots, int) else slots
    counts: dict[Side, int] = {"key": dim if pair[0] is None else pair[0], "value": dim if pair[1] is None else pair[1]}
    for name, side in recipe.sides.items():
        least = 8 if side.kind == "levels" else dim
        most = 3 * dim if side.kind == "levels" else dim
        if counts[name] % 8 or not least <= counts[name] <= most:
            nearest = min(max(round(counts[name] / 8) * 8, least), most)
            expected = f"a multiple of 8 from {least} to {most}; the nearest is {nearest}"
            if least == most:
                expected = f"{dim}, the head size, which is all that recipes of kind {side.kind!r} take"
            raise ValueError(f"slots={counts[name]} on the {name} side of recipe {recipe.name!r}: expected {expected}.")
        if counts[name] > dim and counts[name] % dim and not side.search_bits:
            raise ValueError(
                f"slots={counts[name]} on the {name} side of recipe {recipe.name!r}, which gives all coordinates equal "
                f"bits: expected at most {dim}, or {2 * dim} or {3 * dim}."
            )
    return counts


def _per_row(moments: Moments, name: str) -> jax.Array:
    """Mean over tokens, and over the heads of a group for query-side sums, of an unweighted sum."""
    group = moments.settings.q_heads // moments.settings.kv_heads if name in ("query", "output") else 1
    with jax.enable_x64(True):
        return moments.sums[name] / (moments.sums["tokens"] * group)


def _rotation(moments: Moments, side: SideRecipe, sharding: NamedSharding | None = None) -> np.ndarray:
    """`U H P_br` f64 `[L, K, D, D]`; the same for all heads of a layer with `per_layer`."""
    with jax.enable_x64(True):
        if side.target == "logit-value":
            target = moments.sums["logit"] / moments.sums["logit_weight"][..., None, None]
        else:
            target = _per_row(moments, "output" if side.target == "attention-output" else str(side.target))
        shape = target.shape
        if side.per_layer:
            target = target.mean(1, keepdims=True)
    return np.broadcast_to(over_heads(linalg.reference_rotation, target, sharding=sharding), shape)


def _minmax(moments: Moments, recipe: Recipe, name: Side, sharding: NamedSharding | None) -> TransformCode:
    side, settings = recipe.sides[name], moments.settings
    heads, dim = (settings.layers, settings.kv_heads), settings.head_dim
    if side.frame == "rotation":
        rotation = _rotation(moments, side, sharding)
    else:
        matrix = np.eye(dim) if side.frame == "identity" else linalg.hadamard(dim)
        rotation = np.broadcast_to(matrix, (*heads, dim, dim))
    threshold = None
    if side.clip == "static":
        counts = np.asarray(moments.sums[f"histogram/{recipe.name}/{name}"])
        pooled = counts.sum(1, keepdims=True) if side.per_layer else counts
        threshold = np.broadcast_to(histogram.quantile(pooled, side.clip_ratio), heads)
    return TransformCode.build(
        mu=np.zeros((*heads, dim)),
        encode=rotation,
        inverse=np.swapaxes(rotation, -1, -2),
        bits=np.full((*heads, dim), 2),
        delta=np.ones((*heads, dim)),
        weight=np.ones((*heads, dim)),
        kind="minmax",
        clip=side.clip,
        clip_ratio=side.clip_ratio,
        clip_threshold=threshold,
    )


def _levels(
    moments: Moments,
    recipe: Recipe,
    name: Side,
    slots: int,
    rope: Rotary | None,
    max_position: int,
    sharding: NamedSharding | None,
) -> TransformCode:
    side = recipe.sides[name]
    statistics = _statistics(moments, recipe, name, rope, max_position)
    frame: Frame = over_heads(partial(balanced, side=side, slots=slots), *statistics, sharding=sharding)
    bits = np.asarray(frame.bits)
    delta = np.ones(bits.shape)
    for width, step in (STEPS if side.search_bits else STEPS | {2: side.step}).items():
        delta[bits == width] = step
    gain = np.full(bits.shape[:-1], side.gain)
    if not side.search_bits:
        # The gain makes up for what two-bit rounding takes from a row; finer steps take less.
        errors = np.sum([(bits == width) * error for width, error in ERRORS.items()], axis=0)
        gain = 1 + (side.gain - 1) * errors.sum(-1) / ((bits > 0).sum(-1) * ERRORS[2])
    return TransformCode.build(
        mu=np.asarray(frame.mu),
        encode=np.asarray(frame.encode),
        inverse=np.asarray(frame.inverse),
        bits=bits,
        delta=delta,
        weight=np.asarray(frame.weight),
        gain=gain,
        slots=slots,
        sort_slots=side.sort_slots,
        metric=None if side.damping is None else np.asarray(frame.metric),
    )


def _statistics(
    moments: Moments, recipe: Recipe, name: Side, rope: Rotary | None, max_position: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean `[L, K, D]`, covariance and metric `[L, K, D, D]` of a side, at the positions it is coded at."""
    side, settings, sums = recipe.sides[name], moments.settings, moments.sums
    with jax.enable_x64(True):
        if side.statistics == "plain":
            mean, second = _per_row(moments, f"{name}_sum"), _per_row(moments, name)
        else:
            weight = sums["weighted_pair" if name == "key" else "weighted_value_weight"][..., None]
            mean, second = sums[f"weighted_{name}_sum"] / weight, sums[f"weighted_{name}"] / weight[..., None]
        metric = _metric(moments, side)
        if name == "key" and rope is not None and recipe.positions != "absolute":
            end = max_position - settings.sink
            offsets = np.arange(0, end, settings.bucket)
            if recipe.positions == "averaged":
                # Moments are relative to a bucket's start, which may stand anywhere from the first history position on.
                offsets = settings.sink + np.arange(0, max(end - settings.bucket, 0) + 1, AVERAGING_STEP)
                mean, second = average_vectors(mean, offsets, rope), average_matrices(second, offsets, rope)
            metric = average_matrices(metric, offsets, rope)
        return mean, second - mean[..., :, None] * mean[..., None, :], metric


def _metric(moments: Moments, side: SideRecipe) -> jax.Array:
    settings, sums = moments.settings, moments.sums
    if side.metric == "weighted-query":
        return sums["weighted_query"] / sums["weighted_pair"][..., None, None]
    if side.metric == "query":
        return _per_row(moments, "query")
    if side.metric == "value-metric" and moments.value_metric is not None:
        return moments.value_metric
    square = (settings.layers, settings.kv_heads, settings.head_dim, settings.head_dim)
    return jnp.broadcast_to(jnp.eye(settings.head_dim, dtype=jnp.float64), square)
