"""RotationZoo `.pt` files: the rotations of the OSCAR reference (arXiv 2605.17757), read and written without torch.

A file is a `torch.save` zip archive of

    {"format_version": 1 | 2 | "identity-v1", "objective": str, "source_grouping": str,
     "layers": {global layer id: {"layer_id": int, "rotation": f32 [D, D] or [K, D, D], "eigenvalues": f32 [D]}}}

with int or str layer keys; eigenvalues are optional. `rotation` is the whole composed R, applied from the right,
`x @ R`. Version 1 has one matrix a layer, version 2 one a KV head. The files hold neither clip ratios nor window sizes.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import struct
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calib import restricted_pickle
from pallas_kernels.transform_code import TransformCode, TransformCodes

FORMAT_VERSIONS = (1, 2, "identity-v1")
ORTHOGONALITY_TOLERANCE = 1e-4
REFERENCE_CLIP = (0.96, 0.92)
MAX_ROTATION_BYTES = 2 << 30

_HEADER = ("format_version", "objective", "source_grouping")


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRotation:
    """`rotation`: f32 `[D, D]` of the layer or `[K, D, D]` of each KV head; `eigenvalues`: f32, as stored, or None."""

    rotation: np.ndarray
    eigenvalues: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class RotationFile:
    """One side (K or V) of a model.

    Attributes:
        format_version: 1 (a matrix a layer), 2 (a matrix a KV head) or "identity-v1".
        objective, source_grouping: what the writer recorded, e.g. "qqt_r_h_pbr" and "layer".
        layers: by global layer id, in file order.
        string_ids: whether the file's layer keys are strings.
        extra: any other top-level strings and numbers, kept for `write`.
    """

    format_version: int | str
    objective: str
    source_grouping: str
    layers: dict[int, LayerRotation]
    string_ids: bool = False
    extra: dict[str, str | int | float | bool | None] = dataclasses.field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        return next(iter(self.layers.values())).rotation.shape[-1]

    def check(self) -> None:
        """Raises ValueError, naming layer and head, unless every rotation is orthogonal: `max |R R^T - I| <= 1e-4`."""
        if self.format_version not in FORMAT_VERSIONS:
            raise ValueError(
                f"format_version {self.format_version!r:.40} is unknown; expected one of {FORMAT_VERSIONS}."
            )
        if not self.layers:
            raise ValueError("the file has no layers; expected at least one rotation.")
        dim, rank = self.head_dim, 3 if self.format_version == 2 else 2
        for layer, entry in self.layers.items():
            rotation = entry.rotation
            shape_ok = rotation.ndim == rank or (self.format_version == "identity-v1" and rotation.ndim == 3)
            if not shape_ok or rotation.shape[-2:] != (dim, dim) or not rotation.size or rotation.dtype != np.float32:
                wanted = f"[heads, {dim}, {dim}]" if rank == 3 else f"[{dim}, {dim}]"
                raise ValueError(
                    f"layer {layer}: rotation is {rotation.dtype}{list(rotation.shape)}, "
                    f"format_version {self.format_version} has float32{wanted}."
                )
            for head, matrix in enumerate(rotation.reshape(-1, dim, dim)):
                wide = matrix.astype(np.float64)
                error = np.abs(wide @ wide.T - np.eye(dim)).max()
                # `not <=` also catches NaN.
                if not error <= ORTHOGONALITY_TOLERANCE:
                    raise ValueError(
                        f"layer {layer}, head {head}: rotation is not orthogonal (max |R R^T - I| = {error:.1e}, "
                        f"allowed {ORTHOGONALITY_TOLERANCE:.0e}); fetch the file again or refit it."
                    )
            if self.format_version == "identity-v1" and not (rotation == np.eye(dim, dtype=np.float32)).all():
                raise ValueError(f"layer {layer}: format_version identity-v1 with a rotation that is not the identity.")


def read(path: str | os.PathLike[str]) -> RotationFile:
    """Reads a file with `restricted_pickle`, which cannot execute code, and checks it.

    Raises:
        ValueError: the path and one sentence for a missing or damaged file, another content, or a rotation that is not
            orthogonal.
    """
    content = restricted_pickle.load(path)
    try:
        file = _parse(content)
        file.check()
    except ValueError as error:
        raise ValueError(f"{Path(path)}: {error}") from None
    return file


def _parse(content: Any) -> RotationFile:
    if not isinstance(content, dict) or type(content.get("layers")) is not dict:
        raise ValueError(
            f"holds a {type(content).__name__} without a dict of layers; expected a RotationZoo file "
            "(bare MLA latent rotations are not supported)."
        )
    header = {name: content.get(name) for name in _HEADER}
    names = [header[name] for name in _HEADER[1:]]
    if type(header["format_version"]) not in (int, str) or not all(type(name) is str for name in names):
        raise ValueError(f"lacks one of {', '.join(_HEADER)}; expected a RotationZoo file.")
    extra = {key: value for key, value in content.items() if key not in (*_HEADER, "layers")}
    for key, value in extra.items():
        if type(key) is not str or not (value is None or isinstance(value, str | int | float)):
            raise ValueError(
                f"has an unknown entry {key!r:.40} of type {type(value).__name__}; expected strings and numbers."
            )
    entries: dict[int, LayerRotation] = {}
    total = 0
    for key, entry in content["layers"].items():
        layer = _layer_id(key)
        if layer in entries:
            raise ValueError(f"layer {layer} occurs twice.")
        if type(entry) is not dict or not set(entry) <= {"layer_id", "rotation", "eigenvalues"}:
            raise ValueError(f"layer {layer}: expected a dict of layer_id, rotation and (optionally) eigenvalues.")
        # Nothing but numbers and strings is compared or shown: tuples that share their parts take exponential time.
        own = entry.get("layer_id", layer)
        if type(own) is not int:
            raise ValueError(f"layer {layer}: layer_id is of type {type(own).__name__}, expected int.")
        if own != layer:
            raise ValueError(f"layer {layer}: layer_id says {own}.")
        if "rotation" not in entry:
            raise ValueError(f"layer {layer}: has no rotation.")
        rotation = _float32(layer, "rotation", entry["rotation"])
        eigenvalues = entry.get("eigenvalues")
        # A small file can name one large storage from thousands of layers; copies are made only below this bound.
        total += rotation.nbytes
        if total > MAX_ROTATION_BYTES:
            raise ValueError(f"rotations of more than {MAX_ROTATION_BYTES} bytes; expected at most that.")
        if eigenvalues is not None:
            eigenvalues = _float32(layer, "eigenvalues", eigenvalues)
        entries[layer] = LayerRotation(rotation, eigenvalues)
    return RotationFile(
        **header,  # type: ignore[arg-type]
        layers=entries,
        string_ids=any(type(key) is str for key in content["layers"]),
        extra=extra,
    )


def _layer_id(key: int | str) -> int:
    if type(key) is int and key >= 0:
        return key
    if type(key) is str and key.isascii() and key.isdigit() and len(key) < 7 and str(int(key)) == key:
        return int(key)
    raise ValueError(f"layer key {key!r:.40} is not a layer number.")


def _float32(layer: int, name: str, value: Any) -> np.ndarray:
    """The view itself: the reference writes FloatStorage only, and a cast would break the bit-equal round trip."""
    if not isinstance(value, np.ndarray) or value.dtype != np.float32:
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"layer {layer}: {name} is {kind}, expected a float32 tensor; save it with .float().")
    return value


def write(path: str | os.PathLike[str], file: RotationFile) -> None:
    """Writes `file` so that `torch.load(path, weights_only=True)` gives it back bit for bit.

    Equal contents give equal bytes. They are written beside `path` and renamed, so an interrupted call leaves the old
    file or none.

    Raises:
        ValueError: the rotations fail `RotationFile.check`.
        OSError: the path cannot be written; one sentence with the reason.
    """
    file.check()
    path = Path(path)
    pickle, storages = _pickle(file)
    members = {"data.pkl": pickle, "byteorder": b"little"}
    members |= {f"data/{index}": array.astype("<f4").tobytes() for index, array in enumerate(storages)}
    members |= {"version": b"3\n"}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            # torch takes the root folder's name from the first member; a fixed name and date keep equal bytes equal.
            archive.writestr(zipfile.ZipInfo(f"archive/{name}", date_time=(1980, 1, 1, 0, 0, 0)), data)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(buffer.getvalue())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        advice = "free some space or choose another path" if error.errno == errno.ENOSPC else "choose another path"
        raise OSError(f"{path}: cannot be written ({error.strerror}); {advice}.") from None


def _pickle(file: RotationFile) -> tuple[bytes, list[np.ndarray]]:
    """Protocol 2 opcodes (see `pickletools`) of the file's dict, without memo, and the arrays of `data/0`, ..."""
    storages: list[np.ndarray] = []

    def value(item: Any) -> bytes:
        match item:
            case None:
                return b"N"
            case bool():
                return b"\x88" if item else b"\x89"
            case int() if 0 <= item < 256:
                return b"K" + bytes([item])
            case int() if 0 <= item < 65536:
                return b"M" + struct.pack("<H", item)
            case int():
                return b"\x8a\x08" + struct.pack("<q", item)
            case float():
                return b"G" + struct.pack(">d", item)
            case str():
                return b"X" + struct.pack("<I", len(item.encode())) + item.encode()
            case tuple():
                return b"(" + b"".join(map(value, item)) + b"t"
            case dict():
                return b"}(" + b"".join(value(key) + value(entry) for key, entry in item.items()) + b"u"
            case np.ndarray():
                return tensor(item)
        raise TypeError(f"no pickle opcode for {type(item).__name__}.")

    def tensor(array: np.ndarray) -> bytes:
        storage = b"(" + value("storage") + b"ctorch\nFloatStorage\n" + value(str(len(storages))) + value("cpu")
        storage += value(array.size) + b"tQ"
        storages.append(array)
        strides = tuple(int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim))
        rest = value(0) + value(array.shape) + value(strides) + value(False) + b"ccollections\nOrderedDict\n)R"
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"

    layers = {}
    for layer, entry in file.layers.items():
        fields: dict[str, Any] = {"layer_id": layer, "rotation": entry.rotation}
        if entry.eigenvalues is not None:
            fields["eigenvalues"] = entry.eigenvalues
        layers[str(layer) if file.string_ids else layer] = fields
    content = {name: getattr(file, name) for name in _HEADER} | {"layers": layers} | file.extra
    return b"\x80\x02" + value(content) + b".", storages


def to_codes(
    key: RotationFile,
    value: RotationFile,
    *,
    kv_heads: int,
    clip: tuple[float, float] = REFERENCE_CLIP,
    layer_ids: Sequence[int] | None = None,
    scale_dtype: str = "float16",
) -> TransformCodes:
    """The reference's codec for these rotations: `M = R`, `E = R^T`, no mean, min/max quantization after the rank clip.

    Args:
        key, value: the two sides; the same layers and head size.
        kv_heads: K of the model. A per-layer matrix is used for each of its heads.
        clip: rank clip ratios of K and V in (0, 1]; 1 means no clip. The reference's are 0.96 and 0.92.
        layer_ids: global ids of the model's quantized layers, in model order; by default all of the file, ascending.
        scale_dtype: "float16" or "bfloat16", of scales and offsets.

    Raises:
        ValueError: sides that differ in layers or head size, a missing layer, another head count, or a clip ratio out
            of range.
    """
    if sorted(key.layers) != sorted(value.layers):
        raise ValueError(
            f"key has layers {_numbers(key.layers)}, value has {_numbers(value.layers)}; "
            "expected two files of one model."
        )
    if key.head_dim != value.head_dim:
        raise ValueError(
            f"key has head size {key.head_dim}, value has {value.head_dim}; expected two files of one model."
        )
    wanted = sorted(key.layers) if layer_ids is None else list(layer_ids)
    if absent := sorted(set(wanted) - set(key.layers)):
        raise ValueError(f"layer_ids: {_numbers(absent)} not in the files, which have layers {_numbers(key.layers)}.")
    return TransformCodes(
        key=_side(key, "key", wanted, kv_heads, clip[0]),
        value=_side(value, "value", wanted, kv_heads, clip[1]),
        scale_dtype=scale_dtype,
    )


def _side(file: RotationFile, side: str, layer_ids: Sequence[int], kv_heads: int, clip: float) -> TransformCode:
    if not 0 < clip <= 1:
        raise ValueError(f"clip={clip} of {side}: expected a ratio in (0, 1]; 1 means no clip.")
    file.check()
    rotations = []
    for layer in layer_ids:
        rotation = file.layers[layer].rotation
        if rotation.ndim == 3 and len(rotation) != kv_heads:
            raise ValueError(
                f"{side} layer {layer} has rotations of {len(rotation)} heads, the model has kv_heads={kv_heads}; "
                "use the model's own file."
            )
        rotations.append(np.broadcast_to(rotation, (kv_heads, *rotation.shape[-2:])))
    matrices = np.stack(rotations)
    vectors = matrices.shape[:-1]
    return TransformCode.build(
        mu=np.zeros(vectors, np.float32),
        encode=matrices,
        inverse=matrices.swapaxes(-1, -2),
        bits=np.full(vectors, 2, np.int8),
        delta=np.ones(vectors),
        weight=np.ones(vectors),
        kind="minmax",
        clip="none" if clip == 1 else "rank",
        clip_ratio=clip,
    )


def from_codes(
    codes: TransformCodes,
    *,
    objectives: tuple[str, str] = ("oscar_jax_key", "oscar_jax_value"),
    layer_ids: Sequence[int] | None = None,
) -> tuple[RotationFile, RotationFile]:
    """Inverse of `to_codes`: version 1 where all heads of every layer share a matrix, else version 2.

    Clip ratios have no place in a file; the reader must be told them.

    Args:
        codes: rotations only (the recipes `hadamard*` and `oscar-*` without a static threshold).
        objectives: recorded in the key and value file.
        layer_ids: global ids of the layers; 0 .. L-1 by default.

    Raises:
        ValueError: names the side and the property that a rotation file cannot hold.
    """
    ids = list(range(codes.layers)) if layer_ids is None else list(layer_ids)
    if len(ids) != codes.layers or len(set(ids)) != len(ids):
        raise ValueError(f"layer_ids={_numbers(ids)}: expected {codes.layers} different layers.")
    key, value = (
        _from_side(code, side, objective, ids)
        for code, side, objective in zip((codes.key, codes.value), ("key", "value"), objectives, strict=True)
    )
    return key, value


def _from_side(code: TransformCode, side: str, objective: str, layer_ids: list[int]) -> RotationFile:
    encode, decode = np.asarray(code.encode), np.asarray(code.decode)
    obstacles = {
        f"kind {code.kind!r}": code.kind != "minmax",
        "a static clip threshold": code.clip == "static",
        f"{code.slots} slots for {code.head_dim} coordinates": code.slots != code.head_dim,
        "coordinates of other than 2 bits": bool((np.asarray(code.bits) != 2).any()),
        "a mean": bool(np.asarray(code.mu).any()),
        "an error feedback metric": code.metric is not None,
        "a decode matrix other than the transpose": code.slots == code.head_dim and (decode != encode.mT).any(),
    }
    if found := [name for name, present in obstacles.items() if present]:
        raise ValueError(
            f"the {side} code has {' and '.join(found)}, which a RotationZoo file cannot hold; "
            "export codes of the recipes hadamard, hadamard-clip, oscar-reference or oscar-head."
        )
    shared = bool((encode == encode[:, :1]).all())
    file = RotationFile(
        format_version=1 if shared else 2,
        objective=objective,
        source_grouping="layer" if shared else "per_kv_head",
        layers={layer: LayerRotation(m[0] if shared else m) for layer, m in zip(layer_ids, encode, strict=True)},
    )
    file.check()
    return file


def _numbers(values: Iterable[int]) -> str:
    text = ", ".join(str(value) for value in sorted(values))
    return text if len(text) <= 60 else f"{text[:57]}..."
