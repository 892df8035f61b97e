"""`oscar-jax convert`: rotation files of the reference implementation to an artifact, and back."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from calib import artifact, artifact_folder, rotation_zoo
from calib.identity import ModelIdentity
from calib.rotation_zoo import RotationFile
from pallas_kernels.transform_code import TransformCodes

KEY_FILE, VALUE_FILE = "k_rotation.pt", "v_rotation.pt"


def run(args: argparse.Namespace) -> int:
    """`oscar-jax convert import|export`; always 0, errors are raised."""
    if args.action == "import":
        artifact_folder.require_replaceable(args.out)
        from oscar_jax import models  # transformers, needed only to read a model

        model = None if args.model is None else models.load(args.model)
        codes, manifest = import_rotations(
            args.key_file,
            args.value_file,
            out=args.out,
            shape=None if model is None else (model.config.layers, model.config.kv_heads, model.config.head_dim),
            identity=None if model is None else model.identity,
        )
        report = {
            "artifact": str(args.out),
            "recipe": manifest.recipe,
            "layers": codes.layers,
            "kv_heads": codes.kv_heads,
            "head_dim": codes.head_dim,
            "clip": [codes.key.clip_ratio, codes.value.clip_ratio],
        }
        text = "{artifact}: {layers} layers, {kv_heads} KV heads of size {head_dim}, clip {clip}".format(**report)
    else:
        clip = export_rotations(args.artifact, out=args.out)
        report = {"files": [str(Path(args.out) / name) for name in (KEY_FILE, VALUE_FILE)], "clip": list(clip)}
        text = f"{' and '.join(report['files'])}: serve them with clip ratios {clip[0]} (K) and {clip[1]} (V)"
    print(json.dumps(report) if args.json else text)
    return 0


def import_rotations(
    key_file: str | Path,
    value_file: str | Path,
    *,
    out: str | Path,
    shape: tuple[int, int, int] | None = None,
    identity: ModelIdentity | None = None,
) -> tuple[TransformCodes, artifact.Manifest]:
    """Two RotationZoo files to an artifact at `out`, with the reference's clip ratios.

    Args:
        key_file, value_file: `.pt` files of one model; read without executing anything in them.
        out: the artifact's directory, as `artifact.save` takes it.
        shape: layers, KV heads and head size of the model. Needed for files with one rotation a layer, which do not say
            for how many heads.
        identity: recorded, so that the artifact refuses another model.

    Raises:
        ValueError: a file that is damaged or not of this kind, keys and values swapped as far as their objectives
            tell (those of the reference and of `export_rotations` do), sides or a model that do not fit each other.
    """
    key, value = rotation_zoo.read(key_file), rotation_zoo.read(value_file)
    _require_side(key_file, key, "key")
    _require_side(value_file, value, "value")
    if shape is not None:
        _require_fit(key_file, key, shape)
    kv_heads = _heads(key) or _heads(value) if shape is None else shape[1]
    if kv_heads is None:
        raise ValueError(
            f"{key_file}: has one rotation a layer, so the number of KV heads is unknown; name the model with --model."
        )
    codes = rotation_zoo.to_codes(key, value, kv_heads=kv_heads)
    ids = tuple(sorted(key.layers))
    manifest = artifact.Manifest(
        recipe=f"{key.objective}+{value.objective}",
        model=identity,
        layer_ids=() if ids == tuple(range(len(ids))) else ids,
    )
    return codes, artifact.save(out, codes, manifest)


def export_rotations(source: str | Path, *, out: str | Path) -> tuple[float, float]:
    """An artifact of rotations to `out/k_rotation.pt` and `out/v_rotation.pt`; returns the clip ratios of K and V.

    The files have no place for clip ratios, so whoever serves them has to be told. Their objectives are those they were
    imported with, else the recipe's name and the side, by which `import_rotations` knows the sides apart.

    Raises:
        ValueError: an artifact that cannot be loaded, or that is more than rotations.
        OSError: `out` cannot be written.
    """
    codes, manifest = artifact.load(source)
    key_objective, joined, value_objective = manifest.recipe.partition("+")  # as `import_rotations` joins them
    objectives = (key_objective, value_objective) if joined else (f"{manifest.recipe}-key", f"{manifest.recipe}-value")
    key, value = rotation_zoo.from_codes(codes, objectives=objectives, layer_ids=manifest.layer_ids or None)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    rotation_zoo.write(folder / KEY_FILE, key)
    rotation_zoo.write(folder / VALUE_FILE, value)
    return codes.key.clip_ratio, codes.value.clip_ratio


def _heads(file: RotationFile) -> int | None:
    """KV heads, if the file has a rotation for each."""
    rotation = next(iter(file.layers.values())).rotation
    return len(rotation) if rotation.ndim == 3 else None


def _require_side(path: str | Path, file: RotationFile, side: str) -> None:
    """Refuses what was fitted for the other side: keys from queries (Q Q^T), values from weighted values (S S^T).

    The reference begins objectives with that, our own end with the side; an objective of neither kind passes.
    """
    begin, end = {"key": ("sst", "-value"), "value": ("qqt", "-key")}[side]
    if file.objective.startswith(begin) or file.objective.endswith(end):
        raise ValueError(
            f"{path}: objective {file.objective!r:.40} is not of the {side} side; give the keys first, then the values."
        )


def _require_fit(path: str | Path, file: RotationFile, shape: tuple[int, int, int]) -> None:
    layers, _, head_dim = shape
    if file.head_dim != head_dim:
        raise ValueError(
            f"{path}: rotations of head size {file.head_dim}, the model has {head_dim}; use the model's file."
        )
    if sorted(file.layers) != list(range(layers)):
        raise ValueError(
            f"{path}: has {len(file.layers)} layers up to {max(file.layers)}, the model has layers 0 to {layers - 1}; "
            "use the model's own file."
        )
