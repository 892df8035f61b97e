"""From the tensors of a file to a `Decoder`, or to one error that lists everything that does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from oscar_jax import sharding
from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import Decoder, parameter_shapes

_DTYPES = ("float32", "bfloat16", "float16", "float64")


class StoredTensor(NamedTuple):
    """A tensor in a file: its shape, known without reading it, and how to read a part of it."""

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], np.ndarray]


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
    mesh: jax.sharding.Mesh | None = None,
) -> Decoder:
    """Reads, transposes, stacks and casts a checkpoint's tensors.

    One weight of all layers is on the host at a time; on a mesh one device's part of it, and a process reads only the
    parts that its devices hold.

    Args:
        config: the model.
        tensors: everything the checkpoint holds, by its own names. Matrices are `[outputs, inputs]`.
        names: for every name of `parameter_shapes`, the checkpoint's name with `{layer}` in it.
        source: what to call the checkpoint in errors.
        dtype: of all weights.
        ignored: pattern of whole names that may be present and are not used.
        mesh: to place the weights on; None for one device.

    Raises:
        ValueError: tensors are missing, unknown, or of the wrong shape; every one of them is listed.
    """
    dtype = compute_dtype(dtype)
    shapes = parameter_shapes(config)
    expected = {
        names[name].format(layer=layer): kind.stored
        for name, kind in shapes.items()
        for layer in range(config.layers if name.startswith("layers.") else 1)
    }
    _check(tensors, expected, source=source, ignored=ignored)

    weights = {}
    for name, kind in shapes.items():
        layered = name.startswith("layers.")
        keys = [names[name].format(layer=layer) for layer in range(config.layers if layered else 1)]

        def read(index: tuple[slice, ...], keys=keys, matrix=kind.matrix, layered=layered) -> np.ndarray:
            """A part of the weight; of a layered one `index` begins with all layers."""
            inner = index[1:] if layered else index
            first = _part(tensors[keys[0]], inner, matrix)
            if not layered:
                return first.astype(dtype, copy=False)
            stacked = np.empty((len(keys), *first.shape), dtype)
            stacked[0] = first
            for layer, key in enumerate(keys[1:], 1):
                stacked[layer] = _part(tensors[key], inner, matrix)
            return stacked

        shape = (config.layers, *kind.shape) if layered else kind.shape
        if mesh is None:
            weights[name] = jnp.asarray(read((slice(None),) * len(shape)))
        else:
            weights[name] = sharding.placed(mesh, sharding.weight_spec(name, config, mesh), shape, read)
    decoder = Decoder(config, weights)
    return decoder if mesh is None else sharding.place_decoder(decoder, mesh)


def _part(tensor: StoredTensor, index: tuple[slice, ...], matrix: bool) -> np.ndarray:
    return tensor.read(index[::-1]).T if matrix else tensor.read(index)


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
