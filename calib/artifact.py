"""The stored artifact: one recipe's `TransformCodes` for one model, and a manifest that says what they are.

An artifact is a directory under Orbax's `CheckpointManager` (one kept step, items `arrays` and `manifest`). A step is
written beside the old one and renamed, so a kill at any moment leaves the old artifact, none, or the complete new one;
what an interrupted save left is removed by the next. Several recipes are several directories. Arrays are stored whole,
from the host, so the number of devices at saving does not matter at loading, and loading never executes anything from
the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from calib import artifact_folder
from calib.identity import ModelIdentity
from calib.manifest import FORMAT_VERSION, SIDES, ArrayRecord, CodesRecord, Manifest, SideRecord, package_versions
from pallas_kernels.transform_code import TransformCode, TransformCodes

Placement = jax.sharding.Sharding | Callable[[str], jax.sharding.Sharding | None]


def save(path: str | os.PathLike[str], codes: TransformCodes, manifest: Manifest) -> Manifest:
    """Writes an artifact, replacing the one at `path` if there is one; returns the manifest as stored.

    Args:
        path: the artifact's directory; made if missing, else one that `artifact_folder.require_replaceable` takes.
        codes: arrays on any devices, in any sharding.
        manifest: the caller's fields.

    Raises:
        ValueError: codes that fail the loading checks (zero or non-finite scales too), layer ids or rounding errors
            that do not fit, a directory of something else.
        OSError: the disk is full, `path` cannot be written, or another process is saving to it; the old artifact, if
            any, is untouched.
    """
    path = Path(path).absolute()
    codes.check()
    if manifest.layer_ids and len(manifest.layer_ids) != codes.layers:
        raise ValueError(
            f"layer_ids has {len(manifest.layer_ids)} ids, the codes {codes.layers} layers; give one each."
        )
    if manifest.rounding:
        manifest.rounding.check(codes.layers, codes.kv_heads)
    arrays = {side: _little_endian(getattr(codes, side).arrays()) for side in SIDES}
    manifest = dataclasses.replace(
        manifest,
        codes=CodesRecord(
            rotary=codes.rotary,
            bucket=codes.bucket,
            scale_dtype=codes.scale_dtype,
            key=_side_record(codes.key, arrays["key"]),
            value=_side_record(codes.value, arrays["value"]),
        ),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        packages=package_versions(),
        format_version=FORMAT_VERSION,
    )
    existed = path.exists()
    with contextlib.ExitStack() as lock:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock.enter_context(artifact_folder.replacing(path))
            artifact_folder.discard_unfinished(path)
            size = sum(array.nbytes for side in arrays.values() for array in side.values())
            artifact_folder.require_space(path, size)
            with _manager(path) as manager:
                latest = manager.latest_step()
                contents = ocp.args.Composite(
                    arrays=ocp.args.StandardSave(arrays), manifest=ocp.args.JsonSave(_sealed(manifest.to_json()))
                )
                with _no_late_reports():
                    manager.save(0 if latest is None else latest + 1, args=contents)
        except (artifact_folder.Busy, artifact_folder.NotReplaceable):  # what is unfinished there is another's
            raise
        # Orbax and TensorStore report a failed write as OSError, ValueError or their own classes, by version.
        except Exception as error:
            artifact_folder.discard_late(path)
            if not existed and path.is_dir() and not any(path.iterdir()):
                path.rmdir()
            reason = _reason(error)
            full = reason.startswith("disk full") or os.strerror(errno.ENOSPC) in reason
            advice = "free some space or choose another path" if full else "choose another path"
            raise OSError(f"artifact {path}: cannot be written ({reason}); {advice}.") from error
    return manifest


def load(
    path: str | os.PathLike[str], *, model: ModelIdentity | None = None, sharding: Placement | None = None
) -> tuple[TransformCodes, Manifest]:
    """Reads an artifact, verifies all of it, and places it.

    Args:
        path: the artifact's directory.
        model: the model it is to serve; compared by both hashes unless the artifact records no model.
        sharding: where the arrays go, whatever they were saved from. None: the default device. A `Sharding`: all of
            them. A callable: the sharding of each leaf path ("key/mu", "value/decode", ...), or None again. One that
            spans processes must divide layers and heads alone; each process then reads, checks and holds its own
            heads, and compares their own hashes (not where layers are divided, nor of older artifacts).

    Raises:
        ValueError: one sentence naming the path, for a missing or incomplete artifact, another format version, another
            model, arrays that differ from the manifest in name, shape, dtype or bytes, and codes that fail the loading
            checks.
    """
    path = Path(path).absolute()
    step, manifest = _read_manifest(path)
    if model is not None and manifest.model is not None:
        _require_same_model(path, manifest.model, model)
    record = manifest.codes
    if record is None:
        raise ValueError(f"artifact {path}: the manifest describes no codes; calibrate again.")
    try:
        if isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_addressable:
            return _restore_parts(path, step, record, sharding), manifest
        arrays = _restore(path, step, record)
        sides = {side: _code(getattr(record, side), arrays[side]) for side in SIDES}
        codes = TransformCodes(**sides, rotary=record.rotary, bucket=record.bucket, scale_dtype=record.scale_dtype)
        codes.check()
    except ValueError as error:
        raise ValueError(f"artifact {path}: {error}") from None
    return _place(codes, sharding), manifest


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest alone; raises ValueError as `load` does for what can be told from it."""
    return _read_manifest(Path(path).absolute())[1]


def _read_manifest(path: Path) -> tuple[int, Manifest]:
    """Also the step it was read from, so that the arrays come from the same one."""
    if path.is_file():
        raise ValueError(f"artifact {path}: a file; expected the directory that `oscar-jax calibrate --out` made.")
    if not path.is_dir():
        raise ValueError(f"artifact {path}: no such directory; make it with `oscar-jax calibrate --out {path}`.")
    if (path / artifact_folder.PLAN_FILE).is_file():
        parts = ", ".join(sorted(part.name for part in path.iterdir() if part.is_dir()))
        raise ValueError(
            f"artifact {path}: its layers have different sizes, which this does not take; name one of {parts}."
        )
    with _manager(path) as manager:
        step = manager.latest_step()
        if step is None:
            if children := [child.name for child in sorted(path.iterdir()) if any(child.glob("[0-9]*"))]:
                raise ValueError(f"artifact {path}: a folder of several; name one of them: {', '.join(children)}.")
            raise ValueError(
                f"artifact {path}: nothing complete in it; make it with `oscar-jax calibrate --out {path}`."
            )
        try:
            with _no_late_reports():
                sealed = manager.restore(step, args=ocp.args.Composite(manifest=ocp.args.JsonRestore()))["manifest"]
        except Exception as error:
            child = artifact_folder.foreign(path)
            if child is not None and artifact_folder.is_artifact(path):
                raise ValueError(
                    f"artifact {path}: {child.name!r} in it is not an artifact's; move that elsewhere."
                ) from None
            raise ValueError(
                f"artifact {path}: unreadable manifest ({_reason(error)}); delete the folder, then calibrate again."
            ) from None
    try:
        return step, Manifest.from_json(_unsealed(sealed))
    except ValueError as error:
        raise ValueError(f"artifact {path}: {error}") from None


@contextlib.contextmanager
def _manager(path: Path) -> Iterator[ocp.CheckpointManager]:
    """Orbax's manager of `path`, without the tracebacks it logs of errors that it also raises."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with ocp.CheckpointManager(
            path,
            options=ocp.CheckpointManagerOptions(max_to_keep=1, create=False, enable_async_checkpointing=False),
            item_handlers={"arrays": ocp.StandardCheckpointHandler(), "manifest": ocp.JsonCheckpointHandler()},
        ) as manager:
            yield manager
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _no_late_reports() -> Iterator[None]:
    """Around what Orbax reads or writes: drops what arrays still under way say once one has failed and it has closed
    the event loop of all.

    Each reports to the closed loop, and tasks go unread; the one error that counts was raised. Stays after an error,
    for nothing tells when the last of them is done.
    """
    if not isinstance(sys.unraisablehook, _LoopClosed):
        sys.unraisablehook = _LoopClosed(sys.unraisablehook)
    hook = sys.unraisablehook
    logging.getLogger("asyncio").addFilter(_not_of_orbax)
    yield
    logging.getLogger("asyncio").removeFilter(_not_of_orbax)
    if sys.unraisablehook is hook:
        sys.unraisablehook = hook.previous


@dataclasses.dataclass(frozen=True)
class _LoopClosed:
    """A `sys.unraisablehook` that leaves all but one error to the previous one."""

    previous: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (type(error) is RuntimeError and str(error) == "Event loop is closed"):
            self.previous(unraisable)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    said = f"{record.getMessage()} {record.exc_info}".lower()
    return "orbax" not in said and "tensorstore" not in said


def _restore(path: Path, step: int, record: CodesRecord) -> dict[str, dict[str, np.ndarray]]:
    """The arrays on the host, equal to the record in name, shape, dtype and hash."""
    expected = _expected(record)
    arrays = _read(path, step, record, lambda array: np.empty(array.shape, array.dtype))
    for name, array in expected.items():
        side, leaf = name.split("/")
        _require_like(f"{name} as read", arrays[side][leaf], array)
        if _sha256(arrays[side][leaf]) != array.sha256:
            raise ValueError(f"{name} is not as it was saved (sha256); restore the files or calibrate again.")
    return arrays


def _restore_parts(path: Path, step: int, record: CodesRecord, sharding: jax.sharding.Sharding) -> TransformCodes:
    """The codes with each of this process's devices holding its heads, which were checked as those of `_restore` are.

    Heads in errors of a code count from the first of a device.
    """
    arrays = _read(path, step, record, lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding))
    sides = {}
    for side in SIDES:
        parts = []
        for device in sorted(sharding.addressable_devices, key=lambda device: device.id):
            heads = {}
            for name, array in arrays[side].items():
                shard = next(shard for shard in array.addressable_shards if shard.device == device)
                heads[name] = np.asarray(shard.data)
                _require_heads(f"{side}/{name}", heads[name], shard.index[1], getattr(record, side).arrays[name])
            code = _code(getattr(record, side), heads)
            code.check(side)
            parts.append(jax.device_put(code, device))
        lead = arrays[side]["mu"].shape[:2]

        def joined(*leaves: jax.Array, lead=lead) -> jax.Array:
            return jax.make_array_from_single_device_arrays((*lead, *leaves[0].shape[2:]), sharding, list(leaves))

        sides[side] = jax.tree.map(joined, *parts)
    return TransformCodes(**sides, rotary=record.rotary, bucket=record.bucket, scale_dtype=record.scale_dtype)


def _require_heads(what: str, array: np.ndarray, heads: slice, record: ArrayRecord) -> None:
    """Raises ValueError if heads `[L, heads, ..]` of an array are not as they were saved, as far as it was recorded."""
    if len(array) < record.shape[0] or not record.heads:
        return
    for place, head in enumerate(range(record.shape[1])[heads]):
        if _sha256(array[:, place]) != record.heads[head]:
            raise ValueError(
                f"{what} of head {head} is not as it was saved (sha256); restore the files or calibrate again."
            )


def _expected(record: CodesRecord) -> dict[str, ArrayRecord]:
    return {f"{side}/{name}": array for side in SIDES for name, array in getattr(record, side).arrays.items()}


def _read(
    path: Path, step: int, record: CodesRecord, target: Callable[[ArrayRecord], Any]
) -> dict[str, dict[str, Any]]:
    """What Orbax restores for the target of each array, once the files hold what the record says."""
    expected = _expected(record)
    with _manager(path) as manager:
        try:
            with _no_late_reports():
                metadata = manager.item_metadata(step)["arrays"]
            stored = {f"{side}/{name}": leaf for side, leaves in metadata.items() for name, leaf in leaves.items()}
        except Exception as error:
            raise ValueError(f"the arrays' metadata cannot be read ({_reason(error)}); calibrate again.") from None
        if stored.keys() != expected.keys():
            raise ValueError(
                f"arrays {sorted(stored.keys() ^ expected.keys())} are in the files or the manifest but not in both; "
                "calibrate again."
            )
        # Orbax silently casts to the dtype it is asked for, so what it holds is compared before anything is restored.
        for name, array in expected.items():
            _require_like(f"{name} in the files", stored[name], array)
        targets = {
            side: {name: target(array) for name, array in getattr(record, side).arrays.items()} for side in SIDES
        }
        try:
            wanted = ocp.args.Composite(arrays=ocp.args.StandardRestore(targets))
            with _no_late_reports():
                return manager.restore(step, args=wanted)["arrays"]
        except Exception as error:
            raise ValueError(f"the arrays cannot be read ({_reason(error)}); calibrate again.") from None


def _require_like(what: str, array: Any, record: ArrayRecord) -> None:
    if tuple(array.shape) != record.shape or np.dtype(array.dtype).name != record.dtype:
        raise ValueError(
            f"{what} is {np.dtype(array.dtype).name}{list(array.shape)}, "
            f"the manifest says {record.dtype}{list(record.shape)}; calibrate again."
        )


def _require_same_model(path: Path, stored: ModelIdentity, model: ModelIdentity) -> None:
    if (stored.config_hash, stored.tokenizer_hash) != (model.config_hash, model.tokenizer_hash):
        what = "config" if stored.config_hash != model.config_hash else "tokenizer"
        raise ValueError(
            f"artifact {path}: calibrated for {_describe(stored)}, the model is {_describe(model)}, and their {what} "
            "differs; calibrate this model or load its own artifact."
        )


def _describe(model: ModelIdentity) -> str:
    tokenizer = model.tokenizer_hash[:12] if model.tokenizer_hash else "none"
    return f"{model.model_id} (config {model.config_hash[:12]}, tokenizer {tokenizer})"


def _side_record(code: TransformCode, arrays: dict[str, np.ndarray]) -> SideRecord:
    records = {
        name: ArrayRecord(array.shape, array.dtype.name, _sha256(array), tuple(map(_sha256, array.swapaxes(0, 1))))
        for name, array in arrays.items()
    }
    return SideRecord(code.kind, code.clip, code.clip_ratio, code.slots, records)


def _code(record: SideRecord, arrays: dict[str, Any]) -> TransformCode:
    if (record.clip == "static") != ("clip_threshold" in arrays):
        raise ValueError(f"clip {record.clip!r:.20} does not fit the stored arrays; calibrate again.")
    return TransformCode.from_arrays(
        arrays,
        kind=record.kind,  # type: ignore[arg-type]
        clip=record.clip,  # type: ignore[arg-type]
        clip_ratio=record.clip_ratio,
    )


def _place(codes: TransformCodes, sharding: Placement | None) -> TransformCodes:
    def place(key: tuple[Any, ...], leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(key, simple=True, separator="/")
        target = sharding(name) if callable(sharding) else sharding
        try:
            return jax.device_put(leaf, target)
        except ValueError as error:
            raise ValueError(f"sharding: {name} {list(leaf.shape)} does not fit {target} ({_reason(error)}).") from None

    return jax.tree_util.tree_map_with_path(place, codes)


def _sealed(tree: dict[str, Any]) -> dict[str, Any]:
    return {"manifest": tree, "sha256": _json_sha256(tree)}


def _unsealed(sealed: Any) -> Any:
    if not isinstance(sealed, dict) or _json_sha256(sealed.get("manifest")) != sealed.get("sha256"):
        raise ValueError(
            "the manifest is not as it was saved (sha256); restore the files, or delete the folder and calibrate again."
        )
    return sealed["manifest"]


def _json_sha256(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _little_endian(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in arrays.items()}


def _reason(error: BaseException) -> str:
    """The system's words for a failed operation where there are any, also inside TensorStore's; else one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip() or type(error).__name__
    if code := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(code[1]))
    return text.splitlines()[0][:200]
