"""The codec in eager PyTorch: transform, clip, scale, round, split into slots, pack, and back.

Equal to `pallas_kernels.codec` bit for bit from the same y: sums over coordinates are pairwise in a fixed order,
products are rounded before they are added, scale and offset are rounded once, when stored. Degenerate rows are treated
as there: NaN, Inf or an overflowing mean square store slots 0 and scale NaN; a row constant after clipping stores scale
0, slots 0 and the value as offset.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from triton_ref import clip
from triton_ref.code import PLANES, SLOT_BITS, TransformCode

IMPLIED_OFFSET = -1.5  # of the scale, for `kind == "levels"`
SIGMA_EPSILON = 1e-12
SCALE_LIMIT = 65504.0


class Encoded(NamedTuple):
    """Stored rows: slots uint8 `[..., K, N/4]`, scale `[..., K]` of a 16-bit dtype, offset likewise or None."""

    slots: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None


def encode(code: TransformCode, x: torch.Tensor, *, scale_dtype: torch.dtype = torch.float16) -> Encoded:
    """Encodes rows x `[..., K, D]` of one layer, already rounded to the cache's plain dtype."""
    return quantize(code, transform(code, x), scale_dtype=scale_dtype)


def transform(code: TransformCode, x: torch.Tensor) -> torch.Tensor:
    """`y = (x - mu) M`, `[..., K, D]` in fp32, or float64 for float64 x; never in TF32."""
    compute = torch.promote_types(x.dtype, torch.float32)
    with full_precision():
        return torch.einsum("...kd,kde->...ke", x.to(compute) - code.mu.to(compute), code.encode.to(compute))


def quantize(code: TransformCode, y: torch.Tensor, *, scale_dtype: torch.dtype = torch.float16) -> Encoded:
    """Slots, scale and offset of transformed rows y `[..., K, D]`."""
    finite = torch.isfinite(y).all(-1)
    offset = None
    if code.kind == "minmax":
        stored, scale, offset = _quantize_minmax(code, y)
    else:
        stored, scale, finite = _quantize_levels(code, y, finite)
    owner, shift = code.slot_tables()
    slots = torch.gather(stored, -1, owner.expand(*y.shape[:-1], code.slots)) >> shift & 3
    slots = torch.where(finite[..., None], slots, 0)

    def store(value: torch.Tensor) -> torch.Tensor:
        value = torch.where(finite, value.clamp(-SCALE_LIMIT, SCALE_LIMIT), torch.nan)
        return value.to(scale_dtype)

    return Encoded(pack(slots), store(scale), None if offset is None else store(offset))


def decode(code: TransformCode, encoded: Encoded, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`x_hat = (scale c + offset 1) E + mu`, `[..., K, D]` in `dtype`."""
    scale = encoded.scale.to(dtype)[..., None]
    offset = IMPLIED_OFFSET * scale if encoded.offset is None else encoded.offset.to(dtype)[..., None]
    rows = scale * unpack(encoded.slots).to(dtype) + offset
    with full_precision():
        return torch.einsum("...kn,knd->...kd", rows, code.decode.to(dtype)) + code.mu.to(dtype)


def pack(slots: torch.Tensor) -> torch.Tensor:
    """Slots `[..., N]` to bytes `[..., N/4]`; byte j holds slots j, j + N/4, j + N/2, j + 3N/4, lowest first."""
    planes = slots.to(torch.uint8).unflatten(-1, (PLANES, slots.shape[-1] // PLANES))
    shifts = torch.arange(0, 8, SLOT_BITS, dtype=torch.uint8, device=slots.device)
    return (planes << shifts[:, None]).sum(-2, dtype=torch.uint8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack`: bytes `[..., N/4]` to slots `[..., N]`, uint8 0 .. 3."""
    shifts = torch.arange(0, 8, SLOT_BITS, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None, :] >> shifts[:, None]) & 3).flatten(-2)


def pairwise_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis: pad with zeros to a power of two, add the upper half to the lower, repeat."""
    size = x.shape[-1]
    width = 1 << (size - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, width - size))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """fp32 products in fp32: TF32 off within, afterwards as it was."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _quantize_minmax(code: TransformCode, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if code.clip != "none":
        y = clip.clamp(y, _threshold(code, y))
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    # Divided by a tensor: on a GPU, PyTorch multiplies by the rounded reciprocal of a Python number.
    scale = ((high - low) / torch.full_like(low, 3)).clamp(max=torch.finfo(y.dtype).max)
    constant = scale < torch.finfo(y.dtype).tiny
    level = torch.floor((y - low) / torch.where(constant, 1, scale) + 0.5)
    stored = level.nan_to_num(0).clamp(0, 3).to(torch.int64)
    return torch.where(constant, 0, stored), torch.where(constant, 0, scale)[..., 0], low[..., 0]


def _threshold(code: TransformCode, y: torch.Tensor) -> torch.Tensor:
    if code.clip == "rank":
        return clip.sorted_threshold(y, code.clip_ratio)
    if code.clip == "bisect":
        return clip.bisected_threshold(y, code.clip_ratio)
    if code.clip_threshold is None:
        raise ValueError("clip_threshold=None with clip='static': expected one threshold a KV head.")
    return code.clip_threshold.to(y.dtype)[..., None]


def _quantize_levels(
    code: TransformCode, y: torch.Tensor, finite: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    delta, half = code.delta.to(y.dtype), _half_levels(code)
    kept = half > 0
    mean_square = pairwise_sum(torch.where(kept, y * y, 0)) / kept.sum(-1).to(y.dtype)
    finite = finite & torch.isfinite(mean_square)
    sigma = torch.where(finite, torch.sqrt(mean_square + SIGMA_EPSILON), 1)[..., None]
    y = torch.where(finite[..., None] & kept, y, 0)
    if code.metric is None:
        index = _nearest(y * (1 / sigma) * (1 / delta), half)
        level = torch.where(kept, delta * (index + 0.5), 0)
        weighted = code.weight.to(y.dtype) * level
    else:
        index = _feedback_levels(code, y, sigma, half)
        level = torch.where(kept, delta * (index + 0.5), 0)
        weighted = _metric_product(code, level)
    dot, norm = pairwise_sum(weighted * y), pairwise_sum(weighted * level)
    scale = code.gain.to(y.dtype) * dot / torch.where(norm > 0, norm, 1)
    return (index + half).to(torch.int64), scale, finite


def _half_levels(code: TransformCode) -> torch.Tensor:
    """Levels on each side of zero, `[..., D]`; 0 where dropped."""
    return (1 << code.bits) // 2


def _nearest(z: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """Index k of the level `delta (k + 1/2)`; 0 for a dropped coordinate."""
    return torch.minimum(torch.maximum(torch.floor(z), -half), (half - 1).clamp(min=0))


def _metric_product(code: TransformCode, rows: torch.Tensor) -> torch.Tensor:
    with full_precision():
        return torch.einsum("...kd,kde->...ke", rows, code.metric.to(rows.dtype))  # type: ignore[union-attr]


def _feedback_levels(code: TransformCode, y: torch.Tensor, sigma: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """Rounds coordinates one after another, pushing each error into the later ones, then one sweep of descent."""
    delta, kept = code.delta.to(y.dtype), half > 0
    factor, metric = code.feedback_factor().to(y.dtype), code.metric.to(y.dtype)  # type: ignore[union-attr]

    def level_of(i: int, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = _nearest(z, half[..., i])
        return index, torch.where(kept[..., i], delta[..., i] * (index + 0.5), 0)

    target, index = y.clone(), torch.zeros_like(y)
    for i in range(y.shape[-1]):
        index[..., i], level = level_of(i, target[..., i] / sigma[..., 0] / delta[..., i])
        error = (target[..., i] - level * sigma[..., 0]) / factor[..., i, i]
        target[..., i + 1 :] -= factor[..., i, i + 1 :] * error[..., None]
    level = torch.where(kept, delta * (index + 0.5), 0)
    product = _metric_product(code, level)
    norm = pairwise_sum(product * level)
    scale = pairwise_sum(product * y) / torch.where(norm > 0, norm, 1)
    scale = torch.where(scale == 0, 1, scale)  # y = 0: any scale leaves the levels as they are
    residual = _metric_product(code, y - level * scale[..., None])
    for i in range(y.shape[-1]):
        old = level[..., i].clone()
        step = residual[..., i] / metric[..., i, i] / scale
        index[..., i], new = level_of(i, (old + step) / delta[..., i])
        level[..., i] = new
        residual += metric[..., i, :] * ((old - new) * scale)[..., None]
    return index
