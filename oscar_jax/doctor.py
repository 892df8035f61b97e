"""What this machine can run: versions, devices, attention implementations and why not, files already fetched."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from oscar_jax import download

_DISTRIBUTION = "oscar-jax"
# What a model's layers ask for, and the operation of `pallas_kernels.dispatch` that does it.
_OPERATIONS = {
    "decode attention": "attention",
    "prefill attention": "attention",
    "history writes": "write",
    "demotion": "demote",
}
_OPTIONAL = ("torch", "triton", "matplotlib", "libtpu", "jax-cuda13-plugin")


def run(args: argparse.Namespace) -> int:
    """`oscar-jax doctor`: prints the report; 1 if something here keeps the XLA implementation from working."""
    found = report(Path.cwd())
    print(json.dumps(found) if args.json else as_text(found))
    return 1 if found["problems"] else 0


def report(folder: Path) -> dict[str, Any]:
    """Asks everything and changes nothing.

    Args:
      folder: where to look for artifacts, two levels deep.

    Returns:
      A dict fit for JSON: `python`, `packages` (name, installed, wanted, ok), `optional` (name to version or None),
      `devices` (platform, kind, count), `implementations` (name to None if usable, else the reason), `operations` (name
      to which implementation `runs`, None if none does, and why the others are `passed_over`), `downloads` (name to
      path or None), `cache`, `artifacts` (path, about, ok) and `problems` (sentences).
    """
    packages = _packages()
    devices, device_problem = _devices()
    implementations, operations, implementation_problem = _implementations()
    problems = [
        f"{each['name']} {each['installed'] or 'is missing'}, wanted {each['wanted'] or 'any'}; reinstall"
        for each in packages
        if not each["ok"]
    ]
    problems += [problem for problem in (device_problem, implementation_problem) if problem]
    if implementations.get("xla") is not None:
        problems.append(f"the XLA implementation, which should work anywhere, does not: {implementations['xla']}")
    return {
        "python": {"version": platform.python_version(), "executable": sys.executable, "machine": platform.platform()},
        "packages": packages,
        "optional": {name: _installed(name) for name in _OPTIONAL},
        "devices": devices,
        "implementations": implementations,
        "operations": operations,
        "cache": str(download.cache_dir()),
        "downloads": {name: _text_or_none(download.find(name)) for name in download.ASSETS},
        "artifacts": _artifacts(folder),
        "problems": problems,
    }


def as_text(found: dict[str, Any]) -> str:
    """The report for people, one fact a line."""
    lines = [f"Python {found['python']['version']} ({found['python']['executable']}), {found['python']['machine']}"]
    lines += ["", "packages"]
    lines += [
        f"  {each['name']:<18} {each['installed'] or 'missing':<12} wanted {each['wanted']}"
        for each in found["packages"]
    ]
    lines += [f"  {name:<18} {version or 'not installed':<12} optional" for name, version in found["optional"].items()]
    lines += ["", "devices"]
    lines += [f"  {each['count']} x {each['kind']} ({each['platform']})" for each in found["devices"]] or ["  none"]
    lines += ["", "attention implementations"]
    lines += [f"  {name:<18} {reason or 'works here'}" for name, reason in found["implementations"].items()] or [
        "  none"
    ]
    lines += ["", "what runs by default"]
    for name, operation in found["operations"].items():
        reasons = "".join(f"; not {other}: {reason}" for other, reason in operation["passed_over"].items())
        runs = f"{operation['runs']}, the best that works here" if operation["runs"] else "nothing"
        lines.append(f"  {name:<18} {runs}{reasons}")
    lines += ["", f"downloads in {found['cache']}"]
    lines += [f"  {name:<18} {path or 'not fetched'}" for name, path in found["downloads"].items()]
    lines += ["", "artifacts below this folder"]
    lines += [f"  {each['path']}: {each['about']}" for each in found["artifacts"]] or ["  none"]
    lines += ["", *([f"problem: {problem}" for problem in found["problems"]] or ["no problems found"])]
    return "\n".join(lines)


def _packages() -> list[dict[str, Any]]:
    """The distribution's own requirements against what is installed; none where it runs uninstalled from its source."""
    try:
        declared = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    rows = []
    for requirement in map(Requirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _installed(requirement.name)
        ok = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        rows.append({"name": requirement.name, "installed": installed, "wanted": str(requirement.specifier), "ok": ok})
    return rows


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:  # what jax raises where a named or installed backend does not start
        return [], f"jax finds no device: {error}"
    kinds: dict[tuple[str, str], int] = {}
    for device in devices:
        key = (device.platform, device.device_kind)
        kinds[key] = kinds.get(key, 0) + 1
    return [{"platform": p, "kind": kind, "count": count} for (p, kind), count in kinds.items()], None


def _implementations() -> tuple[dict[str, str | None], dict[str, dict[str, Any]], str | None]:
    try:
        from pallas_kernels import dispatch

        operations = {name: _choice(dispatch.availability(operation)) for name, operation in _OPERATIONS.items()}
        return dispatch.availability(), operations, None
    except (ImportError, RuntimeError) as error:
        return {}, {}, f"the attention implementations cannot be listed: {error}"


def _choice(reasons: dict[str, str | None]) -> dict[str, Any]:
    """The first implementation that works, and the reasons of those before it."""
    passed_over: dict[str, str] = {}
    for name, reason in reasons.items():
        if reason is None:
            return {"runs": name, "passed_over": passed_over}
        passed_over[name] = reason
    return {"runs": None, "passed_over": passed_over}


def _artifacts(folder: Path) -> list[dict[str, Any]]:
    """Artifacts one or two levels below a folder, each with what it is or why it cannot be read."""
    places = sorted({path.parents[1] for depth in ("*", "*/*") for path in folder.glob(f"{depth}/[0-9]*/manifest")})
    if not places:
        return []
    from calib import artifact  # Orbax takes seconds to import, and most folders hold no artifact

    rows = []
    for place in places:
        try:
            manifest = artifact.read_manifest(place)
            model = manifest.model.model_id if manifest.model else "a model not recorded"
            rows.append({"path": str(place), "about": f"{manifest.recipe} for {model}", "ok": True})
        except ValueError as error:
            rows.append({"path": str(place), "about": str(error), "ok": False})
    return rows


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text_or_none(path: Path | None) -> str | None:
    return None if path is None else str(path)
