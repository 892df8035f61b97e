"""Cases in numpy: read from the vectors, or made at random by `triton_ref.cases`."""

from __future__ import annotations

import dataclasses
import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

FORMAT = 1
OPERATIONS = ("packing", "codec", "clip", "rotations", "demotion", "attention", "calibration", "model")


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One operation with inputs and expected outputs; `tests/vectors/README.md` lists the names of each operation."""

    operation: str
    name: str
    meta: dict[str, Any]
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]


def read(path: Path) -> Case:
    """One vector file.

    Raises:
        ValueError: not a file of this format; the path is named.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays.pop("meta")))
        version, operation, name = meta["format"], meta["operation"], meta["case"]
        for narrow in meta["bfloat16"]:
            arrays[narrow] = arrays[narrow].view(np.dtype(jnp.bfloat16))
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a vector file ({error!r}); make them with tests/vectors/generate.py.") from None
    if version != FORMAT or operation not in OPERATIONS:
        raise ValueError(
            f"{path}: format {version}, operation {operation!r}; expected format {FORMAT} and one of "
            f"{', '.join(OPERATIONS)}."
        )
    sides = ({n.partition(".")[2]: x for n, x in arrays.items() if n.startswith(prefix)} for prefix in ("in.", "out."))
    return Case(operation, name, meta, *sides)


def read_all(folder: Path) -> list[Case]:
    """Every vector of a folder, in the order of `OPERATIONS`.

    Raises:
        ValueError: no vectors there, or a file that is none.
    """
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise ValueError(f"vectors={folder}: no .npz file; expected the folder tests/vectors of the repository.")
    return sorted((read(path) for path in paths), key=lambda case: OPERATIONS.index(case.operation))


def random_cases(seed: int) -> Iterator[Case]:
    """Fresh inputs of codec, clip, demotion and attention; needs PyTorch."""
    from triton_ref import cases

    for kind in cases.KINDS:
        yield from_torch(cases.codec_case(kind, seed=seed), seed)
    yield from_torch(cases.clip_case(head_dim=64, seed=seed), seed)
    for kind, bucket in (("default", 32), ("reference", None)):
        yield from_torch(cases.demotion_case(kind, bucket=bucket, seed=seed), seed)
    yield from_torch(cases.random_attention(seed, bucket=128), seed)  # which every kernel takes


def from_torch(case: Any, seed: int) -> Case:
    """A `triton_ref.cases.Case` as arrays."""
    import torch

    def array(tensor: torch.Tensor) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.uint16).numpy().view(np.dtype(jnp.bfloat16))
        return tensor.numpy()

    inputs, expected = ({n: array(x) for n, x in tensors.items()} for tensors in (case.inputs, case.expected))
    return Case(case.operation, f"{case.name}, seed {seed}", case.meta, inputs, expected)


def part(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays named `<prefix>.<name>`, by name, as copies that may be written to."""
    return {name[len(prefix) + 1 :]: np.array(x) for name, x in arrays.items() if name.startswith(f"{prefix}.")}
