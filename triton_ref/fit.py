"""From moments to transform codes, float64: `oscar-reference`, `oscar-head`, `default`, `default-feedback`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from triton_ref import linalg
from triton_ref.code import NO_SLOT, TransformCode, TransformCodes
from triton_ref.moments import Settings
from triton_ref.rope import Rotary

SIX_BIT_COUNTS = (0, 1, 2, 3, 4, 6, 8)
ERRORS = {6: 0.00112, 4: 0.0118, 2: 0.119}
STEPS = {6: 0.104, 4: 0.335, 2: 0.996}
VARIANCE_FLOOR = 1e-8
RIDGE = 1e-3
VALUE_STEP, VALUE_GAIN = 0.98, 1.06
FEEDBACK_VALUE_STEP, FEEDBACK_VALUE_GAIN, DAMPING = 1.0, 1.03, 0.01

Sums = dict[str, torch.Tensor]


class Targets(NamedTuple):
    """Matrices whose eigenvectors rotate, `[L, K, D, D]`: of keys (`Q^T Q`), and the reference's of values."""

    key: torch.Tensor
    value: torch.Tensor


class Statistics(NamedTuple):
    """Mean `[L, K, D]`, covariance and error metric `[L, K, D, D]` of one side."""

    mean: torch.Tensor
    covariance: torch.Tensor
    metric: torch.Tensor


class Frame(NamedTuple):
    """M, A `[D, D]`, bits, weight `[D]` and the damped `A C A^T` `[D, D]` of one head."""

    encode: torch.Tensor
    inverse: torch.Tensor
    bits: torch.Tensor
    weight: torch.Tensor
    metric: torch.Tensor


def reference_targets(first: Sums, second: Sums, *, groups: int, per_layer: bool) -> Targets:
    """`C_Q = Q^T Q / (G T)` and `sum w v v^T / sum w`; averaged over the KV heads of a layer with `per_layer`."""
    key = first["query"] / (first["tokens"] * groups)
    value = second["logit"] / second["logit_weight"][..., None, None]
    if per_layer:
        key, value = (x.mean(1, keepdim=True).expand(x.shape) for x in (key, value))
    return Targets(key, value)


def reference(targets: Targets, *, clip_ratios: tuple[float, float] = (0.96, 0.92)) -> TransformCodes:
    """Rotations `U H P_br` with the online rank clip and min/max."""
    key, value = (
        rotation_code(linalg.reference_rotation(target), clip_ratio=ratio)
        for target, ratio in zip(targets, clip_ratios, strict=True)
    )
    return TransformCodes(key, value)


def rotation_code(rotation: torch.Tensor, *, clip: str = "rank", clip_ratio: float) -> TransformCode:
    """`M = R`, `E = R^T`, two bits a coordinate, min/max; R `[L, K, D, D]`."""
    vector, dim = rotation.shape[:-1], rotation.shape[-1]
    ones = torch.ones(vector)
    return TransformCode(
        mu=torch.zeros(vector), encode=rotation.float(), bits=torch.full(vector, 2, dtype=torch.int32), delta=ones,
        weight=ones, gain=torch.ones(vector[:-1]), slot_order=torch.arange(dim).expand(vector),
        decode=rotation.mT.float(), clip_threshold=None, metric=None, kind="minmax", clip=clip, clip_ratio=clip_ratio,
    )  # fmt: skip


def default_statistics(
    sums: Sums, *, rotary: Rotary | None, max_position: int, settings: Settings, value_metric: torch.Tensor | None
) -> tuple[Statistics, Statistics]:
    """Weighted statistics of keys and values; the query metric is averaged over the starts of all buckets."""

    def moments_of(side: str, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
        total = sums[weight][..., None]
        mean, second = sums[f"weighted_{side}_sum"] / total, sums[f"weighted_{side}"] / total[..., None]
        return mean, second - mean[..., :, None] * mean[..., None, :]

    query = sums["weighted_query"] / sums["weighted_pair"][..., None, None]
    if rotary is not None:
        offsets = range(0, max_position - settings.sink, settings.bucket)
        query = sum((_turned(query, rotary, offset) for offset in offsets), torch.zeros_like(query)) / len(offsets)
    dim = query.shape[-1]
    metric = torch.eye(dim, dtype=torch.float64).expand(query.shape) if value_metric is None else value_metric.double()
    key, value = moments_of("key", "weighted_pair"), moments_of("value", "weighted_value_weight")
    return Statistics(key[0], key[1], query), Statistics(value[0], value[1], metric)


def default(
    key: Statistics, value: Statistics, *, rotary: Rotary | None, bucket: int | None, feedback: bool = False
) -> TransformCodes:
    """Balanced bit planes for keys, two bits of the balanced frame for values; optionally with error feedback."""
    dim = key.mean.shape[-1]
    key_code = _levels(key, lambda spectrum: allocate(spectrum, dim), is_key=True, feedback=feedback)
    value_code = _levels(value, lambda spectrum: torch.full((dim,), 2), is_key=False, feedback=feedback)
    return TransformCodes(key_code, value_code, rotary, bucket if rotary is not None else None)


def balanced(
    covariance: torch.Tensor, metric: torch.Tensor, bits_of, *, metric_weights: bool, damping: float = 0.0
) -> Frame:
    """One head: `M = P^1/2 U Q / rms`, `A = rms Q^T U^T P^-1/2`, Q mixing each class of equal bits."""
    half, inverse_half = linalg.balance(covariance, metric, RIDGE)
    spectrum, vectors = linalg.eigh(half @ covariance @ half)
    spectrum = spectrum.clamp(min=0)
    bits = bits_of(spectrum)
    floor = torch.clamp(VARIANCE_FLOOR * spectrum[0], min=torch.finfo(torch.float64).tiny)
    encode, inverse = torch.zeros_like(covariance), torch.zeros_like(covariance)
    start = 0
    for width in (6, 4, 2):
        size = int((bits == width).sum())
        if not size:
            continue
        columns = slice(start, start + size)
        mixed = linalg.mixer(size)
        rms = torch.sqrt(torch.maximum(spectrum[columns].mean(), floor))
        encode[:, columns] = half @ vectors[:, columns] @ mixed / rms
        inverse[columns] = (inverse_half @ vectors[:, columns] @ mixed * rms).mT
        start += size
    kept, hessian = bits > 0, inverse @ metric @ inverse.mT
    hessian = (hessian + hessian.mT) / 2
    weight = hessian.diagonal() if metric_weights else torch.ones(len(bits)).double()
    # A dropped coordinate gets the identity's row: the matrix stays invertible and couples it to nothing.
    damped = hessian + torch.diag(torch.where(kept, damping * hessian.diagonal(), 1.0))
    return Frame(encode, inverse, bits, torch.where(kept, weight, 0), damped)


def allocate(spectrum: torch.Tensor, slots: int) -> torch.Tensor:
    """Bits of each coordinate, descending: the first split of least predicted error, n6 then n4 ascending."""
    dim, best, chosen = len(spectrum), torch.inf, (0, 0, 0)
    for n6 in SIX_BIT_COUNTS:
        for n4 in range((slots - 3 * n6) // 2 + 1):
            counts = (n6, n4, min(slots - 3 * n6 - 2 * n4, dim - n6 - n4))
            if counts[2] < 0:
                continue
            error, start = 0.0, 0
            for count, width in zip(counts, ERRORS, strict=True):
                error += ERRORS[width] * float(spectrum[start : start + count].sum()) ** 2 / max(count, 1)
                start += count
            error += float(spectrum[start:].square().sum())
            if error < best:
                best, chosen = error, counts
    kept = torch.tensor((6, 4, 2)).repeat_interleave(torch.tensor(chosen))
    return torch.nn.functional.pad(kept, (0, dim - len(kept)))


def _levels(statistics: Statistics, bits_of, *, is_key: bool, feedback: bool) -> TransformCode:
    lead, dim = statistics.mean.shape[:-1], statistics.mean.shape[-1]
    flat = [x.reshape(-1, dim, dim) for x in (statistics.covariance, statistics.metric)]
    damping = DAMPING if feedback else 0.0
    frames = [balanced(s, c, bits_of, metric_weights=is_key, damping=damping) for s, c in zip(*flat, strict=True)]
    encode, inverse, bits, weight, metric = (torch.stack(x).unflatten(0, lead) for x in zip(*frames, strict=True))
    step, gain = (FEEDBACK_VALUE_STEP, FEEDBACK_VALUE_GAIN) if feedback else (VALUE_STEP, VALUE_GAIN)
    delta = torch.ones(bits.shape).double()
    for width, size in (STEPS if is_key else {2: step}).items():
        delta[bits == width] = size
    order = torch.arange(dim).expand(*lead, dim).clone()
    code = TransformCode(
        mu=statistics.mean.float(), encode=encode.float(), bits=bits.to(torch.int32), delta=delta.float(),
        weight=weight.float(), gain=torch.full(lead, 1.0 if is_key else gain), slot_order=order,
        decode=torch.empty(0), clip_threshold=None, metric=metric.float() if feedback else None, kind="levels",
    )  # fmt: skip
    owner, shift = code.slot_tables()
    if is_key:
        heaviness = _power_of(shift) * torch.gather(delta * weight.clamp(min=0).sqrt(), -1, owner)
        order = heaviness.argsort(dim=-1, stable=True)
        owner, shift = torch.gather(owner, -1, order), torch.gather(shift, -1, order)
    factor = _power_of(shift) * torch.gather(delta, -1, owner)
    rows = torch.gather(inverse, -2, owner[..., None].expand(*owner.shape, dim))
    return dataclasses.replace(code, slot_order=order, decode=(factor[..., None] * rows).float())


def _power_of(shift: torch.Tensor) -> torch.Tensor:
    """`4^r` of a slot whose level is shifted right by 2r bits; 0 without an owner."""
    return torch.where(shift == NO_SLOT, 0.0, 2.0 ** shift.double())


def _turned(matrix: torch.Tensor, rotary: Rotary, offset: int) -> torch.Tensor:
    """`R(o)^T C R(o)` of matrices `[..., D, D]`."""
    at = torch.tensor(offset)
    return rotary.rotate(rotary.rotate(matrix, at).mT, at).mT
