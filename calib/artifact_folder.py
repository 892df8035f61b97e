"""The directory of an artifact: what it may hold to be replaced, what a save deletes in it, and the lock of a save."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PLAN_FILE = "plan.json"  # marks a folder of artifacts that share out one model's layers (`oscar_jax.layer_plan`)
UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of every directory Orbax has not committed yet
STEP_NAMES = re.compile(  # of all files and directories within
    r"_CHECKPOINT_METADATA|_METADATA|commit_success\.txt|arrays|manifest|manifest\.ocdbt|ocdbt\.process_\d+|d|[0-9a-f]{32}"
)
STEP_ENTRIES = ("_CHECKPOINT_METADATA", "arrays", "commit_success.txt", "manifest")  # of an artifact, and nothing else


class NotReplaceable(ValueError):
    """The directory holds something else than an artifact."""


class Busy(OSError):
    """Another process saves to the directory."""


def require_replaceable(path: str | os.PathLike[str]) -> None:
    """Checks that `path` is no directory, an empty one, an artifact, or what an interrupted `save` left.

    Raises:
        NotReplaceable: it is not.
        Busy: another process saves to it.
    """
    path = Path(path).absolute()
    try:
        if path.is_dir():
            _check(path)
    except (NotReplaceable, FileNotFoundError):
        with replacing(path):  # says whether a save is under way; only now, for the lock would make one fail
            pass


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Locks a directory, checks it as `require_replaceable` does, and holds the lock."""
    with _exclusive(path):
        _check(path)
        yield


def _check(path: Path) -> None:
    if (path / PLAN_FILE).is_file():
        raise NotReplaceable(
            f"artifact {path}: the folder holds {PLAN_FILE!r}, which would be read as a plan of layers in the "
            "artifact's place; choose a new or empty folder."
        )
    if (child := foreign(path)) is not None:
        raise NotReplaceable(
            f"artifact {path}: the folder holds {child.name!r}, which is not an artifact's; choose a new or empty "
            "folder, or an artifact to replace."
        )


def foreign(path: Path) -> Path | None:
    """What keeps a directory from being replaced by an artifact.

    Orbax takes every directory named by a number for a step of its own, and deletes the old ones.
    """
    children, unfinished = sorted(path.iterdir()), _unfinished(path)
    steps = [child for child in children if child.name.isdecimal()]
    complete = [step for step in steps if _has_manifest(step)]
    newest = max((int(step.name) for step in complete), default=-1)
    # A kill while an old step was being deleted leaves a part of it beside the new one.
    partial = [step for step in steps if int(step.name) < newest and _is_partial(step)]
    found = [step for step in steps if step not in complete and step not in partial]
    found += [child for child in (*complete, *partial, *unfinished) if not _holds_only_ours(child)]
    if not found and not complete:
        found = [child for child in children if child not in unfinished]
    return next(iter(found), None)


def is_artifact(path: Path) -> bool:
    """Whether a directory holds a step of an artifact, of whatever format version, by its manifest."""
    return any(_has_manifest(child) for child in path.iterdir() if child.name.isdecimal())


def _holds_only_ours(step: Path) -> bool:
    if step.is_symlink() or not step.is_dir():
        return False
    return all(child.name.partition(UNFINISHED)[0] in STEP_ENTRIES for child in step.iterdir())


def _is_partial(step: Path) -> bool:
    """Whether it can be what is left of a step, by the names in it; its manifest is whole or gone."""
    return not (step / "manifest" / "metadata").exists() and all(
        STEP_NAMES.fullmatch(child.name) for child in step.rglob("*")
    )


def _has_manifest(step: Path) -> bool:
    """Whether it is a step of an artifact, of whatever format version."""
    try:
        sealed = json.loads((step / "manifest" / "metadata").read_bytes())
        return {"recipe", "format_version"} <= sealed["manifest"].keys() and "sha256" in sealed
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Locks a directory against other processes, where the system can; a kill ends the lock too."""
    if fcntl is None:
        yield
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"artifact {path}: is being saved by another process; wait or choose another path.") from None
        except OSError:
            pass  # a file system without locks of directories
        yield
    finally:
        os.close(folder)


def require_space(path: Path, array_bytes: int) -> None:
    """The old artifact stays until the new one is complete, so the new one needs room of its own."""
    needed, free = array_bytes + (1 << 16), shutil.disk_usage(path).free
    if needed > free:
        raise OSError(f"disk full, {needed} bytes needed, {free} free")


def _unfinished(path: Path) -> list[Path]:
    return [child for child in path.glob(f"*{UNFINISHED}*") if re.match(rf"\d+{re.escape(UNFINISHED)}", child.name)]


def discard_unfinished(path: Path) -> None:
    """Deletes what an interrupted save left, as far as that can be."""
    for leftover in _unfinished(path):
        shutil.rmtree(leftover, ignore_errors=True)


def discard_late(path: Path) -> None:
    """After a failed write, whose neighbours may be under way still and make their directories anew."""
    quiet = 0
    for _ in range(100):
        quiet = 0 if _unfinished(path) else quiet + 1
        if quiet == 3:
            return
        discard_unfinished(path)
        time.sleep(0.02)
