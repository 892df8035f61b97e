"""Streaming moments of queries, keys and values: all that a fit needs to know of the calibration text.

Moments are sums in float64, so batches, hosts and devices may be added in any order. `update` takes all layers
at once and works through them layer by layer and block of queries by block; it enters `jax.enable_x64` itself, so it
does not matter whether the caller has x64 on. Under a mesh, shard the batch axis of q, k, v and lengths over a data
axis; sums over it become one all-reduce.

Positions (see `docs/design.md`): key and query moments of `weighted` are taken relative to the row's own bucket;
those of the paper's and the reference's recipes (`query`, `key`, `value`, `output`, `logit`) at the model's
positions, sinks included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from calib.layer_sums import bucket_origin, covered, first_pass, second_pass
from calib.recipes import Recipe
from calib.recipes import get as get_recipe
from calib.settings import Settings, shapes
from pallas_kernels.rope import Rotary


@partial(jax.tree_util.register_dataclass, data_fields=["sums", "value_metric"], meta_fields=["settings"])
@dataclasses.dataclass(frozen=True)
class Moments:
    """Sums over calibration tokens, float64.

    Attributes:
        sums: by name, only those of `settings.groups`. Always: `tokens []`; `bad_query [L, N]`, `bad_key`,
            `bad_value [L, K]`, rows with NaN or Inf. `query [L, K, D, D]` (sum of `q q^T` over tokens and the
            group). `key_sum`, `value_sum [L, K, D]`, `key`, `value [L, K, D, D]`. `output [L, K, D, D]` (`o o^T` of
            the causal softmax over tokens and the group). `weighted_*`: `pair [L, K]` (sum of w_tj), `query`,
            `key_sum`, `key` (by w_tj, bucket-relative), `value_weight`, `value_sum`, `value` (by p_tj^2), `covered
            [bucket]` (history tokens at each relative position). Second pass: `tokens2 []`, `logit [L, K, D, D]` and
            `logit_weight [L, K]` (`v v^T` by `k^T C_Q k`), `histogram/<recipe>/<side> [L, K, bins]`.
        value_metric: f64 `[L, K, D, D]`, G; None is the identity.
        settings: what is measured.
    """

    sums: dict[str, jax.Array]
    value_metric: jax.Array | None
    settings: Settings


@partial(jax.tree_util.register_dataclass, data_fields=["query", "rotations"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class FirstFit:
    """What the second pass takes from the first.

    Attributes:
        query: f64 `[L, K, D, D]`, C_Q of each head; None without a logit-weighted recipe.
        rotations: `"<recipe>/<side>"` to R, f64 `[L, K, D, D]`, for static clip thresholds.
    """

    query: jax.Array | None
    rotations: dict[str, jax.Array]


def passes(recipe: str | Recipe) -> int:
    """1 or 2: how often the calibration text must stream by."""
    return get_recipe(recipe).passes


def init(
    recipes: str | Recipe | Iterable[str | Recipe],
    *,
    layers: int,
    kv_heads: int,
    q_heads: int,
    head_dim: int,
    bucket: int = 2048,
    sink: int = 16,
    recent: int = 64,
    value_metric: ArrayLike | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Moments:
    """Empty moments for these recipes.

    Args:
        recipes: names or recipes; only the sums that they need are allocated.
        value_metric: `[L, K, D, D]`, mean over the group of `W_o W_o^T`: norm of errors in the attention output.
            None is the identity.
        softmax_scale: factor on `q . k`; `D ** -0.5` by default.
        window: latest tokens that a query sees, in layers with a sliding window; None sees all.

    Raises:
        ValueError: an unknown recipe, or sizes that do not fit together.
    """
    chosen = [recipes] if isinstance(recipes, str | Recipe) else list(recipes)
    if not chosen:
        raise ValueError("recipes=[]: expected at least one recipe name.")
    if q_heads % kv_heads:
        raise ValueError(f"q_heads={q_heads} with kv_heads={kv_heads}: expected a multiple of kv_heads.")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: expected at least 1, or None.")
    if bucket < 1 or sink < 0 or recent < 1:
        raise ValueError(f"bucket={bucket}, sink={sink}, recent={recent}: expected at least 1, 0 and 1.")
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    resolved = tuple(dict.fromkeys(get_recipe(recipe) for recipe in chosen))
    if len({recipe.name for recipe in resolved}) < len(resolved):
        raise ValueError("recipes: two different recipes share a name; rename one.")
    settings = Settings(resolved, layers, kv_heads, q_heads, head_dim, bucket, sink, recent, scale, window)
    square = (layers, kv_heads, head_dim, head_dim)
    if value_metric is not None and np.shape(value_metric) != square:
        raise ValueError(f"value_metric: shape {list(np.shape(value_metric))}, expected [L, K, D, D] = {list(square)}.")
    with jax.enable_x64(True):
        zeros = {name: jnp.zeros(shape, jnp.float64) for name, shape in shapes(settings).items()}
        metric = None if value_metric is None else jnp.asarray(np.asarray(value_metric), jnp.float64)
        return Moments(zeros, metric, settings)


def update(
    moments: Moments,
    q: jax.Array | np.ndarray,
    k: jax.Array | np.ndarray,
    v: jax.Array | np.ndarray,
    *,
    positions: ArrayLike,
    lengths: ArrayLike,
    rope: Rotary | None,
    first_fit: FirstFit | None = None,
) -> Moments:
    """Adds whole sequences to the moments; pure, may be called under `jit` (`accumulate` is that, with value checks).

    Args:
        q, k, v: `[L, B, T, N, D]`, `[L, B, T, K, D]` twice, any float dtype, after rotary positions, as attention
            takes them. Rows see only rows of the same call, so a sequence must come in one piece.
        positions: int `[T]`, increasing.
        lengths: int `[B]`, valid rows of each sequence; rows behind never contribute, whatever they hold.
        rope: the model's rotary positions; None for a model without.
        first_fit: None accumulates the first pass; `fit.first_fit(moments)` the second.

    Raises:
        ValueError: shapes that do not fit the moments, or no token at all.
    """
    _check_arrays(moments.settings, q, k, v, positions, lengths)
    with jax.enable_x64(True):
        positions, lengths = jnp.asarray(positions, jnp.int32), jnp.asarray(lengths, jnp.int32)
        valid = jnp.arange(q.shape[2]) < lengths[:, None]
        tokens = valid.sum().astype(jnp.float64)
        if first_fit is None:
            origin = bucket_origin(positions, moments.settings)
            layer = partial(first_pass, moments.settings, rope, positions, origin, valid)
            added = lax.map(layer, (q, k, v, moments.value_metric)) | {"tokens": tokens}
            if "weighted" in moments.settings.groups:
                added["weighted_covered"] = covered(positions, valid, moments.settings)
        else:
            added = lax.map(partial(second_pass, valid), (k, v, first_fit)) | {"tokens2": tokens}
        sums = {name: total + added[name] if name in added else total for name, total in moments.sums.items()}
        return dataclasses.replace(moments, sums=sums)


_jitted_update = jax.jit(update, static_argnames=("rope",), donate_argnames=("moments",))


def accumulate(
    moments: Moments,
    q: jax.Array | np.ndarray,
    k: jax.Array | np.ndarray,
    v: jax.Array | np.ndarray,
    *,
    positions: ArrayLike,
    lengths: ArrayLike,
    rope: Rotary | None,
    first_fit: FirstFit | None = None,
) -> Moments:
    """`update`, compiled once for each shape, the old moments donated; also checks the values of positions and lengths.

    Raises:
        ValueError: as `update`; no valid token (a capture that never fired), lengths beyond T, positions not
            increasing.
    """
    rows = np.shape(q)[2] if np.ndim(q) == 5 else 0
    sizes = np.asarray(lengths)
    if sizes.size == 0 or sizes.max() < 1:
        raise ValueError(f"lengths={sizes.tolist()}: no token; expected a valid row at least (did the capture run?).")
    if sizes.min() < 0 or sizes.max() > rows:
        raise ValueError(f"lengths={sizes.tolist()}: expected 0 .. T={rows}.")
    if (np.diff(np.asarray(positions)) <= 0).any():
        raise ValueError("positions: expected increasing positions, those of one sequence in one piece.")
    positions, lengths = (x if isinstance(x, jax.Array) else np.asarray(x, np.int32) for x in (positions, lengths))
    with jax.enable_x64(True):
        return _jitted_update(moments, q, k, v, positions=positions, lengths=lengths, rope=rope, first_fit=first_fit)


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of both streams of tokens, for instance of two hosts.

    Raises:
        ValueError: the two measure different things.
    """
    if a.settings != b.settings or (a.value_metric is None) != (b.value_metric is None):
        raise ValueError("merge: the moments have different settings; expected two from the same init.")
    with jax.enable_x64(True):
        return dataclasses.replace(a, sums=jax.tree.map(jnp.add, a.sums, b.sums))


def check(moments: Moments) -> None:
    """Refuses NaN and Inf in what was measured.

    Raises:
        ValueError: names the side, layer, head and number of rows of the first bad one.
    """
    for side in ("query", "key", "value"):
        bad = np.asarray(moments.sums[f"bad_{side}"])
        if bad.any():
            layer, head = np.argwhere(bad)[0]
            raise ValueError(
                f"{side} side, layer {layer}, head {head}: {int(bad[layer, head])} calibration rows hold NaN or Inf; "
                "run the model in a wider dtype, or leave that text out."
            )
    metric = moments.value_metric
    if metric is not None and not (finite := np.isfinite(np.asarray(metric)).all((-1, -2))).all():
        layer, head = np.argwhere(~finite)[0]
        raise ValueError(
            f"value_metric, layer {layer}, head {head}: NaN or Inf; expected the Gram matrix of finite weights."
        )


def _check_arrays(settings: Settings, q, k, v, positions, lengths) -> None:
    batch, rows = q.shape[1:3] if q.ndim == 5 else (0, 0)
    expected_q = (settings.layers, batch, rows, settings.q_heads, settings.head_dim)
    expected_kv = (settings.layers, batch, rows, settings.kv_heads, settings.head_dim)
    for name, array, expected in (("q", q, expected_q), ("k", k, expected_kv), ("v", v, expected_kv)):
        if tuple(array.shape) != expected:
            raise ValueError(f"{name}: shape {list(array.shape)}, expected [L, B, T, heads, D] = {list(expected)}.")
    if batch == 0 or rows == 0:
        raise ValueError(f"q: shape {list(q.shape)} holds no token; expected at least one (did the capture run?).")
    for name, array, expected in (("positions", positions, (rows,)), ("lengths", lengths, (batch,))):
        if np.shape(array) != expected:
            raise ValueError(f"{name}: shape {list(np.shape(array))}, expected {list(expected)}.")
