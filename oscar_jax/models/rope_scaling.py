"""Inverse frequencies and attention factor of every rotary variant whose frequencies do not change while it runs.

The variants and their parameter names are those of Hugging Face configurations (`rope_scaling`, later
`rope_parameters`). Frequencies are float64; transformers computes the same in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pallas_kernels.rope import Rotary


def rotary_from_parameters(
    parameters: Mapping[str, Any], *, head_dim: int, context: int, max_position: int
) -> tuple[Rotary, float]:
    """The rotation and the attention factor that a model's rotary parameters describe.

    Args:
        parameters: `rope_type` (or `type`; "default" if absent), `rope_theta`, `partial_rotary_factor` and what the
            variant needs: `factor`, `original_max_position_embeddings`, `low_freq_factor`, `high_freq_factor`,
            `beta_fast`, `beta_slow`, `truncate`, `attention_factor`, `mscale`, `mscale_all_dim`, `short_factor`,
            `long_factor`.
        head_dim: D.
        context: the model's own maximum, `max_position_embeddings`.
        max_position: tokens the caller will use. longrope has two sets of frequencies and takes the long one if this
            is beyond its original context; one set serves all positions, because stored keys cannot be turned again.

    Raises:
        NotImplementedError: frequencies that depend on the length (dynamic NTK), multi-axis rotary, unknown variants.
        ValueError: a parameter of the variant is missing.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "mrope" or parameters.get("mrope_section"):
        raise NotImplementedError(
            "rope_type 'mrope' (multi-axis rotary positions) is not supported: use a text-only model."
        )
    if kind == "dynamic":
        raise NotImplementedError(
            "rope_type 'dynamic' (NTK frequencies that change with the length) is not supported, because stored keys "
            "cannot be turned again: use 'yarn', or remove the scaling."
        )
    if kind not in _VARIANTS:
        raise NotImplementedError(f"rope_type {kind!r} is not supported: expected one of {', '.join(_VARIANTS)}.")
    rotary_dim = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    theta = float(_required(parameters, "rope_theta", kind))
    plain = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    frequencies, attention_factor = _VARIANTS[kind](plain, parameters, context, max_position)
    return Rotary(tuple(float(f) for f in frequencies), rotary_dim, "half"), float(attention_factor)


_Variant = Callable[[np.ndarray, Mapping[str, Any], int, int], tuple[np.ndarray, float]]


def _default(
    plain: np.ndarray, parameters: Mapping[str, Any], context: int, max_position: int
) -> tuple[np.ndarray, float]:
    return plain, 1.0


def _linear(
    plain: np.ndarray, parameters: Mapping[str, Any], context: int, max_position: int
) -> tuple[np.ndarray, float]:
    return plain / _required(parameters, "factor", "linear"), 1.0


def _llama3(
    plain: np.ndarray, parameters: Mapping[str, Any], context: int, max_position: int
) -> tuple[np.ndarray, float]:
    """Wavelengths above original / low are slowed by `factor`, those below original / high kept, the others blended."""
    factor, low, high, original = (
        _required(parameters, name, "llama3")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = original * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (kept + (1 - kept) / factor), 1.0


def _yarn(
    plain: np.ndarray, parameters: Mapping[str, Any], context: int, max_position: int
) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): a ramp over the pair index between kept and slowed frequencies."""
    original = parameters.get("original_max_position_embeddings") or context
    factor = parameters.get("factor") or context / original
    theta, dim = float(parameters["rope_theta"]), 2 * len(plain)

    def pair_turning(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(parameters.get("beta_fast") or 32)
    high = pair_turning(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = np.clip((np.arange(len(plain)) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return plain * (1 - slowed + slowed / factor), _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return growth(mscale) / growth(mscale_all_dim) if mscale and mscale_all_dim else growth(1.0)


def _longrope(
    plain: np.ndarray, parameters: Mapping[str, Any], context: int, max_position: int
) -> tuple[np.ndarray, float]:
    original = parameters.get("original_max_position_embeddings") or context
    name = "long_factor" if max_position > original else "short_factor"
    divisors = np.asarray(_required(parameters, name, "longrope"), np.float64)
    if divisors.shape != plain.shape:
        raise ValueError(f"{name} has {divisors.size} entries: expected {plain.size}, one for each rotated pair.")
    factor = parameters.get("factor") or context / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return plain / divisors, attention_factor


_VARIANTS: dict[str, _Variant] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _required(parameters: Mapping[str, Any], name: str, kind: str) -> Any:
    if parameters.get(name) is None:
        raise ValueError(f"rotary parameter {name!r} is missing: rope_type {kind!r} needs it.")
    return parameters[name]
