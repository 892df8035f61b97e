"""Inverse frequencies and attention factor of every rotary variant whose frequencies do not change while it runs.

The variants and their parameter names are those of Hugging Face configurations (`rope_scaling`, later
`rope_parameters`). Frequencies are float64; transformers computes the same in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oscar_jax.models.config import positive_number
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
        ValueError: a parameter of the variant is missing or not a number that makes sense; it is named.
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
    if not isinstance(kind, str) or kind not in _VARIANTS:
        raise NotImplementedError(f"rope_type {kind!r:.60} is not supported: expected one of {', '.join(_VARIANTS)}.")
    rotary_dim = int(head_dim * (_optional(parameters, "partial_rotary_factor") or 1.0))
    if not 2 <= rotary_dim <= head_dim:
        factor = parameters["partial_rotary_factor"]
        raise ValueError(f"partial_rotary_factor={factor}: expected a share of head_dim={head_dim}, two at least.")
    theta = _required(parameters, "rope_theta", kind, above=1.0)
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
    if low >= high:
        raise ValueError(f"low_freq_factor={low:g}: expected less than high_freq_factor={high:g}.")
    turns = original * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (kept + (1 - kept) / factor), 1.0


def _yarn(
    plain: np.ndarray, parameters: Mapping[str, Any], context: int, max_position: int
) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): a ramp over the pair index between kept and slowed frequencies."""
    original = _optional(parameters, "original_max_position_embeddings", above=1.0) or context
    factor = _optional(parameters, "factor") or context / original
    theta, dim = float(parameters["rope_theta"]), 2 * len(plain)

    def pair_turning(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(_optional(parameters, "beta_fast") or 32)
    high = pair_turning(_optional(parameters, "beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = np.clip((np.arange(len(plain)) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return plain * (1 - slowed + slowed / factor), _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if (attention_factor := _optional(parameters, "attention_factor")) is not None:
        return attention_factor

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if not parameters.get("mscale") or not parameters.get("mscale_all_dim"):
        return growth(1.0)
    return growth(positive_number("mscale", parameters["mscale"])) / growth(
        positive_number("mscale_all_dim", parameters["mscale_all_dim"])
    )


def _longrope(
    plain: np.ndarray, parameters: Mapping[str, Any], context: int, max_position: int
) -> tuple[np.ndarray, float]:
    original = _optional(parameters, "original_max_position_embeddings", above=1.0) or context
    name = "long_factor" if max_position > original else "short_factor"
    given = _present(parameters, name, "longrope")
    if not isinstance(given, list | tuple) or len(given) != plain.size:
        count = len(given) if isinstance(given, list | tuple) else "no list of"
        raise ValueError(f"{name} has {count} entries: expected {plain.size}, one for each rotated pair.")
    divisors = np.asarray([positive_number(f"entry of {name}", each) for each in given])
    factor = _optional(parameters, "factor") or context / original
    attention_factor = _optional(parameters, "attention_factor")
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


def _required(parameters: Mapping[str, Any], name: str, kind: str, *, above: float = 0.0) -> float:
    return positive_number(name, _present(parameters, name, kind), above=above)


def _optional(parameters: Mapping[str, Any], name: str, *, above: float = 0.0) -> float | None:
    return None if parameters.get(name) is None else positive_number(name, parameters[name], above=above)


def _present(parameters: Mapping[str, Any], name: str, kind: str) -> Any:
    if parameters.get(name) is None:
        raise ValueError(f"rotary parameter {name!r} is missing: rope_type {kind!r} needs it.")
    return parameters[name]
