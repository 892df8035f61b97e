"""From the tensors of a file to a `Decoder`, or to one error that lists everything that does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import Decoder, parameter_shapes

_DTYPES = ("float32", "bfloat16", "float16", "float64")


class StoredTensor(NamedTuple):
    """A tensor in a file: its shape, known without reading it, and how to read it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def compute_dtype(dtype: object) -> np.dtype:
    """The numpy dtype of `dtype`, checked.

    Raises:
        ValueError: not a float dtype of 16 bits or more, or float64 while jax has it switched off.
    """
    resolved = np.dtype(dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if resolved.name not in _DTYPES:
        raise ValueError(f"dtype={resolved.name}: expected one of {', '.join(_DTYPES)}.")
    if resolved == np.float64 and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError("dtype=float64: jax computes in float32 unless this runs inside `with jax.enable_x64(True):`.")
    return resolved


def assemble(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    names: Mapping[str, str],
    *,
    source: str,
    dtype: object,
    ignored: str = r"(?!)",
) -> Decoder:
    """Reads, transposes, stacks and casts a checkpoint's tensors.

    Args:
        config: the model.
        tensors: everything the checkpoint holds, by its own names. Matrices are `[outputs, inputs]`.
        names: for every name of `parameter_shapes`, the checkpoint's name with `{layer}` in it.
        source: what to call the checkpoint in errors.
        dtype: of all weights.
        ignored: pattern of whole names that may be present and are not used.

    Raises:
        ValueError: tensors are missing, unknown, or of the wrong shape; every one of them is listed.
    """
    dtype = compute_dtype(dtype)
    shapes = parameter_shapes(config)
    places: dict[str, tuple[str, int | None]] = {}
    for name in shapes:
        for layer in range(config.layers) if name.startswith("layers.") else (None,):
            places[names[name].format(layer=layer)] = (name, layer)
    _check(tensors, {key: shapes[name].stored for key, (name, _) in places.items()}, source=source, ignored=ignored)

    weights = {
        name: np.empty((config.layers, *kind.shape) if name.startswith("layers.") else kind.shape, dtype)
        for name, kind in shapes.items()
    }
    for key, (name, layer) in places.items():
        x = tensors[key].read()
        weights[name][... if layer is None else layer] = x.T if shapes[name].matrix else x
    return Decoder(config, {name: jnp.asarray(weight) for name, weight in weights.items()})


def _check(
    tensors: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], *, source: str, ignored: str
) -> None:
    unknown = sorted(key for key in tensors if key not in expected and not re.fullmatch(ignored, key))
    missing = sorted(key for key in expected if key not in tensors)
    wrong = [
        f"{key} {list(tensors[key].shape)} instead of {list(shape)}"
        for key, shape in sorted(expected.items())
        if key in tensors and tuple(tensors[key].shape) != shape
    ]
    parts = {"missing": missing, "unknown": unknown, "of the wrong shape": wrong}
    faults = [f"{len(found)} {fault}: {', '.join(found)}" for fault, found in parts.items() if found]
    if faults:
        raise ValueError(f"tensors of {source} do not fit its configuration: {'; '.join(faults)}.")
