"""Transform codes: what calibration hands to every writer and reader of the cache.

One `TransformCode` is one side (K or V) of all layers. A row x of one token and head is encoded from
`y = (x - mu) M` and read back as `x_hat = (scale c + offset 1) E + mu`, with c the stored two-bit slots. A rotation R
with clipping and min/max quantization (OSCAR, arXiv 2605.17757) is the instance `mu = 0, M = R, E = R^T`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_kernels.rope import Rotary
from pallas_kernels.tiers import Tiers

Kind = Literal["levels", "minmax"]
Clip = Literal["none", "rank", "static"]
Codes = TypeVar("Codes")
SCALE_DTYPES = ("float16", "bfloat16")
SLOT_BITS = 2
NO_SLOT = 8  # a shift that moves every stored level (at most 6 bits) out of the slot

_LEAVES = (
    "mu", "encode", "bits", "delta", "weight", "gain", "slot_order", "decode", "clip_threshold", "metric",
)  # fmt: skip


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[*_LEAVES, "slot_owner", "slot_shift", "feedback"],
    meta_fields=["kind", "clip", "clip_ratio"],
)
@dataclasses.dataclass(frozen=True)
class TransformCode:
    """One side of every layer. All leaves lead with `[L, K]`, or with `[K]` after `layer(l)`.

    Of `flat` ones matrices are rows `[L, K, X Y]` until `layer(l)`.

    Attributes:
        mu: f32 `[D]`, subtracted before and added after.
        encode: f32 `[D, D]`, M. Columns of dropped coordinates are zero.
        bits: int8 `[D]`, 6, 4, 2 or 0 a coordinate: classes in that order, dropped coordinates last.
        delta: f32 `[D]`, step in units of the row's rms; 1 where dropped.
        weight: f32 `[D]`, g of the least-squares scale; 0 where dropped.
        gain: f32 `[]`, factor on the fitted scale.
        slot_order: int32 `[N]`; stored slot p holds logical slot `slot_order[p]`.
        decode: f32 `[N, D]`, E, rows in stored order; a slot without an owner has a zero row.
        clip_threshold: f32 `[]`, the static threshold on |y|; None unless `clip == "static"`.
        metric: f32 `[D, D]`, damped A C A^T that error feedback minimises; None for plain rounding.
        slot_owner, slot_shift: int32 `[N]`, coordinate and right shift of each stored slot (derived).
        feedback: f32 `[D, D]`, upper factor U of `metric^-1 = U^T U` (derived); None without `metric`.
        kind: "levels" (least-squares scale, offset -1.5 scale is implied) or "minmax" (offset is stored).
        clip, clip_ratio: clipping of |y| before min/max: "none", "rank" (order statistic
            `min(floor(ratio D), D - 1)`, 0-based ascending) or "static".
    """

    mu: jax.Array
    encode: jax.Array
    bits: jax.Array
    delta: jax.Array
    weight: jax.Array
    gain: jax.Array
    slot_order: jax.Array
    decode: jax.Array
    clip_threshold: jax.Array | None
    metric: jax.Array | None
    slot_owner: jax.Array
    slot_shift: jax.Array
    feedback: jax.Array | None
    kind: Kind
    clip: Clip = "none"
    clip_ratio: float = 1.0

    @property
    def head_dim(self) -> int:
        return self.mu.shape[-1]

    @property
    def slots(self) -> int:
        """N, two-bit slots in a stored row."""
        return self.slot_order.shape[-1]

    @property
    def layers(self) -> int:
        return self.mu.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.mu.shape[-2]

    @property
    def has_offset(self) -> bool:
        return self.kind == "minmax"

    @property
    def row_bits(self) -> int:
        """Stored bits of one token and head: slots and the 16-bit scale and offset."""
        return SLOT_BITS * self.slots + 16 * (1 + self.has_offset)

    def layer(self, index: int | jax.Array) -> TransformCode:
        """The `[K, ...]` leaves of one layer; `index` may be traced."""
        # Codes fresh from a fit are numpy arrays, which a traced index cannot index.
        one = jax.tree.map(lambda leaf: leaf[index] if isinstance(index, int) else jnp.asarray(leaf)[index], self)
        return one._matrices(lambda x: x.reshape(len(x), -1, self.head_dim))

    def _matrices(self, change: Callable[[jax.Array], jax.Array]) -> TransformCode:
        found = {name: getattr(self, name) for name in ("encode", "decode", "metric", "feedback")}
        return dataclasses.replace(self, **{name: change(x) for name, x in found.items() if x is not None})

    @classmethod
    def build(
        cls,
        *,
        mu: np.ndarray,
        encode: np.ndarray,
        inverse: np.ndarray,
        bits: np.ndarray,
        delta: np.ndarray,
        weight: np.ndarray,
        gain: np.ndarray | float = 1.0,
        slots: int | None = None,
        sort_slots: bool = False,
        kind: Kind = "levels",
        clip: Clip = "none",
        clip_ratio: float = 1.0,
        clip_threshold: np.ndarray | None = None,
        metric: np.ndarray | None = None,
    ) -> TransformCode:
        """Makes the slot tables and E from a frame in float64.

        Args:
            mu `[L, K, D]`, encode `[L, K, D, D]` (M), inverse `[L, K, D, D]` (A, rows of dropped coordinates ignored),
            bits, delta, weight `[L, K, D]`: see the class.
            slots: N, a multiple of 8; D by default.
            sort_slots: heaviest slots last (stable ascending by `4^r delta sqrt(weight)`), as keys want.
            clip_threshold: `[L, K]`, with `clip == "static"`.
            metric: `[L, K, D, D]`, already damped.

        Raises:
            ValueError: bits that do not fit the slots or are not 6, 4, 2, 0 in descending order.
        """
        bits = np.asarray(bits, np.int8)
        dim = int(bits.shape[-1])
        slots = dim if slots is None else slots
        if slots % 8:
            raise ValueError(f"slots={slots}: expected a multiple of 8; the nearest is {max(8, round(slots / 8) * 8)}.")
        delta, weight = np.broadcast_to(delta, bits.shape), np.broadcast_to(weight, bits.shape)
        logical_owner, logical_shift = _logical_slots(bits, slots)
        identity = np.broadcast_to(np.arange(slots, dtype=np.int32), logical_owner.shape)
        if sort_slots:
            power = np.where(logical_shift == NO_SLOT, 0.0, 2.0 ** np.minimum(logical_shift, NO_SLOT))
            heaviness = power * np.take_along_axis(delta * np.sqrt(np.maximum(weight, 0)), logical_owner, -1)
            order = np.argsort(heaviness, axis=-1, kind="stable").astype(np.int32)
        else:
            order = identity
        owner, shift = (np.take_along_axis(table, order, -1) for table in (logical_owner, logical_shift))
        factor = np.where(shift == NO_SLOT, 0.0, 2.0**shift * np.take_along_axis(delta, owner, -1))
        rows = np.take_along_axis(np.asarray(inverse, np.float64), owner[..., None], axis=-2)
        kept = bits > 0
        f32 = partial(np.asarray, dtype=np.float32)
        leaves: dict[str, Any] = dict(
            mu=f32(mu),
            encode=f32(np.where(kept[..., None, :], encode, 0)),
            bits=bits,
            delta=f32(np.where(kept, delta, 1)),
            weight=f32(np.where(kept, weight, 0)),
            gain=f32(np.broadcast_to(gain, bits.shape[:-1])),
            slot_order=order,
            decode=f32(factor[..., None] * rows),
            clip_threshold=None if clip_threshold is None else f32(clip_threshold),
            metric=None if metric is None else f32(metric),
            slot_owner=owner,
            slot_shift=shift,
            feedback=_feedback_factor(metric),
        )
        return cls(**leaves, kind=kind, clip=clip, clip_ratio=float(clip_ratio))

    def arrays(self) -> dict[str, np.ndarray]:
        """The leaves an artifact stores, by name; absent ones left out."""
        return {name: np.asarray(getattr(self, name)) for name in _LEAVES if getattr(self, name) is not None}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, jax.Array | np.ndarray], *, kind: Kind, clip: Clip = "none", clip_ratio: float = 1.0
    ) -> TransformCode:
        """Inverse of `arrays`; the slot tables are derived anew.

        Raises:
            ValueError: a leaf missing, unknown, or of an unexpected shape or dtype, or bits or slots out of range.
        """
        missing = [name for name in _LEAVES[:8] if name not in arrays]
        unknown = sorted(set(arrays) - set(_LEAVES))
        if missing or unknown:
            raise ValueError(f"transform code: missing arrays {missing}, unknown arrays {unknown}.")
        lead, dim = arrays["mu"].shape[:-1], arrays["mu"].shape[-1]
        slots = arrays["slot_order"].shape[-1]
        vector, square = (*lead, dim), (*lead, dim, dim)
        expected = dict(
            mu=(vector, "float32"), encode=(square, "float32"), bits=(vector, "int8"), delta=(vector, "float32"),
            weight=(vector, "float32"), gain=(lead, "float32"), slot_order=((*lead, slots), "int32"),
            decode=((*lead, slots, dim), "float32"), clip_threshold=(lead, "float32"), metric=(square, "float32"),
        )  # fmt: skip
        for name, array in arrays.items():
            shape, dtype = expected[name]
            if tuple(array.shape) != shape or str(array.dtype) != dtype:
                raise ValueError(
                    f"transform code array {name}: came as {array.dtype}{list(array.shape)}, "
                    f"expected {dtype}{list(shape)}."
                )
        order = np.asarray(arrays["slot_order"])
        if not (np.sort(order, -1) == np.arange(slots)).all():
            raise ValueError("transform code array slot_order: expected a permutation of 0 .. N-1 for every head.")
        owner, shift = _logical_slots(np.asarray(arrays["bits"]), slots)
        return cls(
            **{name: arrays.get(name) for name in _LEAVES},  # type: ignore[arg-type]
            slot_owner=np.take_along_axis(owner, order, -1),  # type: ignore[arg-type]
            slot_shift=np.take_along_axis(shift, order, -1),  # type: ignore[arg-type]
            feedback=_feedback_factor(arrays.get("metric")),  # type: ignore[arg-type]
            kind=kind,
            clip=clip,
            clip_ratio=float(clip_ratio),
        )

    def check(self, side: str) -> None:
        """Loading checks: finite leaves, positive steps and gain, `A M = I` on kept coordinates to 1e-4.

        Args:
            side: name of the side for the message, "key" or "value".

        Raises:
            ValueError: names the side, layer and head of the first failure.
        """
        for name, array in self.arrays().items():
            if not np.isfinite(array.astype(np.float64)).all():
                _fail(side, ~np.isfinite(array).reshape(*array.shape[:2], -1).all(-1), f"{name} has NaN or Inf")
        bits, delta = np.asarray(self.bits), np.asarray(self.delta, np.float64)
        kept = bits > 0
        _fail(side, (delta <= 0).any(-1), "delta is not positive")
        _fail(side, np.asarray(self.gain) <= 0, "gain is not positive")
        _fail(side, ~kept.any(-1), "no coordinate is kept")
        weight = np.asarray(self.weight)
        _fail(side, (weight < 0).any(-1) | ~(weight > 0).any(-1), "weight is negative, or zero for every coordinate")
        owner, shift = np.asarray(self.slot_owner), np.asarray(self.slot_shift)
        decode, encode = np.asarray(self.decode, np.float64), np.asarray(self.encode, np.float64)
        # Rows of A, from the lowest slot of each kept coordinate; dropped coordinates keep a zero row.
        inverse = np.zeros_like(encode)
        layer, head, slot = np.nonzero(shift == 0)
        coordinate = owner[layer, head, slot]
        inverse[layer, head, coordinate] = decode[layer, head, slot] / delta[layer, head, coordinate][:, None]
        error = np.abs(inverse @ encode - kept[..., None, :] * np.eye(kept.shape[-1])).max((-1, -2))
        _fail(side, error > 1e-4, f"A M differs from the identity by {error.max():.1e}, more than 1e-4")


@partial(
    jax.tree_util.register_dataclass, data_fields=["key", "value"], meta_fields=["rotary", "bucket", "scale_dtype"]
)
@dataclasses.dataclass(frozen=True)
class TransformCodes:
    """Both sides of every layer, and how positions enter.

    Attributes:
        key, value: the two sides.
        rotary: rotation of the model's positions, needed with buckets.
        bucket: history is cut into buckets of this many tokens, each key encoded relative to its bucket's start;
            None means one bucket and no rotation.
        scale_dtype: "float16" or "bfloat16", of scales and offsets.
    """

    key: TransformCode
    value: TransformCode
    rotary: Rotary | None = None
    bucket: int | None = None
    scale_dtype: str = "float16"

    def __post_init__(self):
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype={self.scale_dtype!r}: expected one of {', '.join(SCALE_DTYPES)}.")
        if self.bucket is not None and self.rotary is None:
            raise ValueError(f"bucket={self.bucket} without rotary: bucket-relative keys need the model's rotation.")

    @property
    def layers(self) -> int:
        return self.key.layers

    @property
    def kv_heads(self) -> int:
        return self.key.kv_heads

    @property
    def head_dim(self) -> int:
        return self.key.head_dim

    @property
    def history_bits(self) -> float:
        """Bits per K or V element of history rows, scales and offsets counted."""
        return (self.key.row_bits + self.value.row_bits) / (2 * self.head_dim)

    def check(self) -> None:
        """`TransformCode.check` of both sides.

        Raises:
            ValueError: names the side, layer and head.
        """
        self.key.check("key")
        self.value.check("value")


def flat(codes: Codes) -> Codes:
    """The same codes as TPUs hold them: matrices of less than 128 columns would leave lanes empty, and memory too.

    Args:
        codes: a tree of `TransformCode`.
    """

    def rows(code: TransformCode) -> TransformCode:
        return code._matrices(lambda x: x.reshape(*x.shape[:2], -1))

    return jax.tree.map(rows, codes, is_leaf=lambda x: isinstance(x, TransformCode))


def bits_per_element(codes: TransformCodes | None, tiers: Tiers, context: int, *, plain_bits: int = 16) -> float:
    """Bits per K or V element of a sequence of `context` tokens, scales, offsets and plain windows counted.

    Args:
        codes: None means that every token is plain.
        tiers: the windows.
        context: stored tokens, at least 1.
        plain_bits: width of the plain dtype.
    """
    if context < 1:
        raise ValueError(f"context={context}: expected at least one stored token.")
    if codes is None:
        return float(plain_bits)
    history = tiers.history_tokens(context)
    return ((context - history) * plain_bits + history * codes.history_bits) / context


def _logical_slots(bits: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Owner coordinate and right shift, `[..., N]`, of logical slots: a coordinate's slots adjacent, highest first."""
    if not np.isin(bits, (0, 2, 4, 6)).all() or (np.diff(bits, axis=-1) > 0).any():
        raise ValueError("bits: expected 6, 4, 2 or 0 for each coordinate, in descending order.")
    counts = bits.reshape(-1, bits.shape[-1]) // SLOT_BITS
    if counts.sum(-1).max() > slots:
        raise ValueError(f"bits: need {counts.sum(-1).max()} slots in a row, slots={slots} are there.")
    owner = np.zeros((len(counts), slots), np.int32)
    shift = np.full((len(counts), slots), NO_SLOT, np.int32)
    for row, count in enumerate(counts):
        of = np.repeat(np.arange(len(count)), count)
        within = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        owner[row, : len(of)] = of
        shift[row, : len(of)] = SLOT_BITS * (count[of] - 1 - within)
    shape = (*bits.shape[:-1], slots)
    return owner.reshape(shape), shift.reshape(shape)


def _feedback_factor(metric: np.ndarray | jax.Array | None) -> np.ndarray | None:
    if metric is None:
        return None
    inverse = np.linalg.inv(np.asarray(metric, np.float32).astype(np.float64))
    return np.swapaxes(np.linalg.cholesky((inverse + np.swapaxes(inverse, -1, -2)) / 2), -1, -2).astype(np.float32)


def _fail(side: str, bad: ArrayLike, what: str) -> None:
    if np.any(bad):
        layer, head = np.argwhere(np.atleast_2d(bad))[0]
        raise ValueError(
            f"{side} transform code, layer {layer}, head {head}: {what}; calibrate again or restore the file."
        )
