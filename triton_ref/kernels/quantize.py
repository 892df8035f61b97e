# pyright: reportGeneralTypeIssues=false
# Kernel bodies are Triton's language, whose types Python's checker does not know.
"""Clip, quantize and pack as one Triton kernel: rows of a transform code, and the OSCAR reference's own row format.

A program takes a few rows of D coordinates. Everything is exact: sums are pairwise in the codec's order, divisions and
roots are correctly rounded, products are never fused into additions, and an order statistic is found bit by bit. So
slots and parameters equal `triton_ref.codec` and `triton_ref.reference` bit for bit. Error feedback is eager only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from triton_ref import clip, codec, reference
from triton_ref.code import TransformCode
from triton_ref.kernels.launch import block, interpreted, run

ROWS = 4  # of a program
LARGEST = tl.constexpr(3.4028234663852886e38)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
SIGMA_EPSILON = tl.constexpr(codec.SIGMA_EPSILON)
SCALE_LIMIT = tl.constexpr(codec.SCALE_LIMIT)
RANGE_FLOOR = tl.constexpr(reference.RANGE_FLOOR)


@triton.jit
def _pairwise_sum(x, ROWS: tl.constexpr, SIZE: tl.constexpr, HALVINGS: tl.constexpr):
    for i in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, (ROWS, 2, SIZE >> (i + 1))), axis=1)
    return tl.sum(x, axis=1)


@triton.jit
def _order_statistic(magnitude, RANK: tl.constexpr):
    """The RANK-th smallest (0-based) of each row of non-negative numbers: their bits order as integers do."""
    bits = magnitude.to(tl.int32, bitcast=True)
    found = tl.min(bits * 0, axis=1)
    for i in tl.static_range(31):
        candidate = found | (1 << (30 - i))
        below = tl.sum((bits < candidate[:, None]).to(tl.int32), axis=1)
        found = tl.where(below <= RANK, candidate, found)
    return found.to(tl.float32, bitcast=True)


@triton.jit
def _bisected(magnitude, known, D: tl.constexpr, RANK: tl.constexpr, HALVINGS: tl.constexpr):
    high = tl.max(tl.where(known, magnitude, 0.0), axis=1)
    low = high * 0.0
    for _ in tl.static_range(HALVINGS):
        middle = (low + high) * 0.5
        above = tl.sum((known & (magnitude > middle[:, None])).to(tl.int32), axis=1) > D - RANK
        low = tl.where(above, middle, low)
        high = tl.where(above, high, middle)
    return high


@triton.jit
def _level_index(y, inverse_sigma, delta, half):
    """Index k of the level `delta (k + 1/2)`, as float; 0 for a dropped coordinate."""
    z = y * inverse_sigma * tl.div_rn(1.0, delta)
    top = tl.maximum(half - 1, 0).to(tl.float32)
    return tl.minimum(tl.maximum(tl.floor(z), -half.to(tl.float32)), top)


@triton.jit
def quantize_kernel(
    y_ptr, half_ptr, delta_ptr, weight_ptr, gain_ptr, threshold_ptr, owner_ptr, shift_ptr,
    slots_ptr, scale_ptr, bias_ptr,
    COUNT: tl.constexpr, ROWS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HALVINGS: tl.constexpr, QUARTER: tl.constexpr, BLOCK_Q: tl.constexpr, FORM: tl.constexpr, CLIP: tl.constexpr,
    RANK: tl.constexpr, BISECTIONS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of COUNT; grid (ceil(COUNT / ROWS),).

    Inputs: y f32 `[COUNT, D]`, rows of K heads in turn; by head half int32 (levels on each side of zero), delta, weight
    f32 `[K, D]`, gain, threshold f32 `[K]`, owner, shift int32 `[K, N]`. Outputs: slots uint8 `[COUNT, N/4]`, scale and
    bias `[COUNT]` (bias is not written for levels).

    FORM: "levels", "offset" (min/max, the minimum stored) or "zero-point" (the reference's). CLIP: "none", "rank",
    "static" or "bisect".
    """
    # Rows past the end repeat the last one, and store the same again.
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), COUNT - 1).to(tl.int64)
    head = (row % KV_HEADS).to(tl.int32)
    d = tl.arange(0, BLOCK_D)
    known = (d < D)[None, :] & (row >= 0)[:, None]
    of_head = head[:, None] * D + d[None, :]
    y = tl.load(y_ptr + row[:, None] * D + d[None, :], mask=known, other=0.0)
    finite = tl.min((tl.abs(y) <= LARGEST).to(tl.int32), axis=1) == 1

    if FORM == "levels":
        half = tl.load(half_ptr + of_head, mask=known, other=0)
        kept = half > 0
        count = tl.sum(kept.to(tl.int32), axis=1).to(tl.float32)
        mean_square = tl.div_rn(_pairwise_sum(tl.where(kept, y * y, 0.0), ROWS, BLOCK_D, HALVINGS), count)
        finite = finite & (tl.abs(mean_square) <= LARGEST)
        inverse_sigma = tl.div_rn(1.0, tl.where(finite, tl.sqrt_rn(mean_square + SIGMA_EPSILON), 1.0))
        y = tl.where(kept & finite[:, None], y, 0.0)
        delta = tl.load(delta_ptr + of_head, mask=known, other=1.0)
        level = tl.where(kept, delta * (_level_index(y, inverse_sigma[:, None], delta, half) + 0.5), 0.0)
        weighted = tl.load(weight_ptr + of_head, mask=known, other=0.0) * level
        dot = _pairwise_sum(weighted * y, ROWS, BLOCK_D, HALVINGS)
        norm = _pairwise_sum(weighted * level, ROWS, BLOCK_D, HALVINGS)
        scale = tl.div_rn(tl.load(gain_ptr + head) * dot, tl.where(norm > 0, norm, 1.0))
        bias = scale
    else:
        magnitude = tl.where(known, tl.abs(y), LARGEST)
        if CLIP == "rank":
            threshold = _order_statistic(magnitude, RANK)
        elif CLIP == "bisect":
            threshold = _bisected(magnitude, known, D, RANK, BISECTIONS)
        elif CLIP == "static":
            threshold = tl.load(threshold_ptr + head)
        else:
            threshold = tl.max(tl.where(known, magnitude, 0.0), axis=1)
        threshold = threshold[:, None]
        clipped = tl.minimum(tl.maximum(y, -threshold), threshold)
        low = tl.min(tl.where(known, clipped, LARGEST), axis=1)
        high = tl.max(tl.where(known, clipped, -LARGEST), axis=1)
        if FORM == "zero-point":
            scale = tl.div_rn(tl.maximum(high - low, RANGE_FLOOR), 3.0)
            bias = tl.div_rn(-low, scale)
        else:
            scale = tl.minimum(tl.div_rn(high - low, 3.0), LARGEST)
            scale = tl.where(scale < SMALLEST_NORMAL, 0.0, scale)
            bias = low

    j = tl.arange(0, BLOCK_Q)
    real = (j < QUARTER)[None, :] & (row >= 0)[:, None]
    byte = tl.full((ROWS, BLOCK_Q), 0, tl.int32)
    for i in tl.static_range(4):
        slot = head[:, None] * 4 * QUARTER + i * QUARTER + j[None, :]
        owner = tl.load(owner_ptr + slot, mask=real, other=0)
        shift = tl.load(shift_ptr + slot, mask=real, other=8)
        x = tl.load(y_ptr + row[:, None] * D + owner, mask=real, other=0.0)
        if FORM == "levels":
            half_of = tl.load(half_ptr + head[:, None] * D + owner, mask=real, other=0)
            delta_of = tl.load(delta_ptr + head[:, None] * D + owner, mask=real, other=1.0)
            stored = _level_index(x, inverse_sigma[:, None], delta_of, half_of).to(tl.int32) + half_of
        else:
            x = tl.minimum(tl.maximum(x, -threshold), threshold)
            if FORM == "zero-point":
                stored = (tl.div_rn(x, scale[:, None]) + bias[:, None] + 0.5).to(tl.int32)
            else:
                step = tl.where(scale > 0, scale, 1.0)[:, None]
                stored = tl.floor(tl.div_rn(x - low[:, None], step) + 0.5).to(tl.int32)
                stored = tl.where((scale > 0)[:, None], stored, 0)
            stored = tl.minimum(tl.maximum(stored, 0), 3)
        byte |= tl.where(finite[:, None], (stored >> shift) & 3, 0) << (2 * i)
    tl.store(slots_ptr + row[:, None] * QUARTER + j[None, :], byte.to(tl.uint8), mask=real)

    if FORM != "zero-point":
        scale = tl.minimum(tl.maximum(scale, -SCALE_LIMIT), SCALE_LIMIT)
        bias = tl.minimum(tl.maximum(bias, -SCALE_LIMIT), SCALE_LIMIT)
    scale = tl.where(finite, scale, float("nan"))
    bias = tl.where(finite, bias, float("nan"))
    tl.store(scale_ptr + row, scale.to(scale_ptr.dtype.element_ty))
    if FORM != "levels":
        tl.store(bias_ptr + row, bias.to(bias_ptr.dtype.element_ty))


class Launch(NamedTuple):
    """A call of `quantize_kernel`: its input and output tensors in order, its grid, and its constants."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    grid: tuple[int]
    constants: dict[str, Any]

    def run(self) -> list[torch.Tensor]:
        options = {"num_warps": 4, "enable_fp_fusion": False}
        run(quantize_kernel, self.grid, *self.inputs, *self.outputs, **self.constants, **options)
        return self.outputs


def quantize(code: TransformCode, y: torch.Tensor, *, scale_dtype: torch.dtype = torch.float16) -> codec.Encoded:
    """`triton_ref.codec.quantize` of f32 rows y `[..., K, D]`.

    Raises:
        NotImplementedError: a code with error feedback.
    """
    slots, scale, bias = arguments(code, y, scale_dtype=scale_dtype).run()
    return codec.Encoded(slots, scale, None if code.kind == "levels" else bias)


def reference_encode(
    y: torch.Tensor, ratio: float, *, evaluator: str, parameter_dtype: torch.dtype = torch.float32
) -> reference.Rows:
    """`triton_ref.reference.encode` of f32 rows y `[..., K, D]`: scale and zero point, one group a row."""
    kv_heads, dim = y.shape[-2:]
    ones = torch.ones(kv_heads, dim, device=y.device)
    order = torch.arange(dim, device=y.device).expand(kv_heads, dim)
    clip_by = evaluator if ratio > 0 else "none"
    heads = (2 * ones, ones, ones, ones[:, 0], ones[:, 0], order, 0 * order)
    slots, scale, zero = _launch(y, heads, "zero-point", clip_by, ratio, parameter_dtype).run()
    return reference.Rows(slots, scale[..., None], zero[..., None])


def arguments(code: TransformCode, y: torch.Tensor, *, scale_dtype: torch.dtype) -> Launch:
    """How `quantize` calls the kernel; its third output is not written for levels."""
    if code.metric is not None:
        raise NotImplementedError("error feedback rounds coordinate by coordinate: eager PyTorch only")
    owner, shift = code.slot_tables()
    threshold = code.gain if code.clip_threshold is None else code.clip_threshold
    heads = ((1 << code.bits) // 2, code.delta, code.weight, code.gain, threshold, owner, shift)
    form = "levels" if code.kind == "levels" else "offset"
    return _launch(y, heads, form, code.clip, code.clip_ratio, scale_dtype)


def _launch(
    y: torch.Tensor, heads: Sequence[torch.Tensor], form: str, clip_by: str, ratio: float, parameter_dtype: torch.dtype
) -> Launch:
    """heads: half, delta, weight, gain, threshold, owner, shift, by head."""
    kv_heads, dim = y.shape[-2:]
    half, *numbers, owner, shift = heads
    inputs = [y.float(), half.int(), *(x.float() for x in numbers), owner.int(), shift.int()]
    width, size, count = owner.shape[-1] // 4, block(dim), y.shape[:-1].numel()
    slots = torch.empty(*y.shape[:-1], width, dtype=torch.uint8, device=y.device)
    outputs = [slots, *(torch.empty(y.shape[:-1], dtype=parameter_dtype, device=y.device) for _ in range(2))]
    rows = 64 if interpreted(quantize_kernel) else ROWS
    constants = dict(
        COUNT=count, ROWS=rows, KV_HEADS=kv_heads, D=dim, BLOCK_D=size, HALVINGS=size.bit_length() - 1, QUARTER=width,
        BLOCK_Q=block(width), FORM=form, CLIP=clip_by, RANK=clip.rank(ratio, dim), BISECTIONS=dim.bit_length() - 1,
    )  # fmt: skip
    return Launch([x.contiguous() for x in inputs], outputs, (-(-count // rows),), constants)
