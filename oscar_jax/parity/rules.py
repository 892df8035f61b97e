"""Whether outputs agree, by the rules of equality that every implementation of a transform code is held to.

E1: from the same y, slots, scale and offset are bit-equal. E2: from the same x, a slot may differ only where the
float64 argument of the rounding lies within 2^-12 of a threshold, by one level, in at most 1e-5 of slots (at least
one), and scales are within one unit in the last place; with error feedback, the weighted error of a row is at most
1.001 of the expected one's. Attention: the error against float64 is at most twice that of eager PyTorch in the same
precision, plus two units in the last place of the largest output; in fp32, where the order of sums decides, 2e-6 of the
largest output is enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from oscar_jax.parity.cases import Case, part
from pallas_kernels.transform_code import TransformCode

NEAR_TIE = 2.0**-12
SLOT_SHARE = 1e-5
FEEDBACK_RATIO = 1.001
DECODED = 4e-6  # fp32 products of decoding, relative to the largest number of a row
MOMENTS = 1e-12
INVARIANTS = 1e-9
FP32 = 2e-6

Outputs = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """max_error and relative_error (to the largest expected number) of the numbers compared, 0 where only bits are;
    slots_equal: None where there are none."""

    max_error: float
    relative_error: float
    slots_equal: bool | None
    passed: bool


def judge(case: Case, outputs: Outputs, *, precision: str | None = None) -> Verdict:
    """Compares what an implementation gave with what was expected.

    Args:
        outputs: by name; an implementation may give only some of what is expected.
        precision: the arithmetic of its attention, "float32", "float16" or "bfloat16"; None is the plain dtype's.
    """
    if not outputs:
        return Verdict(np.inf, np.inf, None, False)
    if case.operation == "attention":
        verdict = _attention(case, outputs["out"], precision or case.meta["plain_dtype"])
    else:
        verdict = _RULES[case.operation](case, outputs)
    return dataclasses.replace(verdict, passed=bool(verdict.passed))


def _exact(case: Case, outputs: Outputs) -> Verdict:
    same = all(np.array_equal(x, case.expected[name]) for name, x in outputs.items())
    return Verdict(0.0, 0.0, same if "slots" in str(list(outputs)) else None, same)


def _errors(got: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Largest difference, and the same relative to the largest finite number wanted; equal NaN count as equal."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    if got.shape != wanted.shape:
        return np.inf, np.inf
    known = np.isfinite(wanted)
    if (np.isfinite(got) != known).any():
        return np.inf, np.inf
    error = float(np.abs(got - wanted)[known].max(initial=0))
    return error, error / max(float(np.abs(wanted[known]).max(initial=0)), 1e-300)


def _attention(case: Case, out: np.ndarray, precision: str) -> Verdict:
    wanted, counts = case.expected["out"], case.inputs["counts"]
    real = np.arange(wanted.shape[1]) < counts[:, None]
    if not np.isfinite(out[real].astype(np.float64)).all():
        return Verdict(np.inf, np.inf, None, False)
    error, relative = _errors(out[real], wanted[real])
    largest = np.abs(wanted[real]).max(initial=0)
    limit = 2 * case.meta["low_precision_error"][precision] + 2 * float(jnp.finfo(precision).eps) * largest
    if precision == "float32":
        limit = max(limit, FP32 * largest)
    return Verdict(error, relative, None, error <= limit)


def _codec(case: Case, outputs: Outputs) -> Verdict:
    """`y.slots`, `y.scale`, `y.offset`: quantized from the expected y (E1); without "y.": from x (E2); `x_hat`."""
    code = TransformCode.from_arrays(part(case.inputs, "code"), **case.meta["code"])
    error, relative, passed, slots_equal = 0.0, 0.0, True, True
    if "x_hat" in outputs:
        error, relative = _errors(outputs["x_hat"], case.expected["x_hat"])
        largest = np.abs(np.nan_to_num(case.expected["x_hat"])).max(-1, keepdims=True)
        off = np.abs(np.nan_to_num(outputs["x_hat"]) - np.nan_to_num(case.expected["x_hat"])) > DECODED * largest
        passed &= not off.any() and error < np.inf
    x = case.inputs["x"].astype(np.float64)
    with np.errstate(invalid="ignore"):
        y = np.einsum("nkd,kde->nke", x - code.mu, np.asarray(code.encode, np.float64))
    for prefix, rows, exact in (("y.", case.expected["y"].astype(np.float64), True), ("", y, False)):
        got = {name: outputs[prefix + name] for name in ("slots", "scale", "offset") if prefix + name in outputs}
        if not got:
            continue
        wanted = {name: case.expected[name] for name in got}
        slots_equal &= bool((got["slots"] == wanted["slots"]).all())
        if code.metric is not None:
            passed &= bool((_weighted(code, rows, got) <= FEEDBACK_RATIO * _weighted(code, rows, wanted) + 1e-30).all())
        elif exact:
            passed &= all(np.array_equal(x, wanted[name], equal_nan=x.dtype.kind == "f") for name, x in got.items())
        else:
            passed &= near_ties(code, rows, got, wanted)
    return Verdict(error, relative, slots_equal, bool(passed))


def near_ties(code: TransformCode, y: np.ndarray, got: Outputs, wanted: Outputs) -> bool:
    """E2 for rows y f64 `[n, K, D]` of one layer's code."""
    for name in ("scale", "offset"):
        if name in got and not _within_one_ulp(got[name], wanted[name]):
            return False
    differs = levels(code, got["slots"]).astype(int) - levels(code, wanted["slots"]).astype(int)
    places = np.nonzero(differs)
    slots = (_unpack(got["slots"]) != _unpack(wanted["slots"])).sum()
    if slots > max(1, SLOT_SHARE * got["slots"].size * 4) or np.abs(differs).max(initial=0) > 1:
        return False
    z = arguments(code, y)[places]
    return bool((np.abs(z - np.round(z)) < NEAR_TIE).all())


def levels(code: TransformCode, slots: np.ndarray) -> np.ndarray:
    """Stored level of each coordinate, `[n, K, D]`, of packed slots `[n, K, N/4]`."""
    owner, shift = np.asarray(code.slot_owner), np.asarray(code.slot_shift)
    parts = np.where(shift < 8, _unpack(slots).astype(int) << np.minimum(shift, 7), 0)
    result = np.zeros((*slots.shape[:-1], code.head_dim), int)
    for head in range(slots.shape[-2]):
        for slot, coordinate in enumerate(owner[head]):
            result[:, head, coordinate] += parts[:, head, slot]
    return result


def arguments(code: TransformCode, y: np.ndarray) -> np.ndarray:
    """What is rounded down to a level, float64 `[n, K, D]`: thresholds are the whole numbers."""
    with np.errstate(all="ignore"):
        if code.kind == "levels":
            kept = np.asarray(code.bits) > 0
            square = np.where(kept, y * y, 0).sum(-1, keepdims=True) / kept.sum(-1, keepdims=True)
            return np.where(kept, y / np.sqrt(square + 1e-12) / np.asarray(code.delta, np.float64), 0.5)
        if code.clip == "rank":
            rank = min(int(np.floor(code.clip_ratio * y.shape[-1])), y.shape[-1] - 1)
            bound = np.sort(np.abs(y), -1)[..., rank : rank + 1]
            y = np.clip(y, -bound, bound)
        elif code.clip == "static":
            bound = np.asarray(code.clip_threshold, np.float64)[:, None]
            y = np.clip(y, -bound, bound)
        low = y.min(-1, keepdims=True)
        return (y - low) / ((y.max(-1, keepdims=True) - low) / 3) + 0.5


def _weighted(code: TransformCode, y: np.ndarray, rows: Outputs) -> np.ndarray:
    """`e^T (A C A^T) e` of each finite row, e the error in y."""
    known = np.isfinite(rows["scale"].astype(np.float64))
    half = (1 << np.asarray(code.bits, int)) // 2
    level = np.where(half > 0, np.asarray(code.delta) * (levels(code, rows["slots"]) - half + 0.5), 0)
    error = np.where(half > 0, rows["scale"].astype(np.float64)[..., None] * level - y, 0)
    error = np.where(known[..., None], error, 0)
    return np.einsum("nkd,kde,nke->nk", error, np.asarray(code.metric, np.float64), error)


def _within_one_ulp(got: np.ndarray, wanted: np.ndarray) -> bool:
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    known = np.isfinite(wanted)
    if (np.isfinite(got) != known).any():
        return False
    got, wanted = got[known], wanted[known]
    # 11 bits of a float16; below its normal numbers the spacing is 2^-24.
    ulp = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(wanted), 2.0**-14))) - 10), 2.0**-24)
    return bool((np.abs(got - wanted) <= ulp).all())


def _unpack(packed: np.ndarray) -> np.ndarray:
    return np.concatenate([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)


def _demotion(case: Case, outputs: Outputs) -> Verdict:
    """History ends, or pages: the rows that were written by E2, everything else untouched."""
    if "pages.key.slots" not in outputs:
        return _exact(case, outputs)
    sink, _, _, page = case.meta["tiers"]
    place = np.arange(len(case.inputs["k"]))
    ids, offsets = case.inputs["page_indices"][0][place // page], place % page
    slots_equal, passed = True, True
    for side in ("key", "value"):
        code = TransformCode.from_arrays(part(case.inputs, f"codes.{side}"), **case.meta["codes"][side])
        got, wanted = (part(arrays, f"pages.{side}") for arrays in (outputs, case.expected))
        rows = [{name: x[ids, :, offsets] for name, x in pages.items()} for pages in (got, wanted)]
        x = case.inputs["k" if side == "key" else "v"].astype(np.float64)
        if side == "key":
            x = _turned(case, x, place, sink)
        y = np.einsum("nkd,kde->nke", x - code.mu, np.asarray(code.encode, np.float64))
        slots_equal &= bool((rows[0]["slots"] == rows[1]["slots"]).all())
        passed &= near_ties(code, y, *rows)
        for pages in (got, wanted):
            for pool in pages.values():
                pool[ids, :, offsets] = 0
        passed &= all((pool == 0).all() for pool in got.values())
    return Verdict(0.0, 0.0, slots_equal, bool(passed))


def _turned(case: Case, x: np.ndarray, place: np.ndarray, sink: int) -> np.ndarray:
    """Keys relative to their bucket's start, float64."""
    bucket, rotary = case.meta["codes"]["bucket"], case.meta["codes"]["rotary"]
    if bucket is None:
        return x
    angle = (sink + bucket * (place // bucket))[:, None, None] * np.asarray(rotary["inverse_frequencies"])
    half = rotary["rotary_dim"] // 2
    a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos + b * sin, b * cos - a * sin, x[..., 2 * half :]], -1)


def _calibration(case: Case, outputs: Outputs) -> Verdict:
    """Moments; rotations by `R^T C R`, frames by `M^T S M` and `A C A^T`; bits exactly."""
    worst, relative, passed = 0.0, 0.0, True
    for name, got in outputs.items():
        wanted = case.expected[name]
        if name.startswith("moments."):
            error, ratio = _errors(got, wanted)
            passed &= ratio <= MOMENTS
        elif name.endswith(".rotation"):
            target = case.expected[name.replace("rotation", "target")]
            error, ratio = _errors(*(np.swapaxes(r, -1, -2) @ target @ r for r in (got, wanted)))
            passed &= ratio <= INVARIANTS
        elif name.endswith(".encode"):
            covariance = case.expected[name.replace("encode", "covariance")]
            # M is stored in fp32: subspaces agree as far as that rounding allows.
            wide = (np.asarray(m, np.float64) for m in (got, wanted))
            error, ratio = _errors(*(np.swapaxes(m, -1, -2) @ covariance @ m for m in wide))
            passed &= ratio <= FP32
        else:
            error, ratio = _errors(got, wanted)
            passed &= bool(np.array_equal(got, wanted))
        worst, relative = max(worst, error), max(relative, ratio)
    return Verdict(worst, relative, None, bool(passed))


def _rotations(case: Case, outputs: Outputs) -> Verdict:
    """`U H P_br` by `R^T C R`, closed forms to 1e-9."""
    target = case.inputs["target"]
    worst, relative = 0.0, 0.0
    for name, got in outputs.items():
        wanted = case.expected[name]
        if name == "rotation":
            got, wanted = (np.swapaxes(r, -1, -2) @ target @ r for r in (got, wanted))
        error, ratio = _errors(got, wanted)
        worst, relative = max(worst, error), max(relative, ratio)
    return Verdict(worst, relative, None, relative <= INVARIANTS)


def _model(case: Case, outputs: Outputs) -> Verdict:
    """Logits to 1e-9, slots and scales identical (E3 in float64)."""
    error, relative = _errors(outputs["logits"], case.expected["logits"])
    stored = [name for name in case.expected if name != "logits"]
    same = all(np.array_equal(outputs[name], case.expected[name]) for name in stored)
    return Verdict(error, relative, same, same and error <= 1e-9)


_RULES: dict[str, Callable[[Case, Outputs], Verdict]] = {
    "packing": _exact,
    "codec": _codec,
    "clip": _exact,
    "rotations": _rotations,
    "demotion": _demotion,
    "calibration": _calibration,
    "model": _model,
}
