"""What the OSCAR reference implementation (arXiv 2605.17757, SGLang) does where this project's default differs.

`Semantics` names each difference; `docs/parity.md` sets the two side by side with what each costs on real activations.
`serve` runs a layer's activations under any mixture of them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch

from triton_ref import attention, clip, codec
from triton_ref.codec import full_precision
from triton_ref.tiers import Tiers

RANGE_FLOOR = 1e-8
LLOYD_MAX_THRESHOLD = 0.98106527
LLOYD_MAX_STEP = 2 * 1.5095585585 / 3 * 1.16  # of sigma; 1.16 is the reference's "LM_RATIO"
LLOYD_MAX_EPSILON = 1e-8


@dataclasses.dataclass(frozen=True)
class Semantics:
    """One field for each difference; the defaults are this project's.

    Attributes:
        clip: "rank", the exact order statistic in every writer; "by-writer", exact where prefill writes and bisected
            where decoding demotes, as in the reference.
        parameters: "offset", scale and minimum are stored; "zero-point", scale and the float `-min / scale`.
        parameter_dtype: of both.
        frame: "plain", the BF16 tiers hold K and V as they are, rows are rotated in fp32 when they are encoded;
            "rotated", everything is rotated by bf16 products with a bf16 R first, and stored so.
        recents: "by-position" or "from-prompt", see `Tiers`.
        prefill: "by-position" (a prompt token reads its old neighbours in INT2 as decoding would) or "chunk-exact".
        codebook: "uniform" or the reference's "lloyd-max" switch.
        group: channels that share parameters; None is the whole row.
        plain_dtype: of the BF16 tiers.
    """

    clip: Literal["rank", "by-writer"] = "rank"
    parameters: Literal["offset", "zero-point"] = "offset"
    parameter_dtype: torch.dtype = torch.float16
    frame: Literal["plain", "rotated"] = "plain"
    recents: Literal["by-position", "from-prompt"] = "by-position"
    prefill: Literal["by-position", "chunk-exact"] = "by-position"
    codebook: Literal["uniform", "lloyd-max"] = "uniform"
    group: int | None = None
    plain_dtype: torch.dtype = torch.bfloat16


REFERENCE = Semantics(
    clip="by-writer",
    parameters="zero-point",
    parameter_dtype=torch.float32,
    frame="rotated",
    recents="from-prompt",
    prefill="chunk-exact",
)


class Rows(NamedTuple):
    """Stored rows: slots uint8 `[..., D/4]`; scale `[..., D/g]`, and minimum or zero point likewise."""

    slots: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor


def encode(
    y: torch.Tensor, ratio: float, semantics: Semantics, *, evaluator: Literal["rank", "bisect"] = "rank"
) -> Rows:
    """Clip, min/max or Lloyd-Max codes, and packing of rotated rows y `[..., D]`.

    Args:
        ratio: rho; the threshold is the `min(floor(rho D), D - 1)`-th magnitude; 0 or less clips nothing.
        evaluator: which of the reference's two ways finds that magnitude.
    """
    if ratio > 0:
        find = clip.sorted_threshold if evaluator == "rank" else clip.bisected_threshold
        y = clip.clamp(y, find(y, ratio))
    size = y.shape[-1] if semantics.group is None else semantics.group
    if y.shape[-1] % size:
        raise ValueError(f"group={size}: expected a divisor of the head size {y.shape[-1]}.")
    groups = y.unflatten(-1, (-1, size))
    if semantics.codebook == "lloyd-max":
        if semantics.parameters != "zero-point" or semantics.group is not None:
            raise ValueError("codebook='lloyd-max': expected parameters='zero-point' and one group a row.")
        mean = groups.mean(-1, keepdim=True)
        sigma = torch.sqrt(groups.var(-1, correction=0, keepdim=True) + LLOYD_MAX_EPSILON)
        z = (groups - mean) / sigma
        level = sum((z >= bound).to(y.dtype) for bound in (-LLOYD_MAX_THRESHOLD, 0.0, LLOYD_MAX_THRESHOLD))
        scale = LLOYD_MAX_STEP * sigma
        bias = 1.5 - mean / scale
    else:
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        three = torch.full_like(low, 3)
        if semantics.parameters == "zero-point":
            scale = (high - low).clamp(min=RANGE_FLOOR) / three
            bias = -low / scale
            level = torch.trunc(groups / scale + bias + 0.5)
        else:
            scale = (high - low) / three
            bias = low
            level = torch.floor((groups - low) / torch.where(scale > 0, scale, 1) + 0.5)
    level = level.clamp(0, 3)  # type: ignore[union-attr]  # the sum above starts at the integer 0
    slots = codec.pack(level.flatten(-2).to(torch.uint8))
    return Rows(slots, scale[..., 0].to(semantics.parameter_dtype), bias[..., 0].to(semantics.parameter_dtype))


def decode(rows: Rows, semantics: Semantics, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rotated rows back, `[..., D]`: `(c - z) s`, or `s c + min`."""
    levels = codec.unpack(rows.slots).to(dtype).unflatten(-1, (rows.scale.shape[-1], -1))
    scale, bias = rows.scale.to(dtype)[..., None], rows.bias.to(dtype)[..., None]
    decoded = (levels - bias) * scale if semantics.parameters == "zero-point" else scale * levels + bias
    return decoded.flatten(-2)


def serve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotations: tuple[torch.Tensor, torch.Tensor],
    *,
    semantics: Semantics,
    clip_ratios: tuple[float, float] = (0.96, 0.92),
    tiers: Tiers,
    prompt: int,
    chunk: int = 8192,
    scale: float | None = None,
) -> torch.Tensor:
    """What every query of one sequence gets from one layer, prompt and decoded tokens alike, `[T, N, D]` fp32.

    Args:
        q: `[T, N, D]`, k, v: `[T, K, D]`, after rotary positions.
        rotations: R of K and V, `[D, D]` for the layer or `[K, D, D]`.
        prompt: leading tokens that came as the prompt, in chunks of `chunk`; the rest were decoded one by one.
    """
    positions = torch.arange(len(q), device=q.device)
    plain = semantics.plain_dtype
    rotation_k, rotation_v = (_per_head(r, k.shape[1]).float() for r in rotations)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.to(plain).float() for x in (k, v))
    reference_end = tiers.reference_history_end(positions, prompt=prompt, chunk=chunk)
    written = int(tiers.reference_history_end(torch.tensor(prompt), prompt=prompt, chunk=chunk))
    if semantics.recents == "by-position":
        written = int(tiers.history_end(torch.tensor(prompt - 1)))

    def rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        if semantics.frame == "plain":
            return _rotate(x, rotation)
        return _rotate(x.to(plain).float(), rotation.to(plain).float()).to(plain).float()

    key_rows, value_rows = rotated(k, rotation_k), rotated(v, rotation_v)
    decoded = [
        _round_trip(rows, ratio, semantics, written)
        for rows, ratio in zip((key_rows, value_rows), clip_ratios, strict=True)
    ]
    ends = tiers.history_end(positions)
    decode_end = reference_end if semantics.recents == "from-prompt" else ends
    prompt_end = reference_end if semantics.prefill == "chunk-exact" else ends
    options = dict(
        positions=positions, history_end=torch.where(positions < prompt, prompt_end, decode_end), sink=tiers.sink,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )  # fmt: skip
    if semantics.frame == "plain":
        hats = [_rotate(x, r.mT) for x, r in zip(decoded, (rotation_k, rotation_v), strict=True)]
        return attention.attend(q.float(), k, v, *hats, **options)
    queries = rotated(q, rotation_k.repeat_interleave(groups, 0))
    out = attention.attend(queries, key_rows, value_rows, *decoded, **options)
    return rotated(out, rotation_v.mT.repeat_interleave(groups, 0))


def _round_trip(rows: torch.Tensor, ratio: float, semantics: Semantics, written: int) -> torch.Tensor:
    """Decoded rows `[T, K, D]`; those from position `written` on were demoted by decoding, not written by prefill."""
    exact = decode(encode(rows, ratio, semantics), semantics)
    if semantics.clip == "rank":
        return exact
    demoted = decode(encode(rows, ratio, semantics, evaluator="bisect"), semantics)
    return torch.where((torch.arange(len(rows), device=rows.device) < written)[:, None, None], exact, demoted)


def _per_head(rotation: torch.Tensor, kv_heads: int) -> torch.Tensor:
    return rotation.expand(kv_heads, *rotation.shape[-2:])


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    with full_precision():
        return torch.einsum("...kd,kde->...ke", x, rotation)
